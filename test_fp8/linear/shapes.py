"""The Linears that the microtest measures: HARE's, a grid of square ones, and the GEMMs of a model configuration."""

from __future__ import annotations

import argparse
import re
from typing import NamedTuple

from model.config import load_sizes
from model.fp8.recipes import FP8_FEATURE_MULTIPLE, FP8_TRAIN_ROW_MULTIPLE

# The shapes of HARE's microbenchmark.
HARE_SHAPES = "8x2048x2048:512 8x2048x2048:5632 8x2048x2048:2048 8x2048x2048:32 1x1024x1024:1024".split()
SWEEP_ROWS = [1024, 4096, 16384, 65536]
SWEEP_WIDTHS = [512, 1024, 2048, 4096, 8192, 16384]
# On a CPU the rows are divided by the first number, and the widths of a sweep or a model by the second.
CPU_ROWS_FRACTION, CPU_WIDTH_FRACTION = 64, 16


class Shape(NamedTuple):
    """A Linear from `inputs` to `outputs` features on an input of [batch, rows, inputs]."""

    batch: int
    rows: int
    inputs: int
    outputs: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.rows}x{self.inputs}:{self.outputs}"

    @property
    def all_rows(self) -> int:
        return self.batch * self.rows

    @property
    def gemm_flop(self) -> int:
        """Floating point operations of one of the three GEMMs: forward, dgrad and wgrad have the same number."""
        return 2 * self.all_rows * self.inputs * self.outputs

    def why_not_fp8(self) -> str | None:
        """Why FP8 training cannot run this shape, or None."""
        if self.all_rows % FP8_TRAIN_ROW_MULTIPLE:
            return f"batch x rows is {self.all_rows}, not a multiple of {FP8_TRAIN_ROW_MULTIPLE}"
        if self.inputs % FP8_FEATURE_MULTIPLE or self.outputs % FP8_FEATURE_MULTIPLE:
            return f"in or out is not a multiple of {FP8_FEATURE_MULTIPLE}"
        return None


def parse_shape(text: str) -> Shape:
    """The argparse type of --shapes."""
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+):(\d+)", text)
    sizes = [int(n) for n in match.groups()] if match else [0]
    if not all(sizes):
        raise argparse.ArgumentTypeError(
            f"{text!r}: a shape is BATCHxROWSxIN:OUT, all positive, such as {HARE_SHAPES[0]}"
        )
    return Shape(*sizes)


def model_shapes(name: str) -> dict[str, Shape]:
    """The GEMMs of a layer and of the head of a model configuration, q, k, v and gate, up fused, by name."""
    c = load_sizes(name)
    hidden, ffn, heads = c.hidden_size, c.intermediate_size, c.num_attention_heads
    head_dim = getattr(c, "head_dim", None) or hidden // heads
    gemms = {
        "qkv": (hidden, head_dim * (heads + 2 * c.num_key_value_heads)),
        "proj": (head_dim * heads, hidden),
        "gate_up": (hidden, 2 * ffn),
        "down": (ffn, hidden),
        "lm_head": (hidden, c.vocab_size),
    }
    return {f"{name} {what}": Shape(8, 2048, *sizes) for what, sizes in gemms.items()}


def chosen_shapes(
    shapes: list[Shape] | None, sweep: bool, models: list[str], shrink: bool
) -> dict[Shape, list[str]]:
    """Return shape -> names. HARE's shapes unless `shapes` are given, the GEMMs of `models`, and with `sweep` the
    square ones. shrink: all but `shapes` at a size for a CPU. Shapes with the same GEMM are measured once."""
    found = [("given", shape, 1) for shape in shapes or []]
    found += [] if shapes else [("HARE", parse_shape(text), 1) for text in HARE_SHAPES]
    found += [(what, s, CPU_WIDTH_FRACTION) for name in models for what, s in model_shapes(name).items()]
    if sweep:
        found += [("square", Shape(1, n, w, w), CPU_WIDTH_FRACTION) for n in SWEEP_ROWS for w in SWEEP_WIDTHS]
    first: dict[tuple[int, int, int], Shape] = {}
    names: dict[Shape, list[str]] = {}
    for what, shape, width_fraction in found:
        if shrink and what != "given":
            widths = shape.inputs // width_fraction, shape.outputs // width_fraction
            shape = Shape(shape.batch, shape.rows // CPU_ROWS_FRACTION, *widths)
        shape = first.setdefault((shape.all_rows, shape.inputs, shape.outputs), shape)
        names.setdefault(shape, []).append(what)
    return names
