"""What follows from measured times: pure functions, without a GPU or a clock.

Candidates stand in the order of preference: FP8, which was asked for, before bf16; no CUDA graphs before CUDA graphs;
cuDNN's attention, which needs no further package, first. A tie, that is a difference such as two measurements of the
same thing show, goes to the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

TIE = 0.01  # relative; medians of one GPU repeat within it

Tried = Literal["fp8", "bf16"]
COMPUTE: dict[Tried, str] = {"fp8": "FP8", "bf16": "bf16"}
ATTENTION_CANDIDATES = ("fused", "flash")


@dataclass
class AttentionTime:
    """Forward and backward of one attention backend; `error`: the larger relative error against SDPA; `note`: why it
    has no time."""

    backend: str
    ms: float | None = None
    error: float | None = None
    note: str = ""

    def __str__(self) -> str:
        return f"attention {self.backend}"

    def measured(self) -> str:
        return "" if self.error is None else f"relative error against SDPA {self.error:.1e}"


@dataclass
class StepTime:
    """Forward and backward of the whole model for one micro-batch; `compute`: of COMPUTE; `peak_gib`: memory that it
    needs; `note`: why it has no time."""

    compute: Tried
    cuda_graphs: bool
    ms: float | None = None
    peak_gib: float | None = None
    note: str = ""

    def __str__(self) -> str:
        return f"step {COMPUTE[self.compute]}" + (", CUDA graphs" if self.cuda_graphs else "")

    def measured(self) -> str:
        return "" if self.peak_gib is None else f"{self.peak_gib:.1f} GiB"


Time = TypeVar("Time", AttentionTime, StepTime)


def _ms(time: AttentionTime | StepTime) -> float:
    return math.inf if time.ms is None else time.ms


def _fastest(times: Sequence[Time]) -> Time:
    """Of a tie the first."""
    limit = min(map(_ms, times)) * (1 + TIE)
    return next(t for t in times if _ms(t) <= limit)


def choose_attention(times: Sequence[AttentionTime], asked: str) -> tuple[str, str]:
    """(backend, why): the fastest of those that have a time; `asked` where there is none."""
    if all(t.ms is None for t in times):
        return asked, f"attention: {asked} as configured" + (", nothing measured" if asked == "auto" else "")
    chosen = _fastest(times)
    others = "; ".join(f"{t.backend}: {t.note or f'{t.ms:.2f} ms'}" for t in times if t is not chosen)
    return chosen.backend, f"attention: {chosen.backend}, {chosen.ms:.2f} ms" + (
        f" ({others})" if others else ""
    )


def choose_step(steps: Sequence[StepTime], memory_gib: float = math.inf) -> tuple[StepTime | None, list[str]]:
    """(the step to run, why, a line each): the fastest that has a time and fits into `memory_gib`; None where there is
    none."""
    usable = [s for s in steps if s.ms is not None and (s.peak_gib or 0.0) <= memory_gib]
    if not usable:
        return None, ["none measured that fits into memory; precision and graphs stay as configured"]
    chosen, fastest = _fastest(usable), min(usable, key=_ms)
    why = "the fastest"
    if chosen is not fastest:
        why = f"within {TIE:.0%} of {fastest}, {fastest.ms:.2f} ms, and preferred"
    return chosen, [f"{chosen}, {chosen.ms:.2f} ms: {why}", _what_fp8_brings(chosen, usable)]


def _what_fp8_brings(chosen: StepTime, usable: Sequence[StepTime]) -> str:
    others = [s for s in usable if s.compute != chosen.compute]
    if not others:
        missing = "FP8" if chosen.compute == "bf16" else "bf16"
        return f"{missing}: not measured, so nothing is known about what FP8 brings"
    other = min(others, key=_ms)
    ratio = _ms(other) / _ms(chosen)
    if chosen.compute == "bf16":
        verdict = "FP8 does not pay here, so precision.compute becomes bf16"
    elif ratio < 1 + TIE:
        verdict = "FP8 is no faster than bf16 here; it stays because it was asked for"
    else:
        verdict = "FP8 pays"
    return f"{verdict}: {other}, {other.ms:.2f} ms, takes {ratio:.2f} times as long"
