"""CPU reference implementation of scaled dot-product attention.

Shapes: B batch, S tokens, N query heads, K key/value heads, D head dimension, H hidden size.
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


class _WideBackward(torch.autograd.Function):
    """Autograd function for torch's attention that computes gradients in float32 and rounds them once.

    On a CPU without 16-bit instructions, computing 16-bit gradients is much slower than computing float32 gradients.
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
    """Compute softmax(q k^T / sqrt(D)) v over the positions where `visible` is True.

    Args:
        q: [B, N, S, D] (B batch, N query heads, S tokens, D head dimension).
        k, v: [B, K, S, D], with K key/value heads.
        visible: bool [S, S].
        grouped: whether K differs from N.

    Returns: [B, N, S, D].
    """
    if q.dtype == torch.float32:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=grouped)
    return _WideBackward.apply(q, k, v, visible, grouped)


class DotProductAttention(nn.Module):
    """CPU version of te.DotProductAttention: causal grouped-query attention with a sliding window, without FP8 or
    dropout.

    Args:
        qkv_format: "bshd" with attn_mask_type "causal", or "thd" with "padding_causal". "thd" concatenates sequences,
            whose boundaries are in cu_seqlens.
        window_size: (left, 0) if a query attends to itself and `left` keys before it. None and (-1, 0) mean all keys
            before it. A Hugging Face sliding_window W is (W - 1, 0).
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
        """Compute attention for inputs with the layout "bshd" or "thd".

        The inputs are q [B, S, N, D] and k and v [B, S, K, D] for "bshd", and q [T, N, D] and k and v [T, K, D] for
        "thd".

        Shapes: B batch, S tokens per sequence, T total tokens, N query heads, K key/value heads, D head dimension.
        Transformer Engine's other arguments for "thd" are ignored.

        Args:
            attn_mask_type, qkv_format, window_size: override the constructor's arguments.
            cu_seqlens_q: for "thd", int32 [sequences + 1]: the start of each sequence, followed by T.

        Returns: [B, S, N * D], or [T, N * D] for "thd".

        Raises ValueError if the mask or window is not supported.
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
        """Compute attention within each concatenated sequence.

        Shapes: q [T, N, D], k and v [T, K, D], result [T, N * D] (T total tokens, N query heads, K key/value heads, D
        head dimension).
        """
        outputs, bounds = [], cu_seqlens.tolist()
        for begin, end in pairwise(bounds):
            if begin < end:
                alone = [t[begin:end].transpose(0, 1)[None] for t in (q, k, v)]
                outputs.append(self._attend(alone[0], alone[1], alone[2], window)[0].transpose(0, 1))
        return torch.cat(outputs).flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        """Compute causal attention for q [B, N, S, D] and k and v [B, K, S, D]. Returns [B, N, S, D].

        A query attends to itself and to at most `window` keys before it. A window of -1 is unlimited.

        Shapes: B batch, N query heads, K key/value heads, S tokens, D head dimension.
        """
        positions = torch.arange(q.shape[2], device=q.device)
        age = positions[:, None] - positions
        visible = (age >= 0) & (age <= (window if window >= 0 else len(positions)))
        if self.softmax_scale is not None:
            q = q * (self.softmax_scale * q.shape[-1] ** 0.5)
        return sdpa(q, k, v, visible, self.num_gqa_groups != self.num_attention_heads)


def _checked_window(window_size: tuple[int, int] | None) -> tuple[int, int]:
    left, right = window_size or (-1, 0)
    if left < -1 or right not in ((-1, 0) if left == -1 else (0,)):
        raise ValueError(
            f"window_size is {window_size}, but must be None, (-1, 0) or (N, 0), where N is the number of "
            "previous tokens that each query attends to."
        )
    return left, 0


def _check_layout(layout: str, mask_type: str) -> None:
    if MASK_OF_FORMAT.get(layout) != mask_type:
        raise ValueError(
            f"DotProductAttention(qkv_format={layout!r}, attn_mask_type={mask_type!r}) is not supported on a "
            f"CPU; use {' and '.join(f'{f!r} with {m!r}' for f, m in MASK_OF_FORMAT.items())}."
        )


class RotaryPositionEmbedding(nn.Module):
    """Angles for rotary position embeddings (https://arxiv.org/abs/2104.09864). Channel i is paired with channel i +
    dim / 2, and the base of the frequencies is 10000.

    Args:
        dim: number of channels to rotate.
    """

    inv_freq: Tensor

    def __init__(self, dim: int):
        super().__init__()
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        self.register_buffer("inv_freq", 1.0 / (10000.0**exponents))

    def forward(self, max_seq_len: int) -> Tensor:
        """Return the rotary angles for positions 0 to max_seq_len - 1: float32 [max_seq_len, 1, 1, dim]."""
        positions = torch.arange(max_seq_len, device=self.inv_freq.device, dtype=self.inv_freq.dtype)
        angles = torch.outer(positions, self.inv_freq)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def _multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Compute a * b + c in float32 with a single rounding, like the GPU's fused multiply-add instruction."""
    return (a.double() * b.double()).add_(c.double()).float()


class _FusedRotation(torch.autograd.Function):
    """Autograd function that rotates t [..., D] by the angles freqs [..., D], where D is the head dimension.

    The backward pass rotates the gradient in the opposite direction.
    """

    @staticmethod
    def forward(ctx: Any, t: Tensor, freqs: Tensor) -> Tensor:
        ctx.save_for_backward(freqs)
        x = t.float()
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1) * freqs.sin()
        return _multiply_add(x, freqs.cos(), turned).to(t.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (freqs,) = ctx.saved_tensors
        x = grad.float()
        first, second = (x * freqs.sin()).chunk(2, dim=-1)
        return _multiply_add(x, freqs.cos(), torch.cat((second, -first), dim=-1)).to(grad.dtype), None


def apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, tensor_format: str = "sbhd", *, fused: bool = False
) -> Tensor:
    """Rotate t [B, S, N, D] by the angles freqs [>= S, 1, 1, D]. Computes in float32 and rounds once.

    Shapes: B batch, S tokens, N heads, D head dimension.

    Raises ValueError if the format is not "bshd", fused is False (Transformer Engine would then round cos and sin
    first), or there are fewer rows of angles than tokens.
    """
    if not fused or tensor_format != "bshd" or t.shape[1] > len(freqs):
        raise ValueError(
            f"apply_rotary_pos_emb(tensor_format={tensor_format!r}, fused={fused}) with {len(freqs)} rows "
            f"of angles for {t.shape[1]} tokens is not supported on a CPU; use tensor_format='bshd', fused=True "
            "and at least one row of angles per token."
        )
    return _FusedRotation.apply(t, freqs[: t.shape[1]].transpose(0, 1))
