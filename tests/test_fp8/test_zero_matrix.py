"""test_fp8/zero_matrix.py: its comparison, what counts as refused, and cells that are trained, right and wrong."""

from __future__ import annotations

import json
import math
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from model.variants import VARIANTS
from test_fp8 import zero_matrix
from test_fp8.zero.cells import Cell, cells, compared, is_about, make_data, refusal
from test_fp8.zero.ranks import Trainings, subprocess
from train.guard import signals
from train.record.provenance import commit

TOLERANCE = {"loss": 1e-3, "grad_norm": 1e-2, "first_grad_norm": 1e-3}
RANKS = 2


def steps(losses: list[float], norms: list[float]) -> list[dict]:
    return [
        {"step": i, "tokens": i * 10, "loss": a, "grad_norm": b}
        for i, (a, b) in enumerate(zip(losses, norms, strict=True), 1)
    ]


def test_what_is_within_the_tolerance_has_no_reason() -> None:
    found = compared(steps([4, 3.999], [1, 1.009]), steps([4, 4], [1, 1]), TOLERANCE)
    assert "reason" not in found
    assert found["loss_difference"] == pytest.approx(0.001 / 4)
    assert found["grad_norm_difference"] == pytest.approx(0.009) and found["first_grad_norm_difference"] == 0
    assert found["loss"] == [4, 3.999] and found["loss_one_rank"] == [4, 4]


@pytest.mark.parametrize(
    ("losses", "norms", "about"),
    [
        ([4, 4.005], [1, 1], ["loss"]),
        ([4, 4], [1, 0.98], ["grad_norm"]),
        ([4, 4], [1.002, 1], ["first_grad_norm"]),
        ([4, 4], [2, 2], ["grad_norm", "first_grad_norm"]),
        ([4, math.nan], [1, 1], ["loss"]),
        ([4], [1], ["1"]),
        ([], [], ["0"]),
    ],
)
def test_what_is_beyond_it_says_by_what(losses: list[float], norms: list[float], about: list[str]) -> None:
    reason = compared(steps(losses, norms), steps([4, 4], [1, 1]), TOLERANCE)["reason"]
    assert [part.partition(" ")[0] for part in reason.split("; ")] == about


def test_a_refusal_is_one_of_the_cells_own_keys(tmp_path: Path) -> None:
    """Not one of the data, by which every cell would be refused, and the matrix be well."""
    options = SimpleNamespace(config="tiny", steps=2, ranks=RANKS)
    data = make_data(tmp_path / "data")
    reasons = {}
    for cell in cells(range(4), ["hf", "te_layer", "torchao"], ["bf16", "fp8"]):
        reason = refusal(cell, cell.settings(options, data, tmp_path), RANKS, [])
        if reason is not None:
            assert is_about(cell, reason), reason
            reasons[cell.name] = reason
    offloads = ["zero_optimization.offload_optimizer", "zero_optimization.offload_param"]
    assert {name for name in reasons if "-hf-" in name} == {
        f"zero{stage}-hf-fp8{more}" for stage in range(4) for more in ("", "-recompute")
    }
    assert {name for name in reasons if "torchao" in name} == {
        f"zero{stage}-torchao-bf16{more}" for stage in range(4) for more in ("", "-recompute")
    }
    assert {name.partition("-")[0] for name in reasons if name.endswith("muon")} == {"zero2", "zero3"}
    assert {name.partition("-")[0] for name in reasons if "optimizer_states" in name} == {
        "zero0", "zero2", "zero3"
    }  # fmt: skip
    assert [sum(key in reason for reason in reasons.values()) for key in offloads] == [3, 1]
    assert sum("zero_optimization.zero_quantized_gradients: " in reason for reason in reasons.values()) == 4
    cell = Cell(1, "te_layer", "fp8")
    absent = refusal(cell, cell.settings(options, tmp_path / "nowhere", tmp_path), RANKS, [])
    assert absent and not is_about(cell, absent)


