"""What follows from measured times: pure functions, without a GPU or a clock.

A tie, that is a difference such as two measurements of the same thing show, goes to what was asked for or is simpler:
FP8 before bf16, no CUDA graphs before CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from model.fp8.recipes import Compute

TIE = 0.01  # relative; medians of one GPU repeat within it

# The preferred one first: FP8 was asked for; cuDNN needs no further package.
COMPUTE: dict[Compute, str] = {"fp8": "FP8", "bf16": "bf16"}
ATTENTION_CANDIDATES = ("fused", "flash")


@dataclass
class AttentionTime:
    """Forward and backward of one attention backend; `error`: the larger relative error against SDPA; `note`: why it
    has no time."""

    backend: str
    ms: float | None = None
    error: float | None = None
    note: str = ""


@dataclass
class StepTime:
    """Forward and backward of the whole model for one micro-batch; `compute`: of COMPUTE; `peak_gib`: memory that it
    needs; `note`: why it has no time."""

    compute: Compute
    cuda_graphs: bool
    ms: float | None = None
    peak_gib: float | None = None
    note: str = ""

    def __str__(self) -> str:
        return COMPUTE[self.compute] + (", CUDA graphs" if self.cuda_graphs else "")


def choose_attention(times: Sequence[AttentionTime], asked: str) -> tuple[str, str]:
    """(backend, why): the fastest of those that have a time; `asked` where there is none."""
    usable = [t for t in times if t.ms is not None]
    if not usable:
        return asked, f"attention: {asked} as configured" + (", nothing measured" if asked == "auto" else "")
    fastest = min(t.ms for t in usable if t.ms is not None)
    near = [t for t in usable if t.ms is not None and t.ms <= fastest * (1 + TIE)]
    chosen = min(near, key=lambda t: ATTENTION_CANDIDATES.index(t.backend))
    others = [t for t in times if t is not chosen]
    compared = "; ".join(
        f"{t.backend} {t.ms:.2f} ms" if t.ms is not None else f"{t.backend}: {t.note}" for t in others
    )
    why = f"attention: {chosen.backend}, {chosen.ms:.2f} ms" + (f" ({compared})" if compared else "")
    return chosen.backend, why


def fits(step: StepTime, memory_gib: float | None) -> bool:
    return memory_gib is None or step.peak_gib is None or step.peak_gib <= memory_gib


def choose_step(
    steps: Sequence[StepTime], memory_gib: float | None = None
) -> tuple[StepTime | None, list[str]]:
    """(the step to run, why): the fastest that has a time and fits into `memory_gib`; None where there is none."""
    usable = [s for s in steps if s.ms is not None and fits(s, memory_gib)]
    if not usable:
        return None, ["step: none measured that fits into memory; precision and graphs stay as configured"]
    time_of = {id(s): s.ms for s in usable if s.ms is not None}
    fastest = min(usable, key=lambda s: time_of[id(s)])
    near = [s for s in usable if time_of[id(s)] <= time_of[id(fastest)] * (1 + TIE)]
    chosen = min(near, key=lambda s: (list(COMPUTE).index(s.compute), s.cuda_graphs))
    why = [f"step: {chosen}, {chosen.ms:.2f} ms, the fastest"]
    if chosen is not fastest:
        why = [
            f"step: {chosen}, {chosen.ms:.2f} ms: within {TIE:.0%} of {fastest}, {fastest.ms:.2f} ms, and simpler"
        ]
    return chosen, why + _against_the_other_precision(chosen, usable, time_of)


def _against_the_other_precision(
    chosen: StepTime, usable: Sequence[StepTime], time_of: dict[int, float]
) -> list[str]:
    """What FP8 is worth, or that it is worth nothing."""
    other = [s for s in usable if s.compute != chosen.compute]
    if not other:
        missing = "FP8" if chosen.compute == "bf16" else "bf16"
        return [f"{missing}: not measured, so nothing is known about what FP8 brings"]
    best = min(other, key=lambda s: time_of[id(s)])
    ratio = time_of[id(best)] / time_of[id(chosen)]
    if chosen.compute == "bf16":
        return [
            f"FP8 does not pay here: its best ({best}, {best.ms:.2f} ms) takes {ratio:.2f} times as long as bf16, so "
            "precision.compute becomes bf16"
        ]
    if ratio < 1 + TIE:
        return [
            f"FP8 is no faster than bf16 ({best}, {best.ms:.2f} ms) here; it stays because it was asked for"
        ]
    return [f"FP8 pays: the best bf16 ({best}, {best.ms:.2f} ms) takes {ratio:.2f} times as long"]
