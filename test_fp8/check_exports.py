#!/usr/bin/env python3
"""Check that vLLM and transformers compute the same results with exported models.

    python test_fp8/check_exports.py [--recipes delayed block] [--model_type qwen3] [--output FILE.json]

A small model is trained for two steps with each FP8 recipe and in bf16, and exported in both formats. vLLM and
transformers load each export. vLLM continues texts greedily, and transformers computes the log-probabilities of all
tokens in float32 ("exact") and as vLLM does, in bf16 with FP8 activations if the weights are in FP8 ("rounded"). The
exit status is 1 if

- the mean difference between vLLM's and the exact log-probabilities is more than twice the mean difference between the
  rounded and the exact log-probabilities, or
- vLLM chooses a token whose log-probability is below the highest by more than four times the largest difference
  between a rounded and an exact log-probability, or
- vLLM and transformers split a text into different tokens.

If the environment variable VLLM_PYTHONPATH is set, it replaces PYTHONPATH for vLLM and transformers."""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model.config import MODEL_TYPES
from model.variants import VARIANTS
from test_fp8.common import report
from test_fp8.common.launch import Program, call_with_vllm, run, vllm_environment
from test_fp8.common.options import option
from test_fp8.common.report import Result

VARIANT = "te_layer"
# the recipes, and bf16, whose FP8 export has one scale per row
RECIPES = [*(recipe for recipe in VARIANTS[VARIANT].recipes if recipe != "mxfp8"), "bf16"]
FACTOR = 2
# The sizes suit the FP8 kernels of vLLM. The texts are longer than the sliding window.
MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "sliding_window": 64,
    "vocab_size": 2048,
}
TEXT_CHARACTERS, TEXTS, NEW_TOKENS = 600, 8, 32

OPTIONS = [
    option(
        "--recipes",
        RECIPES,
        "Precisions to check: names of FP8 recipes, or bf16.",
        nargs="+",
        choices=RECIPES,
    ),
    option(
        "--model_type",
        "mistral",
        "Type of the model to train (model_type in config.json).",
        choices=tuple(MODEL_TYPES),
    ),
]
COLUMNS: report.Columns = {
    "row": ("row", "<"),
    "format": ("format", "<"),
    "vLLM": ("vllm", ".2e"),
    "rounded": ("rounded", ".2e"),
    "largest gap": ("gap", ".2e"),
    "allowed": ("allowed_gap", ".2e"),
    "same greedy": ("same_greedy", "d"),
}


def measure(options: argparse.Namespace) -> report.Outcome:
    """Train and export small models, and compare vLLM and transformers on each export.

    Raises ValueError if vLLM is not installed or a program fails.
    """
    environment = vllm_environment()
    if environment is None:
        raise ValueError(
            "vLLM is not installed. Install it, or set VLLM_PYTHONPATH to the folder of its packages"
        )
    model = MODEL | {"model_type": options.model_type}
    if options.model_type != "mistral":
        model["sliding_window"] = None
    source = inspect.getsource(argparse)
    texts = [source[i * TEXT_CHARACTERS : (i + 1) * TEXT_CHARACTERS] for i in range(TEXTS)]
    with tempfile.TemporaryDirectory() as name:
        exports = export_models(model, options.recipes, Path(name))
        calls: list[dict[str, Any]] = [{"folder": str(f), "texts": texts} for f in exports.values()]
        vllm = call_with_vllm("score_with_vllm", [c | {"new": NEW_TOKENS} for c in calls], environment)
        print("computed the log-probabilities with vLLM", flush=True)
        calls = [c | {"scored": scored} for c, scored in zip(calls, vllm["found"], strict=True)]
        transformers = call_with_vllm("score_with_transformers", calls, environment, "transformers")
    results = [
        {"row": recipe, "format": form, **compare(by_vllm, by_transformers)}
        for (recipe, form), by_vllm, by_transformers in zip(
            exports, vllm["found"], transformers["found"], strict=True
        )
    ]
    failures = [f"{r['row']}, {r['format']}: {why}" for r in results for why in r["problems"]]
    versions = {"vllm": vllm["version"], "transformers": transformers["version"]}
    return report.Outcome(results, {"model": model, "readers": versions}, failures=failures)


