"""Measure the decoding speed of this project's inference engine in FP8 and bf16, of transformers and of vLLM.

    python test_fp8/bench_decode.py [--config hare_1.1b] [--batches 1 4 16 64] [--output FILE.json]

Weights and prompts are random, sampling is greedy, and all prompts have the same length. transformers uses a static
cache and torch.compile. The decoding speed is measured over a whole answer, which the host reads token by token. The
prefill speed is measured for one batch of prompts, and its FLOPs are counted as in training. Each figure is a median
over several rounds, in which FP8 and bf16 alternate. Compilation and graph capture are not included.

vLLM is measured if it is installed. If the environment variable VLLM_PYTHONPATH is set, it replaces PYTHONPATH for
vLLM. "kernel ms" is the time per step in which the GPU computes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from test_fp8.common import report
from test_fp8.common.options import DeviceDefault, option, positive, shared

OPTIONS = [
    *shared(config=DeviceDefault("hare_1.1b", "tiny"), rounds=3),
    option(
        "--batches", DeviceDefault([1, 4, 16, 64], [1, 2]), "Batch sizes to decode.", type=positive, nargs="+"
    ),
    option("--prompt", DeviceDefault(128, 8), "Number of tokens per prompt.", type=positive),
    option(
        "--cache",
        DeviceDefault(512, 24),
        "KV cache length in tokens (prompt plus generated tokens).",
        type=positive,
    ),
    option(
        "--prefill_batch", DeviceDefault(64, 2), "Number of prompts in the prefill benchmark.", type=positive
    ),
    option(
        "--prefill_length",
        DeviceDefault(2048, 32),
        "Length of each prompt in the prefill benchmark, in tokens.",
        type=positive,
    ),
    option(
        "--transformers_batches",
        DeviceDefault([1, 64], [1]),
        "Batch sizes for decoding with transformers. Compilation takes about a minute per batch size.",
        type=positive,
        nargs="*",
    ),
]
COLUMNS: report.Columns = {
    "what": ("what", "<"),
    "row": ("row", "<"),
    "batch": ("batch", "d"),
    "ms": ("ms", ".3f"),
    "kernel ms": ("kernel_ms", ".3f"),
    "tokens/s": ("tokens_per_s", ",.0f"),
    "to bf16": ("to_bf16", ".3f"),
    "TFLOP/s": ("tflops", ".0f"),
    "weights GiB": ("weights_gib", ".3f"),
}


def measure(options: argparse.Namespace) -> report.Outcome:
    """Measure the decoding and prefill speeds.

    Raises ValueError if a sequence length exceeds the KV cache or the model's maximum number of positions.
    """
    from model.config import load_config
    from model.fp8.precision import check_fp8_gpu
    from test_fp8.model import decoding

    if options.cache < options.prompt + 2:
        raise ValueError(
            f"--cache {options.cache} is too small; it must exceed --prompt ({options.prompt}) by at least 2 tokens"
        )
    config = load_config(options.config)
    if (longest := max(options.cache, options.prefill_length + 1)) > config.max_position_embeddings:
        raise ValueError(f"--cache and --prefill_length need {longest} positions, but the model has only "
            f"{config.max_position_embeddings} (max_position_embeddings); reduce --cache or "
            "--prefill_length")  # fmt: skip
    check_fp8_gpu()
    results = decoding.measure(options, config)
    bf16 = {(r["what"], r["batch"]): r["tokens_per_s"] for r in results if r["row"] == "bf16"}
    for r in results:
        other = bf16.get((r["what"], r["batch"]))
        r["to_bf16"] = r["tokens_per_s"] / other if other else None
    return report.Outcome(results)


BENCHMARK = report.Benchmark(__file__, __doc__, OPTIONS, COLUMNS, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(sys.argv[1:]))
