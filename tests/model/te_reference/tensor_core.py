"""The roundings of a Hopper GPU: the sums of its FP8 tensor cores, bit for bit, and those of cuDNN's attention.

An FP8 GEMM on Hopper does not accumulate in float32. A tensor core adds STEP products and the running sum at once: all
are aligned to the largest exponent among them and cut off (towards zero) after FRACTION_BITS bits below it, and so is
their sum. That is 2**-13 of the largest term, about a 30th of a bfloat16 rounding, so one in 30 outputs rounds to
another bfloat16 than a float32 sum does; where it is quantized again that may be another FP8 value, a step of 6 to 25
percent. With `use_split_accumulator` the sum moves to a float32 register every PROMOTION products; tile scales are
applied there too. The model of one such addition is that of https://arxiv.org/abs/2511.10909 (MMA-Sim);
tests/model/te_reference/test_te_recorded.py checks the whole against an H200.

Tens of operations a product: it is the proof that the reference's modules do what the GPU does, see `emulated()`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from model.te_reference import attention, quantize

STEP = 32
"""Products that one instruction adds."""
PROMOTION = 128
"""Products between two additions in float32; also the tiles of block scaling."""
FRACTION_BITS = 13
SMALLEST_EXPONENT = {torch.float8_e4m3fn: -6, torch.float8_e5m2: -14}
"""Exponent of the subnormal numbers, which are not normalized before they are aligned."""
CHUNK = 2**21
"""Products held in memory at once."""


@contextmanager
def emulated() -> Iterator[None]:
    """Context in which the FP8 modules, forward and backward, accumulate as the tensor cores do, and the attention
    rounds where cuDNN's does."""
    with mock.patch.object(quantize, "accumulate", matmul):
        with mock.patch.object(attention, "sdpa", cudnn_attention):
            yield


