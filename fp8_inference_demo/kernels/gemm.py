"""Matrix products for several rows: activations [M, C] times a weight [R, C] with G scales per row.

With few rows, the columns are also split over several programs, because most of the GPU would be idle otherwise. The
next kernel adds up the partial sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fp8_inference_demo.kernels.common import PROGRAMS, Late, Sums, magnitude_bits, prefetch
from fp8_inference_demo.kernels.rows import rows as quantize
from fp8_inference_demo.kernels.rows import swiglu_rows
from fp8_inference_demo.reference import Rows
from fp8_inference_demo.weights import FP8_MAX, Matrix

# Largest number of rows for which these kernels are used. With more rows, cuBLAS is faster.
CUBLAS_ROWS = 128

# Maximum number of columns that tensor cores accumulate when the activations have two FP8 codes. Hopper's tensor cores
# accumulate FP8 products with about 14 bits. A longer sum loses more precision than the second code adds. On an H200, a
# layer of hare_2.0b with 8192 columns caused an error of 1.4 % in the logits.
COLUMNS_ADDED = 2048


@triton.jit
def _multiply_many(
    x,
    x_scale,
    weight,
    scale,
    out,
    largest,
    M,
    R,
    C: tl.constexpr,
    G: tl.constexpr,
    DIGITS: tl.constexpr,
    LATE: tl.constexpr,
    SWIGLU: tl.constexpr,
    LARGEST: tl.constexpr,
    LIMIT: tl.constexpr,
    STEPS: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GPU: tl.constexpr,
):
    """Multiply BLOCK_M rows of x by BLOCK_R rows of the weight. Compute one partial sum over STEPS blocks of columns.

    Both operands are FP8, or bf16 if G is 0. x has one scale per row. Each row of the weight has G scales.

    DIGITS: number of FP8 codes per element of x.
    LATE: whether x is bf16 and this kernel quantizes x. x_scale then contains the bits of the largest magnitude in each
        row.
    SWIGLU: whether the weight has R rows of gate and R rows of up, and `out` is silu(gate) * up.
    LARGEST: write the bits of the largest magnitude in each row of `out` to `largest`. The next product uses them to
        quantize `out`.
    ADDED: number of columns that tensor cores accumulate before the sum is moved to float32. None means all columns.

    The kernel starts before the previous kernel has finished, so it loads the weights first.
    """
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    low = tl.program_id(2) * (STEPS * BLOCK_C)
    safe_m, safe_r = tl.where(m < M, m, 0).to(tl.int64), tl.where(r < R, r, 0).to(tl.int64)
    second_r = safe_r + R
    if GPU:
        gdc_launch_dependents()
        LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
        LINES: tl.constexpr = triton.next_power_of_2(STEPS * BLOCK_C // LINE)
        line = low + tl.arange(0, LINES) * LINE
        line = tl.where(line < C, line, low)[None, :]
        prefetch(weight + (safe_r[:, None] * C + line))
        if SWIGLU:
            prefetch(weight + (second_r[:, None] * C + line))
    if G == 1:
        r_scale = tl.load(scale + safe_r)
        if SWIGLU:
            second_scale = tl.load(scale + second_r)
    if GPU:
        gdc_wait()
    if LATE:
        m_scale = tl.maximum(
            tl.load(x_scale + safe_m).to(tl.float32, bitcast=True) / LIMIT,
            1e-12,
            propagate_nan=tl.PropagateNan.ALL,
        )
        inverse = 1.0 / m_scale
    elif DIGITS > 0:
        m_scale = tl.load(x_scale + safe_m)
    total = tl.zeros((BLOCK_R, BLOCK_M), tl.float32)
    rest = tl.zeros((BLOCK_R, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_R, BLOCK_M), tl.float32)
    up_rest = tl.zeros((BLOCK_R, BLOCK_M), tl.float32)
    for start in tl.range(low, tl.minimum(low + STEPS * BLOCK_C, C), BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        theirs = tl.load(weight + safe_r[:, None] * C + column[None, :])
        if SWIGLU:
            theirs_up = tl.load(weight + second_r[:, None] * C + column[None, :])
        ours = tl.load(x + safe_m[None, :] * C + column[:, None])
        if LATE:
            wide = ours.to(tl.float32) * inverse[None, :]
            wide = tl.clamp(wide, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
            ours = wide.to(weight.dtype.element_ty)
            if DIGITS == 2:
                second = ((wide - ours.to(tl.float32)) * 16.0).to(weight.dtype.element_ty)
        elif DIGITS == 2:
            second = tl.load(x + (M + safe_m)[None, :] * C + column[:, None])
        if G > 1:  # the columns of a block share a scale
            group = start // (C // G)
            by = tl.load(scale + safe_r * G + group)[:, None]
            total += tl.dot(theirs, ours) * by
            if DIGITS == 2:
                rest += tl.dot(theirs, second) * by
            if SWIGLU:
                by = tl.load(scale + second_r * G + group)[:, None]
                up += tl.dot(theirs_up, ours) * by
                if DIGITS == 2:
                    up_rest += tl.dot(theirs_up, second) * by
        else:
            total = tl.dot(theirs, ours, total, max_num_imprecise_acc=ADDED)
            if DIGITS == 2:
                rest = tl.dot(theirs, second, rest, max_num_imprecise_acc=ADDED)
            if SWIGLU:
                up = tl.dot(theirs_up, ours, up, max_num_imprecise_acc=ADDED)
                if DIGITS == 2:
                    up_rest = tl.dot(theirs_up, second, up_rest, max_num_imprecise_acc=ADDED)
    if DIGITS == 2:
        total += rest / 16.0
        up += up_rest / 16.0
    if G == 1:
        total = total * r_scale[:, None]
        if SWIGLU:
            up = up * second_scale[:, None]
    if G > 0:
        total = total * m_scale[None, :]
        up = up * m_scale[None, :]
    there = (r < R)[:, None] & (m < M)[None, :]
    at = (tl.program_id(2).to(tl.int64) * M + m)[None, :] * R + r[:, None]
    if SWIGLU:
        inner = (total * tl.sigmoid(total) * up).to(out.dtype.element_ty)
        tl.store(out + at, inner, mask=there)
        if LARGEST:
            bits = tl.where(there, magnitude_bits(inner.to(tl.float32)), 0)
            tl.atomic_max(largest + m, tl.max(bits, 0), mask=m < M, sem="relaxed")
    else:
        tl.store(out + at, total.to(out.dtype.element_ty), mask=there)


@dataclass(frozen=True)
class Tiling:
    """Block sizes and launch settings for a matrix product.

    rows, columns: size of a block of the weight. programs: target for the number of Triton programs.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    programs: int


