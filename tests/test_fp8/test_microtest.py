"""test_fp8/test_fp8.py as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ["delayed", "current", "block"]


def microtest(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "test_fp8" / "test_fp8.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def check_report(folder: Path) -> None:
    output = folder / "results" / "micro.json"
    shapes = ["2x8x32:64", "1x1x32:32"]
    run = microtest("--shapes", *shapes, "--iterations", "2", "--output", str(output))
    assert run.returncode == 0, run.stderr
    report = json.loads(output.read_text())
    assert {"command", "date", "machine", "versions", "iterations", "results"} <= report.keys()
    assert str(folder) not in output.read_text(), "a report must not hold the machine's paths"
    assert report["versions"]["torch"] and report["machine"]["cpu"]

    results = {(r["shape"], r["precision"]): r for r in report["results"]}
    assert list(results) == [(s, p) for s in shapes for p in ["fp32", "bf16", *(f"fp8-{r}" for r in RECIPES)]]
    for recipe in RECIPES:
        good, one_row = results[shapes[0], f"fp8-{recipe}"], results[shapes[1], f"fp8-{recipe}"]
        assert good["ran_fp8"] is True
        assert good["tflops"] == pytest.approx(6 * 16 * 32 * 64 / good["ms_median"] / 1e9)
        assert good["speed_to_bf16"] == pytest.approx(
            results[shapes[0], "bf16"]["ms_median"] / good["ms_median"]
        )
        # e4m3 keeps 3 bits of mantissa: a few percent an element, and not nothing, as bf16 in disguise would show
        assert 0.01 < good["output_error"] < 0.1
        assert "multiple of 8" in one_row["reason"] and "ms_median" not in one_row
        assert one_row["reason"] in run.stdout
    assert results[shapes[1], "bf16"]["ran_fp8"] is False
    assert results[shapes[0], "fp32"]["output_error"] < 1e-3


def test_report(tmp_path: Path) -> None:
    check_report(tmp_path)


@pytest.mark.gpu
def test_report_on_a_gpu(tmp_path: Path) -> None:
    check_report(tmp_path)


def test_nothing_in_fp8_is_an_error() -> None:
    run = microtest("--shapes", "1x1x32:32", "--iterations", "1", "--recipes", "current")
    assert run.returncode == 1
    assert "nothing ran in FP8" in run.stderr


@pytest.mark.parametrize("shape", ["8x8x8", "0x8x16:16", "8x8x16-16"])
def test_bad_shape(shape: str) -> None:
    run = microtest("--shapes", shape)
    assert run.returncode == 2
    assert shape in run.stderr and "BATCHxROWSxIN:OUT" in run.stderr
