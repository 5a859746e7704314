"""Sums over a GEMM operand and its quantized values, for the FP8 health check on a GPU (model/checks/health.py).

One kernel reads each element once. If another kernel computed the operand and cast it in one step, this kernel
recomputes the operand in float32 without writing it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from model.te_reference.quantize import BLOCK

IGNORED = -100  # a label
# A block has this many rows, and the columns of one tile of scales. Sums are in float32 within a block and in float64
# across blocks.
ROWS, WARPS = 32, 4


@triton.jit
def _source(x, other, weight, m, n, M, N, KIND: tl.constexpr, IGNORED: tl.constexpr):
    """Return one block of the operand before quantization, as float32 [rows, columns].

    Elements outside the matrix are 0.
    """
    row, column = m.to(tl.int64)[:, None], n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    if KIND == "swiglu":
        gate = tl.load(x + row * (2 * N) + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * (2 * N) + N + column, mask=inside, other=0.0).to(tl.float32)
        value = gate * tl.sigmoid(gate) * up
    elif KIND == "swiglu_gradient":
        half = N // 2
        of_up = column >= half
        f = tl.where(of_up, column - half, column)
        above = tl.load(other + row * half + f, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(x + row * N + f, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * N + half + f, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
        value = above * tl.where(of_up, gate * sigmoid, up * slope)
    elif KIND == "loss_gradient":  # as in cross_entropy.py
        logit = tl.load(x + row * N + column, mask=inside, other=float("-inf")).to(tl.float32)
        label = tl.load(weight + m, mask=m < M, other=IGNORED)
        largest = tl.load(other + 3 * m, mask=m < M, other=0.0)
        total = tl.load(other + 3 * m + 1, mask=m < M, other=1.0)
        factor = tl.load(other + 3 * m + 2, mask=m < M, other=0.0)
        value = tl.exp(logit - largest[:, None]) / total[:, None]
        value -= tl.where(label[:, None] == column, 1.0, 0.0)
        value = tl.where((label == IGNORED)[:, None] | ~inside, 0.0, value * factor[:, None])
    else:
        value = tl.load(x + row * N + column, mask=inside, other=0.0).to(tl.float32)
        if KIND == "norm":
            inverse_rms = tl.load(other + m, mask=m < M, other=0.0)
            value = value * inverse_rms[:, None]
            value = value * tl.load(weight + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    return value


@triton.jit
def _totals(
    x, other, weight, codes, scale_inv, out, M, N, per_row, per_tile,
    KIND: tl.constexpr, ROUNDED: tl.constexpr, E4M3: tl.constexpr, MOMENTS: tl.constexpr,
    SCALE_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, IGNORED: tl.constexpr,
):  # fmt: skip
    """Write the nine totals for one block (see `operand_totals`) to `out` [programs, 9]."""
    program, across = tl.program_id(0), tl.cdiv(N, COLUMNS)
    block_n, block_m = program % across, program // across
    m = block_m * ROWS + tl.arange(0, ROWS)
    n = block_n * COLUMNS + tl.arange(0, COLUMNS)
    inside = (m < M)[:, None] & (n < N)[None, :]
    value = _source(x, other, weight, m, n, M, N, KIND, IGNORED)
    if ROUNDED:
        value = value.to(x.dtype.element_ty).to(tl.float32)
    # a block lies within one column of tiles
    inverse = tl.load(scale_inv + (m // SCALE_ROWS) * per_row + block_n * per_tile, mask=m < M, other=1.0)
    at = m.to(tl.int64)[:, None] * N + n[None, :]
    stored = tl.load(codes + at, mask=inside, other=0)
    code = tl.cast(stored, tl.float8e4nv if E4M3 else tl.float8e5, bitcast=True).to(tl.float32)
    overflow = 464.0 if E4M3 else 61440.0
    magnitude, square = tl.abs(value), value * value
    off = code * inverse[:, None] - value
    to = out + program * 9
    tl.store(to, tl.sum(tl.where(value != 0.0, 1.0, 0.0)))
    tl.store(to + 1, tl.sum(tl.where(code != 0.0, 1.0, 0.0)))
    tl.store(to + 2, tl.sum(tl.where(magnitude > (inverse * overflow)[:, None], 1.0, 0.0)))
    tl.store(to + 3, tl.sum(off * off))
    tl.store(to + 4, tl.sum(square))
    if MOMENTS:
        tl.store(to + 5, tl.sum(value))
        tl.store(to + 6, tl.sum(square * value))
        tl.store(to + 7, tl.sum(square * square))
    tl.store(to + 8, tl.max(tl.div_rn(tl.max(magnitude, axis=1), inverse), axis=0))


def operand_totals(source: Any, codes: torch.Tensor, scale_inv: torch.Tensor, moments: bool) -> torch.Tensor:
    """Compute nine health-check totals for an operand x [M, N] (M rows, N columns): float64 [9]. CUDA only.

    The totals are: (1) the number of nonzero elements of x, (2) the number of nonzero FP8 codes, (3) the number of
    elements of |x| that rounding alone would move beyond the format's largest value, (4) the sum of (codes * scale_inv
    - x)^2, (5) the sum of x^2, (6 to 8) with `moments` the sums of x, x^3 and x^4, otherwise 0, and (9) the largest |x|
    / scale_inv, which is NaN if x contains NaN.

    Args:
        source: the tensor that was quantized (model.checks.quantize_hooks.Source).
        codes: float8 [M, N].
        scale_inv: float32, one for the tensor or one per tile ([M, N / 128] or [M / 128, N / 128]).
    """
    M, N = codes.shape
    parts = source.parts
    if source.kind == "loss_gradient":
        logits, labels, stats, counted, upstream = parts
        parts = (logits, torch.cat([stats, (upstream.float() / counted).expand(M, 1)], 1), labels)
    parts = [part.contiguous() for part in parts]
    x, other, weight = (*parts, *[parts[0]] * (3 - len(parts)))
    tiles = scale_inv.dim() > 0
    blocks = triton.cdiv(M, ROWS) * triton.cdiv(N, BLOCK)
    out = torch.zeros(blocks, 9, dtype=torch.float32, device=codes.device)
    _totals[(blocks,)](
        x, other, weight, codes.view(torch.uint8).contiguous(), scale_inv.contiguous(), out, M, N,
        scale_inv.shape[1] if tiles else 0, int(tiles),
        KIND=source.kind, ROUNDED=source.rounded, E4M3=codes.dtype == torch.float8_e4m3fn, MOMENTS=moments,
        SCALE_ROWS=BLOCK if tiles and scale_inv.shape[0] != M else 1, ROWS=ROWS, COLUMNS=BLOCK, IGNORED=IGNORED,
        num_warps=WARPS,
    )  # fmt: skip
    sums = out.sum(0, dtype=torch.float64)
    # the kernel's maximum ignores NaN, but its sums do not
    sums[8] = torch.where(sums[4].isnan(), sums[4], out[:, 8].max())
    return sums
