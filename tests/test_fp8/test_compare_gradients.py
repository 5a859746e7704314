"""test_fp8/compare_gradients.py: its figures, and the program as it is run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from test_fp8.compare_gradients import BENCHMARK
from test_fp8.model import gradients
from tests.model.fp8.test_gemms import without_fp8
from tests.test_fp8.running import report_of

SMALL = ["--batches", "2", "--micro_batch", "1", "--seq_length", "32"]


def test_figures_of_a_gradient_that_is_too_short() -> None:
    torch.manual_seed(0)
    exact = [{"a": torch.randn(8, 8), "b": torch.randn(8)} for _ in range(3)]
    short = [{name: 0.9 * g for name, g in batch.items()} for batch in exact]
    found = gradients.compare("short", short, exact)
    errors = [found[key] for key in ("error_of_batch", "error_of_sum", "worst")]
    assert errors == pytest.approx([0.1] * 3, rel=1e-5) and found["along"] == pytest.approx(0.9, rel=1e-5)
    assert found["worst_matrix"] == "a", "the only matrix"


def test_a_case_has_to_run_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    without_fp8(monkeypatch, "nn")
    assert BENCHMARK.main(["--rows", "bf16", *SMALL]) == 0
    assert BENCHMARK.main(["--rows", "block", *SMALL]) == 2


def test_the_program(tmp_path: Path) -> None:
    bf16, fp8 = report_of(BENCHMARK, tmp_path, "--rows", "bf16", "current_e4m3", *SMALL)["results"]
    assert 0 < bf16["error_of_batch"] < 0.02 < fp8["error_of_batch"] < 0.2
    assert bf16["along"] == pytest.approx(1, abs=0.01) and fp8["along"] == pytest.approx(1, abs=0.05)
