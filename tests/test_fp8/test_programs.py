"""The smaller benchmarks of test_fp8: their figures, and the programs as they are run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from test_fp8 import bench_scaling
from test_fp8.bench_decode import BENCHMARK as DECODING
from test_fp8.bench_scaling import BENCHMARK as SCALING
from test_fp8.bench_scaling import summarize
from test_fp8.check_exports import compare
from test_fp8.compare_gradients import BENCHMARK as GRADIENTS
from test_fp8.linear import Linear, measure_shape
from test_fp8.model import gradients
from test_fp8.test_fp8 import BENCHMARK as LINEAR
from test_fp8.test_fp8 import Shape
from tests.model.conftest import without_fp8
from tests.model.test_head import double_gradient_of_parts, use_torch_cross_entropy
from tests.test_fp8.running import install_stand_in, report_of

SMALL_DECODING = [
    "--batches",
    "1",
    "3",
    "--prompt",
    "4",
    "--cache",
    "8",
    "--rounds",
    "1",
    "--transformers_batches",
]


def test_decoding_report(tmp_path: Path) -> None:
    prefill = ["--prefill_batch", "2", "--prefill_length", "16"]
    report = report_of(DECODING, tmp_path, *SMALL_DECODING, *prefill)
    found = [(r["what"], r["row"], r["batch"]) for r in report["results"]]
    decoding = [("decode", row, batch) for batch in (1, 3) for row in ("fp8", "bf16")]
    rest = [("prefill", "fp8", 2), ("prefill", "bf16", 2)]
    assert found == [*decoding, *rest]
    fp8, bf16 = report["results"][2:4]
    assert fp8["tokens_per_s"] == pytest.approx(3 / (fp8["ms"] / 1000))
    assert (
        fp8["to_bf16"] == pytest.approx(fp8["tokens_per_s"] / bf16["tokens_per_s"]) and bf16["to_bf16"] == 1
    )
    assert fp8["weights_gib"] < bf16["weights_gib"]
    assert "--batches 1 3" in report["command"]


# A decoding step takes 2 ms in this process and 8 ms in another one.
VLLM = """
import json, os, time
from types import SimpleNamespace

class SamplingParams:
    def __init__(self, **options):
        self.tokens = options["max_tokens"]

class LLM:
    def __init__(self, model, max_num_seqs, **options):
        config = json.load(open(model + "/config.json"))
        assert config["architectures"] == ["MistralForCausalLM"] and max_num_seqs == 2
        self.step_s = 0.002 if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" else 0.03

    def generate(self, prompts, params, use_tqdm):
        time.sleep(params.tokens * self.step_s)
        assert all(len(prompt["prompt_token_ids"]) == 4 for prompt in prompts)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * params.tokens)]) for _ in prompts]
