"""Clocks: single calls, calls that take turns, laps that do not wait for the GPU, and the host's time to enqueue."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Laps:
    """Times between marks on the GPU's own clock, without waiting for it; without a GPU on the host's."""

    def __init__(self) -> None:
        self.marks: list[tuple[str | None, Any]] = []

    def mark(self, name: str | None = None) -> None:
        """End a lap `name` that the mark before began; without a name its time is of no interest."""
        if torch.cuda.is_available():
            event: Any = torch.cuda.Event(enable_timing=True)
            event.record()
        else:
            event = time.perf_counter()
        self.marks.append((name, event))

    def ms(self) -> dict[str, list[float]]:
        """Milliseconds of the laps by name; waits for the GPU."""
        synchronize()
        times: dict[str, list[float]] = {}
        for (_, start), (name, end) in zip(self.marks, self.marks[1:], strict=False):
            if name is not None:
                times.setdefault(name, []).append(
                    start.elapsed_time(end) if torch.cuda.is_available() else (end - start) * 1e3
                )
        return times


def timed_ms(step: Callable[[], Any]) -> float:
    """Milliseconds of one call, to the end of its last kernel. The GPU is idle at the start, so that the time of
    launching is part of it wherever it is not hidden."""
    synchronize()
    laps = Laps()
    laps.mark()
    step()
    laps.mark("step")
    return laps.ms()["step"][0]


def take_turns(steps: Mapping[Key, Sequence[Callable[[], Any]]], rounds: int) -> dict[Key, list[float]]:
    """Milliseconds of each step in each of `rounds` rounds; of a step the last call is timed, those before it only run.

    A round runs every step once, so that a clock that drifts meets all of them alike, and every second round runs
    them in reverse, so that none always follows the same one.
    """
    times: dict[Key, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name in list(steps) if turn % 2 == 0 else reversed(list(steps)):
            *before, timed = steps[name]
            for call in before:
                call()
            times[name].append(timed_ms(timed))
    return times


def mean_pass_ms(laps: Mapping[str, Sequence[float]], accumulation: int) -> float:
    """Of a pass in the mean of a step, from the medians of its kinds."""
    later = statistics.median(laps["later"])
    first = statistics.median(laps["first"]) if laps.get("first") else later
    return (first + (accumulation - 1) * later) / accumulation


def times_in(seconds: float, ms: float, least: int, most: int) -> int:
    """How often what takes `ms` goes into `seconds`, within limits."""
    return max(least, min(most, round(seconds * 1e3 / ms)))


def enqueue_ms(step: Callable[[], Any]) -> float:
    """Milliseconds of the host until `step` has returned, from an idle GPU and without waiting for its end. Where a
    pass has more launches than the GPU's queue takes (about 1,000), waiting for room is in it."""
    synchronize()
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3
