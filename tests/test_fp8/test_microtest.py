"""test_fp8/test_fp8.py as a user runs it, and what it decides by itself."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from test_fp8.linear import bench as linear_bench
from test_fp8.linear.bench import measure_shape
from test_fp8.linear.cases import Case
from test_fp8.linear.shapes import Shape, chosen_shapes, model_shapes
from test_fp8.linear.summary import fp8_against_bf16, from_width, plot, summary_lines
from tests import programs
from tests.model.fp8.test_gemms import without_fp8

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ["delayed", "current", "block"]
PRECISIONS = ["fp32", "bf16", *(f"fp8-{recipe}" for recipe in RECIPES)]


def microtest(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "test_fp8" / "test_fp8.py"), *arguments]
    return programs.run(command, capture_output=True, text=True, timeout=240)


def check_report(folder: Path, launches: list[str]) -> dict[str, Any]:
    output = folder / "results" / "micro.json"
    shapes = ["2x8x32:64", "1x8x32:32"]
    run = microtest("--shapes", *shapes, "--iterations", "2", "--output", str(output))
    assert run.returncode == 0, run.stderr
    report = json.loads(output.read_text())
    assert {"command", "date", "machine", "versions", "iterations", "ceilings", "results"} <= report.keys()
    assert str(folder) not in output.read_text(), "a report must not hold the machine's paths"
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    results = {(r["shape"], r["precision"], r["launch"]): r for r in report["results"]}
    assert list(results) == [(s, p, w) for s in shapes for p in PRECISIONS for w in ("eager", "graph")]
    for launch in launches:
        for recipe in RECIPES:
            good = results[shapes[0], f"fp8-{recipe}", launch]
            assert good["ran_fp8"] is True
            # e4m3 keeps 3 bits of mantissa: a few percent an element, and not nothing, as bf16 in disguise would show
            assert all(0.01 < error < 0.1 for error in good["errors"].values())
            assert good["errors"].keys() == {"output", "dgrad", "wgrad"}
            bf16 = results[shapes[0], "bf16", launch]
            for part, gemms in {"step": 3, "forward": 1, "dgrad": 1, "wgrad": 1}.items():
                median = good[part]["ms_median"]
                assert good[part]["tflops"] == pytest.approx(gemms * 2 * 16 * 32 * 64 / median / 1e9)
                assert good[part]["speed_to_bf16"] == pytest.approx(bf16[part]["ms_median"] / median)
                assert good[part]["ms_min"] <= median <= good[part]["ms_max"]
            few_rows = results[shapes[1], f"fp8-{recipe}", launch]
            assert "multiple of 16" in few_rows["reason"] and "step" not in few_rows
            assert few_rows["reason"] in run.stdout
        assert results[shapes[1], "bf16", launch]["ran_fp8"] is False
        assert results[shapes[0], "fp32", launch]["errors"]["output"] < 1e-4
    return report


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.process
def test_report(tmp_path: Path) -> None:
    report = check_report(tmp_path, ["eager"])
    graphs = [r for r in report["results"] if r["launch"] == "graph" and r["shape"] == "2x8x32:64"]
    assert graphs and all("needs a GPU" in r["reason"] for r in graphs)
    assert report["ceilings"] == {}


@pytest.mark.gpu
@pytest.mark.process
def test_report_on_a_gpu(tmp_path: Path) -> None:
    report = check_report(tmp_path, ["eager", "graph"])
    ceilings = report["ceilings"]
    assert ceilings["fp8"]["tflops"] > 1.3 * ceilings["bf16"]["tflops"]
    row = next(r for r in report["results"] if r["precision"] == "fp8-current")
    assert row["step"]["share_of_ceiling"] == pytest.approx(row["step"]["tflops"] / ceilings["fp8"]["tflops"])


@pytest.mark.gpu
@pytest.mark.process
def test_a_shape_that_does_not_fit_says_so() -> None:
    rows = measure_shape(
        Shape(1, 2**24, 16384, 16384), [], ["bf16"], {}, iterations=1, warmup=1, cached_weight=False
    )
    assert all("GiB of GPU memory are free" in row["reason"] for row in rows)


@pytest.mark.process
def test_nothing_in_fp8_is_an_error() -> None:
    run = microtest("--shapes", "1x1x32:32", "--iterations", "1", "--recipes", "current")
    assert run.returncode == 1
    assert "nothing ran in FP8" in run.stderr


@pytest.mark.parametrize("shape", ["8x8x8", "0x8x16:16", "8x8x16-16"])
@pytest.mark.process
def test_bad_shape(shape: str) -> None:
    run = microtest("--shapes", shape)
    assert run.returncode == 2
    assert shape in run.stderr and "BATCHxROWSxIN:OUT" in run.stderr


def measured(names: list[str], cached_weight: bool = False) -> list[dict[str, Any]]:
    return measure_shape(
        Shape(1, 32, 64, 64), ["square"], names, {}, iterations=1, warmup=1, cached_weight=cached_weight
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_cached_weight_is_as_right(recipe: str) -> None:
    fresh, cached = measured([f"fp8-{recipe}"])[0], measured([f"fp8-{recipe}"], cached_weight=True)[0]
    for name, error in fresh["errors"].items():
        assert cached["errors"][name] == pytest.approx(error, rel=0.05)


def test_a_wrong_row_has_a_reason_and_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Case.backward

    def wrong(self: Case, output: torch.Tensor, *names: str) -> dict[str, torch.Tensor]:
        gradients = right(self, output, *names)
        return {k: g * 1.2 if self.compute == "fp8" and k == "wgrad" else g for k, g in gradients.items()}

    monkeypatch.setattr(Case, "backward", wrong)
    rows = {(r["precision"], r["launch"]): r for r in measured(["bf16", "fp8-current"])}
    assert "wgrad is off" in rows["fp8-current", "eager"]["reason"]
    assert "step" not in rows["fp8-current", "eager"]
    assert rows["bf16", "eager"]["step"]["ms_median"] > 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_row_whose_gradients_are_not_fp8_has_no_speed(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured([f"fp8-{recipe}"])[0]["ran_fp8"] is True
    without_fp8(monkeypatch, "tn")
    row = measured([f"fp8-{recipe}"])[0]
    assert "ran 1 FP8 GEMMs, not 2" in row["reason"] and "step" not in row


def test_a_row_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of\nluck")

    rows = measured(["bf16", "fp8-block"])
    monkeypatch.setattr(linear_bench, "Tensors", fail)
    assert {r["reason"] for r in measured(["bf16"])} == {"out of luck"}
    assert rows[0]["step"] and rows[2]["step"]
    monkeypatch.undo()
    monkeypatch.setattr(linear_bench.timing, "take_turns", fail)
    assert measured(["bf16"])[0]["reason"] == "out of luck"


def test_shapes() -> None:
    hare = chosen_shapes(None, sweep=False, models=[], shrink=False)
    assert len(hare) == 5 and set(map(tuple, hare.values())) == {("HARE",)}
    everything = chosen_shapes(None, sweep=True, models=["hare_1.1b"], shrink=False)
    # 16384 rows of 2048 to 2048 are HARE's third shape, a projection of its model, and a square: measured once
    assert everything[Shape(8, 2048, 2048, 2048)] == ["HARE", "hare_1.1b proj", "square"]
    assert Shape(1, 16384, 2048, 2048) not in everything
    assert len(everything) == len({(s.all_rows, s.inputs, s.outputs) for s in everything})
    squares = {(s.all_rows, s.inputs) for s, what in everything.items() if "square" in what}
    assert {(1024, 512), (1024, 16384), (65536, 512), (65536, 16384)} <= squares
    given = [Shape(1, 16, 32, 32)]
    assert list(chosen_shapes(given, sweep=False, models=[], shrink=True)) == given


def test_every_shape_for_a_cpu_can_run_fp8() -> None:
    models = ["hare_0.4b", "hare_1.1b", "hare_2.0b", "mistral_7b"]
    shapes = chosen_shapes(None, sweep=True, models=models, shrink=True)
    assert [shape for shape in shapes if shape.why_not_fp8()] == []
    assert max(3 * shape.gemm_flop for shape in shapes) < 3e10


def test_gemms_of_a_model() -> None:
    gemms = {what: (s.inputs, s.outputs) for what, s in model_shapes("hare_1.1b").items()}
    assert gemms == {
        "hare_1.1b qkv": (2048, 2048 + 2 * 512),
        "hare_1.1b proj": (2048, 2048),
        "hare_1.1b gate_up": (2048, 2 * 5632),
        "hare_1.1b down": (5632, 2048),
        "hare_1.1b lm_head": (2048, 32000),
    }


def row(rows: int, width: int, precision: str, speed: float, launch: str = "graph") -> dict[str, Any]:
    return {
        "what": ["square"],
        "shape": f"1x{rows}x{width}:{width}",
        **Shape(1, rows, width, width)._asdict(),
        "precision": precision,
        "launch": launch,
        "ran_fp8": precision.startswith("fp8"),
        "step": {"tflops": 100 * speed, "speed_to_bf16": speed},
    }


def test_where_fp8_overtakes_bf16(tmp_path: Path) -> None:
    speeds = {512: 1.1, 1024: 0.8, 2048: 1.2, 4096: 1.5}
    results = [row(1024, width, "fp8-delayed", speed) for width, speed in speeds.items()]
    results += [row(64, width, "fp8-delayed", 0.5) for width in speeds]
    results += [row(1024, width, "bf16", 1.0) for width in speeds]
    results.append({**row(1024, 8192, "fp8-delayed", 9.0), "reason": "no"})
    (summary,) = fp8_against_bf16(results)
    assert (summary["faster"], summary["shapes"]) == (3, 8)
    # faster at 512 by chance is no crossing
    assert summary["from_width_by_rows"] == {64: None, 1024: 2048}
    text = "\n".join(summary_lines([summary]))
    assert "1024 rows: from width 2048 on" in text and "64 rows: never" in text
    assert from_width({512: 2.0, 1024: 1.5}) == 512
    plot(results, {"fp8": {"tflops": 1400.0}}, "title", tmp_path / "x.json")
    plot([{"reason": "no"}], {}, "title", tmp_path / "y.json")
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]
