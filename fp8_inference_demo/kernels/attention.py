"""Attention to the KV cache for one token per row.

As in Flash-Decoding (https://pytorch.org/blog/flash-decoding), several Triton programs share the cache of a row. The
last program to finish combines their results. For a single row with a short cache, one program per query head is
enough.

The kernels also apply RMSNorm (Qwen3) and RoPE to the query and key of the token and write its key and value into the
cache. This saves a launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fp8_inference_demo.kernels.common import PROGRAMS, Late, Sums, magnitude_bits
from fp8_inference_demo.reference import LayerContext, Rows

ATTEND_BLOCK = 64
# Maximum number of key elements that one program keeps in registers. The same limit applies to values.
ATTEND_HELD = 32768


@triton.jit
def _fold(query, key, value, there, factor, peak, total, mean):
    """Update the running softmax (maximum, sum and weighted mean) with one more block of keys and values."""
    scores = tl.dot(query, tl.trans(key)) * factor
    scores = tl.where(there[None, :], scores, float("-inf"))
    new = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new[:, None])
    fade = tl.exp2(peak - new)
    mean = tl.dot(weights.to(value.dtype), value, mean * fade[:, None])
    return new, total * fade + tl.sum(weights, 1), mean


@triton.jit
def _attend(
    qkv,
    cosines,
    sines,
    positions,
    norms,
    keys,
    values,
    out,
    largest,
    partial,
    sums,
    arrived,
    M,
    S,
    factor,
    eps,
    NORMS: tl.constexpr,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    SUMS: tl.constexpr,
    SPLITS: tl.constexpr,
    ALL_SPLITS: tl.constexpr,
    ALL_PER: tl.constexpr,
    LARGEST: tl.constexpr,
    GPU: tl.constexpr,
):
    """Compute attention over one split of the visible cache, for all query heads of a row that share a key/value head.

    M rows, D head dimension, PER query heads per key/value head.

    qkv: fused projection as SUMS partial sums, [SUMS, M, (HEADS + 2 KV_HEADS) D], before RMSNorm and RoPE.
    norms: with NORMS, the weights of RMSNorm for q and for k, [2, D].
    partial: weighted mean of the values for each split, float32 [M, KV_HEADS, SPLITS, PER, D].
    sums: largest score and sum of exponentials for each split, float32 [M, KV_HEADS, SPLITS, 2, PER].
    arrived: number of finished splits, int32 zeros [M, KV_HEADS].
    WIDE, ALL_SPLITS, ALL_PER: D, SPLITS and PER, each rounded up to a power of two.
    """
    PER: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = D // 2
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    g, d, block = tl.arange(0, QUERIES), tl.arange(0, WIDE), tl.arange(0, BLOCK)
    if GPU:
        gdc_launch_dependents()
    # Before the projection has finished, load all data that it does not write: positions and older keys and values.
    position = tl.load(positions + row).to(tl.int32)
    end = position + 1
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(end - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(end - begin, SPLITS), BLOCK) * BLOCK
    low = begin + split * share
    high = tl.minimum(low + share, end)
    used = tl.cdiv(end - begin, share)  # number of splits that are not empty
    real = d < D
    turn = position * HALF + d % HALF
    cos = tl.load(cosines + turn, mask=real, other=1.0)
    sin = tl.load(sines + turn, mask=real, other=0.0)
    sin = tl.where(d < HALF, -sin, sin)
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    q_cos, q_sin, k_cos, k_sin = cos, sin, cos, sin
    if NORMS:  # RMSNorm multiplies a channel and its partner by their weights before RoPE
        q_cos *= tl.load(norms + d, mask=real, other=0.0).to(tl.float32)
        q_sin *= tl.load(norms + partner, mask=real, other=0.0).to(tl.float32)
        k_cos *= tl.load(norms + D + d, mask=real, other=0.0).to(tl.float32)
        k_sin *= tl.load(norms + D + partner, mask=real, other=0.0).to(tl.float32)
    base = (row.to(tl.int64) * KV_HEADS + kv_head) * S
    s = low + block
    old = ((s < high) & (s < position))[:, None] & real[None, :]
    place = (base + s)[:, None] * D + d[None, :]
    key = tl.load(keys + place, mask=old, other=0.0)
    value = tl.load(values + place, mask=old, other=0.0)
    if GPU:
        gdc_wait()
    if split < used:
        heads = kv_head * PER + g
        mask = (g < PER)[:, None] & real[None, :]
        query, other = tl.zeros((QUERIES, WIDE), tl.float32), tl.zeros((QUERIES, WIDE), tl.float32)
        own, own_other = tl.zeros((WIDE,), tl.float32), tl.zeros((WIDE,), tl.float32)
        new_value = tl.zeros((WIDE,), tl.float32)
        for i in tl.static_range(SUMS):
            at = qkv + (i * M + row).to(tl.int64) * WIDTH
            q_at = at + heads[:, None] * D
            query += tl.load(q_at + d[None, :], mask=mask, other=0.0).to(tl.float32)
            other += tl.load(q_at + partner[None, :], mask=mask, other=0.0).to(tl.float32)
            k_at = at + (HEADS + kv_head) * D
            own += tl.load(k_at + d, mask=real, other=0.0).to(tl.float32)
            own_other += tl.load(k_at + partner, mask=real, other=0.0).to(tl.float32)
            new_value += tl.load(k_at + KV_HEADS * D + d, mask=real, other=0.0).to(tl.float32)
        turned = query * q_cos[None, :] + other * q_sin[None, :]
        own_turned = own * k_cos + own_other * k_sin
        if NORMS:
            turned *= tl.rsqrt(tl.sum(query * query, 1) / D + eps)[:, None]
            own_turned *= tl.rsqrt(tl.sum(own * own, 0) / D + eps)
        rotated = turned.to(key.dtype)
        own_key = own_turned.to(key.dtype)
        own_value = new_value.to(key.dtype)
        if split == used - 1:
            tl.store(keys + (base + position) * D + d, own_key, mask=real)
            tl.store(values + (base + position) * D + d, own_value, mask=real)
        here = (s == position)[:, None]
        key = tl.where(here, own_key[None, :], key)
        value = tl.where(here, own_value[None, :], value)
        peak = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        mean = tl.zeros((QUERIES, WIDE), tl.float32)
        peak, total, mean = _fold(rotated, key, value, s < high, factor, peak, total, mean)
        for start in tl.range(low + BLOCK, high, BLOCK):
            s = start + block
            old = ((s < high) & (s < position))[:, None] & real[None, :]
            place = (base + s)[:, None] * D + d[None, :]
            here = (s == position)[:, None]
            key = tl.where(here, own_key[None, :], tl.load(keys + place, mask=old, other=0.0))
            value = tl.where(here, own_value[None, :], tl.load(values + place, mask=old, other=0.0))
            peak, total, mean = _fold(rotated, key, value, s < high, factor, peak, total, mean)
        if SPLITS == 1:
            whole = (mean / total[:, None]).to(out.dtype.element_ty)
            tl.store(out + (row * HEADS + heads)[:, None] * D + d[None, :], whole, mask=mask)
            if LARGEST:
                bits = tl.where(mask, magnitude_bits(whole.to(tl.float32)), 0)
                tl.atomic_max(largest + row, tl.max(tl.max(bits, 1), 0), sem="relaxed")
        else:
            at = (row * KV_HEADS + kv_head) * SPLITS
            piece = partial + ((at + split) * PER + g)[:, None] * D + d[None, :]
            tl.store(piece, mean, mask=mask)
            tl.store(sums + (at + split) * 2 * PER + g, peak, mask=g < PER)
            tl.store(sums + ((at + split) * 2 + 1) * PER + g, total, mask=g < PER)
            tl.debug_barrier()  # write all results before this program increments the counter
            before = tl.atomic_add(arrived + row * KV_HEADS + kv_head, 1, sem="acq_rel")
            if before == used - 1:
                tl.store(arrived + row * KV_HEADS + kv_head, 0)
                n, h = tl.arange(0, ALL_SPLITS), tl.arange(0, ALL_PER)
                exists = (n < used)[:, None] & (h < PER)[None, :]
                sums_at = sums + (at + n)[:, None] * 2 * PER + h[None, :]
                peaks = tl.load(sums_at, mask=exists, other=float("-inf"), cache_modifier=".cg")
                totals = tl.load(sums_at + PER, mask=exists, other=0.0, cache_modifier=".cg")
                fades = tl.exp2(peaks - tl.max(peaks, 0)[None, :])
                fades = tl.where(exists, fades, 0.0)
                means_at = partial + ((at + n)[:, None] * PER + h[None, :])[:, :, None] * D + d[None, None, :]
                means = tl.load(
                    means_at,
                    mask=exists[:, :, None] & real[None, None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                all_of_it = tl.sum(means * fades[:, :, None], 0) / tl.sum(totals * fades, 0)[:, None]
                done = all_of_it.to(out.dtype.element_ty)
                there = (h < PER)[:, None] & real[None, :]
                out_at = out + (row * HEADS + kv_head * PER + h)[:, None] * D + d[None, :]
                tl.store(out_at, done, mask=there)
                if LARGEST:
                    all_bits = tl.where(there, magnitude_bits(done.to(tl.float32)), 0)
                    tl.atomic_max(largest + row, tl.max(tl.max(all_bits, 1), 0), sem="relaxed")


@triton.jit
def _attend_short(
    qkv,
    cosines,
    sines,
    positions,
    norms,
    keys,
    values,
    out,
    S,
    factor,
    eps,
    NORMS: tl.constexpr,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    LENGTH: tl.constexpr,
    GPU: tl.constexpr,
):
    """Compute attention for one query head of a single row.

    The kernel reads the cache while the previous kernel, the projection to q, k and v, is still running.

    LENGTH, WIDE: cache length S and head dimension D, each rounded up to a power of two.
    """
    PER: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = D // 2
    head = tl.program_id(0)
    kv_head = head // PER
    s, d = tl.arange(0, LENGTH), tl.arange(0, WIDE)
    if GPU:
        gdc_launch_dependents()
    position = tl.load(positions).to(tl.int32)
    seen = s < position
    if WINDOW > 0:
        seen = seen & (s > position - WINDOW)
    real = d < D
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    base = kv_head.to(tl.int64) * S * D
    old = seen[:, None] & real[None, :]
    place = base + s[:, None] * D + d[None, :]
    key = tl.load(keys + place, mask=old, other=0.0)
    value = tl.load(values + place, mask=old, other=0.0)
    turn = position * HALF + d % HALF
    cos = tl.load(cosines + turn, mask=real, other=1.0)
    sin = tl.load(sines + turn, mask=real, other=0.0)
    sin = tl.where(d < HALF, -sin, sin)
    q_cos, q_sin, k_cos, k_sin = cos, sin, cos, sin
    if NORMS:
        q_cos *= tl.load(norms + d, mask=real, other=0.0).to(tl.float32)
        q_sin *= tl.load(norms + partner, mask=real, other=0.0).to(tl.float32)
        k_cos *= tl.load(norms + D + d, mask=real, other=0.0).to(tl.float32)
        k_sin *= tl.load(norms + D + partner, mask=real, other=0.0).to(tl.float32)
    if GPU:
        gdc_wait()
    q_at, k_at = qkv + head * D, qkv + (HEADS + kv_head) * D
    query = tl.load(q_at + d, mask=real, other=0.0).to(tl.float32)
    other = tl.load(q_at + partner, mask=real, other=0.0).to(tl.float32)
    own = tl.load(k_at + d, mask=real, other=0.0).to(tl.float32)
    own_other = tl.load(k_at + partner, mask=real, other=0.0).to(tl.float32)
    own_value = tl.load(k_at + KV_HEADS * D + d, mask=real, other=0.0).to(key.dtype)
    turned = query * q_cos + other * q_sin
    own_turned = own * k_cos + own_other * k_sin
    if NORMS:
        turned *= tl.rsqrt(tl.sum(query * query, 0) / D + eps)
        own_turned *= tl.rsqrt(tl.sum(own * own, 0) / D + eps)
    own_key = own_turned.to(key.dtype)
    if head % PER == 0:
        tl.store(keys + base + position * D + d, own_key, mask=real)
        tl.store(values + base + position * D + d, own_value, mask=real)
    rotated = turned.to(key.dtype).to(tl.float32) * factor
    scores = tl.sum(key.to(tl.float32) * rotated[None, :], 1)
    scores = tl.where(seen, scores, float("-inf"))
    own_score = tl.sum(own_key.to(tl.float32) * rotated, 0)
    peak = tl.maximum(tl.max(scores, 0), own_score)
    weights, own_weight = tl.exp2(scores - peak), tl.exp2(own_score - peak)
    mean = tl.sum(value.to(tl.float32) * weights[:, None], 0) + own_value.to(tl.float32) * own_weight
    mean = mean / (tl.sum(weights, 0) + own_weight)
    tl.store(out + head * D + d, mean.to(out.dtype.element_ty), mask=real)


def attend_cache(
    context: LayerContext,
    qkv: Sums,
    head_norms: torch.Tensor | None,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    digits: int,
    largest: torch.Tensor | None,
) -> Rows | Late:
    """Triton version of `reference.attend_cache` for M rows and K key/value heads.

    context.arrived: buffer with at least M rows and K columns. The kernel resets the buffer to zero.
    largest: buffer for the largest magnitude in each row of the output, int32 zeros [M]. May be None if digits is 0.
    """
    M, (K, S, D) = len(positions), keys.shape[1:]
    N, window, norms = context.heads, context.window or 0, head_norms is not None
    queries, wide = max(16, triton.next_power_of_2(N // K)), max(16, triton.next_power_of_2(D))
    splits = max(1, min(PROGRAMS // (M * K), triton.cdiv(S, ATTEND_BLOCK), 32))
    out = torch.empty(M, N * D, dtype=keys.dtype, device=keys.device)
    factor = D**-0.5 * 1.4426950408889634  # the factor log2(e) is needed because the kernels use exp2
    length = triton.next_power_of_2(S)
    if M == len(qkv) == 1 and not digits and length * wide <= ATTEND_HELD:
        _attend_short[(N,)](
            qkv,
            *context.turns,
            positions,
            head_norms,
            keys,
            values,
            out,
            S,
            factor,
            context.eps,
            NORMS=norms,
            WINDOW=window,
            HEADS=N,
            KV_HEADS=K,
            D=D,
            WIDE=wide,
            LENGTH=length,
            GPU=keys.is_cuda,
            launch_pdl=True,
            num_warps=8,
        )
        return out, None
    partial = torch.empty(M, splits, N, D, dtype=torch.float32, device=keys.device)
    sums = torch.empty(M, splits, 2, N, dtype=torch.float32, device=keys.device)
    _attend[(M, K, splits)](
        qkv,
        *context.turns,
        positions,
        head_norms,
        keys,
        values,
        out,
        largest,
        partial,
        sums,
        context.arrived,
        M,
        S,
        factor,
        context.eps,
        NORMS=norms,
        WINDOW=window,
        HEADS=N,
        KV_HEADS=K,
        D=D,
        WIDE=wide,
        QUERIES=queries,
        BLOCK=ATTEND_BLOCK,
        SUMS=len(qkv),
        SPLITS=splits,
        ALL_SPLITS=triton.next_power_of_2(splits),
        ALL_PER=triton.next_power_of_2(N // K),
        LARGEST=digits > 0,
        GPU=keys.is_cuda,
        launch_pdl=True,
        num_warps=4,
        num_stages=3,
    )
    if not digits:
        return out, None
    assert largest is not None
    return Late(out, largest, digits)
