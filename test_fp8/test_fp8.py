"""Measure one Linear, forward and backward, in fp32, bf16 and FP8 with each recipe.

    python test_fp8/test_fp8.py                                              HARE's shapes
    python test_fp8/test_fp8.py --shapes 8x2048x2048:512 1x16384x8192:8192   other shapes

fp32 (IEEE, no TF32) and bf16 use torch.nn.Linear. FP8 uses te.Linear on bf16 parameters; the time includes the
quantization of input, weight and gradient. Each case is launched normally ("eager") and as a CUDA graph ("graph"). A
result is first compared with float32; a wrong one is reported without a speed. The figures are medians of forward +
backward, with 6 x rows x in x out FLOP (Kaplan et al. 2020, arXiv:2001.08361, section 2.1), and of the forward alone.
The precisions of a shape alternate. On a GPU, the speed of plain matrix products is measured too ("ceiling").

Without a GPU, FP8 runs as the CPU reference on smaller shapes. Results are correct, but speeds are meaningless.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model.fp8.hardware import HOPPER_RECIPES
from model.variants import VARIANTS
from test_fp8.common import report
from test_fp8.common.options import DeviceDefault, option, positive
from test_fp8.linear.shapes import CPU_SHAPES, HARE_SHAPES, parse_shape

RECIPES = list(VARIANTS["te_linear"].recipes)

OPTIONS = [
    option(
        "--shapes",
        DeviceDefault(HARE_SHAPES, CPU_SHAPES),
        "shapes to measure",
        nargs="+",
        type=parse_shape,
        metavar="BATCHxROWSxIN:OUT",
    ),
    option("--recipes", list(HOPPER_RECIPES), "FP8 recipes to measure", nargs="+", choices=RECIPES),
    option("--iterations", DeviceDefault(20, 3), "maximum number of timed samples", type=positive),
]
COLUMNS: report.Columns = {
    "shape": ("shape", "<"),
    "precision": ("precision", "<"),
    "launch": ("launch", "<"),
    "ms": (lambda r: r["step"]["ms_median"], ".4f"),
    "TFLOP/s": (lambda r: r["step"]["tflops"], ".3f"),
    "ceiling": (lambda r: r["step"]["share_of_ceiling"], ".1%"),
    "x bf16": (lambda r: r["step"]["speed_to_bf16"], ".2f"),
    "forward": (lambda r: r["forward"]["tflops"], ".3f"),
    "output error": (lambda r: r["errors"]["output"], ".1e"),
    "dgrad error": (lambda r: r["errors"]["dgrad"], ".1e"),
    "wgrad error": (lambda r: r["errors"]["wgrad"], ".1e"),
    "FP8": (lambda r: "yes" if r["ran_fp8"] else "no", "<"),
}


def measure(options: argparse.Namespace) -> report.Outcome:
    import torch

    from model.autotune.timing import release_memory
    from test_fp8.linear.bench import measure_ceilings, measure_shape

    gpu = torch.cuda.is_available()
    precisions = ["fp32", "bf16", *(f"fp8-{recipe}" for recipe in dict.fromkeys(options.recipes))]
    results: list[report.Result] = []
    # use a side stream from the start: work on the default stream cannot be captured
    with torch.cuda.stream(torch.cuda.Stream() if gpu else None):
        ceilings = measure_ceilings(20)
        for shape in options.shapes:
            release_memory()
            print(f"{shape} ...", flush=True)
            results += measure_shape(shape, precisions, ceilings, options.iterations)
    return report.Outcome(
        results,
        {"iterations": options.iterations, "ceilings": ceilings},
        failures=[]
        if any(r["ran_fp8"] for r in report.measured(results))
        else ["no case ran in FP8; see the reasons above"],
    )


BENCHMARK = report.Benchmark(__file__, __doc__, OPTIONS, COLUMNS, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(sys.argv[1:]))