def _power_of_two(x: Tensor) -> Tensor:
    """2**exponent of float32 numbers, 0 for 0."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def _magnitudes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """2**exponent of FP8 numbers given in float32, 0 for 0."""
    power = _power_of_two(x)
    return torch.where(power > 0, power.clamp(min=2.0 ** SMALLEST_EXPONENT[dtype]), power)


def _add_products(products: Tensor, largest: Tensor, running: Tensor) -> Tensor:
    """One instruction: products [M, N, <= STEP] with the largest of their powers of two [M, N], plus a running sum."""
    largest = torch.maximum(largest, _power_of_two(running)).clamp_(min=2.0**-90)
    unit = largest * 2.0**-FRACTION_BITS
    in_units = unit.reciprocal()
    total = (products * in_units[..., None]).trunc_().sum(-1).add_((running * in_units).trunc_())
    # float32 has 23 bits of fraction: whole units of at most 2**20, so that the sum above is exact
    total = (total.view(torch.int32) & -(1 << (23 - FRACTION_BITS))).view(torch.float32)
    return total * unit


def _accumulate(a: Tensor, b: Tensor, powers_a: Tensor, powers_b: Tensor) -> Tensor:
    """float32 [M, K] x [N, K] of FP8 values and their powers of two -> [M, N], all in one accumulator."""
    running = a.new_zeros(a.shape[0], b.shape[0])
    for k in range(0, a.shape[1], STEP):
        part = slice(k, k + STEP)
        largest = (powers_a[:, None, part] * powers_b[None, :, part]).amax(-1)
        running = _add_products(a[:, None, part] * b[None, :, part], largest, running)
    return running


def _rows_of_scales(scale_inv: Tensor, rows: int, tile: int) -> Tensor:
    """[rows or row tiles, K tiles] -> the scales of one tile of K, [rows]; one for the whole tensor as it is."""
    if scale_inv.dim() == 0:
        return scale_inv
    column = scale_inv[:, tile]
    return column if len(column) == rows else column.repeat_interleave(PROMOTION)[:rows]


def matmul(a: Tensor, a_scale_inv: Tensor, b: Tensor, b_scale_inv: Tensor, *, fast: bool) -> Tensor:
    """FP8 [M, K] x [N, K] -> float32 [M, N].

    Inverse scales: both [], or tile scales [M or ceil(M/128), ceil(K/128)] and [N or ceil(N/128), ceil(K/128)].
    fast: one accumulator for all products (use_split_accumulator=False); not for tile scales.
    """
    values = a.float(), b.float()
    operands = *values, _magnitudes(values[0], a.dtype), _magnitudes(values[1], b.dtype)
    per_tensor = a_scale_inv.dim() == 0
    rows, columns, length = a.shape[0], b.shape[0], a.shape[1]
    promotion = length if fast and per_tensor else PROMOTION
    height = max(1, CHUNK // (columns * STEP))
    out = values[0].new_zeros(rows, columns)
    for tile, k in enumerate(range(0, length, promotion)):
        part = slice(k, k + promotion)
        x, y, powers_x, powers_y = (operand[:, part] for operand in operands)
        for row in range(0, rows, height):
            chunk = slice(row, row + height)
            product = _accumulate(x[chunk], y, powers_x[chunk], powers_y)
            if not per_tensor:
                row_scales = _rows_of_scales(a_scale_inv, rows, tile)[chunk]
                product *= row_scales[:, None] * _rows_of_scales(b_scale_inv, columns, tile)
            out[chunk] += product
    return out.mul_(a_scale_inv * b_scale_inv) if per_tensor else out


LOG2_E = math.log2(math.e)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).float()


class _CudnnAttention(torch.autograd.Function):
    """(q [B, N, S, D], k and v [B, K, S', D], visible [S, S'], softmax scale) -> [B, N, S, D].

    All products accumulate in float32 and softmax is computed there. What is rounded to the dtype of the inputs:

    - forward: the exponentials before they multiply V, not divided by their sum yet; the output.
    - backward: the probabilities before they multiply the output's gradient; the scores' gradient, times the softmax
      scale, before it multiplies Q and K; the gradients of K and V for each query head, before those of a group are
      summed; and the gradients.

    The kernels shift the exponentials by the largest score so far, here by the largest of the row. That is the same
    within one tile of keys, and moves single roundings beyond.
    """

    @staticmethod
    def _operands(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, ...]:
        """float32 q, k, v with as many heads as q, and the masked scores [B, N, S, S'], not scaled yet."""
        k, v = (t.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        q = q.float()
        return q, k, v, (q @ k.transpose(-1, -2)).masked_fill_(~visible, -math.inf)

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
        _, _, values, scores = _CudnnAttention._operands(q, k, v, visible)
        # a query that sees no key has the output 0
        largest = scores.amax(-1, keepdim=True).nan_to_num_(neginf=0.0)
        exponentials = torch.exp2(scores.mul_(scale * LOG2_E).sub_(largest * (scale * LOG2_E)))
        total = exponentials.sum(-1, keepdim=True)
        total = torch.where(total == 0, torch.ones_like(total), total)
        out = (_rounded(exponentials, q.dtype) @ values).mul_(total.reciprocal()).to(q.dtype)
        ctx.save_for_backward(q, k, v, visible, out, largest * scale + total.log())
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, visible, out, log_sum = ctx.saved_tensors
        dtype, groups = q.dtype, k.shape[1]
        queries, keys, values, scores = _CudnnAttention._operands(q, k, v, visible)
        grad = grad.float()
        probabilities = torch.exp2(scores.mul_(ctx.scale).sub_(log_sum).mul_(LOG2_E))
        grad_values = _rounded(probabilities, dtype).transpose(-1, -2) @ grad
        along_out = (grad * out.float()).sum(-1, keepdim=True)
        grad_scores = (grad @ values.transpose(-1, -2)).sub_(along_out).mul_(probabilities).mul_(ctx.scale)
        grad_scores = _rounded(grad_scores, dtype)
        grad_keys = grad_scores.transpose(-1, -2) @ queries

        def of_groups(t: Tensor) -> Tensor:
            return _rounded(t, dtype).unflatten(1, (groups, -1)).sum(2).to(dtype)

        return (grad_scores @ keys).to(dtype), of_groups(grad_keys), of_groups(grad_values), None, None


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, grouped: bool) -> Tensor:
    """The reference's `sdpa` with the roundings of cuDNN's fused kernels for bfloat16 and float16 on a Hopper GPU.

    q [B, N, S, D], k and v [B, K, S', D], visible bool [S, S'], True where a query sees a key -> [B, N, S, D].
    """
    if q.dtype not in (torch.bfloat16, torch.float16):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=grouped)
    return _CudnnAttention.apply(q, k, v, visible, q.shape[-1] ** -0.5)
