"""Fused cross entropy. Its gradient overwrites the logits or is written as FP8 blocks.

The first kernel computes the loss and statistics of each row. A second kernel computes the gradient from the
statistics. A third kernel writes the gradient directly as FP8, both row by row and transposed. The FP8 result equals a
cast of the second kernel's gradient bit for bit, because the gradient is rounded to the logits' dtype before the cast.

The first two kernels read a row in pieces of a few thousand entries. If they processed whole rows, too few programs
would fit on the GPU, and each would wait for memory. Shape suffixes: M tokens, V vocabulary size.
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
    """Compute statistics for one row of logits: the maximum, the sum of exp(logit - maximum), and the cross entropy."""
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
    """Overwrite one row of logits with the gradient of the mean cross entropy."""
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
def _scale_of(amax, largest, E4M3_MAX: tl.constexpr, POWER_2: tl.constexpr):
    """Return the scale that Transformer Engine uses for a block whose largest magnitude is `amax`.

    largest: value to return if the scale overflows. POWER_2: whether to round the scale down to a power of two.
    """
    scale = tl.div_rn(E4M3_MAX, amax)
    scale = tl.where(scale == float("inf"), largest, scale)
    if POWER_2:
        scale = (scale.to(tl.int32, bitcast=True) & -0x00800000).to(tl.float32, bitcast=True)
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
    POWER_2: tl.constexpr,
):
    """Quantize one BLOCK x BLOCK square of the logit gradient to FP8.

    Adjacent Triton programs process adjacent columns.
    """
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

    scale = _scale_of(tl.max(tl.abs(gradient), axis=1), largest_of_dtype, E4M3_MAX, POWER_2)
    cast = tl.cast((gradient * scale[:, None]).to(tl.float8e4nv), tl.uint8, bitcast=True)
    tl.store(rows + m.to(tl.int64)[:, None] * V + v[None, :], cast, mask=inside)
    tl.store(row_scales + square_v * row_scales_width + m, tl.div_rn(1.0, scale), mask=is_m)

    scale = _scale_of(tl.max(tl.abs(gradient), axis=0), largest_of_dtype, E4M3_MAX, POWER_2)
    # values are already rounded to the dtype, so transposing in 16 bits is exact and moves half the bytes
    turned = tl.trans(gradient.to(dtype)).to(tl.float32) * scale[:, None]
    cast = tl.cast(turned.to(tl.float8e4nv), tl.uint8, bitcast=True)
    tl.store(columns + v.to(tl.int64)[:, None] * M + m[None, :], cast, mask=is_v[:, None] & is_m[None, :])
    tl.store(column_scales + square_m * column_scales_width + v, tl.div_rn(1.0, scale), mask=is_v)


def loss_and_statistics(
    logits_MV: torch.Tensor, labels_M: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Compute the mean cross entropy over all labels except -100, and the statistics for its gradient. CUDA only.

    Args:
        logits_MV: [M, V] for M tokens and V vocabulary entries, bf16 or float32, contiguous.
        labels_M: int64 [M], contiguous.

    Returns:
        loss: float32 scalar in nats.
        statistics: the labels; float32 [M, 2] with each row's largest logit and sum of exp(logit - largest); and the
            number of labels that are not ignored, at least 1.
    """
    M, V = logits_MV.shape
    losses = torch.empty(M, dtype=torch.float32, device=logits_MV.device)
    stats = torch.empty(M, 2, dtype=torch.float32, device=logits_MV.device)
    _statistics[(M,)](logits_MV, labels_M, losses, stats, V, IGNORED=IGNORED, PIECE=PIECE, num_warps=4)
    counted = (labels_M != IGNORED).sum().clamp_(min=1)
    return losses.sum() / counted, (labels_M, stats, counted)


def gradient_in_place(
    logits_MV: torch.Tensor, statistics: Sequence[torch.Tensor], upstream: torch.Tensor
) -> torch.Tensor:
    """Overwrite the logits with the gradient of the mean cross entropy, and return the same tensor.

    The gradient is multiplied by the scalar `upstream`, the gradient of the loss.
    """
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
    power_2_scales: bool = False,
) -> None:
    """Write the gradient of the mean cross entropy as FP8 in the layout of Transformer Engine's block scaling. CUDA
    only.

    Args:
        logits_MV: [M, V] for M tokens and V vocabulary entries.
        statistics: as returned by `loss_and_statistics`.
        upstream: scalar gradient of the loss.
        rows_MV: output, e4m3 codes as bytes [M, V].
        row_scales: output, inverse scales, float32 [ceil(V / 128), >= M].
        columns_VM: output, e4m3 codes as bytes, transposed [V, M].
        column_scales: output, inverse scales, float32 [ceil(M / 128), >= V].
        power_2_scales: whether to round scales down to powers of two, which GPUs from Blackwell on require.
    """
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
        POWER_2=power_2_scales,
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
    """Compute the mean cross entropy of logits [..., V] (vocabulary size V). CUDA only.

    Positions with the label -100 are ignored. The backward pass can run only once, because it overwrites the logits
    with their gradient.
    """
    return _CrossEntropy.apply(logits.reshape(-1, logits.shape[-1]), labels.flatten())