"""


@pytest.mark.slow
@pytest.mark.process
def test_decoding_with_vllm_reports_the_fastest_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PYTHONPATH", str(install_stand_in(tmp_path / "site", VLLM)))
    small = ["--prefill_batch", "2", "--prefill_length", "16", "--batches", "1", "2"]
    report = report_of(DECODING, tmp_path, *SMALL_DECODING, *small, "--cache", "24")
    found = {(r["row"], r["batch"]): r for r in report["results"] if r["row"].startswith("vllm")}
    assert list(found) == [(f"vllm {precision}", batch) for precision in ("fp8", "bf16") for batch in (1, 2)]
    for (_, batch), r in found.items():
        assert r["ms"] < 30 and r["tokens_per_s"] == pytest.approx(batch / r["ms"] * 1000)
        assert r["settings"]["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and r["version"] == "1.2"


def test_exports_are_compared() -> None:
    exact = [-1.0, -2.0, -3.0, -4.0]
    by_transformers = {"exact": exact, "rounded": [-1.01, -2.0, -3.02, -4.01], "gap": [0.0, 0.07]}
    by_transformers |= {"same_ids": 1, "same_greedy": 0}

    def problems(errors: list[float], **changes: Any) -> int:
        scored = [{"logprobs": [a + b for a, b in zip(exact, errors, strict=True)]}]
        return len(compare(scored, by_transformers | changes)["problems"])

    assert problems([0.02, -0.02, 0.01, 0.0]) == 0
    assert problems([0.03, -0.03, 0.03, 0.0]) == 1, (
        "twice the mean of the rounded ones, which is 0.01, is 0.02"
    )
    assert problems([math.nan, 0.0, 0.0, 0.0]) == 1
    assert problems([0.0] * 4, gap=[0.0, 0.09]) == 1
    assert problems([0.0] * 4, same_ids=0) == 1


SMALL_SCALING = "--config tiny --seq_length 16 --accumulation 1 --stages 1 --precisions bf16".split()


def of_gpus(*speeds: float) -> list[dict[str, Any]]:
    """What bench_model.py measured on GPUs at the same time."""
    found = {"allocated_gib": 3.0, "attention": "flash", "startup_checks": []}
    return [{"tokens_per_second": speed, **found} for speed in speeds]


def test_scaling_efficiency() -> None:
    alone = summarize([of_gpus(100.0, 90.0, 110.0, 1000.0)], 1, [])
    assert alone["alone"] == [100, 90, 110, 1000] and alone["tokens_per_second"] == 325
    two = summarize([of_gpus(170.0), of_gpus(182.0)], 2, alone["alone"])
    assert two["tokens_per_second"] == 176 and two["rounds"] == [[170, 182]] and two["peak_gib"] == 3
    assert two["share_of_alone"] == pytest.approx(176 / 190)
    assert two["share_of_slowest"] == pytest.approx(176 / 180)
    on_a_cpu = summarize([of_gpus(150.0)], 2, [100.0])
    assert on_a_cpu["share_of_alone"] == pytest.approx(0.75), "one rank stands for each"
    assert "share_of_alone" not in summarize([of_gpus(10.0)], 2, [])
    assert summarize([of_gpus(1.0), [{"reason": "why"}]], 1, []) == {"reason": "why"}


@pytest.mark.parametrize(
    "words", [["--stages"], ["--row", "mine", "max_steps=3"], ["--row", "f", "optim=sgd"]]
)
def test_invalid_scaling_options_raise(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_scaling, "run_together", lambda *_: pytest.fail("a process was started"))
    assert SCALING.main([*SMALL_SCALING, *words]) == 2


@pytest.mark.usefixtures("forked")
@pytest.mark.process
@pytest.mark.slow
def test_scaling_report(tmp_path: Path) -> None:
    one, two = report_of(SCALING, tmp_path, *SMALL_SCALING, "--gpus", "1", "2")["results"]
    assert (one["step_tokens"], two["step_tokens"]) == (32, 64)
    assert two["share_of_alone"] == pytest.approx(two["tokens_per_second"] / (2 * one["tokens_per_second"]))
    assert (tmp_path / "results" / "report.png").stat().st_size > 0


SMALL_GRADIENTS = ["--batches", "2", "--micro_batch", "1", "--seq_length", "32"]


def test_gradient_figures() -> None:
    torch.manual_seed(0)
    exact = [{"a": torch.randn(8, 8), "b": torch.randn(8)} for _ in range(3)]
    short = [{name: 0.9 * g for name, g in batch.items()} for batch in exact]
    found = gradients.compare("short", short, exact, {"a": exact[0]["a"] * 0.75})
    errors = [found[key] for key in ("error_of_batch", "error_of_sum", "worst")]
    assert errors == pytest.approx([0.1] * 3, rel=1e-5) and found["along"] == pytest.approx(0.9, rel=1e-5)
    assert found["worst_matrix"] == "a", "the only matrix"
    assert found["decoder_error_to_bf16"] == pytest.approx(0.2)


def test_gradient_case_must_run_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    without_fp8(monkeypatch, "nn")
    assert GRADIENTS.main(["--rows", "bf16", *SMALL_GRADIENTS]) == 0
    assert GRADIENTS.main(["--rows", "block", *SMALL_GRADIENTS]) == 2


def test_gradient_report(tmp_path: Path) -> None:
    bf16, fp8 = report_of(GRADIENTS, tmp_path, "--rows", "bf16", "current_e4m3", *SMALL_GRADIENTS)["results"]
    assert 0 < bf16["error_of_batch"] < 0.02 < fp8["error_of_batch"] < 0.2
    assert bf16["along"] == pytest.approx(1, abs=0.01) and fp8["along"] == pytest.approx(1, abs=0.05)


def test_gradient_report_covers_the_head_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_torch_cross_entropy(monkeypatch)
    words = ["--rows", "current_e4m3", "delayed_e4m3_main_grad", *SMALL_GRADIENTS, "--seq_length", "64"]
    assert all(0.01 < r["error_of_batch"] < 0.2 for r in report_of(GRADIENTS, tmp_path, *words)["results"])
    double_gradient_of_parts(monkeypatch)
    assert all(r["error_of_batch"] > 0.9 for r in report_of(GRADIENTS, tmp_path, *words)["results"])


RECIPES = ["delayed", "current", "block"]
PRECISIONS = ["fp32", "bf16", *(f"fp8-{recipe}" for recipe in RECIPES)]


def check_report(folder: Path, launches: list[str]) -> dict[str, Any]:
    shapes = ["2x8x32:64", "1x8x32:32"]
    report = report_of(LINEAR, folder, "--shapes", *shapes, "--iterations", "2")
    results = {(r["shape"], r["precision"], r["launch"]): r for r in report["results"]}
    assert list(results) == [(s, p, w) for s in shapes for p in PRECISIONS for w in ("eager", "graph")]
    for way in launches:
        bf16 = results[shapes[0], "bf16", way]
        assert bf16["ran_fp8"] is False and results[shapes[0], "fp32", way]["errors"]["output"] < 1e-4
        for recipe in RECIPES:
            good = results[shapes[0], f"fp8-{recipe}", way]
            assert good["ran_fp8"] is True and good["errors"].keys() == {"output", "dgrad", "wgrad"}
            # e4m3 keeps 3 bits of mantissa: a few percent an element, and not nothing, as bf16 would show
            assert all(0.01 < error < 0.1 for error in good["errors"].values())
            for part, gemms in {"step": 3, "forward": 1}.items():
                median = good[part]["ms_median"]
                assert good[part]["tflops"] == pytest.approx(gemms * 2 * 16 * 32 * 64 / median / 1e9)
                assert good[part]["speed_to_bf16"] == pytest.approx(bf16[part]["ms_median"] / median)
            few_rows = results[shapes[1], f"fp8-{recipe}", way]
            assert few_rows["reason"] and "step" not in few_rows
    return report


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_linear_report(tmp_path: Path) -> None:
    report = check_report(tmp_path, ["eager"])
    assert all("reason" in r for r in report["results"] if r["launch"] == "graph")


@pytest.mark.gpu
def test_linear_report_on_gpu(tmp_path: Path) -> None:
    check_report(tmp_path, ["eager", "graph"])


def test_linear_without_fp8_fails() -> None:
    assert LINEAR.main(["--shapes", "1x1x32:32", "--iterations", "1", "--recipes", "current"]) == 1


def measured(*precisions: str) -> dict[str, dict[str, Any]]:
    results = measure_shape(Shape(1, 32, 64, 64), list(precisions), 1)
    return {r["precision"]: r for r in results if r["launch"] == "eager"}


def test_wrong_linear_result_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Linear.run

    def wrong(self: Linear, part: str, calls: int) -> dict[str, torch.Tensor]:
        results = right(self, part, calls)
        return {k: t * 1.2 if self.compute == "fp8" and k == "wgrad" else t for k, t in results.items()}

    monkeypatch.setattr(Linear, "run", wrong)
    found = measured("bf16", "fp8-current")
    assert found["fp8-current"]["reason"] and "step" not in found["fp8-current"]
    assert found["bf16"]["step"]["ms_median"] > 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_linear_without_fp8_gradients_has_no_speed(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"fp8-{recipe}"
    assert measured(name)[name]["ran_fp8"] is True
    without_fp8(monkeypatch, "tn")
    assert "reason" in measured(name)[name] and "step" not in measured(name)[name]
