#!/usr/bin/env python3
"""Tokens per second of the inference engine in FP8 and in bf16, and of transformers compiled with a static cache.

    python test_fp8/bench_decode.py [--config hare_1.1b] [--batches 1 4 16 64] [--output FILE.json]

Random weights and prompts, greedy, cache and prompts of one length for all. Decoding is what the engine reports for a
whole answer, read by the host token by token; the median of the rounds, in which the rows take turns; what is compiled
or captured is so before. Prefill is one batch of prompts, beside the forward of the training's te_layer in FP8 with
micro-batches of the same prompts; FLOPs count as in training.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model.fp8.machine import describe, headline
from test_fp8.common import report
from test_fp8.common.options import ByMachine, Options, model_config, positive
from test_fp8.common.report import Result

OPTIONS = Options(__file__, __doc__)
OPTIONS.add("--config", ByMachine("hare_1.1b", "tiny"), "the model", type=model_config)
OPTIONS.add("--batches", ByMachine([1, 4, 16, 64], [1, 2]), "samples at a time", type=positive, nargs="+")
OPTIONS.add("--prompt", ByMachine(128, 8), "tokens of a prompt", type=positive)
OPTIONS.add("--cache", ByMachine(512, 24), "tokens of a prompt with its answer", type=positive)
OPTIONS.add("--prefill_batch", ByMachine(64, 2), "prompts of the prefill", type=positive)
OPTIONS.add("--prefill_length", ByMachine(2048, 32), "their tokens", type=positive)
OPTIONS.add("--rounds", 3, "of which the median counts", type=positive)
OPTIONS.add(
    "--transformers_batches",
    ByMachine([1, 64], [1]),
    "batches that transformers decodes, too; it compiles for a minute a batch",
    type=positive,
    nargs="*",
)
OPTIONS.add_output("JSON and plot")

COLUMNS: report.Columns = {
    "what": ("what", "<"),
    "row": ("row", "<"),
    "batch": ("batch", "d"),
    "ms": ("ms", ".3f"),
    "tokens/s": ("tokens_per_s", ",.0f"),
    "to bf16": ("to_bf16", ".3f"),
    "TFLOP/s": ("tflops", ".0f"),
    "weights GiB": ("weights_gib", ".3f"),
}


def plot(path: Path, results: Sequence[Result]) -> None:
    """Decoding: tokens/s by batch, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 4.5), layout="constrained")
    decoding = [r for r in results if r["what"] == "decode"]
    for row in dict.fromkeys(r["row"] for r in decoding):
        mine = [r for r in decoding if r["row"] == row]
        axis.plot([r["batch"] for r in mine], [r["tokens_per_s"] for r in mine], "o-", label=row)
    axis.set(xlabel="batch", ylabel="tokens/s", xscale="log", yscale="log")
    batches = sorted({r["batch"] for r in decoding})
    axis.set_xticks(batches, map(str, batches))
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: Sequence[str]) -> int:
    options = OPTIONS.parse_args(argv)
    OPTIONS.settle(options)
    if options.cache < options.prompt + 2:
        OPTIONS.error(f"--cache {options.cache}: it must hold --prompt {options.prompt} and two tokens more")
    from model.config import load_config
    from model.fp8.precision import PrecisionError, check_fp8_gpu
    from test_fp8.model.decoding import measure

    positions = load_config(options.config).max_position_embeddings
    if (longest := max(options.cache, options.prefill_length + 1)) > positions:
        OPTIONS.error(f"--cache, --prefill_length: {longest} tokens, and --config has {positions} positions")
    try:
        check_fp8_gpu()
    except PrecisionError as error:
        OPTIONS.error(str(error))

    print(headline(*describe()), flush=True)
    results = measure(options)
    bf16 = {(r["what"], r["batch"]): r["tokens_per_s"] for r in results if r["row"] == "bf16"}
    for result in results:
        other = bf16.get((result["what"], result["batch"]))
        result["to_bf16"] = result["tokens_per_s"] / other if other else None
    print(report.table(results, COLUMNS))
    if options.output:
        report.write_json(options.output, OPTIONS.command(options), results)
        plot(options.output.with_suffix(".png"), results)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
