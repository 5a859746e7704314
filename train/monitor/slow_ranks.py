"""A rank that is slower than the others is named: all wait for it in every step, and no total shows which one it is.

Each rank takes the time from the beginning of a micro-batch to the end of its last layer's forward, in which it waits
for nobody. Not at ZeRO 3, where the layers wait for each other's weights, nor with speed.cuda_graphs, whose replays
pass no Python. On a GPU the time is that between events in its stream, read when they have passed. Every WINDOW_STEPS
steps the ranks compare the medians over their micro-batches, over gloo. One slow window is noise; PATIENCE of them in a
row are a slow rank, named once until it has recovered.
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
# A rank 50% slower is named after 30 to 40 steps. Ranks of one run differ by a few percent.
SLOW_FACTOR = 1.25
PATIENCE = 3
FIRST_STEPS = 5  # of this start: they compile, capture and allocate


class SlowRankDetector:
    """Which rank has been how much slower for PATIENCE windows in a row; the same on every rank. Knows no clocks."""

    def __init__(self, world: int):
        self.in_a_row = [0] * world

    def window(self, times_s: list[float]) -> dict[int, float]:
        """times_s: of each rank in this window. Returns rank -> factor of those that are now found to be slow."""
        found = {}
        for rank, own in enumerate(times_s):
            others = statistics.median(times_s[:rank] + times_s[rank + 1 :])
            slow = own > SLOW_FACTOR * others > 0
            self.in_a_row[rank] = self.in_a_row[rank] + 1 if slow else 0
            if self.in_a_row[rank] == PATIENCE:
                found[rank] = own / others
        return found


class SlowRanks:
    """Measures this rank and compares all, which call the same at the same points. `engine`: its `module.model.norm`
    follows the last layer; `group`: a gloo group of all ranks, None if there is only one."""

    def __init__(self, engine: Any, group: Any, cuda_graphs: bool):
        self.group, self.on_gpu = group, engine.device.type == "cuda"
        self.on = group is not None and engine.zero_optimization_stage() < 3 and not cuda_graphs
        self._start: Any = None
        self._pairs: list[tuple[Any, Any]] = []
        self._steps = 0
        if self.on:
            self._detector = SlowRankDetector(dist.get_world_size(group))
            engine.module.model.norm.register_forward_pre_hook(self._layers_done)

    def begin(self) -> None:
        """A micro-batch of training begins."""
        if self.on:
            self._start = self._now()

    def _layers_done(self, *arguments: object) -> None:
        if self._start is not None:  # else an evaluation
            self._pairs.append((self._start, self._now()))
            self._start = None

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def step(self, step: int) -> None:
        """A step was done; at the end of a window, warn of ranks that are slow."""
        if not self.on:
            return
        self._steps += 1
        if self._steps <= FIRST_STEPS:
            self._pairs.clear()
        elif (self._steps - FIRST_STEPS) % WINDOW_STEPS == 0:
            times: list[Any] = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(times, self._median_s(), group=self.group)
            if None in times:
                return  # a GPU has not come so far yet
            for rank, factor in self._detector.window(times).items():
                logger.warning(
                    f"rank {rank} is slow: the forward of a micro-batch takes it {times[rank] * 1e3:.1f} ms, "
                    f"{factor:.2f} times the {times[rank] / factor * 1e3:.1f} ms of the others, for "
                    f"{PATIENCE * WINDOW_STEPS} steps to step {step}; all ranks wait for it. Look at its "
                    "GPU's clocks and temperature, and at what else runs there"
                )

    def _median_s(self) -> float | None:
        """Over this window's micro-batches, in seconds; None: none of them has passed."""
        pairs, self._pairs = self._pairs, []
        if not self.on_gpu:
            times = [end - start for start, end in pairs]
        else:
            times = [start.elapsed_time(end) / 1e3 for start, end in pairs if end.query()]
        return statistics.median(times) if times else None
