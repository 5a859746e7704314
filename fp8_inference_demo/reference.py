"""The operations of the forward pass, in plain torch: on a CPU, in float32, and what the kernels are compared with.

None waits for the device or has a shape that depends on a value, so they stand in a CUDA graph too.
Shapes: B rows (samples), T tokens, H hidden, N query heads, K key/value heads, D head dimension, S cache, M = B T.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fp8_inference_demo.weights import FP8, FP8_MAX, Matrix


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of [..., H] in float32, rounded once (arXiv:1910.07467)."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [..., 2 I], gate first."""
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def rotate(x_BTND: torch.Tensor, positions_BT: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary positions (arXiv:2104.09864), Hugging Face's halves. angles: float32 [S, D / 2]."""
    turn = angles[positions_BT][:, :, None]
    cos, sin = turn.cos(), turn.sin()
    first, second = x_BTND.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x_BTND.dtype)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[M, C] -> FP8 codes and a float32 scale [M, 1] a row."""
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=1e-12)
    return (wide / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def few_rows(x: torch.Tensor, weight: Matrix) -> torch.Tensor:
    """x [M, C] times the transposed weight: the activations stay as they are, FP8 weights are widened."""
    return F.linear(x, weight.dequantize(x.dtype))


def many_rows(x: torch.Tensor, weight: Matrix) -> torch.Tensor:
    """x [M, C] times the transposed weight; with an FP8 weight both operands are FP8, the sums float32."""
    if weight.scale is None:
        return F.linear(x, weight.values)
    codes, scale = quantize_rows(x)
    groups = weight.scale.shape[1]
    out = torch.zeros(x.shape[0], weight.rows, device=x.device)
    parts = zip(codes.float().chunk(groups, 1), weight.values.float().chunk(groups, 1), strict=True)
    for group, (ours, theirs) in enumerate(parts):
        out += F.linear(ours, theirs) * weight.scale[:, group]
    return (out * scale).to(x.dtype)


def attend_cache(
    q_BND: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    positions_B: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    """Attention of one token a row, at its position, to the cache up to and with it; -> [B, N D]."""
    at = torch.arange(k_BKSD.shape[2], device=q_BND.device)
    behind = positions_B[:, None] - at
    visible = behind >= 0
    if window:
        visible = visible & (behind < window)
    out = F.scaled_dot_product_attention(
        q_BND[:, :, None], k_BKSD, v_BKSD, attn_mask=visible[:, None, None], enable_gqa=True
    )
    return out.flatten(1)


def attend_prompt(
    q_BNTD: torch.Tensor, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor, window: int | None, block: int = 1024
) -> torch.Tensor:
    """Causal attention of whole prompts -> [B, T, N, D]. With a window that is exceeded, by blocks of queries, so
    that the mask stays small."""
    T = q_BNTD.shape[2]
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
