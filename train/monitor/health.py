"""Spikes of the loss and of the gradient norm, and what is known of recent steps.

Steps that are not finite are skipped (train/engine/step.py, SkipDecision). All others are recorded here without waiting
for the GPU, and judged together when the trainer waits for it anyway.

What is known is saved with the run: a resumed run judges as an uninterrupted one, and its first line of metrics has the
mean loss of the whole interval, also of the steps before the stop.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from train.data.stream import SampleStream
from train.monitor.fp8_alarms import FP8Alarms

# With the spread below, a threshold of 10 leaves 600 clean steps of a 0.4B model without an alarm by a factor of 1.3 in
# the gradient norm and 5 in the loss (tests/reliability/test_numbers.py), and is a loss 20% over its median.
SPREAD_OF_MAD = 1.4826  # standard deviations of a normal distribution in its median absolute deviation
SMALLEST_SPREAD = 0.02  # of the median: a flat stretch must not make noise an alarm
LONGEST_WAIT = 1000  # steps that are kept on the device until they are judged
NAMED_WINDOWS = 8  # of each source, in a message; metrics.jsonl has all


@dataclass(frozen=True)
class Spike:
    """A step whose loss or gradient norm is far above those before it."""

    step: int
    first_sample: int
    # first sample of the last step before it that changed weights; its own if that is not known
    previous_sample: int
    what: str  # loss | grad_norm
    value: float
    median: float
    threshold: float

    def __str__(self) -> str:
        name = {"loss": "loss", "grad_norm": "gradient norm"}[self.what]
        return f"{name} {self.value:.4g}, the median before it is {self.median:.4g}, the threshold {self.threshold:.4g}"


class SpikeDetector:
    """Judges a series by its recent values: median + factor * spread of the last `window` of them; factor 0: never.

    The spread is 1.4826 times the median absolute deviation (Hampel, JASA 69, 1974), at least 2% of the median: unlike
    mean and standard deviation neither is moved by the spikes themselves. Flagged values enter the window, too: a level
    that stays is the new normal once it fills half of it. Nothing is judged before the window is full: in its first
    steps a model learns so fast that single norms of several times the median are no sign of harm.
    """

    def __init__(self, window: int, factor: float) -> None:
        self.factor = factor
        self.recent: deque[float] = deque(maxlen=window)

    def judge(self, value: float) -> tuple[float, float] | None:
        """Return (median, threshold) if `value` is above the threshold, and remember the value. Values that are not
        finite belong to skipped steps and are ignored."""
        if not math.isfinite(value):
            return None
        found = None
        if self.factor and len(self.recent) == self.recent.maxlen:
            median = statistics.median(self.recent)
            deviation = statistics.median(abs(v - median) for v in self.recent)
            spread = max(SPREAD_OF_MAD * deviation, SMALLEST_SPREAD * abs(median))
            threshold = median + self.factor * spread
            if value > threshold:
                found = median, threshold
        self.recent.append(value)
        return found


class Health:
    """Records the steps of a run and judges them by the recent ones. Only `find_spikes` waits for the GPU."""

    def __init__(self, window: int, factor: float) -> None:
        self.detectors = {"loss": SpikeDetector(window, factor), "grad_norm": SpikeDetector(window, factor)}
        self.fp8_alarms = FP8Alarms()
        self.load_state_dict({})

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values; call it after `find_spikes`."""
        return {
            "skipped_in_a_row": self.skipped_in_a_row,
            "spikes": self.spikes,
            "interval": self._interval,
            "data_weights": self._data_weights,
            "fp8_alarms": self.fp8_alarms.state_dict(),
            **{what: list(detector.recent) for what, detector in self.detectors.items()},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load what `state_dict` returned; {} for a new run. Steps that were not judged yet are forgotten."""
        # step, its first sample, weights of the sources, of this rank [2]: loss and share of tokens with a label, norm
        self._steps: list[tuple[int, int, dict[str, float], torch.Tensor, torch.Tensor]] = []
        self._previous_sample: int | None = None
        self._data_weights: dict[str, float] | None = saved.get("data_weights")
        self.skipped_in_a_row = saved.get("skipped_in_a_row", 0)
        self.spikes = saved.get("spikes", 0)
        # of the judged steps since the last line of metrics: loss times tokens with a label, and these tokens
        self._interval: list[float] = list(saved.get("interval", [0.0, 0.0]))
        self.fp8_alarms.load_state_dict(saved.get("fp8_alarms", {}))
        for what, detector in self.detectors.items():
            detector.recent.clear()
            detector.recent.extend(saved.get(what, []))

    def record_skipped(self) -> None:
        """Record a step that was skipped."""
        self.skipped_in_a_row += 1

    def record(
        self,
        step: int,
        first_sample: int,
        data_weights: dict[str, float],
        loss: torch.Tensor,
        share: torch.Tensor | None,
        grad_norm: Any,
    ) -> None:
        """Record a step that was not skipped.

        Args:
            data_weights: of the sources in the mixture (SampleStream.weights_at).
            loss: scalar, the mean over this rank's micro-batches.
            share: scalar, the share of tokens that have a label; None: all have one.
            grad_norm: of the engine, scalar tensor or float; None: not known.
        """
        self.skipped_in_a_row = 0
        of_rank = torch.stack([loss, torch.ones_like(loss) if share is None else share])
        # a copy: the engine may write the next norm into its tensor
        norm = torch.as_tensor(math.nan if grad_norm is None else grad_norm, dtype=torch.float32).clone()
        self._steps.append((step, first_sample, data_weights, of_rank, norm))

    def is_full(self) -> bool:
        """Return whether so many steps wait that they should be judged before the next log line."""
        return len(self._steps) >= LONGEST_WAIT

    def find_spikes(self, tokens: int) -> list[Spike]:
        """Return the spikes among the steps since the last call, each of `tokens` tokens over all ranks.

        Collective: all ranks must call it, and all get the same result. A step whose sources have other weights than
        those of the step before starts a new window: the loss of other data says nothing about this one.
        """
        if not self._steps:
            return []
        steps, first_samples, data_weights, of_rank, norms_alone = zip(*self._steps, strict=True)
        values = torch.cat([torch.stack(of_rank), torch.stack(norms_alone).to(of_rank[0])[:, None]], 1)
        # In float64 the sum has the same bits in whatever order the ranks are added, which depends on how many steps
        # are judged together. The norms, too, though each rank has the same: all must judge by the same bits.
        values = values.double()
        dist.all_reduce(values)
        means = values / dist.get_world_size()
        losses, norms = (means[:, 0] / means[:, 1]).tolist(), means[:, 2].tolist()
        for loss, share in means[:, :2].tolist():
            self._interval[0] += loss * tokens
            self._interval[1] += share * tokens
        found = []
        for step, first, weights, loss, norm in zip(
            steps, first_samples, data_weights, losses, norms, strict=True
        ):
            if self._data_weights not in (None, weights):
                for detector in self.detectors.values():
                    detector.recent.clear()
            previous = first if self._previous_sample is None else self._previous_sample
            for what, value in (("loss", loss), ("grad_norm", norm)):
                judged = self.detectors[what].judge(value)
                if judged:
                    found.append(Spike(step, first, previous, what, value, *judged))
            self._previous_sample, self._data_weights = first, weights
        self._steps.clear()
        self.spikes += len({spike.step for spike in found})
        return found

    def interval_loss(self) -> float:
        """Return the mean loss over all tokens of the judged steps since the last call; NaN without any."""
        loss, tokens = self._interval
        self._interval = [0.0, 0.0]
        return loss / tokens if tokens else math.nan


def ranks_without_finite_loss(loss: torch.Tensor) -> dict[int, float]:
    """Return rank -> loss of the ranks whose loss (scalar) is not finite. Collective."""
    every = [torch.zeros_like(loss) for _ in range(dist.get_world_size())]
    dist.all_gather(every, loss)
    losses = torch.stack(every).tolist()
    return {rank: value for rank, value in enumerate(losses) if not math.isfinite(value)}


def samples_record(stream: SampleStream, first: int, count: int) -> dict[str, Any]:
    """Return samples for metrics.jsonl, as positions in the global order and as windows of each source."""
    windows: dict[str, list[int]] = {}
    for source, window in stream.sample_ids(first, count):
        windows.setdefault(stream.sources[source].name, []).append(window)
    return {"first_sample": first, "samples": count, "windows": windows}


def samples_text(record: dict[str, Any]) -> str:
    """Return the same for a message: "samples 64 to 71 (text: windows 5, 17, ... of 8)"."""
    first, last = record["first_sample"], record["first_sample"] + record["samples"] - 1
    sources = []
    for name, windows in record["windows"].items():
        more = f", ... ({len(windows)} in all)" if len(windows) > NAMED_WINDOWS else ""
        sources.append(f"{name}: windows {', '.join(map(str, windows[:NAMED_WINDOWS]))}{more}")
    return f"samples {first} to {last} ({'; '.join(sources)})"
