"""What the kernels share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
import triton
import triton.language as tl

# Programs that keep all multiprocessors of the largest Hopper busy.
PROGRAMS = 264

Sums: TypeAlias = torch.Tensor
"""What `gemm` returns: [sums, M, R], to be added up by whoever reads it."""


@dataclass(frozen=True)
class Late:
    """Rows that the product which reads them writes as FP8 codes: whoever made a row wrote it in pieces, and none knew
    its scale. values: bf16 [M, C]; largest: int32 [M], the bits of the largest magnitude of a row as a float32; digits:
    as in reference.rows."""

    values: torch.Tensor
    largest: torch.Tensor
    digits: int


@triton.jit
def prefetch(places):
    """Have the lines of these pointers come into the L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def magnitude_bits(x):
    """int32 that are ordered as the magnitudes of float32 x are, a NaN above all (tl.max drops a NaN)."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def two_digits(wide, dtype: tl.constexpr):
    """float32 `wide` within FP8's range as FP8, and 16 times what that leaves, as FP8 too; a NaN in at least one.

    Rounded to the four bits of e4m3 as integers: where a kernel packs FP8 and unpacks it again, the ptxas of CUDA 12.8
    (Triton 3.6.0) unpacks half of the values from a register that holds something else."""
    bits = wide.to(tl.int32, bitcast=True)
    head = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    return head.to(dtype), ((wide - head) * 16.0).to(dtype)
