"""Operations of the forward pass in plain torch. The Triton kernels are tested against these operations.

The engine uses them on a CPU, on older GPUs and in float32. A CUDA graph can capture all operations, because none of
them synchronizes or has a shape that depends on a value.
Shapes: B rows (samples), T tokens, H hidden, N query heads, K key/value heads, D head dimension, S cache positions,
M = B T.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fp8_inference_demo.weights import FP8, FP8_MAX, Matrix, Weights

Rows = tuple[torch.Tensor, torch.Tensor | None]
"""Activations for a matrix product: values [M, C], and for FP8 a float32 scale per row, [M, 1]."""


@dataclass(frozen=True)
class LayerContext:
    """Settings and buffers shared by all layers of a model.

    B rows, S context length, K key/value heads, D head dimension.

    turns: cosines and sines for RoPE, each float32 [S, D / 2].
    heads: number of query heads.
    window: size of the sliding window in tokens, or None for full attention.
    eps: epsilon of RMSNorm.
    arrived: int32 zeros [B, K]. The attention kernel uses this buffer to count its finished splits.
    """

    turns: tuple[torch.Tensor, torch.Tensor]
    heads: int
    window: int | None
    eps: float
    arrived: torch.Tensor


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute RMSNorm (arXiv:1910.07467) over the last dimension in float32 and round the result to the dtype of x."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up. The last dimension of `gate_up` is the gate followed by up."""
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def rotate(
    x_BTND: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, positions_BT: torch.Tensor
) -> torch.Tensor:
    """Apply RoPE (arXiv:2104.09864). As in Hugging Face models, channels i and i + D / 2 of a head form a pair.

    x_BTND: queries or keys [B, T, N, D]. cosines, sines: float32 [S, D / 2]. positions_BT: positions of the tokens.
    """
    cos, sin = cosines[positions_BT][:, :, None], sines[positions_BT][:, :, None]
    first, second = x_BTND.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x_BTND.dtype)


def rows(x: torch.Tensor, digits: int) -> Rows:
    """Convert activations x [M, C] to the first operand of `gemm`.

    digits: number of FP8 codes per element. With 0, x is returned unchanged. With 1, FP8 codes and a float32 scale per
        row, [M, 1], are returned. With 2, a product with FP8 weights keeps the precision of bf16: the kernels store the
        rounding error as a second FP8 code, and this reference implementation returns x unchanged.
    """
    if digits != 1:
        return x, None
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=1e-12)
    return (wide / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def add(x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Return x + delta, both [M, C]."""
    return x + delta


def add_norm_rows(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, digits: int
) -> tuple[torch.Tensor, Rows]:
    """Return x + delta, and the RMSNorm of x + delta as an operand of `gemm`. digits: see `rows`."""
    x = x if delta is None else add(x, delta)
    return x, rows(norm(x, weight, eps), digits)


def gemm(rows: Rows, weight: Matrix) -> torch.Tensor:
    """Multiply activations [M, C] by the transposed weight [R, C]. Return [M, R].

    Products of two FP8 operands are summed in float32 and rounded to bf16.
    """
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
    """Multiply activations [M, C] by the transposed gate and up weight [2 I, C] and apply SwiGLU.

    Returns [M, I] as an operand of `gemm`. digits: see `rows`. largest: used only by the kernels.
    """
    return rows(swiglu(gemm(rows_, weight)), digits)


def rotate_into_cache(
    context: LayerContext,
    qkv_MR: torch.Tensor,
    head_norms: torch.Tensor | None,
    positions_BT: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Split the fused projection into q, k and v, and apply RMSNorm and RoPE to the heads of q and k.

    head_norms: weights of RMSNorm for q and for k, [2, D], or None without norms.
    Writes k and v into the cache `keys` and `values`, each [B, key/value heads, context length, head dimension], at
    `positions_BT`. Returns q, [B, T, N, D].
    """
    K, D = keys.shape[1], keys.shape[3]
    q, k, v = qkv_MR.view(*positions_BT.shape, -1, D).split((context.heads, K, K), 2)
    if head_norms is not None:
        q, k = norm(q, head_norms[0], context.eps), norm(k, head_norms[1], context.eps)
    row = torch.arange(keys.shape[0], device=keys.device)[:, None]
    keys[row, :, positions_BT] = rotate(k, *context.turns, positions_BT)
    values[row, :, positions_BT] = v
    return rotate(q, *context.turns, positions_BT)


def attend_cache(
    context: LayerContext,
    qkv_BR: torch.Tensor,
    head_norms: torch.Tensor | None,
    positions_B: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    digits: int,
    largest: torch.Tensor | None = None,
) -> Rows:
    """Run `rotate_into_cache` and causal attention to the cache for one new token per row.

    Returns the attention output [B, N D] as an operand of `gemm`.
    digits: see `rows`. largest: used only by the kernels.
    """
    q = rotate_into_cache(context, qkv_BR, head_norms, positions_B[:, None], keys, values)
    at = torch.arange(keys.shape[2], device=q.device)
    behind = positions_B[:, None] - at
    visible = behind >= 0
    if context.window:
        visible = visible & (behind < context.window)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, attn_mask=visible[:, None, None], enable_gqa=True
    )
    return rows(out.flatten(1), digits)


def attend_prompt(
    q_BTND: torch.Tensor, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor, window: int | None, block: int = 1024
) -> torch.Tensor:
    """Compute causal attention for whole prompts. Return [B, T, N, D].

    window: size of the sliding window in tokens, or None. If the prompts are longer than the window, the queries are
    processed in blocks of `block` tokens to limit the memory for the attention mask.
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
    """Apply the last norm and the head to x + delta, both [M, H]. Return the logits [M, V]."""
    _, (normed, _) = add_norm_rows(x, delta, weights.norm, eps, 0)
    return F.linear(normed, weights.head.values)
