"""test_fp8/compare_gradients.py: its figures, and the program as it is run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from test_fp8 import compare_gradients
from test_fp8.model import gradients
from tests import programs
from tests.model.fp8.test_gemms import without_fp8

ROOT = Path(__file__).resolve().parents[2]


def test_figures_of_a_gradient_that_is_too_short() -> None:
    torch.manual_seed(0)
    exact = [{"a": torch.randn(8, 8), "b": torch.randn(8)} for _ in range(3)]
    short = [{name: 0.9 * g for name, g in batch.items()} for batch in exact]
    row = gradients.compare("short", short, exact)
    assert row["error_of_batch"] == pytest.approx(0.1, rel=1e-5)
    assert row["error_of_sum"] == pytest.approx(0.1, rel=1e-5)
    assert row["along"] == pytest.approx(0.9, rel=1e-5)
    assert row["worst"] == pytest.approx(0.1, rel=1e-5) and row["worst_matrix"] == "a"  # the only matrix


def test_chance_averages_out_in_the_sum() -> None:
    torch.manual_seed(0)
    exact = [{"a": torch.ones(64, 64)} for _ in range(16)]
    noisy = [{"a": g["a"] + torch.randn(64, 64)} for g in exact]
    row = gradients.compare("noisy", noisy, exact)
    assert row["error_of_batch"] == pytest.approx(1.0, rel=0.05)
    assert row["error_of_sum"] == pytest.approx(0.25, rel=0.05)


def test_a_row_has_to_run_fp8(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    without_fp8(monkeypatch, "nn")
    options = ["--rows", "bf16", "block", "--batches", "1", "--micro_batch", "1", "--seq_length", "32"]
    assert compare_gradients.main(options) == 2
    told = capsys.readouterr()
    assert (
        "\nbf16 " in told.out and "error: the backward of 12 FP8 modules ran 17 FP8 GEMMs, not 34" in told.err
    )


@pytest.mark.process
def test_the_program(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "test_fp8/compare_gradients.py"), "--rows", "bf16", "current_e4m3"]
    command += ["--batches", "2", "--seq_length", "32", "--output", str(tmp_path / "g.json")]
    done = programs.run(command, capture_output=True, text=True, check=True)
    written = json.loads((tmp_path / "g.json").read_text())
    bf16, fp8 = written["results"]
    assert 0 < bf16["error_of_batch"] < 0.02 < fp8["error_of_batch"] < 0.2
    assert bf16["along"] == pytest.approx(1, abs=0.01) and fp8["along"] == pytest.approx(1, abs=0.05)
    assert "current_e4m3" in done.stdout and (tmp_path / "g.png").stat().st_size > 1000
    assert written["command"] == (
        "python test_fp8/compare_gradients.py --config tiny --rows bf16 current_e4m3 --micro_batch 2 --batches 2 "
        "--seq_length 32"
    )


def test_what_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = "; give a Hugging Face folder, such as a run's output/RUN/hf\n"
    for option, value, what in (
        ("--init_from", tmp_path / "no", f"is not a folder{folder}"),
        ("--init_from", tmp_path, f"has no config.json{folder}"),
        ("--config", "nonsense", "is neither a file, nor a folder, nor one of hare_0.4b, "),
    ):
        with pytest.raises(SystemExit, match="2"):
            compare_gradients.main([option, str(value)])
        assert f"error: argument {option}: '{value}' {what}" in capsys.readouterr().err


def test_a_damaged_configuration_is_blamed_on_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{")
    assert compare_gradients.main(["--init_from", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(
        f"error: --init_from: {tmp_path / 'config.json'}, line 1 column 2: not valid JSON"
    )