def _choose_tiling(M: int, C: int, fp8: bool, late: bool) -> Tiling:
    """Return the fastest block sizes for M rows and C columns, measured on an H200 with hare_1.1b at 16 and 64 rows."""
    if M <= 16:
        if late:
            return Tiling(128, 128, 8, 4, PROGRAMS)
        return Tiling(64, 128, 4, 4, PROGRAMS if fp8 else 2 * PROGRAMS)
    return Tiling(64, 256, 4, 3, PROGRAMS // 2) if fp8 and C > 4096 else Tiling(64, 128, 4, 4, PROGRAMS // 2)


def _choose_swiglu_tiling(M: int, fp8: bool) -> Tiling:
    """Return the fastest tiling for the gate and up projection of M rows. Each program sums over all columns."""
    if M <= 16:
        return Tiling(64, 128, 8, 4, PROGRAMS)
    if fp8:
        return Tiling(64, 256, 4, 3, PROGRAMS)
    # shared memory fits three stages of 128 rows
    return Tiling(64, 128, 4, 4 if M <= 64 else 3, PROGRAMS)


def gemm(rows: Rows | Late, weight: Matrix) -> Sums:
    """Triton version of `reference.gemm`. Return one or more partial sums, bf16 or float32 [sums, M, R].

    cuBLAS is used for more than CUBLAS_ROWS rows, or if the number of columns is not a multiple of the block size. For
    weights with several scales per row, which cuBLAS does not support, the Triton kernel is always used.
    """
    M, C = (rows.values if isinstance(rows, Late) else rows[0]).shape[-2:]
    tiling = _fit(M, C, weight, _choose_tiling(M, C, weight.fp8, isinstance(rows, Late)))
    if tiling is not None:
        return _launch(rows, weight, tiling, None)
    codes, scales = quantize(rows.values, rows.digits) if isinstance(rows, Late) else rows
    if weight.scale is None or scales is None:
        return F.linear(codes, weight.values)[None]
    out = torch._scaled_mm(
        codes.flatten(0, 1),
        weight.values.t(),
        scale_a=scales.flatten(0, 1),
        scale_b=weight.scale.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return out.view(-1, M, weight.rows)


def swiglu_gemm(rows: Rows, weight: Matrix, digits: int, largest: torch.Tensor | None) -> Rows | Late:
    """Triton version of `reference.swiglu_gemm`. largest: buffer, int32 zeros [M], or None for the prefill."""
    M, C = rows[0].shape[-2:]
    tiling = _fit(M, C, weight, _choose_swiglu_tiling(M, weight.fp8))
    if largest is None or tiling is None or M > CUBLAS_ROWS:
        return swiglu_rows(gemm(rows, weight), digits)
    out = _launch(rows, weight, tiling, largest, digits)[0]
    return Late(out, largest, digits) if digits else (out, None)


def _fit(M: int, C: int, weight: Matrix, tiling: Tiling) -> Tiling | None:
    """Adapt the block sizes to the weight and to M rows. Return None if cuBLAS should compute the product."""
    G = 0 if weight.scale is None else weight.scale.shape[1]
    if G > 1:
        tiling = replace(tiling, columns=C // G, stages=3)
        return replace(tiling, rows=128, warps=8) if M > CUBLAS_ROWS else tiling
    return None if M > CUBLAS_ROWS or C % tiling.columns else tiling


def _launch(
    rows: Rows | Late, weight: Matrix, tiling: Tiling, largest: torch.Tensor | None, digits_of_out: int = 0
) -> Sums:
    """Launch `_multiply_many` with these block sizes. Return the partial sums.

    largest: buffer for the largest magnitude in each row after SwiGLU, or None to compute the product without SwiGLU.
    digits_of_out: number of FP8 codes per element that the next product reads. If 0, `largest` is not written.
    """
    late, swiglu = isinstance(rows, Late), largest is not None
    if isinstance(rows, Late):
        x, x_scale, digits = rows.values, rows.largest, rows.digits
    else:
        (x, x_scale), digits = rows, 0 if rows[1] is None else len(rows[1])
    M, C = x.shape[-2:]
    R = weight.rows // 2 if swiglu else weight.rows
    BLOCK_M = 128 if M > CUBLAS_ROWS else max(16, triton.next_power_of_2(M))
    blocks = triton.cdiv(R, tiling.rows) * triton.cdiv(M, BLOCK_M)
    splits = 1 if swiglu else max(1, min(tiling.programs // blocks, C // tiling.columns // 2, 8))
    steps = triton.cdiv(C // tiling.columns, splits)
    splits = triton.cdiv(C // tiling.columns, steps)
    out = torch.empty(splits, M, R, dtype=torch.float32 if splits > 1 else torch.bfloat16, device=x.device)
    _multiply_many[(triton.cdiv(R, tiling.rows), triton.cdiv(M, BLOCK_M), splits)](
        x,
        x_scale,
        weight.values,
        weight.scale,
        out,
        largest,
        M,
        R,
        C=C,
        G=0 if weight.scale is None else weight.scale.shape[1],
        DIGITS=digits,
        LATE=late,
        SWIGLU=swiglu,
        LARGEST=digits_of_out > 0,
        LIMIT=FP8_MAX,
        STEPS=steps,
        ADDED=tiling.columns if digits == 2 and steps * tiling.columns > COLUMNS_ADDED else None,
        BLOCK_M=BLOCK_M,
        BLOCK_R=tiling.rows,
        BLOCK_C=tiling.columns,
        GPU=x.is_cuda,
        launch_pdl=True,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return out
