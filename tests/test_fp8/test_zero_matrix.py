"""test_fp8/zero_matrix.py: its comparison, what counts as refused, and cases that are trained, right and wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from model.variants import VARIANTS
from test_fp8 import zero_matrix
from test_fp8.zero.cases import case_of, is_about_case, make_data, matrix, refusal, settings_of
from test_fp8.zero_matrix import compared

TOLERANCE = {"loss": 1e-3, "grad_norm": 1e-2, "first_grad_norm": 1e-3}


def steps(losses: list[float], norms: list[float]) -> list[dict]:
    return [
        {"step": i, "tokens": i * 10, "loss": a, "grad_norm": b}
        for i, (a, b) in enumerate(zip(losses, norms, strict=True), 1)
    ]


@pytest.mark.parametrize(
    ("losses", "norms", "beyond"),
    [
        ([4, 3.999], [1, 1.009], []),
        ([4, 4.005], [1, 1], ["loss"]),
        ([4, 4], [1, 0.98], ["grad_norm"]),
        ([4, 4], [1.002, 1], ["first_grad_norm"]),
        ([4, 4], [2, 2], ["grad_norm", "first_grad_norm"]),
        ([4, math.nan], [1, 1], ["loss"]),
        ([4], [1], ["steps"]),
        ([], [], ["steps"]),
    ],
)
def test_what_is_beyond_the_tolerance(losses: list[float], norms: list[float], beyond: list[str]) -> None:
    found = compared(steps(losses, norms), steps([4, 4], [1, 1]), TOLERANCE)
    assert [part.partition(":")[0] for part in found.get("why", "").split("; ") if part] == beyond
    if not beyond:
        assert found["loss_difference"] == pytest.approx(0.001 / 4) and found["loss_one_rank"] == [4, 4]
        assert (
            found["grad_norm_difference"] == pytest.approx(0.009) and found["first_grad_norm_difference"] == 0
        )


def test_a_refusal_is_about_the_case(tmp_path: Path) -> None:
    """Not about the data, by which every case would be refused, and the matrix look well."""
    data, reasons = make_data(tmp_path / "data"), {}
    for case in matrix(range(4), ["hf", "te_layer", "torchao"], ["bf16", "fp8"]):
        if reason := refusal(settings_of(case, "tiny", 2, 2, data), 2, []):
            assert is_about_case(reason), reason
            reasons[case.name] = reason
    again = ("", "-recompute")
    plain = {name for name in reasons if name.count("-") == 2 or name.endswith("-recompute")}
    assert plain == {
        f"zero{n}-{kind}{r}" for n in range(4) for r in again for kind in ("hf-fp8", "torchao-bf16")
    }
    stages = {
        key: sorted(n[4] for n in reasons if key in n)
        for key in ("muon", "states_int8", "offload", "quantized")
    }
    assert stages == {
        "muon": ["2", "3"],
        "states_int8": ["0", "2", "3"],
        "offload": ["1", "2", "3", "3"],
        "quantized": ["0", "1", "2", "3"],
    }
    absent = refusal(settings_of(case_of(1, "te_layer", "fp8"), "tiny", 2, 2, tmp_path / "nowhere"), 2, [])
    assert absent and not is_about_case(absent)


def test_all_cases_are_there_and_what_matters_most_comes_first() -> None:
    every = list(matrix(range(4), list(VARIANTS), ["bf16", "fp8"]))
    names = [case.name for case in every]
    assert len(names) == len(set(names)) == 138
    for variant, its in VARIANTS.items():
        for recipe in its.recipes:
            keys = {"model.variant": variant, "precision.recipe": recipe, "precision.compute": "fp8"}
            found = [case for case in every if keys.items() <= case.overrides.items()]
            assert {case.overrides["gradient_checkpointing"] for case in found} == {False, True} and len(
                found
            ) >= 8
    first = ("zero3-te_layer-fp8", "zero3-te_layer-fp8-offload_param_cpu", "zero3-te_linear-fp8-recompute",
             "zero0-te_linear-fp8-recipe_current", "zero0-hf-bf16", "zero3-torchao-fp8-compile_False")  # fmt: skip
    places = [names.index(name) for name in first]
    assert places == sorted(places) and places[0] < 16


def matrix_of(folder: Path, *options: str) -> tuple[int, dict[str, dict]]:
    written = folder / "matrix.json"
    status = zero_matrix.main(["--variants", "te_linear", "--steps", "2", *options, "--output", str(written)])
    assert str(folder) not in written.read_text()
    return status, {r["row"]: r for r in json.loads(written.read_text())["results"]}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.usefixtures("forked")
def test_cases_are_trained_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    status, results = matrix_of(tmp_path, "--stages", "3", "--precisions", "fp8", "--rows", "*-fp8", "*muon")
    assert status == 0
    outcomes = {name: r["outcome"] for name, r in results.items()}
    assert outcomes == {"zero3-te_linear-fp8": "equal", "zero3-te_linear-fp8-optim_muon": "refused"}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.usefixtures("forked")
def test_a_wrong_training_is_found_and_a_failure_costs_its_case_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the ranks of a case begin with other weights, and another case has a configuration that train.py refuses."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    train = zero_matrix.train

    def wrong(settings: dict, folder: Path, ranks: int) -> list[list[dict]]:
        if settings["gradient_checkpointing"]:
            return train(settings | {"hang_timeout_s": -1}, folder, ranks)
        (folder / "other").mkdir()
        return [train(settings | {"seed": 7}, folder / "other", ranks)[0], train(settings, folder, ranks)[1]]

    monkeypatch.setattr(zero_matrix, "train", wrong)
    status, results = matrix_of(
        tmp_path, "--stages", "2", "--precisions", "bf16", "--rows", "*-bf16", "*recompute"
    )
    assert status == 1
    assert [r["outcome"] for r in results.values()] == ["apart", "failed"]
    assert "first_grad_norm" in results["zero2-te_linear-bf16"]["why"]