def test_the_cells_are_all_there_and_what_matters_most_comes_first() -> None:
    every = list(cells(range(4), list(VARIANTS), ["bf16", "fp8"]))
    names = [cell.name for cell in every]
    assert len(names) == len(set(names))
    ran = {(c.stage, c.variant, c.recipe, c.recomputes) for c in every if c.recipe or c.precision == "bf16"}
    for variant, its in VARIANTS.items():
        for recipe in (None, *its.recipes):
            assert all((n, variant, recipe, again) in ran for n in range(4) for again in (False, True)), (
                variant
            )
    kinds = ("zero3-te_layer-fp8", "zero3-te_layer-fp8-offload_param_cpu", "zero3-te_linear-fp8-recompute",
             "zero0-te_linear-fp8-recipe_current", "zero0-hf-bf16", "zero3-torchao-fp8-compile_False")  # fmt: skip
    places = [names.index(name) for name in kinds]
    assert places == sorted(places) and places[0] < 16
    of_hf = list(cells([1], ["hf"], ["bf16"]))
    assert [c.name for c in of_hf if "optim" in c.name] and not [c for c in of_hf if c.recipe]


def test_what_there_was_no_time_for_is_left_and_only_the_same_matrix_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(zero_matrix, "train_all", lambda *_: None)
    folder, written = tmp_path / "work", tmp_path / "matrix.json"
    command = [
        "--cells",
        "zero[12]-te_layer-fp8",
        "*-hf-fp8",
        "--work_dir",
        str(folder),
        "--output",
        str(written),
    ]
    for _ in range(2):  # begun anew, and gone on with
        assert zero_matrix.main([*command, "--time_limit_s", "9"]) == 3
        outcomes = {r["cell"]: r["outcome"] for r in json.loads(written.read_text())["results"]}
        assert outcomes == dict.fromkeys(
            ["zero1-te_layer-fp8", "zero2-te_layer-fp8"], "left"
        ) | dict.fromkeys([f"zero{stage}-hf-fp8" for stage in range(4)], "refused")
        assert "2 cells are left for want of time; the same command goes on" in capsys.readouterr().out
    assert zero_matrix.main([*command, "--steps", "3"]) == 2
    assert "its trainings are of other steps; give another folder" in capsys.readouterr().err
    monkeypatch.setattr(zero_matrix, "sources_sha256", lambda *_: "of another commit")
    assert zero_matrix.main(command) == 2
    assert "its trainings are of other sources; give another folder" in capsys.readouterr().err
    assert json.loads(written.read_text())["commit"].partition(",")[0] == commit().partition(",")[0]
    assert zero_matrix.main([*command, "--work_dir", str(tmp_path)]) == 2
    assert "it has other files; give an empty folder" in capsys.readouterr().err
    for wrong, said in (
        (["--time_limit_s", "9"], "needs --work_dir"),
        (
            ["--cells", "*", "x"],
            "--cells x: no cell has such a name; there are:\n  zero0-te_linear-bf16\n  zero0-",
        ),
        (
            ["--stages", "3", "--cells", "zero2-*"],
            "--cells zero2-*: no cell has such a name; there are:\n  zero3-",
        ),
    ):
        with pytest.raises(SystemExit):
            zero_matrix.main(wrong)
        assert said in capsys.readouterr().err
    some = zero_matrix.OPTIONS.parse_args(["--stages", "3", "--cells", "zero2-*", "zero3-te_linear-fp8"])
    assert [cell.name for cell in zero_matrix.matrix_of(some)] == ["zero3-te_linear-fp8"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_end_ends_the_ranks_and_removes_their_folder(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Any] = []
    before = signal.signal(number, lambda *_: heard.append("the test"))
    # the first look at the ranks is when the signal comes
    ranks: Any = SimpleNamespace(
        poll=lambda: signal.raise_signal(number),
        terminate=lambda: heard.append("terminated"),
        wait=lambda: heard.append("waited"),
    )
    begun: dict[int, Path] = {}

    def start(trainings: Trainings, *_: object) -> None:
        if trainings.ranks not in begun:
            begun[trainings.ranks], trainings.process = trainings.folder, ranks

    monkeypatch.setattr(Trainings, "start", start)
    try:
        with pytest.raises(SystemExit) as ended:
            zero_matrix.main(["--cells", "zero1-te_layer-fp8"])
        signal.raise_signal(number)
    finally:
        signal.signal(number, before)
    assert ended.value.code == 128 + number and sorted(begun) == [1, RANKS]
    assert heard == ["terminated", "waited"] * 2 + ["the test"]
    assert not any(folder.exists() for folder in begun.values())


def test_trainings_that_ended_are_kept_and_others_begin_anew(tmp_path: Path) -> None:
    settings = {name: {"max_steps": 2, "name": name} for name in ("same", "other", "failed", "new")}
    for name, its, error in (("same", settings["same"], None), ("other", {"max_steps": 3}, None),
                             ("failed", settings["failed"], "it crashed")):  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps({"settings": its, "error": error}))
        (tmp_path / name).mkdir()
    trainings = Trainings(tmp_path, 2, settings, until=0.0)
    assert trainings.found == {"same": None}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["same", "same.json"]
    trainings.start(Path("none"), print)
    assert trainings.process is None, "no time is left"
    # the ranks end: with a training that failed, in the middle of one, and for want of time
    (tmp_path / "other.json").write_text(json.dumps({"settings": settings["other"], "error": "it failed"}))
    trainings.process = SimpleNamespace(poll=lambda: 1)  # type: ignore[assignment]
    assert trainings.have_ended() and trainings.found == {"same": None, "other": "it failed"}
    trainings.process = SimpleNamespace(poll=lambda: 1)  # type: ignore[assignment]
    assert (
        trainings.have_ended()
        and "status 1" in str(trainings.found["failed"])
        and "new" not in trainings.found
    )
    trainings.process = SimpleNamespace(poll=lambda: 0)  # type: ignore[assignment]
    assert trainings.have_ended() and "new" not in trainings.found


