"""Timers, the deadline, and a block that leaves nothing behind."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from model.fp8 import te_backend

ROUNDS = 5  # of which the median counts


class Timer(Protocol):
    def kernels_ms(self, run: Callable[[], Any]) -> float:
        """Milliseconds that the GPU works on what `run` launches, however long launching takes."""

    def elapsed_ms(self, run: Callable[[], Any]) -> float:
        """Milliseconds from before `run` to the end of its last kernel, waiting for launches included."""


class CudaTimer:
    """Timer by CUDA events, on the current stream."""

    def __init__(self) -> None:
        # 256 MiB; not a matrix product, for which cuBLAS would keep a workspace
        self.busy = torch.ones(2**27, device="cuda", dtype=torch.bfloat16)
        self._keep_busy(10)
        self.busy_ms = self.elapsed_ms(lambda: self._keep_busy(10)) / 10

    def _keep_busy(self, times: int) -> None:
        for _ in range(times):
            self.busy.neg_()

    def elapsed_ms(self, run: Callable[[], Any], head_start: int = 0) -> float:
        """head_start: how many kernels of `_keep_busy` the GPU has to do first, which do not count."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        self._keep_busy(head_start)
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def kernels_ms(self, run: Callable[[], Any]) -> float:
        # The GPU is kept busy until everything is launched, so that it then never waits. How long launching took is
        # known afterwards: once more where the head start was too short.
        head_ms, launch_ms = 5.0, 0.0

        def timed_run() -> None:
            nonlocal launch_ms
            start = time.perf_counter()
            run()
            launch_ms = (time.perf_counter() - start) * 1e3

        for _ in range(3):
            ms = self.elapsed_ms(timed_run, int(head_ms / self.busy_ms) + 1)
            if launch_ms < head_ms:
                break
            head_ms = 1.5 * launch_ms
        return ms


def median_ms(run: Callable[[], Any], timer: Timer) -> float:
    """Of ROUNDS kernel times, after two calls to warm up."""
    run()
    run()
    return statistics.median(timer.kernels_ms(run) for _ in range(ROUNDS))


class Deadline:
    """`seconds` from now on, by `clock`."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self.seconds, self.clock, self.start = seconds, clock, clock()

    def elapsed(self) -> float:
        return self.clock() - self.start

    def allows(self, expected_s: float = 0.0, share: float = 1.0) -> bool:
        """Whether something that takes `expected_s` seconds ends within this share of the time."""
        return self.elapsed() + expected_s < self.seconds * share


OUT_OF_TIME = "not measured: out of time"


@contextmanager
def undisturbed(te: Any, attention_backend: str) -> Iterator[None]:
    """A block that leaves random generators, TE's FP8 state and GPU memory as they were, and `attention_backend` as the
    choice of attention."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices), te_backend.own_fp8_state(te):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
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
