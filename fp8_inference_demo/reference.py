"""The operations of the forward pass, in plain torch: on a CPU, in float32, and what the kernels are compared with.

None waits for the device or has a shape that depends on a value, so they stand in a CUDA graph too.
Shapes: B rows (samples), T tokens, H hidden, N query heads, K key/value heads, D head dimension, S cache, M = B T.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fp8_inference_demo.weights import FP8, FP8_MAX, Matrix, Weights

Rows = tuple[torch.Tensor, torch.Tensor | None]
"""Rows of activations as a matrix product takes them: values and, of FP8 codes, a scale a row."""


@dataclass(frozen=True)
class LayerContext:
    """What all layers of a model share.

    turns: cosines and sines of the rotary positions, float32 [S, D / 2]. heads: query heads. window: tokens that
    attention sees, None: all. eps: of norms. arrived: int32 zeros [B, K], in which kernels note the splits of an
    attention that are through.
    """

    turns: tuple[torch.Tensor, torch.Tensor]
    heads: int
    window: int | None
    eps: float
    arrived: torch.Tensor


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of [..., H] in float32, rounded once (arXiv:1910.07467)."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [..., 2 I], gate first."""
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def rotate(
    x_BTND: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, positions_BT: torch.Tensor
) -> torch.Tensor:
    """Rotary positions (arXiv:2104.09864), Hugging Face's halves. cosines, sines: float32 [S, D / 2]."""
    cos, sin = cosines[positions_BT][:, :, None], sines[positions_BT][:, :, None]
    first, second = x_BTND.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x_BTND.dtype)


def rows(x: torch.Tensor, digits: int) -> Rows:
    """[M, C] as an operand of `gemm`. digits 0: as it is; 1: FP8 codes and a float32 scale [M, 1] a row; 2: in bf16's
    precision, for FP8 weights (the kernels write a second FP8 digit of what the first leaves, here nothing is to do).
    """
    if digits != 1:
        return x, None
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=1e-12)
    return (wide / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def add(x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """x [M, C] + delta."""
    return x + delta


def add_norm_rows(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, digits: int
) -> tuple[torch.Tensor, Rows]:
    """x + delta, and `rows` of its RMSNorm."""
    x = x if delta is None else add(x, delta)
    return x, rows(norm(x, weight, eps), digits)


def gemm(rows: Rows, weight: Matrix) -> torch.Tensor:
    """Rows [M, C] times the transposed weight. Where both are FP8 the sums are float32, rounded to bf16."""
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
    """silu(gate) * up of the product with [2 I, C], then `rows`."""
    return rows(swiglu(gemm(rows_, weight)), digits)


def rotate_into_cache(
    qkv_MR: torch.Tensor,
    turns: tuple[torch.Tensor, torch.Tensor],
    positions_BT: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """The fused projection, rows [q; k; v] -> rotated q [B, T, N, D]; rotated k, and v, go into the cache [B, K, S, D]
    at their positions."""
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
    """`rotate_into_cache` of one token a row, and its attention to the cache up to and with it -> `rows` of [B, N D].
    arrived, largest: what the kernels note."""
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
    """Causal attention of whole prompts -> [B, T, N, D]. With a window that is exceeded, by blocks of queries, so
    that the mask stays small."""
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
    """The last norm of x + delta, and the head: x [M, H] -> logits [M, V]."""
    _, (normed, _) = add_norm_rows(x, delta, weights.norm, eps, 0)
    return F.linear(normed, weights.head.values)
