"""Shared parts of the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
import triton
import triton.language as tl

# Number of programs that keeps all multiprocessors of the largest Hopper GPU busy.
PROGRAMS = 264

Sums: TypeAlias = torch.Tensor
"""Result of `gemm`, [sums, M, R]. The consumer adds up the sums."""


@dataclass(frozen=True)
class Late:
    """Rows that the next matrix product quantizes to FP8 while it reads them.

    The kernel that writes a row writes it in pieces, so no program knows the scale of the whole row.
    values: bf16 [M, C]. largest: int32 [M], the bits of each row's largest magnitude as a float32. digits: see
    reference.rows.
    """

    values: torch.Tensor
    largest: torch.Tensor
    digits: int


@triton.jit
def prefetch(places):
    """Prefetch the cache lines of these pointers into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def magnitude_bits(x):
    """Return int32 numbers with the order of the magnitudes of float32 x. NaN is the largest (tl.max drops NaN)."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def two_digits(wide, dtype: tl.constexpr):
    """Return float32 `wide`, within FP8's range, as FP8, and 16 times the rounding error as FP8.

    A NaN is in at least one of them. Rounds to the four bits of e4m3 with integer operations: if a kernel packs and
    unpacks FP8, the ptxas of CUDA 12.8 (Triton 3.6.0) unpacks half of the values from a wrong register."""
    bits = wide.to(tl.int32, bitcast=True)
    head = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    return head.to(dtype), ((wide - head) * 16.0).to(dtype)
