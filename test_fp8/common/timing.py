"""Timing with CUDA events, or with the host's clock without a GPU: single calls, calls that take turns, and laps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Laps:
    """Times between marks, without waiting for the GPU at a mark."""

    def __init__(self) -> None:
        self.marks: list[tuple[str | None, Any]] = []

    def mark(self, name: str | None = None) -> None:
        """End the lap `name` that the mark before began; the time before a mark without a name does not count."""
        if torch.cuda.is_available():
            event: Any = torch.cuda.Event(enable_timing=True)
            event.record()
        else:
            event = time.perf_counter()
        self.marks.append((name, event))

    def ms(self) -> dict[str, list[float]]:
        """Milliseconds of the laps by name. Waits for the GPU."""
        synchronize()
        times: dict[str, list[float]] = {}
        for (_, start), (name, end) in zip(self.marks, self.marks[1:], strict=False):
            if name is not None:
                ms = start.elapsed_time(end) if torch.cuda.is_available() else (end - start) * 1e3
                times.setdefault(name, []).append(ms)
        return times


def timed_ms(step: Callable[[], Any]) -> float:
    """Milliseconds of one call, until its last kernel ends. The GPU is idle at the start, so launching counts where it
    is not hidden."""
    synchronize()
    laps = Laps()
    laps.mark()
    step()
    laps.mark("step")
    return laps.ms()["step"][0]


def take_turns(steps: Mapping[Key, Callable[[], Any]], rounds: int) -> dict[Key, list[float]]:
    """Milliseconds of each step in each round. All steps run in every round, in every second round in reverse order, so
    that a drifting clock affects them alike."""
    times: dict[Key, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name in list(steps) if turn % 2 == 0 else reversed(list(steps)):
            times[name].append(timed_ms(steps[name]))
    return times


def median_ms(step: Callable[[], Any], rounds: int) -> float:
    """The median of `rounds` calls, after one that warms up."""
    step()
    return statistics.median(take_turns({"step": step}, rounds)["step"])


def enqueue_ms(step: Callable[[], Any]) -> float:
    """Milliseconds of the host until `step` returns, starting with an idle GPU. If a pass has more launches than the
    GPU's queue holds (about 1,000), waiting for room is included."""
    synchronize()
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def times_in(seconds: float, ms: float, least: int, most: int) -> int:
    """How often a call of `ms` milliseconds fits into `seconds`, within limits."""
    return max(least, min(most, round(seconds * 1e3 / ms)))
