"""Embedding lookup with a weight gradient that is summed in float32 and rounded once.

torch's kernel sums pieces of a few tokens and stores a float32 row for each piece. This is most expensive if tokens
seldom repeat. Here, each program processes ROWS tokens sorted by id. If all tokens with an id belong to one program,
their sum is written directly. Only sums that continue in the next program are stored as partial sums. There are no
atomics, so results are reproducible.

Shape suffixes: M tokens, H hidden size, V vocabulary size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

ROWS = 32
PIECE = 512


@triton.jit
def _sum_rows(ids, order, gradient, out, parts, M, H, ROWS: tl.constexpr, PIECE: tl.constexpr):
    """Sum the gradients per token id over ROWS tokens, which are sorted by id.

    Args:
        out: output, [V, H] (vocabulary size V, hidden size H), for ids whose tokens are all in this program.
        parts: output, float32 [programs, 2, H]. Program p writes the sum for an id that continues from the previous
            program to parts[p, 0]. It writes the sum for an id that begins here and continues in the next program to
            parts[p, 1].
    """
    chunk = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    is_h = h < H
    start = chunk * ROWS
    total = tl.zeros([PIECE], dtype=tl.float32)
    row = tl.load(ids + start)
    began = (start == 0) | (tl.load(ids + (start - 1), mask=start > 0, other=-1) != row)
    for step in range(ROWS):
        at = start + step
        inside = at < M
        row = tl.load(ids + at, mask=inside, other=-1)
        token = tl.load(order + at, mask=inside, other=0)
        total += tl.load(gradient + token * H + h, mask=is_h & inside, other=0.0).to(tl.float32)
        continues = (at + 1 < M) & (tl.load(ids + at + 1, mask=at + 1 < M, other=-1) == row)
        ends = inside & (continues == 0)
        last = inside & continues & (step == ROWS - 1)
        tl.store(out + row * H + h, total.to(out.dtype.element_ty), mask=is_h & ends & began)
        tl.store(parts + 2 * chunk * H + h, total, mask=is_h & (ends | last) & (began == 0))
        tl.store(parts + (2 * chunk + 1) * H + h, total, mask=is_h & last & began)
        total = tl.where(ends, 0.0, total)
        began = began | ends


@triton.jit
def _join_rows(ids, ends, out, parts, H, ROWS: tl.constexpr, PIECE: tl.constexpr):
    """Add up the partial sums of a token id whose tokens span several programs, starting with this program.

    Args:
        ends: int64 [programs]. Position after the last token that has the same id as the program's last token.
    """
    chunk = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    start, stop = chunk * ROWS, (chunk + 1) * ROWS
    row, end = tl.load(ids + (stop - 1)), tl.load(ends + chunk)
    before = tl.load(ids + (start - 1), mask=start > 0, other=-1)
    end = tl.where((tl.load(ids + start) != row) | (before != row), end, stop)
    its = (h < H) & (end > stop)
    total = tl.load(parts + (2 * chunk + 1) * H + h, mask=its, other=0.0)
    for later in range(chunk + 1, (end - 1) // ROWS + 1):
        total += tl.load(parts + 2 * later * H + h, mask=its, other=0.0)
    tl.store(out + row * H + h, total.to(out.dtype.element_ty), mask=its)


def sum_by_row(gradient_MH: torch.Tensor, ids_M: torch.Tensor, V: int) -> torch.Tensor:
    """Sum the gradients of all tokens with the same id. CUDA only.

    Args:
        gradient_MH: [M, H] for M tokens and hidden size H, contiguous.
        ids_M: int64 [M], contiguous, from 0 to V - 1 (vocabulary size V).

    Returns: [V, H] in the dtype of the gradient, 0 for ids without tokens.
    """
    M, H = gradient_MH.shape
    out = gradient_MH.new_zeros(V, H)
    ids, order = torch.sort(ids_M, stable=True)
    chunks, pieces = triton.cdiv(M, ROWS), triton.cdiv(H, PIECE)
    parts = torch.empty(chunks, 2, H, dtype=torch.float32, device=gradient_MH.device)
    _sum_rows[chunks, pieces](ids, order, gradient_MH, out, parts, M, H, ROWS=ROWS, PIECE=PIECE, num_warps=4)
    if M > ROWS:
        ends = torch.searchsorted(ids, ids[ROWS - 1 :: ROWS].contiguous(), right=True)
        _join_rows[M // ROWS, pieces](ids, ends, out, parts, H, ROWS=ROWS, PIECE=PIECE, num_warps=4)
    return out


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.V = weight_VH.shape[0]  # ZeRO 3 frees the weight before the backward
        return torch.nn.functional.embedding(ids, weight_VH)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        (ids,) = ctx.saved_tensors
        gradient_MH = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        return None, sum_by_row(gradient_MH, ids.flatten().contiguous(), ctx.V)


def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Look up token embeddings. The weight gradient is summed in float32 (`sum_by_row`). CUDA only.

    Args:
        ids: int64 [...], any shape.
        weight: [V, H] (vocabulary size V, hidden size H).

    Returns: [..., H].
    """
    return _Embedding.apply(ids, weight)
