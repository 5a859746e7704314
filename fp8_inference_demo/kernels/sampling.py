"""Finish a greedy step in one kernel launch; torch needs a dozen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def _take(logits, history, tokens, positions, steps, last, V, S, B, BLOCK: tl.constexpr, GPU: tl.constexpr):
    """Process one row: store its most likely token, or -1 for logits that are not finite, in history [S, B] and as the
    input of the next step.
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
    """Do the work of engine.Step.take for greedy decoding.

    logits: float32 or bf16 [B, V]. history: int64 [S, B]. tokens, positions (up to `last`), steps: int64 [B].
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
