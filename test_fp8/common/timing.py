"""Measure GPU memory and time, with CUDA events or, without a GPU, with the host's clock."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch

from model.autotune import release_memory
from model.config import GIB
from model.fp8 import te_backend

Key = TypeVar("Key", bound=Hashable)


def synchronize() -> None:
    """Wait until the GPU has finished all work. Does nothing without a GPU."""
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
    """Call functions one after the other and return the time of each call in milliseconds.

    The GPU is not synchronized between the calls.
    """
    marks = [record_time()]
    for call in calls:
        call()
        marks.append(record_time())
    synchronize()
    gpu = torch.cuda.is_available()
    return [start.elapsed_time(end) if gpu else (end - start) * 1e3 for start, end in pairwise(marks)]


def timed_ms(step: Callable[[], Any]) -> float:
    """Return the time in milliseconds from a function call to the end of its last GPU kernel.

    The GPU is idle at the start, so the time includes kernel launches that do not overlap with other kernels.
    """
    synchronize()
    return laps_ms([step])[0]


def time_alternately(steps: Mapping[Key, Callable[[], Any]], rounds: int) -> dict[Key, list[float]]:
    """Time several functions alternately.

    Each round calls all functions once. Every second round runs in reverse order, so that a drifting GPU clock affects
    all functions equally.

    steps: the functions by name. rounds: the number of rounds. Returns the milliseconds in each round by name.
    """
    times: dict[Key, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name in list(steps) if turn % 2 == 0 else reversed(list(steps)):
            times[name].append(timed_ms(steps[name]))
    return times


def median_ms(step: Callable[[], Any], rounds: int) -> float:
    """Return the median time of `rounds` function calls in milliseconds, after one warm-up call."""
    step()
    return statistics.median(time_alternately({"step": step}, rounds)["step"])


def enqueue_ms(step: Callable[[], Any]) -> float:
    """Return the time that the host needs to enqueue a function's kernels on an idle GPU, in milliseconds.

    If the function launches more kernels than fit into the GPU's queue (about 1,000), the time includes waiting for the
    queue.
    """
    synchronize()
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def memory_facts(before_gib: float) -> dict[str, float]:
    """Return GPU memory figures for the report, in GiB. Without a GPU, all figures are 0.

    before_gib: the memory that was allocated before the model was built.
    """
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"allocated_gib": peaks[0] / GIB, "reserved_gib": peaks[1] / GIB, "before_gib": before_gib}


def free_memory() -> None:
    """Free the GPU memory of earlier measurements: models, compiled code and CUDA graphs."""
    te_backend.release_models()
    torch._dynamo.reset()
    gc.collect()  # this creates more garbage, which release_memory collects
    release_memory()
