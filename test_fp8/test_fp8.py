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

import argparse
import gc
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)
import torch

from model.variants import VARIANTS
from test_fp8.common import report
from test_fp8.linear.bench import LAUNCHES, measure_shape
from test_fp8.linear.ceilings import measure_ceilings
from test_fp8.linear.shapes import (
    CPU_ROWS_FRACTION,
    CPU_WIDTH_FRACTION,
    chosen_shapes,
    model_names,
    parse_shape,
)
from test_fp8.linear.summary import (
    HEADER,
    LEGEND,
    fp8_against_bf16,
    plot,
    summary_lines,
    table_row,
)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: a positive whole number is expected")
    return int(text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("--shapes", nargs="+", type=parse_shape, metavar="BATCHxROWSxIN:OUT")
    parser.add_argument("--sweep", action="store_true", help="square Linears and the GEMMs of hare_1.1b too")
    parser.add_argument("--models", nargs="+", choices=model_names(), default=[], help="their GEMMs too")
    recipes = list(VARIANTS["te_linear"].recipes)
    parser.add_argument("--recipes", nargs="+", choices=recipes, default=recipes, help="FP8 recipes")
    parser.add_argument(
        "--cached_weight",
        action="store_true",
        help="FP8 weights are quantized while warming up, not in each forward",
    )
    parser.add_argument("--iterations", type=positive, help="samples, at most; default: 20, without a GPU 3")
    parser.add_argument(
        "--output", type=report.output_file, metavar="FILE.json", help="write JSON and a plot"
    )
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    gpu = torch.cuda.is_available()
    iterations, warmup = arguments.iterations or (20 if gpu else 3), 2 if gpu else 1
    models = arguments.models + ["hare_1.1b"] * arguments.sweep
    shapes = chosen_shapes(arguments.shapes, arguments.sweep, models, shrink=not gpu)
    names = ["fp32", "bf16", *(f"fp8-{recipe}" for recipe in dict.fromkeys(arguments.recipes))]
    print(report.headline(*report.describe()))
    if not gpu:
        print(
            "No GPU: FP8 is the CPU reference, right in its results and slow; these times say nothing about FP8."
        )
        print(f"Shapes not given by --shapes have 1/{CPU_ROWS_FRACTION} of their rows,", end=" ")
        print(f"those of models and the sweep also 1/{CPU_WIDTH_FRACTION} of their widths.")

    # A stream of its own from the start: work on the default stream cannot be captured, nor what autograd built there.
    stream = torch.cuda.Stream() if gpu else None
    with torch.cuda.stream(stream):
        ceilings = measure_ceilings(10)
        for precision, ceiling in ceilings.items():
            print(f"ceiling {precision}: {ceiling['tflops']:.0f} TFLOP/s, matrices of {ceiling['size']}")
        print(f"median of at most {iterations} samples\n{LEGEND}\n\n{HEADER}\n{'-' * len(HEADER)}")
        results = []
        for shape, what in shapes.items():
            if gpu:
                gc.collect()
                torch.cuda.empty_cache()
            results += measure_shape(
                shape,
                what,
                names,
                ceilings,
                iterations=iterations,
                warmup=warmup,
                cached_weight=arguments.cached_weight,
            )
            print("\n".join(map(table_row, results[-len(names) * len(LAUNCHES) :])), flush=True)

    summary = fp8_against_bf16(results)
    print("\n" + "\n".join(summary_lines(summary)))
    if arguments.output:
        settings = {"warmup": warmup, "iterations": iterations, "cached_weight": arguments.cached_weight}
        report.write_json(
            arguments.output,
            command(arguments, iterations),
            results,
            **settings,
            ceilings=ceilings,
            fp8_against_bf16=summary,
        )
        machine, _ = report.describe()
        plot(results, ceilings, f"One Linear on {machine.get('gpu', machine['cpu'])}", arguments.output)
    if not any(row.get("ran_fp8") for row in results):
        print("error: nothing ran in FP8; the reasons are in the table", file=sys.stderr)
        return 1
    return 0


def command(arguments: argparse.Namespace, iterations: int) -> str:
    options: list[object] = []
    if arguments.shapes:
        options += ["--shapes", *arguments.shapes]
    if arguments.sweep:
        options.append("--sweep")
    if arguments.models:
        options += ["--models", *arguments.models]
    options += ["--recipes", *arguments.recipes, "--iterations", iterations]
    if arguments.cached_weight:
        options.append("--cached_weight")
    return report.command_line("test_fp8/test_fp8.py", options)


if __name__ == "__main__":
    raise SystemExit(main())