def test_ranks_end_with_the_program_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: given.update(options))
    Trainings(tmp_path, 2, {"a": {}}, until=None).start(Path("none"), lambda text: None)
    if sys.platform == "linux":
        assert given["preexec_fn"].args == (signals.PR_SET_PDEATHSIG, signal.SIGTERM)


def trained(*options: str, folder: Path) -> tuple[int, list[dict]]:
    """Exit status of the matrix, and its results."""
    written = folder / "matrix.json"
    command = ["--variants", "te_linear", "--steps", "2", *options, "--cells", "*-bf16", "*fp8", "*recompute"]
    status = zero_matrix.main([*command, "--work_dir", str(folder / "work"), "--output", str(written)])
    assert str(folder) not in written.read_text()  # no folder of this machine
    return status, json.loads(written.read_text())["results"]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.usefixtures("forked")
def test_cells_are_trained_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    status, results = trained("--stages", "3", "--precisions", "fp8", folder=tmp_path)
    assert status == 0 and "0 neither" in capsys.readouterr().out
    assert [r["outcome"] for r in results if not r["more"]] == ["equal"] * 2
    assert {r["outcome"] for r in results if r["more"]} == {"refused"}
    again = trained("--stages", "3", "--precisions", "fp8", folder=tmp_path)
    assert again == (status, results) and "trainings, see" not in capsys.readouterr().out, "they are kept"


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.usefixtures("forked")
def test_a_wrong_reduction_is_found_and_a_crash_costs_its_cell_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(zero_matrix, "RANKS", Path(__file__).with_name("wrong_ranks.py"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    status, results = trained("--stages", "2", folder=tmp_path)
    assert status == 1 and "3 neither" in capsys.readouterr().out
    found = {r["cell"]: (r["outcome"], r.get("reason", "")) for r in results if not r["more"]}
    assert {cell: outcome for cell, (outcome, _) in found.items()} == {
        "zero2-te_linear-bf16": "apart",
        "zero2-te_linear-bf16-recompute": "failed",
        "zero2-te_linear-fp8": "apart",
        "zero2-te_linear-fp8-recompute": "equal",
    }
    assert "first_grad_norm" in found["zero2-te_linear-bf16"][1]
    assert "on 2 ranks: AssertionError: as the test wants it" in found["zero2-te_linear-bf16-recompute"][1]
    assert "first_grad_norm" in found["zero2-te_linear-fp8"][1]
