"""test_fp8/zero_matrix.py: its comparison, what counts as refused, and cells that are trained, right and wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from test_fp8 import zero_matrix
from test_fp8.zero.cells import Cell, cells, compared, is_about, make_data, refusal

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
    for cell in cells(range(4), ["hf", "te_layer"], ["bf16", "fp8"]):
        reason = refusal(cell, cell.settings(options, data, tmp_path), RANKS, [])
        if reason is not None:
            assert is_about(cell, reason), reason
            reasons[cell.name] = reason
    offloads = ["zero_optimization.offload_optimizer", "zero_optimization.offload_param"]
    assert {name for name in reasons if "-hf-" in name} == {
        f"zero{stage}-hf-fp8{more}" for stage in range(4) for more in ("", "-recompute")
    }
    assert {name.partition("-")[0] for name in reasons if name.endswith("muon")} == {"zero2", "zero3"}
    assert {name.partition("-")[0] for name in reasons if "optimizer_states" in name} == {
        "zero0", "zero2", "zero3"
    }  # fmt: skip
    assert [sum(key in reason for reason in reasons.values()) for key in offloads] == [3, 1]
    cell = Cell(1, "te_layer", "fp8")
    absent = refusal(cell, cell.settings(options, tmp_path / "nowhere", tmp_path), RANKS, [])
    assert absent and not is_about(cell, absent)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("kind", "outcome", "reason"),
    [
        ("", "equal", ""),
        ("left_out", "apart", "first_grad_norm"),
        ("factor", "apart", "first_grad_norm"),
        ("crash", "failed", "as the test wants it"),
    ],
)
def test_cells_are_trained_and_a_wrong_reduction_is_found(
    kind: str,
    outcome: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    stage = "2" if kind else "3"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if kind:
        monkeypatch.setattr(zero_matrix, "RANKS", Path(__file__).with_name("wrong_ranks.py"))
        monkeypatch.setenv("KIND", kind)
    written = tmp_path / "matrix.json"
    command = ["--stages", stage, "--variants", "te_linear", "--precisions", "fp8", "--steps", "2"]
    status = zero_matrix.main([*command, "--work_dir", str(tmp_path / "work"), "--output", str(written)])
    results = json.loads(written.read_text())["results"]
    trained = [r for r in results if not r["more"]]
    assert "neither" in capsys.readouterr().out
    assert [r["outcome"] for r in trained] == [outcome] * 2
    assert status == bool(kind)
    assert [r["reason"] for r in trained if reason not in r.get("reason", "")] == []
    assert {r["outcome"] for r in results if r["more"]} == {"refused"}
    assert str(tmp_path) not in written.read_text()  # no folder of this machine
