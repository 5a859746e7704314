"""The operations of the forward pass in plain torch, used on a CPU and in float32. The kernels are tested against them.

No operation waits for the device or has a shape that depends on a value, so a CUDA graph can capture all of them.
Shapes: B rows (samples), T tokens, H hidden, N query heads, K key/value heads, D head dimension, S cache, M = B T.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fp8_inference_demo.weights import FP8, FP8_MAX, Matrix, Weights

Rows = tuple[torch.Tensor, torch.Tensor | None]
"""Operand of a matrix product: values, and for FP8 codes one scale per row."""


@dataclass(frozen=True)
class LayerContext:
    """Settings and buffers that all layers of a model share.

    turns: cosines and sines of the rotary positions, float32 [S, D / 2].
    heads: number of query heads.
    window: number of tokens that attention sees; None: all.
    eps: epsilon of the norms.
    arrived: int32 zeros [B, K]; kernels count the finished splits of an attention there.
    """

    turns: tuple[torch.Tensor, torch.Tensor]
    heads: int
    window: int | None
    eps: float
    arrived: torch.Tensor


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute RMSNorm of [..., H] in float32, rounded once (arXiv:1910.07467)."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up of [..., 2 I], gate first."""
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def rotate(
    x_BTND: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, positions_BT: torch.Tensor
) -> torch.Tensor:
    """Apply rotary positions (arXiv:2104.09864) to the two halves of D, as Hugging Face does.

    cosines, sines: float32 [S, D / 2].
    """
    cos, sin = cosines[positions_BT][:, :, None], sines[positions_BT][:, :, None]
    first, second = x_BTND.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x_BTND.dtype)


def rows(x: torch.Tensor, digits: int) -> Rows:
    """Convert [M, C] to an operand of `gemm`.

    digits: 0 leaves x unchanged. 1 returns FP8 codes and a float32 scale per row, [M, 1]. 2 keeps bf16's precision for
    FP8 weights: the kernels write the rounding error as a second FP8 digit; here, x is returned unchanged.
    """
    if digits != 1:
        return x, None
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=1e-12)
    return (wide / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def add(x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Return x [M, C] + delta."""
    return x + delta


def add_norm_rows(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, digits: int
) -> tuple[torch.Tensor, Rows]:
    """Return x + delta, and `rows` of its RMSNorm."""
    x = x if delta is None else add(x, delta)
    return x, rows(norm(x, weight, eps), digits)


def gemm(rows: Rows, weight: Matrix) -> torch.Tensor:
    """Multiply rows [M, C] by the transposed weight. FP8 products are summed in float32 and rounded to bf16."""
    x, scale = rows
    if weight.scale is None or scale is None:
        return F.linear(x, weight.dequantize(x.dtype))
    groups = weight.scale.shape[1]
    out = torch.zeros(x.shape[0], weight.rows, device=x.device)
    parts = zip(x.float().chunk(groups, 1), weight.values.float().chunk(groups, 1), strict=True)
    for group, (ours, theirs) in enumerate(parts):
        out += F.linear(ours, theirs) * weight.scale[:, group]
    return (out * scale).to(torch.bfloat16)


def swiglu_gemm(rows_: Rows, weight: Matrix, digits: int, largest: torch.Tensor | None = None) -> Rows:
    """Multiply by the weight [2 I, C], apply SwiGLU, and return the `rows` of the result."""
    return rows(swiglu(gemm(rows_, weight)), digits)


def rotate_into_cache(
    qkv_MR: torch.Tensor,
    turns: tuple[torch.Tensor, torch.Tensor],
    positions_BT: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """Split and rotate the fused projection, whose rows are [q; k; v].

    Writes k (rotated) and v into the cache [B, K, S, D] at their positions and returns q (rotated), [B, T, N, D].
    """
    K, D = keys.shape[1], keys.shape[3]
    q, k, v = qkv_MR.view(*positions_BT.shape, -1, D).split((num_heads, K, K), 2)
    row = torch.arange(keys.shape[0], device=keys.device)[:, None]
    keys[row, :, positions_BT] = rotate(k, *turns, positions_BT)
    values[row, :, positions_BT] = v
    return rotate(q, *turns, positions_BT)


def attend_cache(
    qkv_BR: torch.Tensor,
    turns: tuple[torch.Tensor, torch.Tensor],
    positions_B: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    num_heads: int,
    window: int | None,
    digits: int,
    arrived: torch.Tensor | None = None,
    largest: torch.Tensor | None = None,
) -> Rows:
    """Run `rotate_into_cache` for one token per row and attend to the cache up to it. Return `rows` of [B, N D].

    arrived, largest: buffers that only the kernels use.
    """
    q = rotate_into_cache(qkv_BR, turns, positions_B[:, None], keys, values, num_heads)
    at = torch.arange(keys.shape[2], device=q.device)
    behind = positions_B[:, None] - at
    visible = behind >= 0
    if window:
        visible = visible & (behind < window)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, attn_mask=visible[:, None, None], enable_gqa=True
    )
    return rows(out.flatten(1), digits)


def attend_prompt(
    q_BTND: torch.Tensor, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor, window: int | None, block: int = 1024
) -> torch.Tensor:
    """Compute causal attention of whole prompts, [B, T, N, D].

    If the prompts are longer than the window, queries are processed in blocks to keep the mask small.
    """
    q_BNTD, T = q_BTND.transpose(1, 2), q_BTND.shape[1]
    if not window or T <= window:
        out = F.scaled_dot_product_attention(q_BNTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)
    pieces = []
    for start in range(0, T, block):
        stop, first = min(start + block, T), max(0, start - window + 1)
        query = torch.arange(start, stop, device=q_BNTD.device)[:, None]
        behind = query - torch.arange(first, stop, device=q_BNTD.device)
        pieces.append(
            F.scaled_dot_product_attention(
                q_BNTD[:, :, start:stop],
                k_BKTD[:, :, first:stop],
                v_BKTD[:, :, first:stop],
                attn_mask=(behind >= 0) & (behind < window),
                enable_gqa=True,
            )
        )
    return torch.cat(pieces, 2).transpose(1, 2)


def head(weights: Weights, eps: float, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
    """Apply the last norm to x + delta, x [M, H], and the head. Return the logits [M, V]."""
    _, (normed, _) = add_norm_rows(x, delta, weights.norm, eps, 0)
    return F.linear(normed, weights.head.values)
