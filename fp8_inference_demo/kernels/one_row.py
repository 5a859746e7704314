"""Decoding of one row: a layer is five launches.

    qkv      norm, projection, rotary positions, keys and values into the cache
    attend   see attention.py
    add      output projection + residual
    swiglu   norm, gate and up projection, SwiGLU
    add      down projection + residual

Shapes: R rows and C columns of a weight, G groups of columns that share a scale, S cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fp8_inference_demo.kernels.attention import attend_cache
from fp8_inference_demo.kernels.common import Sums
from fp8_inference_demo.kernels.rows import add, add_norm_rows
from fp8_inference_demo.weights import Layer, Matrix

if TYPE_CHECKING:
    from fp8_inference_demo.forward import Forward

PLAIN, ADD, SWIGLU, QKV = (tl.constexpr(kind) for kind in range(4))


@triton.jit
def _prefetch(weight, begin, end, ELEMENTS: tl.constexpr):
    """Have ELEMENTS of a weight, from `begin` on, come into the L2; what lies beyond `end` is not touched."""
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2((ELEMENTS + LINE - 1) // LINE)
    at = begin + tl.arange(0, LINES) * LINE
    line = weight + tl.where(at < end, at, begin)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _multiply(
    x,
    norm,
    weight,
    scale,
    out,
    residual,
    cosines,
    sines,
    positions,
    keys,
    values,
    R,
    S,
    eps,
    C: tl.constexpr,
    G: tl.constexpr,
    KIND: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GPU: tl.constexpr,
):
    """x [C], normalized unless KIND is ADD, times BLOCK_R rows of the weight, or BLOCK_R pairs of rows: gate and up (R:
    pairs), or the two halves of a head that a rotation mixes. G 0: no scale; 1: one a row."""
    PAIRS: tl.constexpr = (KIND == SWIGLU) | (KIND == QKV)
    NORM: tl.constexpr = KIND != ADD
    EVEN: tl.constexpr = C % BLOCK_C == 0
    ONCE: tl.constexpr = C == BLOCK_C
    pid = tl.program_id(0)
    if KIND == QKV:
        HALF: tl.constexpr = D // 2
        BLOCKS: tl.constexpr = HALF // BLOCK_R
        head = pid // BLOCKS
        channel = (pid % BLOCKS) * BLOCK_R + tl.arange(0, BLOCK_R)
        rows = head * D + channel
        seconds = rows + HALF
        begin = (head * D + (pid % BLOCKS) * BLOCK_R) * C
        apart = HALF * C
        end = R * C
    else:
        rows = pid * BLOCK_R + tl.arange(0, BLOCK_R)
        seconds = tl.where(rows < R, rows, 0) + R
        begin = pid * (BLOCK_R * C)
        apart = R * C
        end = (2 * R if PAIRS else R) * C
    fits = rows < R
    safe = tl.where(fits, rows, 0)
    first_at = weight + safe.to(tl.int64)[:, None] * C
    second_at = weight + seconds.to(tl.int64)[:, None] * C
    if GPU:
        gdc_launch_dependents()
    if ONCE:
        column = tl.arange(0, BLOCK_C)
        one = tl.load(first_at + column[None, :])
        if PAIRS:
            two = tl.load(second_at + column[None, :])
    elif GPU:
        _prefetch(weight, begin, end, BLOCK_R * C)
        if PAIRS:
            _prefetch(weight, begin + apart, end, BLOCK_R * C)
    if GPU:
        gdc_wait()
    first = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    second = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    squares = tl.zeros((BLOCK_C,), tl.float32)
    for start in tl.range(0, C, BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        inside = column < C
        if not EVEN:
            column = tl.where(inside, column, 0)
        if not ONCE:
            one = tl.load(first_at + column[None, :])
            if PAIRS:
                two = tl.load(second_at + column[None, :])
        row = tl.load(x + column).to(tl.float32)
        if not EVEN:
            row = tl.where(inside, row, 0.0)
        if NORM:
            squares += row * row
            row = row * tl.load(norm + column).to(tl.float32)
        product = one.to(tl.float32) * row[None, :]
        if G > 1:  # a block has one group of columns
            group = start // (C // G)
            product = product * tl.load(scale + safe * G + group)[:, None]
        first += product
        if PAIRS:
            product = two.to(tl.float32) * row[None, :]
            if G > 1:
                product = product * tl.load(scale + seconds * G + group)[:, None]
            second += product
    one_sum, two_sum = tl.sum(first, 1), tl.sum(second, 1)
    if G == 1:
        one_sum = one_sum * tl.load(scale + safe)
        if PAIRS:
            two_sum = two_sum * tl.load(scale + seconds)
    if NORM:
        shrink = tl.rsqrt(tl.sum(squares, 0) / C + eps)
        one_sum = one_sum * shrink
        two_sum = two_sum * shrink
    dtype = out.dtype.element_ty
    if KIND == PLAIN:
        tl.store(out + rows, one_sum.to(dtype), mask=fits)
    elif KIND == ADD:
        one_sum += tl.load(residual + rows, mask=fits, other=0.0).to(tl.float32)
        tl.store(out + rows, one_sum.to(dtype), mask=fits)
    elif KIND == SWIGLU:
        tl.store(out + rows, (one_sum * tl.sigmoid(one_sum) * two_sum).to(dtype), mask=fits)
    else:
        position = tl.load(positions)
        if head < HEADS + KV_HEADS:
            turn = position * (D // 2) + channel
            cos, sin = tl.load(cosines + turn), tl.load(sines + turn)
            turned = one_sum * cos - two_sum * sin
            two_sum = two_sum * cos + one_sum * sin
            one_sum = turned
        if head < HEADS:
            place = out + head * D + channel
        elif head < HEADS + KV_HEADS:
            place = keys + ((head - HEADS).to(tl.int64) * S + position) * D + channel
        else:
            place = values + ((head - HEADS - KV_HEADS).to(tl.int64) * S + position) * D + channel
        tl.store(place, one_sum.to(dtype))
        tl.store(place + D // 2, two_sum.to(dtype))


def _blocks(kind: int, C: int, fp8: bool) -> dict[str, int]:
    """How a product is cut: what was fastest on an H200, over weights that were not in its L2."""
    if C > 4096:  # not all columns at once
        rows, columns, warps = 1, 512, 2
    elif kind == QKV.value:
        rows, columns, warps = (8, 2048, 8) if fp8 else (8, 2048, 4)
    elif kind == ADD.value:
        rows, columns, warps = 2, 2048, 4
    else:
        rows, columns, warps = 4, 2048, 4
    return {
        "BLOCK_R": rows,
        "BLOCK_C": min(columns, triton.next_power_of_2(C)),
        "num_warps": warps,
        "num_stages": 2,
    }


def _product(
    forward: Forward,
    kind: int,
    x: torch.Tensor,
    weight: Matrix,
    out: torch.Tensor,
    norm: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
) -> torch.Tensor:
    C, half = x.shape[1], forward.cosines.shape[1]
    G = 0 if weight.scale is None else weight.scale.shape[1]
    R = weight.rows // 2 if kind == SWIGLU.value else weight.rows
    blocks = _blocks(kind, C, weight.fp8)
    if G > 1:
        blocks["BLOCK_C"] = C // G
    if kind == QKV.value:
        blocks["BLOCK_R"] = min(blocks["BLOCK_R"], half & -half)
        grid = (forward.heads + 2 * forward.kv_heads) * (half // blocks["BLOCK_R"])
    else:
        grid = triton.cdiv(R, blocks["BLOCK_R"])
    _multiply[(grid,)](
        x,
        norm,
        weight.values,
        weight.scale,
        out,
        residual,
        forward.cosines,
        forward.sines,
        positions,
        keys,
        values,
        R,
        forward.cache.max_length,
        forward.eps,
        C=C,
        G=G,
        KIND=kind,
        HEADS=forward.heads,
        KV_HEADS=forward.kv_heads,
        D=2 * half,
        GPU=x.is_cuda,
        launch_pdl=True,
        **blocks,
    )
    return out


def decode_layer(
    forward: Forward,
    x: torch.Tensor,
    layer: Layer,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """One layer for the next token of one row: x [1, H] -> [1, H]; its keys and values go into the cache [1, K, S, D]
    at positions [1]."""
    q = x.new_empty(1, layer.o.values.shape[1])
    _product(forward, QKV.value, x, layer.qkv, q, layer.input_norm, None, positions, keys, values)
    heads = q.view(1, forward.heads, -1)
    attended = attend_cache(heads, keys, values, positions, forward.window, forward.arrived)
    x = _product(forward, ADD.value, attended, layer.o, torch.empty_like(x), residual=x)
    inner = x.new_empty(1, layer.down.values.shape[1])
    _product(forward, SWIGLU.value, x, layer.gate_up, inner, layer.post_norm)
    return _product(forward, ADD.value, inner, layer.down, torch.empty_like(x), residual=x)


def head(forward: Forward, x: torch.Tensor, delta: Sums | None) -> torch.Tensor:
    """As reference.head."""
    weights = forward.weights
    if len(x) > 1:
        _, (rows, _) = add_norm_rows(x, delta, weights.norm, forward.eps, 0)
        return F.linear(rows, weights.head.values).float()
    x = x if delta is None else add(x, delta)
    out = torch.empty(1, weights.head.rows, dtype=torch.float32, device=x.device)
    return _product(forward, PLAIN.value, x, weights.head, out, weights.norm)
