"""What the GPU at hand reaches in plain matrix products: the ceiling that a Linear's speed is a share of."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from model.fp8.recipes import why_no_fp8
from test_fp8.common.timing import take_turns

SIZES = {"fp32": [4096, 8192], "bf16": [4096, 8192, 16384], "fp8": [4096, 8192, 16384]}
# A sample is as many products as come to this: 7 ms in bf16, 4 in FP8, 20 in float32.
SAMPLE_FLOP = {"fp32": 1e12, "bf16": 5e12, "fp8": 5e12}
E4M3_MAX = 448.0


def product(precision: str, size: int) -> Callable[[], Tensor]:
    """A product of two random [size, size] matrices, one call's worth. FP8: e4m3 operands that are there already, one
    scale a tensor, fast accumulation, bf16 result; quantizing is no part of a ceiling."""
    left, right = (torch.randn(size, size, device="cuda") for _ in range(2))
    if precision == "fp32":
        return lambda: left @ right
    if precision == "bf16":
        left, right = left.bfloat16(), right.bfloat16()
        return lambda: left @ right
    scales = [E4M3_MAX / matrix.abs().max() for matrix in (left, right)]
    a, b = ((m * scale).to(torch.float8_e4m3fn) for m, scale in zip((left, right), scales, strict=True))
    inverse_a, inverse_b = (scale.reciprocal() for scale in scales)
    # the tensor cores take the second operand by columns
    return lambda: torch._scaled_mm(
        a, b.t(), scale_a=inverse_a, scale_b=inverse_b, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def repeat(step: Callable[[], Any], calls: int) -> None:
    for _ in range(calls):
        step()


def measure_ceilings(rounds: int) -> dict[str, dict[str, Any]]:
    """precision -> {"tflops": the best median, "size": where, "tflops_by_size"}; {} without a GPU.

    FP8 is missing on a GPU that may not run it. All take turns; the first two rounds are for warming up.
    """
    if not torch.cuda.is_available():
        return {}
    no_fp8 = why_no_fp8(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    kinds = [kind for kind in SIZES if kind != "fp8" or not no_fp8]
    calls, steps = {}, {}
    for precision in kinds:
        for size in SIZES[precision]:
            calls[precision, size] = max(1, round(SAMPLE_FLOP[precision] / (2 * size**3)))
            steps[precision, size] = [partial(repeat, product(precision, size), calls[precision, size])]
    take_turns(steps, 2)
    times = take_turns(steps, rounds)
    ceilings = {}
    for precision in kinds:
        by_size = {
            size: calls[precision, size] * 2 * size**3 / statistics.median(times[precision, size]) / 1e9
            for size in SIZES[precision]
        }
        best = max(by_size, key=lambda size: by_size[size])
        ceilings[precision] = {"tflops": by_size[best], "size": best, "tflops_by_size": by_size}
    return ceilings
