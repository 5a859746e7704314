"""Rotary positions (https://arxiv.org/abs/2104.09864)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from model.te_reference.base import check_arguments


class RotaryPositionEmbedding(nn.Module):
    """Angles of rotary position embeddings (https://arxiv.org/abs/2104.09864), first half of the channels
    with second.

    dim: channels to rotate. rotary_base: the base of the geometric sequence of frequencies.
    """

    inv_freq: Tensor

    def __init__(self, dim: int, rotary_base: float = 10000.0, **others: Any):
        super().__init__()
        check_arguments(
            "RotaryPositionEmbedding",
            others,
            {
                "rotary_percent": (1.0,),
                "seq_len_interpolation_factor": (None,),
                "pretrained_max_position_embeddings": (None,),
                "interleaved": (False,),
            },
        )
        self.rotary_base = rotary_base
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        self.register_buffer("inv_freq", 1.0 / (rotary_base**exponents))

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """float32 [max_seq_len, 1, 1, dim]: angles of the positions from `offset` on."""
        positions = torch.arange(max_seq_len, device=self.inv_freq.device, dtype=self.inv_freq.dtype) + offset
        angles = torch.outer(positions, self.inv_freq)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def _multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """float32 a * b + c, rounded once as by the GPU's instruction."""
    return (a.double() * b.double()).add_(c.double()).float()


class _FusedRotation(torch.autograd.Function):
    """t [..., D] turned by the angles freqs [..., D]; backward turns the gradient back."""

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
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Rotate t, [B, S, N, D] ("bshd"), [S, B, N, D] ("sbhd") or [T, N, D] ("thd"), by freqs [>= S, 1, 1, <= D].

    start_positions: int [B], the position of each sequence's first token (default 0), not for "thd". cu_seqlens: int
    [sequences + 1], for "thd": where each sequence begins among the T tokens, and T. fused: compute in
    float32 and round once, as the fused kernel of TransformerLayer does; otherwise cos and sin are rounded to
    t's dtype first, as in transformers.
    Raises ValueError: interleaved=True, another format, or freqs too short.
    """
    packed = tensor_format == "thd"
    if interleaved or tensor_format not in ("bshd", "sbhd", "thd") or packed != (cu_seqlens is not None):
        raise ValueError(
            f"apply_rotary_pos_emb(tensor_format={tensor_format!r}, interleaved={interleaved}): the CPU "
            "reference supports 'bshd' and 'sbhd', and 'thd' with cu_seqlens, not interleaved."
        )
    if packed:
        return _rotate_packed(t, freqs, start_positions, fused, cu_seqlens)
    length = t.shape[1] if tensor_format == "bshd" else t.shape[0]
    last = length + (0 if start_positions is None else int(start_positions.max()))
    if last > freqs.shape[0]:
        raise ValueError(f"rotary frequencies for {freqs.shape[0]} positions, but {last} are needed.")
    if start_positions is None:
        freqs = freqs[:length]
    else:
        freqs = torch.cat([freqs[start : start + length] for start in start_positions.tolist()], dim=1)
    if tensor_format == "bshd":
        freqs = freqs.transpose(0, 1)
    rotated, passed = t[..., : freqs.shape[-1]], t[..., freqs.shape[-1] :]
    if fused:
        rotated = _FusedRotation.apply(rotated, freqs)
    else:
        first, second = rotated.chunk(2, dim=-1)
        cos, sin = freqs.cos().to(t.dtype), freqs.sin().to(t.dtype)
        rotated = rotated * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated, passed), dim=-1) if passed.shape[-1] else rotated


def _rotate_packed(
    t: Tensor, freqs: Tensor, start_positions: Tensor | None, fused: bool, cu_seqlens: Any
) -> Tensor:
    """As one sequence, whose tokens each have the angle of their position."""
    if start_positions is not None:
        raise ValueError("apply_rotary_pos_emb: start_positions are not supported with 'thd'.")
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    positions = torch.arange(len(t), device=t.device) - cu_seqlens[:-1].long().repeat_interleave(lengths)
    if int(lengths.max()) > len(freqs):
        raise ValueError(
            f"rotary frequencies for {len(freqs)} positions, but {int(lengths.max())} are needed."
        )
    return apply_rotary_pos_emb(t[None], freqs[positions], "bshd", fused=fused)[0]


def split_and_rotate(
    packed: Tensor, freqs: Tensor, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What model/qkv_rope.py computes in one kernel: [B, T, (N + 2 K) D] with rows [q; k; v] -> rotated q [B, T, N, D],
    rotated k [B, T, K, D], v [B, T, K, D]; freqs float32 [>= T, 1, 1, D]."""
    heads = packed.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=2)
    rotated = (apply_rotary_pos_emb(x, freqs, "bshd", fused=True) for x in (q, k))
    return *rotated, v.contiguous()
