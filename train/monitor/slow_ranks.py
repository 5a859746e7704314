"""Detect a rank that is slower than the others.

All ranks wait for a slow rank in every step, so total times do not show which rank it is. Each rank measures the time
from the start of a micro-batch to the end of the last layer's forward, in which it waits for no other rank. On a GPU it
uses CUDA events, which it reads without waiting. Every WINDOW_STEPS steps the ranks compare the medians of their
micro-batches over gloo. One slow window is noise; after PATIENCE slow windows in a row a rank is reported, once until
it recovers.

The detector is off with ZeRO 3, where the layers wait for weights of other ranks, and with speed.cuda_graphs, whose
replays run no Python.
"""

from __future__ import annotations

import logging
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)
WINDOW_STEPS = 10
# A rank that is 50% slower is reported after 30 to 40 steps. The ranks of a healthy run differ by a few percent.
SLOW_FACTOR = 1.25
PATIENCE = 3


def count_slow_windows(before: list[int], times_s: list[float]) -> list[int]:
    """Return the number of slow windows in a row of each rank.

    Args:
        before: these numbers before the last window.
        times_s: time of each rank in the last window, in seconds.
    """
    counts = []
    for rank, own in enumerate(times_s):
        others = statistics.median(times_s[:rank] + times_s[rank + 1 :])
        counts.append(before[rank] + 1 if own > SLOW_FACTOR * others else 0)
    return counts


class SlowRanks:
    """Measures this rank and compares all ranks, which must call the methods at the same points.

    Args:
        engine: its `module.model.norm` follows the last layer.
        group: gloo group of all ranks; None with one rank.
        cuda_graphs: whether CUDA graphs are on, which turns the detector off.
    """

    def __init__(self, engine: Any, group: Any, cuda_graphs: bool):
        self.group, self.on_gpu = group, engine.device.type == "cuda"
        self.on = group is not None and engine.zero_optimization_stage() < 3 and not cuda_graphs
        self._start: Any = None
        self._pairs: list[tuple[Any, Any]] = []
        if self.on:
            self._slow_windows = [0] * dist.get_world_size(group)
            engine.module.model.norm.register_forward_pre_hook(self._layers_done)

    def begin(self) -> None:
        """Record the start of a training micro-batch."""
        if self.on:
            self._start = self._now()

    def _layers_done(self, *arguments: object) -> None:
        if self._start is not None:  # otherwise this is an evaluation
            self._pairs.append((self._start, self._now()))
            self._start = None

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def step(self, step: int) -> None:
        """Compare the ranks at the end of a window, after `step`, and warn about slow ones."""
        if not self.on or step % WINDOW_STEPS:
            return
        times: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(times, self._median_s(), group=self.group)
        if None in times:
            return  # a GPU has not finished any micro-batch yet
        self._slow_windows = count_slow_windows(self._slow_windows, times)
        for rank, count in enumerate(self._slow_windows):
            if count == PATIENCE:
                logger.warning(
                    f"rank {rank} is slow: the forward of a micro-batch takes {times[rank] * 1e3:.1f} ms, the median "
                    f"of all ranks is {statistics.median(times) * 1e3:.1f} ms, in the {WINDOW_STEPS} steps to step "
                    f"{step} and in those before. All ranks wait for it. Check the clocks and the temperature of its "
                    "GPU, and other processes on its node"
                )

    def _median_s(self) -> float | None:
        """Return the median time over the micro-batches of this window in seconds, or None if none has finished."""
        pairs, self._pairs = self._pairs, []
        if not self.on_gpu:
            times = [end - start for start, end in pairs]
        else:
            times = [start.elapsed_time(end) / 1e3 for start, end in pairs if end.query()]
        return statistics.median(times) if times else None
