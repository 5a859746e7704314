"""A choice as it is printed and saved: what was measured, what follows, and what it was made for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from model.autotune.decide import AttentionTime, StepTime, Tried
from model.fp8.recipes import PrecisionConfig
from model.keys import STRICT
from model.variants import ATTENTION_BACKENDS, SpeedConfig


@dataclass(config=STRICT)
class Choice:
    """precision.compute, speed.cuda_graphs, model.attention_backend."""

    compute: Tried
    cuda_graphs: bool
    attention_backend: Literal[tuple(ATTENTION_BACKENDS)]  # type: ignore[valid-type]

    def apply(self, precision: PrecisionConfig, speed: SpeedConfig) -> tuple[PrecisionConfig, SpeedConfig]:
        """Copies with this choice in them: what a user would write who knew it."""
        return (
            replace(precision, auto=False, compute=self.compute),
            replace(speed, cuda_graphs=self.cuda_graphs),
        )


@dataclass(config=STRICT)
class Record:
    """asked: the model and what its user asked for. circumstances: batch, GPU and what else decides times (both and
    versions: of `Task.made_for`). why: the reasons, a line each. measurements: "attention", "steps"."""

    asked: dict[str, Any]
    circumstances: dict[str, Any]
    versions: dict[str, Any]
    choice: Choice
    why: list[str]
    seconds: float
    measurements: dict[str, list[dict[str, Any]]]

    def summary(self) -> str:
        """One line: the choice as a user would write it."""
        c = self.choice
        return (
            f"precision.auto: precision.compute {c.compute}, speed.cuda_graphs {json.dumps(c.cuda_graphs)}, "
            f"model.attention_backend {c.attention_backend}; measured in {self.seconds:.0f} s"
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Raises ValueError: not what `to_json` writes."""
        try:
            return TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            problems = [": ".join([".".join(map(str, e["loc"])), e["msg"]]) for e in error.errors()]
            raise ValueError(f"it is no saved choice of this version: {'; '.join(problems)}") from error


def table(times: Sequence[AttentionTime | StepTime]) -> list[str]:
    """The measurements for the log."""
    return [
        f"  {t!s:<22} {'' if t.ms is None else f'{t.ms:.3f} ms':>12}  {t.note or t.measured()}".rstrip()
        for t in times
    ]
