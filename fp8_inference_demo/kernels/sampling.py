"""Finish a greedy decoding step in one kernel launch. Plain torch needs a dozen launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


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

    This kernel replaces `engine.Step.take` for greedy decoding. All arguments except `logits` and `last` are updated.
    logits: float32 or bf16 [B, V]. history: int64 [S, B], the tokens of each step. tokens, positions, steps: int64 [B].
    last: largest position in the KV cache.
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
