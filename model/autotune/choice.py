"""Choose the fastest of the measured candidates. Needs neither a GPU nor a clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from model.fp8.recipes import Compute

TIE = 0.01  # relative; medians on one GPU repeat within it


@dataclass(frozen=True)
class Choice:
    """Values for precision.compute, speed.cuda_graphs and model.attention_backend."""

    compute: Compute
    cuda_graphs: bool
    attention_backend: str

    def __str__(self) -> str:
        graphs = str(self.cuda_graphs).lower()
        return f"compute {self.compute}, cuda_graphs {graphs}, attention_backend {self.attention_backend}"


@dataclass
class Candidate:
    """A choice and its measurements.

    times_ms: forward and backward of the model for one micro-batch, a time per visit. peak_gib: GPU memory of the
    model. note: why the candidate cannot be chosen.
    """

    choice: Choice
    times_ms: list[float] = field(default_factory=list)
    peak_gib: float = 0.0
    note: str = ""

    @property
    def ms(self) -> float:
        """Mean time over the visits; infinite if the candidate cannot be chosen."""
        return sum(self.times_ms) / len(self.times_ms) if self.times_ms and not self.note else math.inf

    def line(self) -> str:
        """A line of the printed table."""
        result = self.note or f"{self.ms:9.3f} ms  {self.peak_gib:6.1f} GiB"
        return f"  {self.choice!s:<62} {result}"


def choose(candidates: Sequence[Candidate], memory_gib: float = math.inf) -> Choice | None:
    """Return the choice of the fastest candidate that fits into memory_gib, or None.

    Args:
        candidates: in the order of preference. Times within TIE of each other are equal: the first candidate wins.
        memory_gib: GPU memory available to the model.
    """
    usable = [c for c in candidates if math.isfinite(c.ms) and c.peak_gib <= memory_gib]
    fastest = min((c.ms for c in usable), default=math.inf)
    return next((c.choice for c in usable if c.ms <= fastest * (1 + TIE)), None)
