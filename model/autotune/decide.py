"""What follows from measured times: pure functions, without a GPU or a clock.

A tie, that is a difference such as two measurements of the same thing show, goes to what was asked for or is simpler:
FP8 before bf16, FP8 everywhere before FP8 in places, no CUDA graphs before CUDA graphs.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

TIE = 0.01  # relative; medians of one GPU repeat within it

# How a step can be run, the preferred one first: FP8 but where the user keeps bf16; bf16 also where that is faster; no
# FP8 at all.
PLANS = {"fp8": "FP8", "mixed": "FP8 where faster", "bf16": "bf16"}
# The preferred one first: cuDNN needs no further package.
ATTENTION_CANDIDATES = ("fused", "flash")


@dataclass
class ModuleTime:
    """Forward and backward of the modules of one shape. `weights`: [outputs, inputs] of each matrix; `patterns`: names
    of these modules as precision.bf16_modules takes them; `note`: why it has no times; `fp8_possible`: whether an FP8
    GEMM takes these sizes."""

    kind: str
    weights: list[list[int]]
    count: int
    patterns: list[str]
    fp8_ms: float | None = None
    bf16_ms: float | None = None
    note: str = ""
    fp8_possible: bool = True

    @property
    def bf16_is_faster(self) -> bool:
        if self.fp8_ms is None or self.bf16_ms is None:
            return False
        return self.bf16_ms * (1 + TIE) < self.fp8_ms

    def __str__(self) -> str:
        sizes = ", ".join(f"{inputs} -> {outputs}" for outputs, inputs in self.weights)
        return f"{self.kind} {sizes} ({self.count} x)"


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
    """Forward and backward of the whole model for one micro-batch, by a plan of PLANS; `peak_gib`: memory that it
    needs; `note`: why it has no time."""

    plan: str
    cuda_graphs: bool
    ms: float | None = None
    peak_gib: float | None = None
    note: str = ""

    def __str__(self) -> str:
        return PLANS[self.plan] + (", CUDA graphs" if self.cuda_graphs else "")


def name_patterns(names: Sequence[str], all_names: Iterable[str]) -> list[str]:
    """The shortest list of patterns, as fnmatch takes them, that match `names` and of `all_names` nothing else but what
    is inside those: one for all layers where that is so, else the names."""
    everything = list(all_names)
    patterns = []
    for family in dict.fromkeys(_any_layer(name) for name in names):
        members = [name for name in names if _any_layer(name) == family]
        matches = fnmatch.filter(everything, family)
        inside = all(any(m == name or m.startswith(name + ".") for name in members) for m in matches)
        patterns += [family] if inside and len(members) > 1 else members
    return patterns


def _any_layer(name: str) -> str:
    """ "model.layers.7.mlp.up_proj" -> "model.layers.*.mlp.up_proj"."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def plans(modules: Sequence[ModuleTime], bf16_modules: Sequence[str]) -> dict[str, list[str]]:
    """Plan -> its precision.bf16_modules, for the plans that differ. `bf16_modules`: what the user keeps in bf16;
    `modules`: all others."""
    unable = [p for m in modules if not m.fp8_possible for p in m.patterns]
    slower = [p for m in modules if m.fp8_possible and m.bf16_is_faster for p in m.patterns]
    some_stay = any(m.fp8_possible and not m.bf16_is_faster for m in modules)
    out = {"fp8": [*bf16_modules, *unable], "bf16": list(bf16_modules)}
    if modules and not any(m.fp8_possible for m in modules):
        del out["fp8"]
    if slower and some_stay:
        out["mixed"] = [*bf16_modules, *unable, *slower]
    return out


def about_modules(modules: Sequence[ModuleTime], bf16_modules: Sequence[str]) -> list[str]:
    """What the modules' times say, a line each; the steps decide whether it is followed."""
    lines = [f"modules: kept in bf16 as configured: {', '.join(bf16_modules)}"] if bf16_modules else []
    for what, members in (
        ("FP8 at least as fast", [m for m in modules if m.fp8_ms is not None and not m.bf16_is_faster]),
        ("bf16 faster", [m for m in modules if m.bf16_is_faster]),
        ("bf16, since FP8 cannot take the sizes", [m for m in modules if not m.fp8_possible]),
        ("FP8 as configured, not measured", [m for m in modules if m.fp8_possible and m.fp8_ms is None]),
    ):
        if members:
            lines.append(f"modules: {what}: {'; '.join(map(str, members))}")
    return lines


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
    chosen = min(near, key=lambda s: (list(PLANS).index(s.plan), s.cuda_graphs))
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
    other = [s for s in usable if (s.plan == "bf16") != (chosen.plan == "bf16")]
    if not other:
        missing = "FP8" if chosen.plan == "bf16" else "bf16"
        return [f"{missing}: not measured, so nothing is known about what FP8 brings"]
    best = min(other, key=lambda s: time_of[id(s)])
    ratio = time_of[id(best)] / time_of[id(chosen)]
    if chosen.plan == "bf16":
        return [
            f"FP8 does not pay here: its best ({best}, {best.ms:.2f} ms) takes {ratio:.2f} times as long as bf16, so "
            "precision.compute becomes bf16"
        ]
    if ratio < 1 + TIE:
        return [
            f"FP8 is no faster than bf16 ({best}, {best.ms:.2f} ms) here; it stays because it was asked for"
        ]
    return [f"FP8 pays: the best bf16 ({best}, {best.ms:.2f} ms) takes {ratio:.2f} times as long"]
