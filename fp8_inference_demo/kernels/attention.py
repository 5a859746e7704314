"""Attention of one token of each row to the cache, split over programs (Flash-Decoding,
https://pytorch.org/blog/flash-decoding); the last split to end combines them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fp8_inference_demo.kernels.common import PROGRAMS

ATTEND_BLOCK = 64


@triton.jit
def _attend(
    q,
    keys,
    values,
    positions,
    out,
    partial,
    sums,
    arrived,
    S,
    factor,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    ALL_SPLITS: tl.constexpr,
    ALL_PER: tl.constexpr,
    GPU: tl.constexpr,
):
    """The query heads of one row that share a key/value head, over one split of what they see.

    partial [M, KV_HEADS, SPLITS, PER, D], sums [M, KV_HEADS, SPLITS, 2, PER] (largest score, sum of exponentials),
    arrived [M, KV_HEADS] zeros: float32 and int32 of the splits. WIDE, ALL_...: D and others, rounded up."""
    PER: tl.constexpr = HEADS // KV_HEADS
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    g, d = tl.arange(0, QUERIES), tl.arange(0, WIDE)
    if GPU:
        gdc_launch_dependents()
        gdc_wait()
    end = tl.load(positions + row).to(tl.int32) + 1
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(end - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(end - begin, SPLITS), BLOCK) * BLOCK
    low = begin + split * share
    high = tl.minimum(low + share, end)
    used = tl.cdiv(end - begin, share)  # splits that have something
    if split < used:
        heads = kv_head * PER + g
        mask = (g < PER)[:, None] & (d < D)[None, :]
        query = tl.load(q + (row * HEADS + heads)[:, None] * D + d[None, :], mask=mask, other=0.0)
        base = (row.to(tl.int64) * KV_HEADS + kv_head) * S
        largest = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        mean = tl.zeros((QUERIES, WIDE), tl.float32)
        for start in tl.range(low, high, BLOCK):
            s = start + tl.arange(0, BLOCK)
            there = (s < high)[:, None] & (d < D)[None, :]
            place = (base + s)[:, None] * D + d[None, :]
            key = tl.load(keys + place, mask=there, other=0.0)
            scores = tl.dot(query, tl.trans(key)) * factor
            scores = tl.where((s < high)[None, :], scores, float("-inf"))
            new = tl.maximum(largest, tl.max(scores, 1))
            weights = tl.exp2(scores - new[:, None])
            fade = tl.exp2(largest - new)
            value = tl.load(values + place, mask=there, other=0.0)
            mean = tl.dot(weights.to(value.dtype), value, mean * fade[:, None])
            total = total * fade + tl.sum(weights, 1)
            largest = new
        if SPLITS == 1:
            mean = mean / total[:, None]
            tl.store(
                out + (row * HEADS + heads)[:, None] * D + d[None, :],
                mean.to(out.dtype.element_ty),
                mask=mask,
            )
        else:
            at = (row * KV_HEADS + kv_head) * SPLITS
            own = partial + ((at + split) * PER + g)[:, None] * D + d[None, :]
            tl.store(own, mean, mask=mask)
            tl.store(sums + (at + split) * 2 * PER + g, largest, mask=g < PER)
            tl.store(sums + ((at + split) * 2 + 1) * PER + g, total, mask=g < PER)
            tl.debug_barrier()  # all of it is written before this program says so
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
                    mask=exists[:, :, None] & (d < D)[None, None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                whole = tl.sum(means * fades[:, :, None], 0) / tl.sum(totals * fades, 0)[:, None]
                out_at = out + (row * HEADS + kv_head * PER + h)[:, None] * D + d[None, :]
                tl.store(out_at, whole.to(out.dtype.element_ty), mask=(h < PER)[:, None] & (d < D)[None, :])


def attend_cache(
    q_MND: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    window: int | None,
    arrived: torch.Tensor,
) -> torch.Tensor:
    """Attention of one token a row to the cache [M, K, S, D] up to its position -> [M, N D]. arrived: int32 zeros
    [at least M, K], left as zeros. Split over programs (Flash-Decoding, https://pytorch.org/blog/flash-decoding)."""
    M, N, D = q_MND.shape
    K, S = keys.shape[1:3]
    queries, wide = max(16, triton.next_power_of_2(N // K)), max(16, triton.next_power_of_2(D))
    splits = max(1, min(PROGRAMS // (M * K), triton.cdiv(S, ATTEND_BLOCK), 32))
    out = torch.empty(M, N * D, dtype=q_MND.dtype, device=q_MND.device)
    partial = torch.empty(M, splits, N, D, dtype=torch.float32, device=q_MND.device)
    sums = torch.empty(M, splits, 2, N, dtype=torch.float32, device=q_MND.device)
    _attend[(M, K, splits)](
        q_MND,
        keys,
        values,
        positions,
        out,
        partial,
        sums,
        arrived,
        S,
        D**-0.5 * 1.4426950408889634,  # exp2 for exp
        WINDOW=window or 0,
        HEADS=N,
        KV_HEADS=K,
        D=D,
        WIDE=wide,
        QUERIES=queries,
        BLOCK=ATTEND_BLOCK,
        SPLITS=splits,
        ALL_SPLITS=triton.next_power_of_2(splits),
        ALL_PER=triton.next_power_of_2(N // K),
        GPU=q_MND.is_cuda,
        launch_pdl=True,
        num_warps=4,
        num_stages=3,
    )
    return out
