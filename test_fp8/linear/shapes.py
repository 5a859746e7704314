"""Which Linears the microtest measures: HARE's, a grid of square ones, and the GEMMs of a model configuration."""

from __future__ import annotations

import argparse
import json
import re
from typing import NamedTuple

from model.config import CONFIGS
from model.fp8.recipes import FP8_FEATURE_MULTIPLE, FP8_TRAIN_ROW_MULTIPLE

# The parts of a Linear that are timed, and the GEMMs in each, and how they are launched: see cases.py.
GEMMS = {"step": 3, "forward": 1, "dgrad": 1, "wgrad": 1}
LAUNCHES = ("eager", "graph")

# The shapes of HARE's microbenchmark.
HARE_SHAPES = "8x2048x2048:512 8x2048x2048:5632 8x2048x2048:2048 8x2048x2048:32 1x1024x1024:1024".split()
SWEEP_ROWS = [1024, 4096, 16384, 65536]
SWEEP_WIDTHS = [512, 1024, 2048, 4096, 8192, 16384]
# The batch of a model's GEMMs: 8 sequences of 2048.
MODEL_BATCH, MODEL_ROWS = 8, 2048
# What a CPU gets of the rows, and in a sweep or a model of the widths, to be through in a minute.
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
        """Floating point operations of one of the three GEMMs: forward, dgrad and wgrad have equally many."""
        return 2 * self.all_rows * self.inputs * self.outputs

    def shrunk(self, width_fraction: int) -> Shape:
        """What a CPU measures in its place."""
        inputs, outputs = self.inputs // width_fraction, self.outputs // width_fraction
        return Shape(self.batch, self.rows // CPU_ROWS_FRACTION, inputs, outputs)

    def why_not_fp8(self) -> str | None:
        """What keeps FP8 training from this shape, None if nothing does."""
        if self.all_rows % FP8_TRAIN_ROW_MULTIPLE:
            return (
                f"batch x rows is {self.all_rows}, not a multiple of {FP8_TRAIN_ROW_MULTIPLE}, which the weight "
                "gradient's FP8 GEMM needs"
            )
        for name, size in (("in", self.inputs), ("out", self.outputs)):
            if size % FP8_FEATURE_MULTIPLE:
                return f"{name} is {size}, not a multiple of {FP8_FEATURE_MULTIPLE}"
        return None


def parse_shape(text: str) -> Shape:
    """The argparse type of --shapes. Raises argparse.ArgumentTypeError: not BATCHxROWSxIN:OUT."""
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)(?:->|:)(\d+)", text)
    sizes = [int(n) for n in match.groups()] if match else [0]
    if not all(sizes):
        raise argparse.ArgumentTypeError(
            f"{text!r}: a shape is BATCHxROWSxIN:OUT, all positive, for instance {HARE_SHAPES[0]}"
        )
    return Shape(*sizes)


def model_names() -> list[str]:
    return sorted(path.stem for path in CONFIGS.glob("*.json"))


def model_shapes(name: str) -> dict[str, Shape]:
    """The GEMMs of a layer and the head of model/configs/NAME.json as te.TransformerLayer runs them, q, k, v and gate,
    up fused, by what they are."""
    c = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    hidden, ffn, heads = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
    head_dim = c.get("head_dim") or hidden // heads
    gemms = {
        "qkv": (hidden, head_dim * (heads + 2 * c["num_key_value_heads"])),
        "proj": (head_dim * heads, hidden),
        "gate_up": (hidden, 2 * ffn),
        "down": (ffn, hidden),
        "lm_head": (hidden, c["vocab_size"]),
    }
    return {f"{name} {what}": Shape(MODEL_BATCH, MODEL_ROWS, *sizes) for what, sizes in gemms.items()}


def chosen_shapes(
    shapes: list[Shape] | None, sweep: bool, models: list[str], shrink: bool
) -> dict[Shape, list[str]]:
    """Shape -> what it is. HARE's unless `shapes` are given, the GEMMs of `models`, and the square ones of a `sweep`;
    `shrink`: all but `shapes` at a size for a CPU. Two of the same GEMM sizes are measured once, under both names."""
    found = [("given", shape) for shape in shapes or []]
    hare = [] if shapes else [("HARE", parse_shape(text)) for text in HARE_SHAPES]
    more = [item for name in models for item in model_shapes(name).items()]
    if sweep:
        more += [("square", Shape(1, rows, w, w)) for rows in SWEEP_ROWS for w in SWEEP_WIDTHS]
    for group, width_fraction in ((hare, 1), (more, CPU_WIDTH_FRACTION)):
        found += [(what, shape.shrunk(width_fraction) if shrink else shape) for what, shape in group]

    first: dict[tuple[int, int, int], Shape] = {}
    names: dict[Shape, list[str]] = {}
    for what, shape in found:
        kept = names.setdefault(first.setdefault((shape.all_rows, shape.inputs, shape.outputs), shape), [])
        if what not in kept:
            kept.append(what)
    return names
