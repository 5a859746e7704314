"""Detect a rank that is slower than the others.

All ranks wait for a slow rank in every step, so step times do not show which rank is slow. Each rank measures the time
from the start of a micro-batch to the end of the last layer's forward pass. During this time, a rank does not wait for
other ranks. On a GPU, the time is measured with CUDA events, which are read without waiting for the GPU.

Every WINDOW_STEPS steps, the ranks compare their median times over gloo. A single slow window is noise. A rank is
reported after PATIENCE consecutive slow windows, and reported again only if it has recovered in between.

The detector is disabled with ZeRO 3, because the layers wait for weights of other ranks. It is also disabled with
speed.cuda_graphs, because a graph replay runs no Python code.
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
    """Return the number of consecutive windows in which each rank was slow, up to and including the latest window.

    Args:
        before: The number of consecutive slow windows of each rank before the latest window.
        times_s: Time of each rank in the latest window, in seconds.
    """
    counts = []
    for rank, own in enumerate(times_s):
        others = statistics.median(times_s[:rank] + times_s[rank + 1 :])
        counts.append(before[rank] + 1 if own > SLOW_FACTOR * others else 0)
    return counts


class SlowRanks:
    """Detector for slow ranks, which compares the forward time of this rank with the other ranks.

    All ranks must call the methods at the same points.

    Args:
        engine: DeepSpeed engine. Its `module.model.norm` must be the module after the last layer.
        group: Gloo group of all ranks, or None with a single rank.
        cuda_graphs: Whether CUDA graphs are used, which disables the detector.
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
        """At the end of a measurement window, compare the speed of all ranks and warn about slow ranks.

        Args:
            step: Number of the step that has finished.
        """
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
                    f"rank {rank} is slow: its forward pass takes {times[rank] * 1e3:.1f} ms per micro-batch, "
                    f"but the median of all ranks is {statistics.median(times) * 1e3:.1f} ms (last "
                    f"{WINDOW_STEPS} steps, up to step {step}). All other ranks wait for this rank. Check the "
                    "clock rate and temperature of the GPU, and look for other processes on the node"
                )

    def _median_s(self) -> float | None:
        """Return the median time of a micro-batch in this window, in seconds, or None if none has finished."""
        pairs, self._pairs = self._pairs, []
        if not self.on_gpu:
            times = [end - start for start, end in pairs]
        else:
            times = [start.elapsed_time(end) / 1e3 for start, end in pairs if end.query()]
        return statistics.median(times) if times else None
