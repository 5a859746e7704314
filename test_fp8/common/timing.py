"""Measure time with CUDA events, or with the host's clock without a GPU, and peaks of GPU memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch

from model.autotune.timing import release_memory
from model.config import GIB
from model.fp8 import te_backend

Key = TypeVar("Key", bound=Hashable)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def record_time() -> Any:
    """Record a point in time on the GPU's clock, or on the host's clock without a GPU."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def laps_ms(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Return the milliseconds of each call, without waiting for the GPU between calls."""
    marks = [record_time()]
    for call in calls:
        call()
        marks.append(record_time())
    synchronize()
    gpu = torch.cuda.is_available()
    return [start.elapsed_time(end) if gpu else (end - start) * 1e3 for start, end in pairwise(marks)]


def timed_ms(step: Callable[[], Any]) -> float:
    """Return the milliseconds of one call, until its last kernel ends.

    The GPU is idle at the start, so launch time that is not hidden is included.
    """
    synchronize()
    return laps_ms([step])[0]


def time_alternately(steps: Mapping[Key, Callable[[], Any]], rounds: int) -> dict[Key, list[float]]:
    """Return the milliseconds of each step in each round.

    All steps run in every round. Every second round runs in reverse order, so that a drifting GPU clock affects all
    steps equally.
    """
    times: dict[Key, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name in list(steps) if turn % 2 == 0 else reversed(list(steps)):
            times[name].append(timed_ms(steps[name]))
    return times


def median_ms(step: Callable[[], Any], rounds: int) -> float:
    """Return the median milliseconds of `rounds` calls, after one warm-up call."""
    step()
    return statistics.median(time_alternately({"step": step}, rounds)["step"])


def enqueue_ms(step: Callable[[], Any]) -> float:
    """Return the host's milliseconds until `step` returns, starting with an idle GPU.

    If `step` launches more kernels than the GPU's queue holds (about 1,000), the time includes waiting for the queue.
    """
    synchronize()
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def count_calls(seconds: float, ms: float, min_calls: int, max_calls: int) -> int:
    """Return how often a call of `ms` milliseconds fits into `seconds`, within limits."""
    return max(min_calls, min(max_calls, round(seconds * 1e3 / ms)))


def memory_facts(before_gib: float) -> dict[str, float]:
    """Return the peaks of GPU memory and the memory allocated before the model was built; 0 without a GPU."""
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"allocated_gib": peaks[0] / GIB, "reserved_gib": peaks[1] / GIB, "before_gib": before_gib}


def free_memory() -> None:
    """Free models, compiled code and graphs of earlier measurements, including references in Transformer Engine."""
    te_backend.release_models()
    torch._dynamo.reset()
    gc.collect()  # the engine's clean-up creates more garbage, which release_memory collects
    release_memory()
