"""Split a fused QKV projection into q, k and v and apply the norms of q and k (Qwen3) and rotary embeddings in one
kernel, or rotate a single tensor.

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
# Elements of a thread in each half of the heads. With norms, the backward pass holds six such tensors in registers.
ENTRIES_OF_A_THREAD = 16
# Programs of the backward pass with norms. Each sums the gradients of the norm weights over its tokens.
PROGRAMS = 2048


@triton.jit
def _head_gains(q_norm, k_norm, head, channel, fits, N: tl.constexpr, K: tl.constexpr):
    """Return the norm weight for each head and channel as float32. The weight is 1 for the heads of v."""
    of_q = tl.load(q_norm + channel, mask=fits, other=0.0).to(tl.float32)
    of_k = tl.load(k_norm + channel, mask=fits, other=0.0).to(tl.float32)
    return tl.where(head < N, of_q, tl.where(head < N + K, of_k, 1.0))


@triton.jit
def _load_heads(q_at, k_at, v_at, is_q, is_k, is_v):
    """Load the heads of a block from separate tensors for q, k and v. Returns float32."""
    return (
        tl.load(q_at, mask=is_q, other=0.0)
        + tl.load(k_at, mask=is_k, other=0.0)
        + tl.load(v_at, mask=is_v, other=0.0)
    ).to(tl.float32)


@triton.jit
def _inverse_rms(first, second, turns, eps, D: tl.constexpr):
    """Return 1 / RMS of each head of q and k, and 1 for the heads of v.

    first, second: the two halves of all heads. turns: whether a head belongs to q or k.
    """
    return tl.where(turns, tl.rsqrt(tl.sum(first * first + second * second, 1) / D + eps)[:, None], 1.0)


@triton.jit
def _rotate_heads(
    packed,
    q,
    k,
    v,
    freqs,
    q_norm,
    k_norm,
    tokens,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORMS: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Split one token's packed QKV into heads, and rotate q and k.

    If NORMS is set, RMSNorm is applied to q and k before the rotation. If BACKWARD is set (not supported with NORMS),
    rotate the gradients back and pack them.

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
        first = _load_heads(q_at, k_at, v_at, is_q, is_k, is_v)
        second = _load_heads(q_at + D // 2, k_at + D // 2, v_at + D // 2, is_q, is_k, is_v)
    else:
        first = tl.load(packed_at, mask=is_q | is_k | is_v, other=0.0).to(tl.float32)
        second = tl.load(packed_at + D // 2, mask=is_q | is_k | is_v, other=0.0).to(tl.float32)
    if NORMS:
        inverse_rms = _inverse_rms(first, second, turns, eps, D)
        first *= inverse_rms * _head_gains(q_norm, k_norm, head, channel, fits, N, K)
        second *= inverse_rms * _head_gains(q_norm + D // 2, k_norm + D // 2, head, channel, fits, N, K)
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


@triton.jit
def _norm_heads_backward(
    packed,
    dq,
    dk,
    dv,
    freqs,
    q_norm,
    k_norm,
    gradient,
    partial,
    rows,
    tokens,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Compute the gradient of packed QKV through RMSNorm and rotation, and sum the gradients of the norm weights.

    With x the normalized heads, g their gradients times the norm weights, and r = 1 / rms, the gradient of a head is
    r (g - x mean(g x)).

    packed: input of the forward pass. gradient: its gradient. partial: sums over the tokens of each program for the
    weights of q and of k, float32 [programs, 2, D]. HEADS, HALF: see _rotate_heads.
    """
    head = tl.arange(0, HEADS)[:, None]
    channel = tl.arange(0, HALF)[None, :]
    fits = channel < D // 2
    turns = head < N + K
    is_q = (head < N) & fits
    is_k = (head >= N) & turns & fits
    is_v = (head >= N + K) & (head < N + 2 * K) & fits
    first_gain = _head_gains(q_norm, k_norm, head, channel, fits, N, K)
    second_gain = _head_gains(q_norm + D // 2, k_norm + D // 2, head, channel, fits, N, K)
    first_total = tl.zeros((HEADS, HALF), tl.float32)
    second_total = tl.zeros((HEADS, HALF), tl.float32)
    for token in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(token, tl.int64)
        angle = tl.load(freqs + (row % tokens) * D + channel, mask=fits, other=0.0)
        cos = tl.where(turns, tl.cos(angle), 1.0)
        sin = tl.where(turns, tl.sin(angle), 0.0)
        q_at = dq + row * (N * D) + head * D + channel
        k_at = dk + row * (K * D) + (head - N) * D + channel
        v_at = dv + row * (K * D) + (head - N - K) * D + channel
        turned_first = _load_heads(q_at, k_at, v_at, is_q, is_k, is_v)
        turned_second = _load_heads(q_at + D // 2, k_at + D // 2, v_at + D // 2, is_q, is_k, is_v)
        at = row * ((N + 2 * K) * D) + head * D + channel
        first = tl.load(packed + at, mask=is_q | is_k, other=0.0).to(tl.float32)
        second = tl.load(packed + at + D // 2, mask=is_q | is_k, other=0.0).to(tl.float32)

        inverse_rms = _inverse_rms(first, second, turns, eps, D)
        first *= inverse_rms
        second *= inverse_rms
        first_gradient = turned_first * cos + turned_second * sin
        second_gradient = turned_second * cos - turned_first * sin
        first_total += first_gradient * first
        second_total += second_gradient * second
        first_gradient *= first_gain
        second_gradient *= second_gain
        mean = (tl.sum(first_gradient * first + second_gradient * second, 1) / D)[:, None]
        dtype = gradient.dtype.element_ty
        inside = is_q | is_k | is_v
        tl.store(gradient + at, ((first_gradient - first * mean) * inverse_rms).to(dtype), mask=inside)
        tl.store(
            gradient + at + D // 2, ((second_gradient - second * mean) * inverse_rms).to(dtype), mask=inside
        )
    place = tl.arange(0, HALF)
    out = partial + tl.program_id(0) * (2 * D) + place
    tl.store(out, tl.sum(tl.where(is_q, first_total, 0.0), 0), mask=place < D // 2)
    tl.store(out + D // 2, tl.sum(tl.where(is_q, second_total, 0.0), 0), mask=place < D // 2)
    tl.store(out + D, tl.sum(tl.where(is_k, first_total, 0.0), 0), mask=place < D // 2)
    tl.store(out + D + D // 2, tl.sum(tl.where(is_k, second_total, 0.0), 0), mask=place < D // 2)


def _blocks(N: int, K: int, D: int) -> tuple[int, int, int]:
    """Return the block sizes HEADS and HALF, and the number of warps for a kernel with norms."""
    heads, half = triton.next_power_of_2(N + 2 * K), triton.next_power_of_2(D // 2)
    return heads, half, max(4, min(16, heads * half // (32 * ENTRIES_OF_A_THREAD)))


def _launch(
    packed: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    freqs: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    backward: bool,
) -> None:
    B, T, N, D = q.shape
    K = k.shape[2]
    heads, half, warps = _blocks(N, K, D)
    norms = q_norm is not None
    _rotate_heads[(B * T,)](
        packed,
        q,
        k,
        v,
        freqs,
        q_norm,
        k_norm,
        T,
        eps,
        N=N,
        K=K,
        D=D,
        HEADS=heads,
        HALF=half,
        NORMS=norms,
        BACKWARD=backward,
        num_warps=warps if norms else 4,
    )


def _launch_norm_backward(
    packed: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    freqs: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of `packed`, and the gradients of `q_norm` and `k_norm` as float32 [2, D]."""
    B, T, N, D = dq.shape
    K = dk.shape[2]
    heads, half, warps = _blocks(N, K, D)
    gradient = torch.empty_like(packed)
    programs = min(B * T, PROGRAMS)
    partial = torch.empty(programs, 2, D, dtype=torch.float32, device=packed.device)
    _norm_heads_backward[(programs,)](
        packed,
        dq,
        dk,
        dv,
        freqs,
        q_norm,
        k_norm,
        gradient,
        partial,
        B * T,
        T,
        eps,
        N=N,
        K=K,
        D=D,
        HEADS=heads,
        HALF=half,
        num_warps=warps,
    )
    return gradient, partial.sum(0)


class _SplitAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        packed: torch.Tensor,
        freqs: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, ...]:
        B, T, width = packed.shape
        D = width // (num_heads + 2 * num_kv_heads)
        q = packed.new_empty(B, T, num_heads, D)
        k = packed.new_empty(B, T, num_kv_heads, D)
        v = packed.new_empty(B, T, num_kv_heads, D)
        _launch(packed, q, k, v, freqs, q_norm, k_norm, eps, backward=False)
        ctx.save_for_backward(freqs, q_norm, k_norm, None if q_norm is None else packed)
        ctx.eps = eps
        return q, k, v

    @staticmethod
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        freqs, q_norm, k_norm, packed = ctx.saved_tensors
        gradients = dq.contiguous(), dk.contiguous(), dv.contiguous()
        if q_norm is not None:
            gradient, (of_q, of_k) = _launch_norm_backward(packed, *gradients, freqs, q_norm, k_norm, ctx.eps)
            return gradient, None, None, None, of_q.to(q_norm.dtype), of_k.to(k_norm.dtype), None
        B, T, N, D = dq.shape
        gradient = dq.new_empty(B, T, (N + 2 * dk.shape[2]) * D)
        _launch(gradient, *gradients, freqs, None, None, 0.0, backward=True)
        return gradient, None, None, None, None, None, None


def split_and_rotate(
    packed: torch.Tensor,
    freqs: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split a fused QKV projection into q, k and v, and apply rotary embeddings to q and k. CUDA only.

    If norm weights are given, RMSNorm is applied to each head of q and k before the rotation. Results are computed in
    float32 and rounded once.

    Shapes: B batch, T tokens, N query heads, K key/value heads, D head dimension.

    Args:
        packed: [B, T, (N + 2 K) D], ordered q, k, v, contiguous.
        freqs: rotary angles, float32 [T, 1, 1, D], contiguous. The second half of D repeats the first
            (https://arxiv.org/abs/2104.09864).
        q_norm, k_norm: weights of RMSNorm [D], or both None.
        eps: epsilon of RMSNorm.

    Returns: rotated q [B, T, N, D], rotated k [B, T, K, D], and v [B, T, K, D].
    """
    return _SplitAndRotate.apply(packed, freqs, num_heads, num_kv_heads, q_norm, k_norm, eps)


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
    """Apply rotary embeddings to x. The result is computed in float32 and rounded once. CUDA only.

    Args:
        x: [B, T, heads, D] (batch B, T tokens, head dimension D).
        freqs: rotary angles, float32 [T, 1, 1, D].
    """
    return _Rotate.apply(x, freqs)
