"""The cross entropy of logits and its gradient: in their place and dtype, or cast to FP8 in blocks and transposed.

The gradient is computed by a second kernel from the statistics that the first one leaves. The third writes it as FP8
right away, bit for bit what casting the second one's makes: it is rounded to the logits' dtype before it is cast. A row
is read in pieces of a few thousand entries: with whole rows at a time too few programs share a GPU, and each waits for
its memory. Shape suffixes: M tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

IGNORED = -100
PIECE = 4096
BLOCK = 128  # entries that share a scale
E4M3_MAX = 448.0


@triton.jit
def _statistics(logits, labels, losses, stats, V, IGNORED: tl.constexpr, PIECE: tl.constexpr):
    """Of one row: the largest logit and the sum of exp(logit - largest), and its loss."""
    row = tl.program_id(0).to(tl.int64)
    largest, total = float("-inf"), 0.0
    for start in range(0, V, PIECE):
        v = start + tl.arange(0, PIECE)
        x = tl.load(logits + row * V + v, mask=v < V, other=float("-inf")).to(tl.float32)
        before = largest
        largest = tl.maximum(before, tl.max(x, axis=0))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(x - largest), axis=0)
    label = tl.load(labels + row)
    tl.store(stats + 2 * row, largest)
    tl.store(stats + 2 * row + 1, total)
    counts = (label != IGNORED) & (label >= 0) & (label < V)
    of_label = tl.load(logits + row * V + label, mask=counts, other=float("-inf")).to(tl.float32)
    loss = largest + tl.log(total) - of_label
    tl.store(losses + row, tl.where(label == IGNORED, 0.0, loss))


@triton.jit
def _gradient(logits, labels, stats, counted, upstream, V, IGNORED: tl.constexpr, PIECE: tl.constexpr):
    """Of one row, in the place of its logits."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    largest = tl.load(stats + 2 * row)
    total = tl.load(stats + 2 * row + 1)
    factor = tl.load(upstream).to(tl.float32) / tl.load(counted)
    for start in range(0, V, PIECE):
        v = start + tl.arange(0, PIECE)
        x = tl.load(logits + row * V + v, mask=v < V, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(x - largest) / total - tl.where(label == v, 1.0, 0.0)
        gradient = tl.where(label == IGNORED, 0.0, gradient * factor)
        tl.store(logits + row * V + v, gradient.to(logits.dtype.element_ty), mask=v < V)


@triton.jit
def _scale_of(amax, largest, E4M3_MAX: tl.constexpr):
    """What Transformer Engine takes for a block of that largest value, where scales need be no powers of two."""
    scale = tl.div_rn(E4M3_MAX, amax)
    scale = tl.where(scale == float("inf"), largest, scale)
    return tl.where((amax > 0) & (amax < float("inf")), scale, 1.0)


@triton.jit
def _gradient_in_fp8(
    logits,
    labels,
    stats,
    counted,
    upstream,
    rows,
    row_scales,
    columns,
    column_scales,
    M,
    V,
    row_scales_width,
    column_scales_width,
    largest_of_dtype,
    IGNORED: tl.constexpr,
    BLOCK: tl.constexpr,
    E4M3_MAX: tl.constexpr,
):
    """Of one square of BLOCK x BLOCK: neighbours among programs are neighbours along V, as logits lie in memory."""
    square_v, square_m = tl.program_id(0), tl.program_id(1)
    m = square_m * BLOCK + tl.arange(0, BLOCK)
    v = square_v * BLOCK + tl.arange(0, BLOCK)
    is_m, is_v = m < M, v < V
    inside = is_m[:, None] & is_v[None, :]
    dtype = logits.dtype.element_ty

    x = tl.load(logits + m.to(tl.int64)[:, None] * V + v[None, :], mask=inside, other=float("-inf"))
    label = tl.load(labels + m, mask=is_m, other=IGNORED)
    largest = tl.load(stats + 2 * m, mask=is_m, other=0.0)
    total = tl.load(stats + 2 * m + 1, mask=is_m, other=1.0)
    factor = tl.load(upstream).to(tl.float32) / tl.load(counted)
    gradient = tl.exp(x.to(tl.float32) - largest[:, None]) / total[:, None]
    gradient -= tl.where(label[:, None] == v[None, :], 1.0, 0.0)
    gradient = tl.where((label == IGNORED)[:, None], 0.0, gradient * factor).to(dtype).to(tl.float32)

    scale = _scale_of(tl.max(tl.abs(gradient), axis=1), largest_of_dtype, E4M3_MAX)
    cast = tl.cast((gradient * scale[:, None]).to(tl.float8e4nv), tl.uint8, bitcast=True)
    tl.store(rows + m.to(tl.int64)[:, None] * V + v[None, :], cast, mask=inside)
    tl.store(row_scales + square_v * row_scales_width + m, tl.div_rn(1.0, scale), mask=is_m)

    scale = _scale_of(tl.max(tl.abs(gradient), axis=0), largest_of_dtype, E4M3_MAX)
    # it has been rounded to the dtype: transposed in 16 bits it moves half the bytes
    turned = tl.trans(gradient.to(dtype)).to(tl.float32) * scale[:, None]
    cast = tl.cast(turned.to(tl.float8e4nv), tl.uint8, bitcast=True)
    tl.store(columns + v.to(tl.int64)[:, None] * M + m[None, :], cast, mask=is_v[:, None] & is_m[None, :])
    tl.store(column_scales + square_m * column_scales_width + v, tl.div_rn(1.0, scale), mask=is_v)


def loss_and_statistics(
    logits_MV: torch.Tensor, labels_M: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Mean cross entropy in nats (float32 scalar) over the labels that are not -100, and what the gradient is computed
    from: labels; float32 [M, 2], each row's largest logit and sum of exp(logit - largest); how many labels counted, at
    least 1. logits: contiguous, bf16 or float32; labels: int64, contiguous. CUDA only."""
    M, V = logits_MV.shape
    losses = torch.empty(M, dtype=torch.float32, device=logits_MV.device)
    stats = torch.empty(M, 2, dtype=torch.float32, device=logits_MV.device)
    _statistics[(M,)](logits_MV, labels_M, losses, stats, V, IGNORED=IGNORED, PIECE=PIECE, num_warps=4)
    counted = (labels_M != IGNORED).sum().clamp_(min=1)
    return losses.sum() / counted, (labels_M, stats, counted)


def gradient_in_place(
    logits_MV: torch.Tensor, statistics: Sequence[torch.Tensor], upstream: torch.Tensor
) -> torch.Tensor:
    """The gradient of the mean cross entropy times `upstream` (scalar), in the memory of the logits."""
    M, V = logits_MV.shape
    _gradient[(M,)](logits_MV, *statistics, upstream, V, IGNORED=IGNORED, PIECE=PIECE, num_warps=4)
    return logits_MV


def gradient_in_fp8(
    logits_MV: torch.Tensor,
    statistics: Sequence[torch.Tensor],
    upstream: torch.Tensor,
    rows_MV: torch.Tensor,
    row_scales: torch.Tensor,
    columns_VM: torch.Tensor,
    column_scales: torch.Tensor,
) -> None:
    """Writes that gradient as Transformer Engine's block scaling lays it out: e4m3 as bytes, `rows` and, transposed,
    `columns`, and their inverse scales, float32 [ceil(V / 128), >= M] and [ceil(M / 128), >= V]."""
    M, V = logits_MV.shape
    _gradient_in_fp8[(triton.cdiv(V, BLOCK), triton.cdiv(M, BLOCK))](
        logits_MV,
        *statistics,
        upstream,
        rows_MV,
        row_scales,
        columns_VM,
        column_scales,
        M,
        V,
        row_scales.shape[1],
        column_scales.shape[1],
        torch.finfo(logits_MV.dtype).max,
        IGNORED=IGNORED,
        BLOCK=BLOCK,
        E4M3_MAX=E4M3_MAX,
        num_warps=8,
    )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_MV: torch.Tensor, labels_M: torch.Tensor) -> torch.Tensor:
        loss, statistics = loss_and_statistics(logits_MV, labels_M)
        ctx.save_for_backward(logits_MV, *statistics)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        logits_MV, *statistics = ctx.saved_tensors
        gradient = gradient_in_place(logits_MV, statistics, upstream)
        torch.autograd.graph.increment_version(logits_MV)  # a second backward raises
        return gradient, None


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy as in `loss_and_statistics`, of logits [..., V], which the backward overwrites with their
    gradient: one backward alone."""
    return _CrossEntropy.apply(logits.reshape(-1, logits.shape[-1]), labels.flatten())
