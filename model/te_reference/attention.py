"""Scaled dot-product attention.

Shapes: B batch, S tokens, N query heads, K key/value heads, D head dimension, H hidden.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.te_reference.base import check_supported

MASK_OF_FORMAT = {"bshd": "causal", "thd": "padding_causal"}
"""Mask type for each layout: "bshd" is [batch, tokens, ...], "thd" is sequences one after the other."""


def causal_mask(tokens: int, window: int, device: torch.device) -> Tensor:
    """Return bool [tokens, tokens], True if a query sees a key: not later, and at most `window` before it (-1: any)."""
    query = torch.arange(tokens, device=device)[:, None]
    key = torch.arange(tokens, device=device)[None, :]
    visible = key <= query
    return visible & (query - key <= window) if window >= 0 else visible


class _WideBackward(torch.autograd.Function):
    """torch's attention with gradients computed in float32 and rounded once.

    In 16 bits they take five times as long on a CPU without 16-bit instructions.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, grouped: bool) -> Tensor:
        ctx.save_for_backward(q, k, v, visible)
        ctx.grouped = grouped
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=grouped)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *narrow, visible = ctx.saved_tensors
        with torch.enable_grad():
            q, k, v = (t.detach().float().requires_grad_() for t in narrow)
            out = sdpa(q, k, v, visible, ctx.grouped)
        grads = torch.autograd.grad(out, (q, k, v), grad.float())
        return *(g.to(grad.dtype) for g in grads), None, None


def sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, grouped: bool) -> Tensor:
    """Compute softmax(q k^T / sqrt(D)) v at the positions where `visible` is True.

    Args:
        q: [B, N, S, D].
        k: [B, K, S, D], as v.
        visible: bool [S, S].
        grouped: whether K differs from N.

    Returns: [B, N, S, D].
    """
    if q.dtype == torch.float32:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=grouped)
    return _WideBackward.apply(q, k, v, visible, grouped)


class DotProductAttention(nn.Module):
    """te.DotProductAttention for causal attention with grouped queries and a sliding window; no FP8, no dropout.

    Args:
        qkv_format: "bshd" with attn_mask_type "causal", or "thd" with "padding_causal": the sequences of cu_seqlens one
            after the other.
        window_size: (left, 0): a query sees itself and `left` keys before it. None and (-1, 0): all keys before it. A
            Hugging Face sliding_window W is (W - 1, 0).
        softmax_scale: factor of the scores. None: 1 / sqrt(D).
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        *,
        softmax_scale: float | None = None,
        layer_number: int | None = None,
    ):
        super().__init__()
        check_supported("DotProductAttention", attention_dropout=(attention_dropout, 0.0))
        _check_layout(qkv_format, attn_mask_type)
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_gqa_groups or num_attention_heads
        self.qkv_format, self.attn_mask_type = qkv_format, attn_mask_type
        self.window_size = _checked_window(window_size)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attn_mask_type: str | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        window_size: tuple[int, int] | None = None,
    ) -> Tensor:
        """Compute attention of [B, S, N, D] and twice [B, S, K, D], or for "thd" of [T, N, D] and twice [T, K, D].

        Transformer Engine's other arguments for "thd" have no effect here.

        Args:
            attn_mask_type: overrides the constructor's, as do qkv_format and window_size.
            cu_seqlens_q: for "thd": int32 [sequences + 1], the start of each sequence of queries and keys, then T.

        Returns: [B, S, N * D], or for "thd" [T, N * D].

        Raises ValueError: an unsupported mask or window.
        """
        layout = qkv_format or self.qkv_format
        _check_layout(layout, attn_mask_type or self.attn_mask_type)
        window = _checked_window(window_size or self.window_size)[0]
        if layout == "thd":
            assert cu_seqlens_q is not None
            return self._attend_packed(query_layer, key_layer, value_layer, cu_seqlens_q, window)
        q, k, v = (t.transpose(1, 2) for t in (query_layer, key_layer, value_layer))
        return self._attend(q, k, v, window).transpose(1, 2).flatten(2)

    def _attend_packed(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int) -> Tensor:
        """Attend within each sequence: [T, N, D] and twice [T, K, D] -> [T, N * D]."""
        outputs, bounds = [], cu_seqlens.tolist()
        for begin, end in pairwise(bounds):
            if begin < end:
                alone = [t[begin:end].transpose(0, 1)[None] for t in (q, k, v)]
                outputs.append(self._attend(alone[0], alone[1], alone[2], window)[0].transpose(0, 1))
        return torch.cat(outputs).flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        """Attend: [B, N, S, D] and twice [B, K, S, D] -> [B, N, S, D]."""
        visible = causal_mask(q.shape[2], window, q.device)
        if self.softmax_scale is not None:
            q = q * (self.softmax_scale * q.shape[-1] ** 0.5)
        return sdpa(q, k, v, visible, self.num_gqa_groups != self.num_attention_heads)


def _checked_window(window_size: tuple[int, int] | None) -> tuple[int, int]:
    left, right = window_size or (-1, 0)
    if left < -1 or right not in ((-1, 0) if left == -1 else (0,)):
        raise ValueError(
            f"window_size must be None, (-1, 0) or (number of keys before the query, 0), not {window_size}."
        )
    return left, 0


def _check_layout(layout: str, mask_type: str) -> None:
    if MASK_OF_FORMAT.get(layout) != mask_type:
        raise ValueError(
            f"DotProductAttention(qkv_format={layout!r}, attn_mask_type={mask_type!r}): the CPU reference supports "
            f"{' and '.join(f'{f!r} with {m!r}' for f, m in MASK_OF_FORMAT.items())}."
        )
