"""Measure the forward and backward pass of a linear layer in fp32, bf16 and FP8 with each recipe.

    python test_fp8/test_fp8.py                                              # the shapes of HARE's microbenchmark
    python test_fp8/test_fp8.py --shapes 8x2048x2048:512 1x16384x8192:8192   # other shapes

fp32 (IEEE, without TF32) and bf16 use torch.nn.Linear. FP8 uses te.Linear with bf16 parameters, and the measured time
includes the quantization of input, weight and gradient. Each precision is measured with normal kernel launches
("eager") and with a CUDA graph ("graph"). Results are first compared with float32, and no speed is reported for wrong
results. The figures are medians for forward and backward, with 6 x rows x in x out FLOPs (Kaplan et al. 2020,
arXiv:2001.08361, section 2.1), and for the forward pass alone. All precisions of a shape are measured alternately.

Without a GPU, the CPU reference implementation computes FP8 on smaller shapes. The results are correct, but the speeds
are meaningless.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model.fp8.hardware import HOPPER_RECIPES
from model.fp8.recipes import FP8_FEATURE_MULTIPLE, FP8_TRAIN_ROW_MULTIPLE
from model.variants import VARIANTS
from test_fp8.common import report
from test_fp8.common.options import DeviceDefault, option, positive


class Shape(NamedTuple):
    """The shape of a linear layer with `inputs` input features and `outputs` output features.

    The input of the layer has the shape [batch, rows, inputs].
    """

    batch: int
    rows: int
    inputs: int
    outputs: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.rows}x{self.inputs}:{self.outputs}"

    @property
    def gemm_flop(self) -> int:
        """Return the number of floating-point operations in each of the three GEMMs: forward, dgrad and wgrad."""
        return 2 * self.batch * self.rows * self.inputs * self.outputs

    def fp8_problem(self) -> str | None:
        """Return why FP8 training does not support this shape, or None if it does."""
        if self.batch * self.rows % FP8_TRAIN_ROW_MULTIPLE:
            return f"batch x rows is {self.batch * self.rows}, but FP8 needs a multiple of {FP8_TRAIN_ROW_MULTIPLE}"
        if self.inputs % FP8_FEATURE_MULTIPLE or self.outputs % FP8_FEATURE_MULTIPLE:
            return (
                f"the layer has {self.inputs} input and {self.outputs} output features, but FP8 needs multiples of "
                f"{FP8_FEATURE_MULTIPLE}"
            )
        return None


def parse_shape(text: str) -> Shape:
    """Argparse type for the shape of a linear layer, such as 8x2048x2048:512."""
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+):(\d+)", text)
    sizes = [int(n) for n in match.groups()] if match else [0]
    if not all(sizes):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected BATCHxROWSxIN:OUT with positive integers, for example 8x2048x2048:512"
        )
    return Shape(*sizes)


# The shapes in the microbenchmark of the HARE project (github.com/LiteAI-Team/HARE), and the same shapes with fewer
# rows for hosts without a GPU.
HARE_SHAPES = [parse_shape(text) for text in (
    "8x2048x2048:512", "8x2048x2048:5632", "8x2048x2048:2048", "8x2048x2048:32", "1x1024x1024:1024"
)]  # fmt: skip
CPU_SHAPES = [shape._replace(rows=shape.rows // 64) for shape in HARE_SHAPES]
RECIPES = list(VARIANTS["te_linear"].recipes)

OPTIONS = [
    option(
        "--shapes",
        DeviceDefault(HARE_SHAPES, CPU_SHAPES),
        "Shapes of the linear layers to measure.",
        nargs="+",
        type=parse_shape,
        metavar="BATCHxROWSxIN:OUT",
    ),
    option("--recipes", list(HOPPER_RECIPES), "FP8 recipes to measure.", nargs="+", choices=RECIPES),
    option(
        "--iterations",
        DeviceDefault(20, 3),
        "Number of timing samples per measurement.",
        type=positive,
    ),
]
COLUMNS: report.Columns = {
    "shape": ("shape", "<"),
    "precision": ("precision", "<"),
    "launch": ("launch", "<"),
    "ms": (lambda r: r["step"]["ms_median"], ".4f"),
    "TFLOP/s": (lambda r: r["step"]["tflops"], ".3f"),
    "x bf16": (lambda r: r["step"]["speed_to_bf16"], ".2f"),
    "forward": (lambda r: r["forward"]["tflops"], ".3f"),
    "output error": (lambda r: r["errors"]["output"], ".1e"),
    "dgrad error": (lambda r: r["errors"]["dgrad"], ".1e"),
    "wgrad error": (lambda r: r["errors"]["wgrad"], ".1e"),
    "FP8": (lambda r: "yes" if r["ran_fp8"] else "no", "<"),
}


def measure(options: argparse.Namespace) -> report.Outcome:
    import torch

    from model.autotune import release_memory
    from test_fp8.linear import measure_shape

    gpu = torch.cuda.is_available()
    precisions = ["fp32", "bf16", *(f"fp8-{recipe}" for recipe in dict.fromkeys(options.recipes))]
    results: list[report.Result] = []
    # use a side stream from the start, because work on the default stream cannot be captured in a CUDA graph
    with torch.cuda.stream(torch.cuda.Stream() if gpu else None):
        for shape in options.shapes:
            release_memory()
            print(f"{shape} ...", flush=True)
            results += measure_shape(shape, precisions, options.iterations)
    return report.Outcome(
        results,
        {"iterations": options.iterations},
        failures=[]
        if any(r["ran_fp8"] for r in report.measured(results))
        else ["no measurement ran in FP8; see the reasons above"],
    )


BENCHMARK = report.Benchmark(__file__, __doc__, OPTIONS, COLUMNS, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(sys.argv[1:]))
