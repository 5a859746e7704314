"""The clock of the GPU, the deadline, and a block that leaves nothing behind."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from model.fp8 import te_backend

CYCLES_PER_S = 2e9  # no GPU's clock is faster by much

# `cuda_ms`, or what takes its place in a test
Timer = Callable[..., float]


def cuda_ms(run: Callable[[], Any], queued: bool = False) -> float:
    """Milliseconds from before `run` to the end of its last kernel, waiting for launches included. queued: of the
    kernels alone, however long launching takes: they are launched while the GPU is kept busy; `run` runs twice then."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    launch_s = 0.0
    if queued:
        began = time.perf_counter()
        run()
        launch_s = time.perf_counter() - began
    torch.cuda.synchronize()
    torch.cuda._sleep(int(2 * launch_s * CYCLES_PER_S))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


class Deadline:
    """`seconds` from now on, by `clock`."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self.seconds, self.clock, self.start = seconds, clock, clock()

    def elapsed(self) -> float:
        return self.clock() - self.start

    def allows(self, expected_s: float) -> bool:
        """Whether something that takes `expected_s` seconds ends in time."""
        return self.elapsed() + expected_s < self.seconds


@contextmanager
def undisturbed(te: Any, attention_backend: str) -> Iterator[None]:
    """A block that leaves torch's random generators, TE's FP8 state and GPU memory as they were, and
    `attention_backend` as the choice of attention."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices), te_backend.own_fp8_state(te):
            yield
    finally:
        te_backend.choose_attention_backend(attention_backend)
        release_memory()


def release_memory() -> None:
    """Give back the memory of what is no longer used; peak statistics begin anew."""
    gc.collect()  # modules and their hooks refer to each other
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
