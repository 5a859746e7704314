"""test_fp8/zero_matrix.py: its comparison, what counts as refused, and cases that are trained, right and wrong."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from model.errors import UserError
from test_fp8.zero_matrix import BENCHMARK, compare_runs, make_data, matrix, training_settings
from tests.test_fp8.running import report_of
from train.config.load import build_arguments
from train.preflight.check import check

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
    found = compare_runs(steps(losses, norms), steps([4, 4], [1, 1]), TOLERANCE)
    assert [part.partition(":")[0] for part in found.get("why", "").split("; ") if part] == beyond
    if not beyond:
        assert found["loss_difference"] == pytest.approx(0.001 / 4) and found["loss_one_rank"] == [4, 4]
        assert (
            found["grad_norm_difference"] == pytest.approx(0.009) and found["first_grad_norm_difference"] == 0
        )


def test_what_is_refused(tmp_path: Path) -> None:
    data, refused = make_data(tmp_path / "data"), []
    cases = {case.name: case for case in matrix()}
    assert len(cases) == len(list(matrix()))
    for case in cases.values():
        try:
            check(build_arguments(training_settings(case, 2, 2, data)), 2, 2, [])
        except UserError:
            refused.append(case.name)
    plain = {name for name in refused if name.count("-") == 2 or name.endswith("-recompute")}
    kinds = [f"{kind}{again}" for kind in ("hf-fp8", "torchao-bf16") for again in ("", "-recompute")]
    assert plain == {f"zero{stage}-{kind}" for stage in range(4) for kind in kinds}
    stages = {
        key: "".join(sorted(name[4] for name in refused if key in name))
        for key in ("muon", "states_int8", "offload", "quantized")
    }
    assert stages == {"muon": "23", "states_int8": "023", "offload": "00112233", "quantized": "0123"}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.usefixtures("forked")
def test_cases_are_trained_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rows = ["zero3-te_linear-fp8", "zero3-te_layer-fp8-optim_muon"]
    report = report_of(BENCHMARK, tmp_path, "--steps", "2", "--rows", *rows)
    assert [r["outcome"] for r in report["results"]] == ["equal", "refused"]
