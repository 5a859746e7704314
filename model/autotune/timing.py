"""Measure GPU time, and restore random generators, FP8 state and memory after measurements."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from model.fp8 import te_backend

Timer = Callable[[Callable[[], Any]], float]


def cuda_ms(run: Callable[[], Any]) -> float:
    """Measure the time in ms from the call to `run` until its last kernel finishes, including launch time."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


@contextmanager
def undisturbed(te: Any, attention_backend: str) -> Iterator[None]:
    """Restore random generators, FP8 state and attention backend on exit from this context manager.

    GPU memory is also freed.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices), te_backend.isolated_fp8_state(te):
            yield
    finally:
        te_backend.choose_attention_backend(attention_backend)
        release_memory()


def release_memory() -> None:
    """Free unused GPU memory and reset the peak memory statistics."""
    gc.collect()  # modules and their hooks are reference cycles
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def one_line(error: BaseException) -> str:
    """Return an error's message as one line of at most 200 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
