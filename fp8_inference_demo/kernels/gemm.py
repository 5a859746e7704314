"""The products of several rows: M rows of activations times a weight of R rows and C columns, G groups of which share a
scale. Few rows leave most of the GPU idle unless the columns are split, too: whoever reads the sums adds them up."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fp8_inference_demo.kernels.common import PROGRAMS, Sums
from fp8_inference_demo.reference import Rows
from fp8_inference_demo.weights import Matrix

# Above it cuBLAS multiplies.
CUBLAS_ROWS = 128


@triton.jit
def _multiply_many(
    x,
    x_scale,
    weight,
    scale,
    out,
    M,
    R,
    C: tl.constexpr,
    G: tl.constexpr,
    DIGITS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GPU: tl.constexpr,
):
    """One sum, over STEPS blocks of columns, of BLOCK_R rows of the weight times BLOCK_M rows of x: both FP8, with a
    scale for each row of x and of the weight (G 1) or each C / G columns of the weight; or both bf16 (G 0).

    Launched while the kernel before it ends: weights do not depend on that one and are asked for at once."""
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    low = tl.program_id(2) * (STEPS * BLOCK_C)
    safe_m, safe_r = tl.where(m < M, m, 0).to(tl.int64), tl.where(r < R, r, 0).to(tl.int64)
    if GPU:
        gdc_launch_dependents()
        LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
        LINES: tl.constexpr = triton.next_power_of_2(STEPS * BLOCK_C // LINE)
        line = low + tl.arange(0, LINES) * LINE
        line = safe_r[:, None] * C + tl.where(line < C, line, low)[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [weight + line],
            tl.int32,
            is_pure=False,
            pack=1,
        )
        gdc_wait()
    total = tl.zeros((BLOCK_R, BLOCK_M), tl.float32)
    rest = tl.zeros((BLOCK_R, BLOCK_M), tl.float32)
    for start in tl.range(low, tl.minimum(low + STEPS * BLOCK_C, C), BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        theirs = tl.load(weight + safe_r[:, None] * C + column[None, :])
        ours = tl.load(x + safe_m[None, :] * C + column[:, None])
        if DIGITS == 2:
            second = tl.load(x + (M + safe_m)[None, :] * C + column[:, None])
        if G > 1:  # a block has one group of columns
            group = tl.load(scale + safe_r * G + start // (C // G))[:, None]
            total += tl.dot(theirs, ours) * group
            if DIGITS == 2:
                rest += tl.dot(theirs, second) * group
        else:
            total = tl.dot(theirs, ours, total)
            if DIGITS == 2:
                rest = tl.dot(theirs, second, rest)
    if DIGITS == 2:
        total += rest / 16.0
    if G == 1:
        total = total * tl.load(scale + safe_r)[:, None]
    if G > 0:
        total = total * tl.load(x_scale + safe_m)[None, :]
    at = (tl.program_id(2).to(tl.int64) * M + m)[None, :] * R + r[:, None]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(r < R)[:, None] & (m < M)[None, :])


@dataclass(frozen=True)
class Cut:
    """How a product is cut. rows, columns: of the weight, in a block; programs: how many it is split for."""

    rows: int
    columns: int
    warps: int
    stages: int
    programs: int


def _cut(M: int, fp8: bool) -> Cut:
    """What was fastest on an H200 for the products of hare_1.1b, at 4 and at 64 rows."""
    if M <= 16:
        return Cut(128, 128, 8, 4, PROGRAMS) if fp8 else Cut(64, 128, 4, 4, 2 * PROGRAMS)
    return Cut(64, 256, 4, 3, PROGRAMS) if fp8 else Cut(64, 128, 4, 4, PROGRAMS // 2)


def gemm(rows: Rows, weight: Matrix) -> Sums:
    """As reference.gemm, in one or several sums: bf16 or float32 [sums, M, R].

    cuBLAS where there are rows enough to keep it busy, or columns that the blocks here do not fit."""
    codes, scales = rows
    M, C, R = codes.shape[-2], codes.shape[-1], weight.rows
    G = 0 if weight.scale is None else weight.scale.shape[1]
    cut = _cut(M, weight.fp8)
    BLOCK_M = max(16, triton.next_power_of_2(M))
    if G > 1:
        cut = replace(cut, columns=C // G, stages=3)
        if M > CUBLAS_ROWS:
            BLOCK_M, cut = 128, replace(cut, rows=128, warps=8)
    elif M > CUBLAS_ROWS or C % cut.columns:
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
        return out.view(-1, M, R)
    blocks = triton.cdiv(R, cut.rows) * triton.cdiv(M, BLOCK_M)
    splits = max(1, min(cut.programs // blocks, C // cut.columns // 2, 8))
    steps = triton.cdiv(C // cut.columns, splits)
    splits = triton.cdiv(C // cut.columns, steps)
    dtype = torch.float32 if splits > 1 else torch.bfloat16
    out = torch.empty(splits, M, R, dtype=dtype, device=codes.device)
    _multiply_many[(triton.cdiv(R, cut.rows), triton.cdiv(M, BLOCK_M), splits)](
        codes,
        scales,
        weight.values,
        weight.scale,
        out,
        M,
        R,
        C=C,
        G=G,
        DIGITS=0 if scales is None else len(scales),
        STEPS=steps,
        BLOCK_M=BLOCK_M,
        BLOCK_R=cut.rows,
        BLOCK_C=cut.columns,
        GPU=codes.is_cuda,
        launch_pdl=True,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    return out
