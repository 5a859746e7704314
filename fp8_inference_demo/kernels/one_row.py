"""Decode a single row with five kernel launches per layer.

    1. norm, projection to q, k and v
    2. attention (attention.py)
    3. output projection + residual
    4. norm, gate and up projection, SwiGLU
    5. down projection + residual

Before the previous kernel has finished, a program loads its part of the weight, the scales and the weights of the norm.
It keeps them in registers if they fit. It then waits only for the row of activations.

Most weights are converted to float32. For FP8 weights with a scale per row, this conversion would take as long as
reading them. The output, gate and up projections therefore multiply such weights on FP8 tensor cores, with the
activations as two FP8 codes.
Shapes: R rows and C columns of a weight, G groups of columns that share a scale, S cache positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fp8_inference_demo.kernels.attention import attend_cache
from fp8_inference_demo.kernels.common import Late, Sums, magnitude_bits, prefetch, two_digits
from fp8_inference_demo.kernels.rows import add, add_norm_rows
from fp8_inference_demo.reference import LayerContext
from fp8_inference_demo.weights import FP8_MAX, Layer, Matrix, Weights

NORM, ADD, SWIGLU = (tl.constexpr(kind) for kind in range(3))
# Number of weight rows that one program of _multiply_digits processes, and number of parts of the columns.
DIGIT_ROWS, DIGIT_PARTS = 16, 8


@triton.jit
def _multiply(
    x,
    norm,
    weight,
    scale,
    out,
    residual,
    R,
    eps,
    C: tl.constexpr,
    G: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GPU: tl.constexpr,
):
    """Multiply a single row of activations x [C] by BLOCK_R rows of the weight.

    KIND: NORM applies RMSNorm to x first. ADD adds `residual` to the result. SWIGLU applies RMSNorm first, multiplies
        by BLOCK_R of the R rows of gate and by the same rows of up, and applies SwiGLU.
    G: number of scales per row of the weight. 0 means that the weight has no scales.
    """
    PAIRS: tl.constexpr = KIND == SWIGLU
    ONCE: tl.constexpr = C <= BLOCK_C
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    fits = rows < R
    safe = tl.where(fits, rows, 0)
    seconds = safe + R
    first_at = weight + safe.to(tl.int64)[:, None] * C
    second_at = weight + seconds.to(tl.int64)[:, None] * C
    column = tl.arange(0, BLOCK_C)
    inside = column < C
    if GPU:
        gdc_launch_dependents()
    if ONCE:
        one = tl.load(first_at + column[None, :], mask=inside[None, :], other=0.0)
        if PAIRS:
            two = tl.load(second_at + column[None, :], mask=inside[None, :], other=0.0)
        if KIND != ADD:
            gain = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    elif GPU:
        LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
        LINES: tl.constexpr = triton.next_power_of_2((C + LINE - 1) // LINE)
        line = tl.arange(0, LINES) * LINE
        line = tl.where(line < C, line, 0)[None, :]
        prefetch(first_at + line)
        if PAIRS:
            prefetch(second_at + line)
    if G == 1:
        first_scale = tl.load(scale + safe)
        if PAIRS:
            second_scale = tl.load(scale + seconds)
    if GPU:
        gdc_wait()
    if KIND == ADD:
        left = tl.load(residual + rows, mask=fits, other=0.0).to(tl.float32)
    if ONCE:
        row = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
        if KIND != ADD:
            shrink = tl.rsqrt(tl.sum(row * row, 0) / C + eps)
            row = row * gain
        one_sum = tl.sum(one.to(tl.float32) * row[None, :], 1)
        if PAIRS:
            two_sum = tl.sum(two.to(tl.float32) * row[None, :], 1)
    else:
        first = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        second = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        squares = tl.zeros((BLOCK_C,), tl.float32)
        for start in tl.range(0, C, BLOCK_C):
            at = start + column
            within = at < C
            one = tl.load(first_at + at[None, :], mask=within[None, :], other=0.0)
            row = tl.load(x + at, mask=within, other=0.0).to(tl.float32)
            if KIND != ADD:
                squares += row * row
                row = row * tl.load(norm + at, mask=within, other=0.0).to(tl.float32)
            product = one.to(tl.float32) * row[None, :]
            if G > 1:  # the columns of a block share a scale
                group = start // (C // G)
                product = product * tl.load(scale + safe * G + group)[:, None]
            first += product
            if PAIRS:
                two = tl.load(second_at + at[None, :], mask=within[None, :], other=0.0)
                product = two.to(tl.float32) * row[None, :]
                if G > 1:
                    product = product * tl.load(scale + seconds * G + group)[:, None]
                second += product
        one_sum, two_sum = tl.sum(first, 1), tl.sum(second, 1)
        if KIND != ADD:
            shrink = tl.rsqrt(tl.sum(squares, 0) / C + eps)
    if G == 1:
        one_sum = one_sum * first_scale
        if PAIRS:
            two_sum = two_sum * second_scale
    if KIND != ADD:
        one_sum = one_sum * shrink
    if KIND == ADD:
        one_sum += left
    if PAIRS:
        two_sum = two_sum * shrink
        one_sum = one_sum * tl.sigmoid(one_sum) * two_sum
    tl.store(out + rows, one_sum.to(out.dtype.element_ty), mask=fits)


@triton.jit
def _multiply_digits(
    x,
    norm,
    weight,
    scale,
    out,
    residual,
    R,
    eps,
    C: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    GPU: tl.constexpr,
):
    """Compute the same as `_multiply` on FP8 tensor cores, for ROWS rows of FP8 weights with one scale per row.

    With SWIGLU, the rows of gate and up alternate.

    Tensor cores multiply 64 rows by 16 columns at a time, but x has only one row. The columns of the weight are
    therefore split into PARTS, which become rows of the first operand. The second operand has two columns per part of
    x: x / scale rounded to FP8, and 16 times the rounding error as FP8. Only the products of matching parts are added
    up. Each part of x has its own scale, so no multiplication waits for the whole row.
    """
    PAIRS: tl.constexpr = KIND == SWIGLU
    WIDTH: tl.constexpr = C // PARTS
    WIDE: tl.constexpr = triton.next_power_of_2(WIDTH)
    OUT: tl.constexpr = ROWS // 2 if PAIRS else ROWS
    line = tl.arange(0, PARTS * ROWS)
    part, r = line // ROWS, line % ROWS
    rows = tl.program_id(0) * OUT + tl.arange(0, OUT)
    fits = rows < R
    safe = tl.where(fits, rows, 0)
    row = tl.program_id(0) * OUT + (r // 2 if PAIRS else r)
    row = tl.where(row < R, row, 0)
    if PAIRS:
        row += (r % 2) * R
    inner = tl.arange(0, WIDE)
    real = None if WIDE == WIDTH else (inner < WIDTH)[None, :]
    nothing = None if WIDE == WIDTH else 0.0
    column = tl.arange(0, PARTS)[:, None] * WIDTH + inner[None, :]
    if GPU:
        gdc_launch_dependents()
    held = tl.load(weight + (row.to(tl.int64) * C + part * WIDTH)[:, None] + inner[None, :], real, nothing)
    if KIND != ADD:
        gain = tl.load(norm + column, real, nothing).to(tl.float32)
    first_scale = tl.load(scale + safe)
    if PAIRS:
        second_scale = tl.load(scale + safe + R)
    if GPU:
        gdc_wait()
    if KIND == ADD:
        left = tl.load(residual + safe).to(tl.float32)
    wide = tl.load(x + column, real, nothing).to(tl.float32)
    if KIND != ADD:
        squares = wide * wide
        wide = wide * gain
    largest = tl.max(magnitude_bits(wide), 1).to(tl.float32, bitcast=True)
    x_scale = tl.maximum(largest / LIMIT, 1e-12, propagate_nan=tl.PropagateNan.ALL)
    wide = tl.clamp(wide * (1.0 / x_scale)[:, None], -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    one, two = two_digits(wide, weight.dtype.element_ty)
    digits = tl.reshape(tl.permute(tl.join(one, two), (0, 2, 1)), (2 * PARTS, WIDE))
    products = tl.dot(held, tl.trans(digits))
    of = tl.arange(0, 2 * PARTS)
    worth = tl.reshape(tl.join(x_scale, x_scale / 16.0), (2 * PARTS,))
    own = tl.where(part[:, None] == (of // 2)[None, :], products * worth[None, :], 0.0)
    sums = tl.sum(tl.reshape(tl.sum(own, 1), (PARTS, ROWS)), 0)
    if KIND != ADD:
        sums *= tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / C + eps)
    if PAIRS:
        one_sum, two_sum = tl.split(tl.reshape(sums, (OUT, 2)))
        one_sum = one_sum * first_scale
        result = one_sum * tl.sigmoid(one_sum) * (two_sum * second_scale)
    else:
        result = sums * first_scale
    if KIND == ADD:
        result += left
    tl.store(out + rows, result.to(out.dtype.element_ty), mask=fits)


def _by_digits(kind: int, C: int) -> bool:
    """Return whether `_multiply_digits` supports C columns and is faster than `_multiply`.

    The limits of 256 and 4096 columns were measured with hare_1.1b on an H200.
    """
    return kind != NORM.value and C % (16 * DIGIT_PARTS) == 0 and 256 <= C <= 4096


def _blocks(kind: int, R: int, C: int, fp8: bool) -> tuple[int, int, int]:
    """Return the fastest (rows, columns, warps) for a program of `_multiply`, measured on an H200 with hare_1.1b."""
    if C > 4096:
        return 1, 512, (4 if fp8 else 2)
    if kind == NORM.value:
        return (8 if fp8 or R > 8192 else 32), 2048, 8
    if kind == ADD.value:
        return (2, 2048, 1) if fp8 else (8, 2048, 4)
    return 4, 2048, 4


def _product(
    eps: float,
    kind: int,
    x: torch.Tensor,
    weight: Matrix,
    out: torch.Tensor,
    norm: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    C = x.shape[1]
    G = 0 if weight.scale is None else weight.scale.shape[1]
    R = weight.rows // 2 if kind == SWIGLU.value else weight.rows
    if G == 1 and _by_digits(kind, C):
        rows = DIGIT_ROWS // 2 if kind == SWIGLU.value else DIGIT_ROWS
        _multiply_digits[(triton.cdiv(R, rows),)](
            x,
            norm,
            weight.values,
            weight.scale,
            out,
            residual,
            R,
            eps,
            C=C,
            KIND=kind,
            LIMIT=FP8_MAX,
            ROWS=DIGIT_ROWS,
            PARTS=DIGIT_PARTS,
            GPU=x.is_cuda,
            launch_pdl=True,
            num_warps=4,
        )
        return out
    rows, columns, warps = _blocks(kind, R, C, weight.fp8)
    columns = C // G if G > 1 else min(columns, triton.next_power_of_2(C))
    _multiply[(triton.cdiv(R, rows),)](
        x,
        norm,
        weight.values,
        weight.scale,
        out,
        residual,
        R,
        eps,
        C=C,
        G=G,
        KIND=kind,
        BLOCK_R=rows,
        BLOCK_C=columns,
        GPU=x.is_cuda,
        launch_pdl=True,
        num_warps=warps,
        num_stages=2,
    )
    return out


def decode_layer(
    context: LayerContext,
    x: torch.Tensor,
    layer: Layer,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Run one layer for a single token. x: hidden states [1, H]. Return the new hidden states [1, H].

    Writes the key and value of the token into the cache `keys` and `values`, each [1, key/value heads, context length,
    head dimension], at `positions` [1].
    """
    eps = context.eps
    qkv = _product(eps, NORM.value, x, layer.qkv, x.new_empty(1, layer.qkv.rows), layer.input_norm)
    attended = attend_cache(context, qkv[None], layer.head_norms, positions, keys, values, 0, None)
    assert not isinstance(attended, Late)
    x = _product(eps, ADD.value, attended[0], layer.o, torch.empty_like(x), residual=x)
    inner = x.new_empty(1, layer.down.values.shape[1])
    _product(eps, SWIGLU.value, x, layer.gate_up, inner, layer.post_norm)
    return _product(eps, ADD.value, inner, layer.down, torch.empty_like(x), residual=x)


def head(weights: Weights, eps: float, x: torch.Tensor, delta: Sums | None) -> torch.Tensor:
    """Apply the last norm and the head, with one Triton kernel if x has a single row. See `reference.head`."""
    if len(x) > 1:
        _, (rows, _) = add_norm_rows(x, delta, weights.norm, eps, 0)
        return F.linear(rows, weights.head.values)
    x = x if delta is None else add(x, delta)
    out = torch.empty(1, weights.head.rows, dtype=torch.float32, device=x.device)
    return _product(eps, NORM.value, x, weights.head, out, weights.norm)
