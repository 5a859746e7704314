"""Causal attention with the roundings of cuDNN's fused kernels for bfloat16 and float16 on a Hopper GPU.

All products accumulate in float32 and softmax is computed there. What is rounded to the dtype of the inputs:

- forward: the exponentials before they multiply V, not divided by their sum yet; the output.
- backward: the probabilities before they multiply the output's gradient; the scores' gradient, times the softmax
  scale, before it multiplies Q and K; the gradients of K and V for each query head, before those of a group are
  summed; and the gradients.

The kernels shift the exponentials by the largest score so far, here by the largest of the row. That is the same
within one tile of keys, and moves single roundings beyond.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).float()


class _Attention(torch.autograd.Function):
    """(q [B, N, S, D], k and v [B, K, S', D], visible [S, S'], softmax scale) -> [B, N, S, D]."""

    @staticmethod
    def _operands(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, ...]:
        """float32 q, k, v with as many heads as q, and the masked scores [B, N, S, S'], not scaled yet."""
        k, v = (t.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        q = q.float()
        return q, k, v, (q @ k.transpose(-1, -2)).masked_fill_(~visible, -math.inf)

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
        _, _, values, scores = _Attention._operands(q, k, v, visible)
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
        queries, keys, values, scores = _Attention._operands(q, k, v, visible)
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


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None) -> Tensor:
    """q [B, N, S, D], k and v [B, K, S', D] in a 16-bit dtype, visible bool [S, S'] -> [B, N, S, D].

    scale: of the scores, default 1 / sqrt(D).
    """
    return _Attention.apply(q, k, v, visible, q.shape[-1] ** -0.5 if scale is None else scale)
