#!/usr/bin/env python3
"""Microtest: one Linear, forward and backward, in fp32, bf16 and FP8 with each recipe, launched normally ("eager") and
as a CUDA graph ("graph").

    python test_fp8/test_fp8.py                          HARE's shapes
    python test_fp8/test_fp8.py --sweep                  and square Linears from 512 to 16384 wide on 1k to 64k rows,
                                                         and the GEMMs of hare_1.1b
    python test_fp8/test_fp8.py --models hare_1.1b       and the GEMMs of a model configuration
    python test_fp8/test_fp8.py --shapes 8x2048x2048:512 these instead of HARE's
                                [--recipes delayed current block] [--cached_weight] [--iterations N]
                                [--output FILE.json]

fp32 (IEEE, no TF32) and bf16 are torch.nn.Linear, the baseline that FP8 has to beat; FP8 is te.Linear on bf16
parameters, whose quantization of input, weight and gradient is part of every figure (--cached_weight: but for the
weight's). Figures are for forward + backward, 6 x rows x in x out FLOP (Kaplan et al. 2020, arXiv:2001.08361, section
2.1), and for forward, dgrad (the input's gradient) and wgrad (the weight's) on their own. A sample is several calls in
a row on the same random tensors, the figure the median over samples, between which all rows of a shape take turns, so
that a clock that drifts meets them alike. First of all the results are compared with float32; a row whose results are
wrong has no speed. On a GPU the speed of plain matrix products is measured too, of which each row's is a share.

On a machine without a GPU, FP8 is the CPU reference on smaller shapes: it shows that everything runs and what it
computes, and no speed can be read from it.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model.fp8.machine import describe, headline
from model.variants import VARIANTS
from test_fp8.common import report
from test_fp8.common.options import ByMachine, Options, positive
from test_fp8.linear import shapes, summary

RECIPES = list(VARIANTS["te_linear"].recipes)

OPTIONS = Options(__file__, __doc__, usage=argparse.SUPPRESS)
OPTIONS.add(
    "--shapes",
    None,
    "these instead of HARE's",
    nargs="+",
    type=shapes.parse_shape,
    metavar="BATCHxROWSxIN:OUT",
)
OPTIONS.add_flag("--sweep", "square Linears and the GEMMs of hare_1.1b too")
OPTIONS.add("--models", [], "their GEMMs too", nargs="+", choices=shapes.model_names())
OPTIONS.add("--recipes", RECIPES, "FP8 recipes", nargs="+", choices=RECIPES)
OPTIONS.add_flag("--cached_weight", "FP8 weights are quantized while warming up, not in each forward")
OPTIONS.add("--iterations", ByMachine(20, 3), "samples, at most", type=positive)
OPTIONS.add_output("JSON and a plot")


def main(argv: Sequence[str]) -> int:
    options = OPTIONS.parse_args(argv)
    OPTIONS.settle(options)
    import torch

    from test_fp8.linear.bench import measure_shape
    from test_fp8.linear.ceilings import measure_ceilings

    gpu = torch.cuda.is_available()
    models = options.models + ["hare_1.1b"] * options.sweep
    chosen = shapes.chosen_shapes(options.shapes, options.sweep, models, shrink=not gpu)
    names = ["fp32", "bf16", *(f"fp8-{recipe}" for recipe in dict.fromkeys(options.recipes))]
    settings = {
        "warmup": 2 if gpu else 1,
        "iterations": options.iterations,
        "cached_weight": options.cached_weight,
    }
    machine, versions = describe()
    print(headline(machine, versions))
    if not gpu:
        print(
            "No GPU: FP8 is the CPU reference, right in its results and slow; these times say nothing about FP8.\n"
            f"Shapes not given by --shapes have 1/{shapes.CPU_ROWS_FRACTION} of their rows, those of models and the "
            f"sweep also 1/{shapes.CPU_WIDTH_FRACTION} of their widths."
        )

    # A stream of its own from the start: work on the default stream cannot be captured, nor what autograd built there.
    results: list[report.Result] = []
    with torch.cuda.stream(torch.cuda.Stream() if gpu else None):
        ceilings = measure_ceilings(10)
        for precision, ceiling in ceilings.items():
            print(f"ceiling {precision}: {ceiling['tflops']:.0f} TFLOP/s, matrices of {ceiling['size']}")
        line = "-" * len(summary.HEADER)
        print(f"median of at most {options.iterations} samples\n{summary.LEGEND}\n\n{summary.HEADER}\n{line}")
        for shape, what in chosen.items():
            if gpu:
                gc.collect()
                torch.cuda.empty_cache()
            found = measure_shape(shape, what, names, ceilings, **settings)
            print("\n".join(map(summary.table_row, found)), flush=True)
            results += found

    compared = summary.fp8_against_bf16(results)
    print("\n" + "\n".join(summary.summary_lines(compared)))
    if options.output:
        more = {**settings, "ceilings": ceilings, "fp8_against_bf16": compared}
        report.write_json(options.output, OPTIONS.command(options), results, **more)
        title = f"One Linear on {machine.get('gpu', machine['cpu'])}"
        summary.plot(results, ceilings, title, options.output)
    if not any(row["ran_fp8"] for row in report.measured(results)):
        print("error: nothing ran in FP8; the reasons are in the table", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
