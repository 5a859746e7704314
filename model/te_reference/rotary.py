"""Rotary position embeddings (https://arxiv.org/abs/2104.09864) in the CPU reference implementation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RotaryPositionEmbedding(nn.Module):
    """Angles for rotary position embeddings (https://arxiv.org/abs/2104.09864). Channel i is paired with channel i +
    dim / 2.

    Args:
        dim: number of channels to rotate.
        rotary_base: base of the geometric sequence of frequencies.
    """

    inv_freq: Tensor

    def __init__(self, dim: int, rotary_base: float = 10000.0):
        super().__init__()
        self.rotary_base = rotary_base
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        self.register_buffer("inv_freq", 1.0 / (rotary_base**exponents))

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
