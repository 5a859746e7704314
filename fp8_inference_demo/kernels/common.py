"""Constants, types and device functions shared by the inference kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
import triton
import triton.language as tl

# Number of Triton programs that keeps all multiprocessors of the largest Hopper GPU busy.
PROGRAMS = 264

Sums: TypeAlias = torch.Tensor
"""Partial sums returned by `gemm`, [sums, M, R] for M rows and R output features. The next kernel adds them up."""


@dataclass(frozen=True)
class Late:
    """Activations that the next matrix product quantizes to FP8 while it reads them.

    Several Triton programs write parts of the same row, so none of them knows the scale for the whole row.

    values: bf16 [M, C]. largest: int32 [M], the bits of the largest magnitude in each row as a float32. digits: see
    `reference.rows`.
    """

    values: torch.Tensor
    largest: torch.Tensor
    digits: int


@triton.jit
def prefetch(places):
    """Prefetch the cache lines at these pointers into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def magnitude_bits(x):
    """Return the bits of abs(x) as int32, for float32 x.

    The integers have the same order as the magnitudes, and NaN is the largest. tl.max ignores NaN in float32 tensors,
    but not in this representation.
    """
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def two_digits(wide, dtype: tl.constexpr):
    """Return `wide` rounded to FP8, and 16 times the rounding error as FP8.

    wide: float32 values within the range of FP8. If a value is NaN, at least one of the two results is NaN.

    Rounds to the four significant bits of e4m3 with integer operations. If a kernel converts to FP8 and back, the ptxas
    in CUDA 12.8 (Triton 3.6.0) reads half of the values from a wrong register.
    """
    bits = wide.to(tl.int32, bitcast=True)
    head = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    return head.to(dtype), ((wide - head) * 16.0).to(dtype)
