"""test_fp8/test_fp8.py as a user runs it, and what it decides by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from test_fp8.linear.bench import Linear, measure_shape
from test_fp8.linear.shapes import Shape
from test_fp8.test_fp8 import BENCHMARK
from tests.model.fp8.test_gemms import without_fp8
from tests.test_fp8.running import report_of

RECIPES = ["delayed", "current", "block"]
PRECISIONS = ["fp32", "bf16", *(f"fp8-{recipe}" for recipe in RECIPES)]


def check_report(folder: Path, launches: list[str]) -> dict[str, Any]:
    shapes = ["2x8x32:64", "1x8x32:32"]
    report = report_of(BENCHMARK, folder, "--shapes", *shapes, "--iterations", "2")
    results = {(r["shape"], r["precision"], r["launch"]): r for r in report["results"]}
    assert list(results) == [(s, p, w) for s in shapes for p in PRECISIONS for w in ("eager", "graph")]
    for launch in launches:
        bf16 = results[shapes[0], "bf16", launch]
        assert bf16["ran_fp8"] is False and results[shapes[0], "fp32", launch]["errors"]["output"] < 1e-4
        for recipe in RECIPES:
            good = results[shapes[0], f"fp8-{recipe}", launch]
            assert good["ran_fp8"] is True and good["errors"].keys() == {"output", "dgrad", "wgrad"}
            # e4m3 keeps 3 bits of mantissa: a few percent an element, and not nothing, as bf16 would show
            assert all(0.01 < error < 0.1 for error in good["errors"].values())
            for part, gemms in {"step": 3, "forward": 1}.items():
                median = good[part]["ms_median"]
                assert good[part]["tflops"] == pytest.approx(gemms * 2 * 16 * 32 * 64 / median / 1e9)
                assert good[part]["speed_to_bf16"] == pytest.approx(bf16[part]["ms_median"] / median)
            few_rows = results[shapes[1], f"fp8-{recipe}", launch]
            assert few_rows["reason"] and "step" not in few_rows
    return report


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_report(tmp_path: Path) -> None:
    report = check_report(tmp_path, ["eager"])
    assert (
        all("reason" in r for r in report["results"] if r["launch"] == "graph") and report["ceilings"] == {}
    )


@pytest.mark.gpu
def test_report_on_a_gpu(tmp_path: Path) -> None:
    report = check_report(tmp_path, ["eager", "graph"])
    ceilings = report["ceilings"]
    assert ceilings["fp8"]["tflops"] > 1.3 * ceilings["bf16"]["tflops"]
    case = next(r for r in report["results"] if r["precision"] == "fp8-current")
    assert case["step"]["share_of_ceiling"] == pytest.approx(
        case["step"]["tflops"] / ceilings["fp8"]["tflops"]
    )


def test_nothing_in_fp8_is_a_failure() -> None:
    assert BENCHMARK.main(["--shapes", "1x1x32:32", "--iterations", "1", "--recipes", "current"]) == 1


def measured(*precisions: str) -> dict[str, dict[str, Any]]:
    results = measure_shape(Shape(1, 32, 64, 64), list(precisions), {}, 1)
    return {r["precision"]: r for r in results if r["launch"] == "eager"}


def test_a_wrong_result_has_a_reason_and_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Linear.run

    def wrong(self: Linear, part: str, calls: int) -> dict[str, torch.Tensor]:
        results = right(self, part, calls)
        return {k: t * 1.2 if self.compute == "fp8" and k == "wgrad" else t for k, t in results.items()}

    monkeypatch.setattr(Linear, "run", wrong)
    found = measured("bf16", "fp8-current")
    assert found["fp8-current"]["reason"] and "step" not in found["fp8-current"]
    assert found["bf16"]["step"]["ms_median"] > 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_that_are_not_fp8_have_no_speed(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"fp8-{recipe}"
    assert measured(name)[name]["ran_fp8"] is True
    without_fp8(monkeypatch, "tn")
    assert "reason" in measured(name)[name] and "step" not in measured(name)[name]
