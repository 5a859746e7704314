"""Operations on several rows: norm, SwiGLU, residual, quantization, KV cache writes, and greedy sampling.

Shapes: M rows, C columns, B samples of T tokens, S cache positions, K key/value heads, D head dimension.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fp8_inference_demo.kernels.common import Sums
from fp8_inference_demo.reference import LayerContext, Rows
from fp8_inference_demo.weights import FP8, FP8_MAX


@triton.jit
def _row(
    x,
    delta,
    total,
    norm,
    codes,
    scales,
    M,
    C,
    eps,
    SPLITS: tl.constexpr,
    DELTA: tl.constexpr,
    NORM: tl.constexpr,
    SWIGLU: tl.constexpr,
    DIGITS: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
    GPU: tl.constexpr,
):
    """Process one row: add `delta`, apply RMSNorm or SwiGLU, and store the result as FP8 codes with a scale.

    DIGITS: number of FP8 codes per element. If 0, the result is stored in the dtype of `codes`. SPLITS: number of
    partial sums in `delta`, or in x with SWIGLU. The kernel adds them up.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < C
    if GPU:
        gdc_launch_dependents()
    if NORM:
        gain = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    if GPU:
        gdc_wait()
    if SWIGLU:
        gate, up = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        for split in tl.static_range(SPLITS):
            at = x + (split * M + row) * 2 * C + column
            gate += tl.load(at, mask=inside, other=0.0).to(tl.float32)
            up += tl.load(at + C, mask=inside, other=0.0).to(tl.float32)
        wide = gate * tl.sigmoid(gate) * up
    else:
        wide = tl.load(x + row * C + column, mask=inside, other=0.0).to(tl.float32)
    if DELTA:
        for split in tl.static_range(SPLITS):
            wide += tl.load(delta + (split * M + row) * C + column, mask=inside, other=0.0).to(tl.float32)
        narrow = wide.to(total.dtype.element_ty)
        tl.store(total + row * C + column, narrow, mask=inside)
        wide = narrow.to(tl.float32)
    if NORM:
        wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / C + eps)
        wide = wide * gain
    place = codes + row * C + column
    if DIGITS > 0:
        scale = tl.maximum(tl.max(tl.abs(wide), 0) / LIMIT, 1e-12)
        tl.store(scales + row, scale)
        if DIGITS == 2:
            tl.store(scales + M + row, scale / 16.0)
        # keep NaN, so that the check of the logits detects it
        wide = tl.clamp(wide / scale, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    code = wide.to(codes.dtype.element_ty)
    tl.store(place, code, mask=inside)
    if DIGITS == 2:
        rest = (wide - code.to(tl.float32)) * 16.0
        tl.store(codes + (M + row) * C + column, rest.to(codes.dtype.element_ty), mask=inside)


def _rows(
    x: torch.Tensor,
    digits: int,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    swiglu: bool = False,
    delta: Sums | None = None,
) -> tuple[torch.Tensor, Rows]:
    """Launch `_row`. Return x + delta, and its RMSNorm or SwiGLU (if `swiglu`) as an operand of `gemm`.

    digits: number of FP8 codes whose scaled sum represents each value of the operand. If 0, the operand is bf16 [M, C]
    without a scale. Otherwise, it consists of FP8 codes [digits, M, C] and scales [digits, M, 1].
    """
    M, C = x.shape[-2:]
    C = C // 2 if swiglu else C
    sums = x if swiglu else delta
    dtype = FP8 if digits else torch.bfloat16
    codes = torch.empty(*((digits, M) if digits else (M,)), C, dtype=dtype, device=x.device)
    scales = torch.empty(digits, M, 1, dtype=torch.float32, device=x.device) if digits else None
    total = x if delta is None else torch.empty_like(x)
    BLOCK = triton.next_power_of_2(C)
    _row[(M,)](
        x,
        delta,
        total,
        norm,
        codes,
        scales,
        M,
        C,
        eps,
        SPLITS=1 if sums is None else len(sums),
        DELTA=delta is not None,
        NORM=norm is not None,
        SWIGLU=swiglu,
        DIGITS=digits,
        LIMIT=FP8_MAX,
        BLOCK=BLOCK,
        GPU=x.is_cuda,
        launch_pdl=True,
        num_warps=16,
    )
    return total, (codes, scales)


def rows(x: torch.Tensor, digits: int) -> Rows:
    """Convert activations to an operand of `gemm` with a Triton kernel. See `reference.rows`."""
    return _rows(x, digits)[1] if digits else (x, None)


def add(x: torch.Tensor, delta: Sums) -> torch.Tensor:
    """Add the partial sums `delta` to x. See `reference.add`."""
    return (x + delta.float().sum(0)).to(x.dtype)


def add_norm_rows(
    x: torch.Tensor, delta: Sums | None, norm: torch.Tensor, eps: float, digits: int
) -> tuple[torch.Tensor, Rows]:
    """Add `delta`, apply RMSNorm and quantize in one Triton kernel. See `reference.add_norm_rows`."""
    return _rows(x, digits, norm, eps, delta=delta)


def swiglu_rows(gate_up: Sums, digits: int) -> Rows:
    """Apply SwiGLU to the partial sums [sums, M, 2 C]. Return [M, C] as an operand of `gemm`."""
    return _rows(gate_up, digits, swiglu=True)[1]


@triton.jit
def _rotate_into_cache(
    qkv,
    cosines,
    sines,
    positions,
    norms,
    q,
    keys,
    values,
    M,
    T,
    S,
    eps,
    SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    ALL: tl.constexpr,
    HALF: tl.constexpr,
    NORMS: tl.constexpr,
    GPU: tl.constexpr,
):
    """Apply RoPE to all heads of one token, and write the key and value into the KV cache.

    With NORMS, the heads of q and k first pass RMSNorm, whose weights are `norms`.

    ALL, HALF: HEADS + 2 KV_HEADS and D / 2, each rounded up to a power of two.
    """
    if GPU:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    row, position = token // T, tl.load(positions + token)
    head, channel = tl.arange(0, ALL)[:, None], tl.arange(0, HALF)[None, :]
    fits = channel < D // 2
    turn = position * (D // 2) + channel
    turns = (head < HEADS + KV_HEADS) & fits  # v is not rotated
    cos = tl.load(cosines + turn, mask=turns, other=1.0)
    sin = tl.load(sines + turn, mask=turns, other=0.0)
    any_head = (head < HEADS + 2 * KV_HEADS) & fits
    first, second = tl.zeros((ALL, HALF), tl.float32), tl.zeros((ALL, HALF), tl.float32)
    for split in tl.static_range(SPLITS):
        at = qkv + (split * M + token) * ((HEADS + 2 * KV_HEADS) * D) + head * D + channel
        first += tl.load(at, mask=any_head, other=0.0).to(tl.float32)
        second += tl.load(at + D // 2, mask=any_head, other=0.0).to(tl.float32)
    if NORMS:
        inverse_rms = tl.rsqrt(tl.sum(first * first + second * second, 1) / D + eps)[:, None]
        inverse_rms = tl.where(head < HEADS + KV_HEADS, inverse_rms, 1.0)
        gain = norms + tl.where(head < HEADS, 0, D) + channel
        first *= inverse_rms * tl.load(gain, mask=turns, other=1.0).to(tl.float32)
        second *= inverse_rms * tl.load(gain + D // 2, mask=turns, other=1.0).to(tl.float32)
    one = (first * cos - second * sin).to(q.dtype.element_ty)
    two = (second * cos + first * sin).to(q.dtype.element_ty)
    q_at = q + (token * HEADS + head) * D + channel
    k_at = keys + ((row * KV_HEADS + head - HEADS) * S + position) * D + channel
    v_at = values + ((row * KV_HEADS + head - HEADS - KV_HEADS) * S + position) * D + channel
    is_q = (head < HEADS) & fits
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS) & fits
    is_v = (head >= HEADS + KV_HEADS) & any_head
    tl.store(q_at, one, mask=is_q)
    tl.store(q_at + D // 2, two, mask=is_q)
    tl.store(k_at, one, mask=is_k)
    tl.store(k_at + D // 2, two, mask=is_k)
    tl.store(v_at, one, mask=is_v)
    tl.store(v_at + D // 2, two, mask=is_v)


def rotate_into_cache(
    context: LayerContext,
    qkv: Sums,
    head_norms: torch.Tensor | None,
    positions_BT: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Apply RMSNorm and RoPE, and fill the KV cache with a Triton kernel. See `reference.rotate_into_cache`."""
    B, T = positions_BT.shape
    K, S, D = keys.shape[1:]
    q = torch.empty(B, T, context.heads, D, dtype=keys.dtype, device=keys.device)
    _rotate_into_cache[(B * T,)](
        qkv,
        *context.turns,
        positions_BT.contiguous(),
        head_norms,
        q,
        keys,
        values,
        B * T,
        T,
        S,
        context.eps,
        SPLITS=len(qkv),
        HEADS=context.heads,
        KV_HEADS=K,
        D=D,
        ALL=triton.next_power_of_2(context.heads + 2 * K),
        HALF=triton.next_power_of_2(D // 2),
        NORMS=head_norms is not None,
        GPU=q.is_cuda,
        launch_pdl=True,
        num_warps=4,
    )
    return q


@triton.jit
def _take(logits, history, tokens, positions, steps, last, V, S, B, BLOCK: tl.constexpr, GPU: tl.constexpr):
    """Select the most likely token for one row. Store it in `history` [S, B] and as the input of the next step.

    Stores -1 in `history` if the logits of the row are not finite.
    """
    row = tl.program_id(0)
    if GPU:
        gdc_wait()
    best, token, broken = float("-inf"), 0, 0
    for start in tl.range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        at = logits + row.to(tl.int64) * V + column
        values = tl.load(at, mask=column < V, other=float("-inf")).to(tl.float32)
        broken = tl.maximum(broken, tl.max(((values != values) | (values == float("inf"))).to(tl.int32), 0))
        peak, place = tl.max(values, 0, return_indices=True)
        token = tl.where(peak > best, start + place, token)
        best = tl.maximum(best, peak)
    drawn = tl.where((broken > 0) | (best == float("-inf")), -1, token).to(tl.int64)
    step = tl.load(steps + row)
    tl.store(history + step * B + row, drawn, mask=step < S)
    tl.store(tokens + row, tl.maximum(drawn, 0))
    tl.store(steps + row, step + 1)
    tl.store(positions + row, tl.minimum(tl.load(positions + row) + 1, last))


def take_likeliest(
    logits: torch.Tensor,
    history: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    steps: torch.Tensor,
    last: int,
) -> None:
    """Select and store the most likely token for each of B rows, and advance the positions.

    This kernel replaces `engine.Step.take` for greedy decoding, for which plain torch needs a dozen launches.

    All arguments except `logits` and `last` are updated. logits: float32 or bf16 [B, V]. history: int64 [S, B], the
    tokens of each step. tokens, positions, steps: int64 [B]. last: largest position in the KV cache.
    """
    B, V = logits.shape
    BLOCK = min(16384, triton.next_power_of_2(V))
    _take[(B,)](
        logits,
        history,
        tokens,
        positions,
        steps,
        last,
        V,
        len(history),
        B,
        BLOCK=BLOCK,
        GPU=logits.is_cuda,
        launch_pdl=True,
        num_warps=16,
    )
