"""What follows from measured times, without a GPU or a clock; and the record of it that is printed and saved."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from model.fp8.recipes import PrecisionConfig
from model.keys import STRICT
from model.variants import ATTENTION_BACKENDS, SpeedConfig

TIE = 0.01  # relative; medians of one GPU repeat within it


@dataclass(config=STRICT)
class Choice:
    """precision.compute, speed.cuda_graphs, model.attention_backend."""

    compute: Literal["fp8", "bf16"]
    cuda_graphs: bool
    attention_backend: Literal[tuple(ATTENTION_BACKENDS)]  # type: ignore[valid-type]

    def apply(self, precision: PrecisionConfig, speed: SpeedConfig) -> tuple[PrecisionConfig, SpeedConfig]:
        """Copies with this choice in them: what a user would write who knew it."""
        return (
            dataclasses.replace(precision, auto=False, compute=self.compute),
            dataclasses.replace(speed, cuda_graphs=self.cuda_graphs),
        )


@dataclass(config=STRICT)
class Way:
    """A part of a choice (an attention backend, or compute and cuda_graphs together), and forward and backward with it:
    of the attention, or of the whole model for one micro-batch. peak_gib: memory that the model needs; note: why there
    is no time."""

    choice: dict[str, Any]
    ms: float | None = None
    peak_gib: float | None = None
    note: str = ""

    def __str__(self) -> str:
        return ", ".join(f"{key} {str(value).lower()}" for key, value in self.choice.items())

    def mean_with(self, ms: float) -> None:
        """Take the time of a visit, with that of one before."""
        self.ms = ms if self.ms is None else (self.ms + ms) / 2

    def line(self) -> str:
        """For the log."""
        ms = "" if self.ms is None else f"{self.ms:.3f} ms"
        peak = "" if self.peak_gib is None else f"{self.peak_gib:.1f} GiB"
        return f"  {self!s:<32} {ms:>12}  {self.note or peak}".rstrip()


@dataclass(config=STRICT)
class Record:
    """asked: the model and what its user asked for. circumstances: batch, GPU and what else decides times (both and
    versions: of `Task.made_for`). why: the reasons, a line each."""

    asked: dict[str, Any]
    circumstances: dict[str, Any]
    versions: dict[str, Any]
    choice: Choice
    why: list[str]
    seconds: float
    measured: list[Way]

    def summary(self) -> str:
        """One line: the choice as a user would write it."""
        c = self.choice
        return (
            f"precision.auto: precision.compute {c.compute}, speed.cuda_graphs {json.dumps(c.cuda_graphs)}, "
            f"model.attention_backend {c.attention_backend}; measured in {self.seconds:.0f} s"
        )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Raises ValueError: not what `to_json` writes."""
        try:
            return TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            problems = [": ".join([".".join(map(str, e["loc"])), e["msg"]]) for e in error.errors()]
            raise ValueError(f"it is no saved choice of this version: {'; '.join(problems)}") from error


def _ms(way: Way) -> float:
    return math.inf if way.ms is None else way.ms


def choose(ways: Sequence[Way], memory_gib: float = math.inf) -> tuple[dict[str, Any], list[str]]:
    """(the choice of the fastest that has a time and fits into `memory_gib`, why, a line each); nothing where there is
    none. `ways` stand in the order of preference: a tie, that is a difference such as two measurements of the same
    thing show, goes to the first."""
    usable = [way for way in ways if way.ms is not None and (way.peak_gib or 0.0) <= memory_gib]
    if not usable:
        return {}, []
    fastest = min(usable, key=_ms)
    chosen = next(way for way in usable if _ms(way) <= _ms(fastest) * (1 + TIE))
    why = "the fastest"
    if chosen is not fastest:
        why = f"within {TIE:.0%} of {fastest}, {fastest.ms:.2f} ms, and preferred"
    return chosen.choice, [f"{chosen}, {chosen.ms:.2f} ms: {why}", *_what_fp8_brings(chosen, usable)]


def _what_fp8_brings(chosen: Way, usable: Sequence[Way]) -> list[str]:
    compute = chosen.choice.get("compute")
    if compute is None:
        return []
    others = [way for way in usable if way.choice["compute"] != compute]
    if not others:
        missing = "FP8" if compute == "bf16" else "bf16"
        return [f"{missing}: not measured, so nothing is known about what FP8 brings"]
    other = min(others, key=_ms)
    ratio = _ms(other) / _ms(chosen)
    if compute == "bf16":
        verdict = "FP8 does not pay here, so precision.compute becomes bf16"
    elif ratio < 1 + TIE:
        verdict = "FP8 is no faster than bf16 here; it stays because it was asked for"
    else:
        verdict = "FP8 pays"
    return [f"{verdict}: {other}, {other.ms:.2f} ms, takes {ratio:.2f} times as long"]
