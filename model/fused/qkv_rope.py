"""Split a fused QKV projection into q, k and v and apply rotary embeddings in one kernel, or rotate a single tensor.

te.TransformerLayer copies strided views of q, k and v, rotates q and k, and copies the three gradients back together in
the backward pass, each with a separate launch. Here, one kernel writes contiguous q, k and v, and one kernel computes
the backward pass. Transformer Engine's fused kernel requires the rows of the QKV weight to be interleaved by group, but
this kernel supports Hugging Face's order [q; k; v]. Transformer Engine's kernel for a single tensor reaches only a
quarter of the memory bandwidth if heads are small.

Shape suffixes: B batch, T tokens, N query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

ENTRIES = 4096  # elements per program of _rotate, in each half of the heads


@triton.jit
def _rotate_heads(
    packed,
    q,
    k,
    v,
    freqs,
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Split one token's packed QKV into heads and rotate q and k.

    With BACKWARD, rotate the gradients back and pack them.

    HEADS is N + 2 K (N query heads, K key/value heads) and HALF is half the head dimension, each rounded up to a power
    of two.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    channel = tl.arange(0, HALF)[None, :]
    fits = channel < D // 2
    angle = tl.load(freqs + (row % tokens) * D + channel, mask=fits, other=0.0)
    turns = head < N + K  # v is only copied
    cos = tl.where(turns, tl.cos(angle), 1.0)
    sin = tl.where(turns, tl.sin(angle), 0.0)
    if BACKWARD:
        sin = -sin

    packed_at = packed + row * ((N + 2 * K) * D) + head * D + channel
    q_at = q + row * (N * D) + head * D + channel
    k_at = k + row * (K * D) + (head - N) * D + channel
    v_at = v + row * (K * D) + (head - N - K) * D + channel
    is_q = (head < N) & fits
    is_k = (head >= N) & (head < N + K) & fits
    is_v = (head >= N + K) & (head < N + 2 * K) & fits
    if BACKWARD:
        first = (
            tl.load(q_at, mask=is_q, other=0.0)
            + tl.load(k_at, mask=is_k, other=0.0)
            + tl.load(v_at, mask=is_v, other=0.0)
        ).to(tl.float32)
        second = (
            tl.load(q_at + D // 2, mask=is_q, other=0.0)
            + tl.load(k_at + D // 2, mask=is_k, other=0.0)
            + tl.load(v_at + D // 2, mask=is_v, other=0.0)
        ).to(tl.float32)
    else:
        first = tl.load(packed_at, mask=is_q | is_k | is_v, other=0.0).to(tl.float32)
        second = tl.load(packed_at + D // 2, mask=is_q | is_k | is_v, other=0.0).to(tl.float32)
    dtype = packed.dtype.element_ty
    turned_first = (first * cos - second * sin).to(dtype)
    turned_second = (second * cos + first * sin).to(dtype)
    if BACKWARD:
        tl.store(packed_at, turned_first, mask=is_q | is_k | is_v)
        tl.store(packed_at + D // 2, turned_second, mask=is_q | is_k | is_v)
    else:
        tl.store(q_at, turned_first, mask=is_q)
        tl.store(q_at + D // 2, turned_second, mask=is_q)
        tl.store(k_at, turned_first, mask=is_k)
        tl.store(k_at + D // 2, turned_second, mask=is_k)
        tl.store(v_at, turned_first, mask=is_v)
        tl.store(v_at + D // 2, turned_second, mask=is_v)


def _launch(
    packed: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    freqs: torch.Tensor,
    backward: bool,
) -> None:
    B, T, N, D = q.shape
    K = k.shape[2]
    _rotate_heads[(B * T,)](
        packed,
        q,
        k,
        v,
        freqs,
        T,
        N=N,
        K=K,
        D=D,
        HEADS=triton.next_power_of_2(N + 2 * K),
        HALF=triton.next_power_of_2(D // 2),
        BACKWARD=backward,
        num_warps=4,
    )


class _SplitAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, packed: torch.Tensor, freqs: torch.Tensor, num_heads: int, num_kv_heads: int
    ) -> tuple[torch.Tensor, ...]:
        B, T, width = packed.shape
        D = width // (num_heads + 2 * num_kv_heads)
        q = packed.new_empty(B, T, num_heads, D)
        k = packed.new_empty(B, T, num_kv_heads, D)
        v = packed.new_empty(B, T, num_kv_heads, D)
        _launch(packed, q, k, v, freqs, backward=False)
        ctx.save_for_backward(freqs)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (freqs,) = ctx.saved_tensors
        B, T, N, D = dq.shape
        packed = dq.new_empty(B, T, (N + 2 * dk.shape[2]) * D)
        _launch(packed, dq.contiguous(), dk.contiguous(), dv.contiguous(), freqs, backward=True)
        return packed, None, None, None


def split_and_rotate(
    packed: torch.Tensor, freqs: torch.Tensor, num_heads: int, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split a fused QKV projection and apply rotary embeddings to q and k. Computes in float32 and rounds once. CUDA
    only.

    Shapes: B batch, T tokens, N query heads, K key/value heads, D head dimension.

    Args:
        packed: [B, T, (N + 2 K) D], ordered q, k, v, contiguous.
        freqs: rotary angles, float32 [T, 1, 1, D], contiguous. The second half of D repeats the first
            (https://arxiv.org/abs/2104.09864).

    Returns: rotated q [B, T, N, D], rotated k [B, T, K, D], and v [B, T, K, D].
    """
    return _SplitAndRotate.apply(packed, freqs, num_heads, num_kv_heads)


@triton.jit
def _rotate(
    x,
    out,
    freqs,
    rows,
    tokens,
    N: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Rotate all heads of ROWS tokens.

    HEADS is the number of heads and HALF is half the head dimension, each rounded up to a power of two.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None]
    head = tl.arange(0, HEADS)[None, :, None]
    channel = tl.arange(0, HALF)[None, None, :]
    angle = tl.load(freqs + (row % tokens) * D + channel, mask=(row < rows) & (channel < D // 2), other=0.0)
    cos, sin = tl.cos(angle), tl.sin(angle)
    if BACKWARD:
        sin = -sin
    at = row * (N * D) + head * D + channel
    inside = (row < rows) & (head < N) & (channel < D // 2)
    first = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + at + D // 2, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    tl.store(out + at, (first * cos - second * sin).to(dtype), mask=inside)
    tl.store(out + at + D // 2, (second * cos + first * sin).to(dtype), mask=inside)


def _launch_rotate(x: torch.Tensor, freqs: torch.Tensor, backward: bool) -> torch.Tensor:
    B, T, N, D = x.shape
    x, heads, half = x.contiguous(), triton.next_power_of_2(N), triton.next_power_of_2(D // 2)
    out = torch.empty_like(x)
    rows = max(1, ENTRIES // (heads * half))
    _rotate[(triton.cdiv(B * T, rows),)](
        x,
        out,
        freqs,
        B * T,
        T,
        N=N,
        D=D,
        ROWS=rows,
        HEADS=heads,
        HALF=half,
        BACKWARD=backward,
        num_warps=4,
    )
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(freqs)
        return _launch_rotate(x, freqs, backward=False)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (freqs,) = ctx.saved_tensors
        return _launch_rotate(gradient, freqs, backward=True), None


def rotate(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Apply rotary embeddings to x [B, T, heads, D]. Computes in float32 and rounds once. CUDA only.

    Args:
        freqs: rotary angles, float32 [T, 1, 1, D] (T tokens, head dimension D).
    """
    return _Rotate.apply(x, freqs)