def export_models(model: dict[str, Any], recipes: Sequence[str], folder: Path) -> dict[tuple[str, str], Path]:
    """Train a model in each precision, and export the model in both formats.

    model: keys of config.json that differ from model/configs/tiny.json. recipes: names of FP8 recipes, or bf16. Returns
    a dictionary from (recipe, format) to the folder of the export.
    """
    log = folder / "log"
    text = ["--input", Path(json.__file__).parent, inspect.getfile(argparse)]
    tokenizer, data = folder / "tokenizer", folder / "data"
    run(
        Program(
            "train/train_tokenizer.py",
            [*text, "--vocab_size", model["vocab_size"], "--output", tokenizer],
            log,
        )
    )
    prepare = [*text, "--tokenizer", tokenizer, "--output", data, "--eval_fraction", 0.1, "--workers", 1]
    run(Program("train/prepare_data.py", prepare, log))
    tiny = json.loads(
        (Path(__file__).resolve().parent.parent / "model/configs/tiny.json").read_text(encoding="utf-8")
    )
    (folder / "model.json").write_text(json.dumps(tiny | model), encoding="utf-8")
    exports = {}
    for recipe in recipes:
        output, config = folder / recipe, folder / f"{recipe}.json"
        settings = {
            "model": {"config": str(folder / "model.json"), "variant": VARIANT},
            "precision": {"compute": "bf16"} if recipe == "bf16" else {"recipe": recipe},
            "data": {"sources": {"text": str(data)}},
            "output_dir": str(output),
            "max_steps": 2,
            "max_seq_length": 256,
            "per_device_train_batch_size": 8,
            "learning_rate": 1e-3,
            "warmup_steps": 1,
        }
        config.write_text(json.dumps(settings), encoding="utf-8")
        run(Program("train/train.py", [config], log))
        exports[recipe, "hf"] = output / "hf"
        out = exports[recipe, "hf-fp8"] = folder / f"{recipe}-fp8"
        run(Program("train/export.py", [output, out, "--format", "hf-fp8"], log))
        print(f"trained and exported a model; precision: {recipe}", flush=True)
    return exports


def compare(vllm: Sequence[Result], transformers: Result) -> Result:
    """Compare the log-probabilities of vLLM with those of transformers (test_fp8/model/vllm_functions.py).

    Returns a report entry: the mean differences to the exact log-probabilities ("vllm" and "rounded"), the largest
    "gap" and the "allowed_gap", the number of "tokens" and "texts", and a list of "problems".
    """
    exact = transformers["exact"]
    by_vllm = [logprob for text in vllm for logprob in text["logprobs"]]
    difference, rounded = (
        [abs(a - b) for a, b in zip(logprobs, exact, strict=True)]
        for logprobs in (by_vllm, transformers["rounded"])
    )
    result: Result = {
        "vllm": statistics.mean(difference),
        "rounded": statistics.mean(rounded),
        "gap": max(transformers["gap"]),
        "allowed_gap": 2
        * FACTOR
        * max(rounded),  # each of two logits may be off by FACTOR times the difference
        "tokens": len(exact),
        "texts": len(vllm),
        "same_ids": transformers["same_ids"],
        "same_greedy": transformers["same_greedy"],
    }
    problems = []
    if not result["vllm"] <= FACTOR * result["rounded"]:
        problems.append(
            f"the log-probabilities of vLLM differ from those of transformers by {result['vllm']:.2e} on average, but "
            f"at most {FACTOR * result['rounded']:.2e} is allowed"
        )
    if not result["gap"] <= result["allowed_gap"]:
        problems.append(
            f"vLLM chose a token whose log-probability is {result['gap']:.2e} below the highest, but at most "
            f"{result['allowed_gap']:.2e} is allowed"
        )
    if result["same_ids"] != result["texts"]:
        problems.append(
            f"vLLM and transformers use the same token ids for only {result['same_ids']} of {result['texts']} texts"
        )
    return {**result, "problems": problems}


BENCHMARK = report.Benchmark(__file__, __doc__, OPTIONS, COLUMNS, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(sys.argv[1:]))
