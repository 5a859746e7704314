"""Define the shapes of the linear layers that test_fp8.py measures."""

from __future__ import annotations

import argparse
import re
from typing import NamedTuple

from model.fp8.recipes import FP8_FEATURE_MULTIPLE, FP8_TRAIN_ROW_MULTIPLE


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
            return f"for FP8, the numbers of input and output features must be multiples of {FP8_FEATURE_MULTIPLE}"
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


# The shapes in HARE's microbenchmark, and the same shapes with fewer rows for hosts without a GPU.
HARE_SHAPES = [parse_shape(text) for text in (
    "8x2048x2048:512", "8x2048x2048:5632", "8x2048x2048:2048", "8x2048x2048:32", "1x1024x1024:1024"
)]  # fmt: skip
CPU_SHAPES = [shape._replace(rows=shape.rows // 64) for shape in HARE_SHAPES]
