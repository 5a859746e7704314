"""Detect spikes in the loss and the gradient norm from the history of recent steps.

Steps with a non-finite loss or gradient are skipped (SkipDecision in train/engine/step.py). All other steps are
recorded here without waiting for the GPU. They are judged together when the trainer has to wait for the GPU anyway.

The history is saved in checkpoints, so a resumed run makes the same decisions as an uninterrupted run. The first line
of metrics after a resume has the mean loss of the whole interval, including the steps before the stop.
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

# With these constants and a factor (spike_threshold) of 10, 600 steps of a healthy 0.4B run have no spike. The margin
# is a factor of 1.3 for the gradient norm and 5 for the loss (tests/reliability/test_numbers.py). The threshold for the
# loss is then 20% above its median.
SPREAD_OF_MAD = 1.4826  # ratio of standard deviation and median absolute deviation of a normal distribution
SMALLEST_SPREAD = (
    0.02  # minimum, as a fraction of the median, so that noise after constant values is not a spike
)
MAX_LISTED_WINDOWS = (
    8  # maximum number of windows listed per source in a message; metrics.jsonl has all of them
)


@dataclass(frozen=True)
class Spike:
    """A step whose loss or gradient norm is far above the values of recent steps."""

    step: int
    first_sample: int
    # first sample of the previous step that was not skipped, or of this step if that is unknown
    previous_sample: int
    what: str  # loss | grad_norm
    value: float
    median: float
    threshold: float

    def __str__(self) -> str:
        limits = f"median of earlier steps: {self.median:.4g}, threshold: {self.threshold:.4g}"
        return f"{self.what} {self.value:.4g} ({limits})"


def judge(recent: deque[float], value: float, factor: float) -> tuple[float, float] | None:
    """Return (median, threshold) if a value is far above the median of recent values, otherwise None.

    The threshold is median + factor * spread. The spread is 1.4826 times the median absolute deviation (Hampel, JASA
    69, 1974), but at least 2% of the median. Unlike the mean and the standard deviation, these statistics are hardly
    affected by single spikes.

    Args:
        recent: The last values, to which the value is added. Spikes are also added, so a higher level that persists is
            accepted once it fills half of the window. No spike is reported before the window is full, because gradient
            norms of several times the median are harmless at the beginning of training.
        value: The value to judge. If it is not finite, it is ignored, because it belongs to a skipped step.
        factor: The factor spike_threshold. If 0, no value is a spike.
    """
    if not math.isfinite(value):
        return None
    is_full, previous = len(recent) == recent.maxlen, list(recent)
    recent.append(value)
    if not (factor and is_full):
        return None
    median = statistics.median(previous)
    deviation = statistics.median(abs(v - median) for v in previous)
    threshold = median + factor * max(SPREAD_OF_MAD * deviation, SMALLEST_SPREAD * abs(median))
    return (median, threshold) if value > threshold else None


class Health:
    """Record of the losses and gradient norms of a run, which is searched for spikes.

    Only `find_spikes` waits for the GPU.
    """

    def __init__(self, window: int, factor: float) -> None:
        self.window, self.factor = window, factor
        self.fp8_alarms = FP8Alarms()
        self.load_state_dict({})

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-serializable values.

        Call `find_spikes` first. Steps that `find_spikes` has not examined yet are not part of the state.
        """
        return {
            "skipped_in_a_row": self.skipped_in_a_row,
            "spikes": self.spikes,
            "interval": self._interval,
            "data_weights": self._data_weights,
            "fp8_alarms": self.fp8_alarms.state_dict(),
            **{what: list(recent) for what, recent in self._recent.items()},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned, and drop all steps that `find_spikes` has not examined yet.

        For a new run, `saved` is {}.
        """
        # step, its first sample, weights of the sources, [loss, share of labelled tokens] of this rank, gradient norm
        self._steps: list[tuple[int, int, dict[str, float], torch.Tensor, torch.Tensor]] = []
        self._previous_sample: int | None = None
        self._data_weights: dict[str, float] | None = saved.get("data_weights")
        self.skipped_in_a_row = saved.get("skipped_in_a_row", 0)
        self.spikes = saved.get("spikes", 0)
        # sums over the judged steps since the last line of metrics: loss * labelled tokens, labelled tokens
        self._interval: list[float] = list(saved.get("interval", [0.0, 0.0]))
        self.fp8_alarms.load_state_dict(saved.get("fp8_alarms", {}))
        self._recent = {
            what: deque[float](saved.get(what, []), self.window) for what in ("loss", "grad_norm")
        }

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
            step: Number of the step.
            first_sample: Position of the first sample of the step in the training order.
            data_weights: Weights of the data sources in the mixture (SampleStream.weights_at).
            loss: Mean loss over the micro-batches of this rank, a scalar.
            share: Fraction of the tokens that have a label, a scalar. None if all tokens have a label.
            grad_norm: Gradient norm from the engine, a scalar tensor or float. None if unknown.
        """
        self.skipped_in_a_row = 0
        of_rank = torch.stack([loss, torch.ones_like(loss) if share is None else share])
        # copy, because the engine may write the next norm to the same tensor
        norm = torch.as_tensor(math.nan if grad_norm is None else grad_norm, dtype=torch.float32).clone()
        self._steps.append((step, first_sample, data_weights, of_rank, norm))

    def find_spikes(self, tokens: int) -> list[Spike]:
        """Return the loss and gradient-norm spikes in the steps since the last call.

        Collective: all ranks must call this method. The result is the same on all ranks.

        When the weights of the data sources change, a new window begins, because losses on different data are not
        comparable.

        Args:
            tokens: Number of tokens per step over all ranks.
        """
        if not self._steps:
            return []
        steps, first_samples, data_weights, of_rank, norms_alone = zip(*self._steps, strict=True)
        values = torch.cat([torch.stack(of_rank), torch.stack(norms_alone).to(of_rank[0])[:, None]], 1)
        # The order in which all_reduce adds the ranks depends on the number of steps judged together. In float64 the
        # sum has the same bits in any order. The norms are reduced too, so that all ranks judge the same bits.
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
                for recent in self._recent.values():
                    recent.clear()
            previous = first if self._previous_sample is None else self._previous_sample
            for what, value in (("loss", loss), ("grad_norm", norm)):
                if judged := judge(self._recent[what], value, self.factor):
                    found.append(Spike(step, first, previous, what, value, *judged))
            self._previous_sample, self._data_weights = first, weights
        self._steps.clear()
        self.spikes += len({spike.step for spike in found})
        return found

    def interval_loss(self) -> float:
        """Return the mean loss per token since the last call, or NaN if there are no new steps.

        Only steps that `find_spikes` has examined are included.
        """
        loss, tokens = self._interval
        self._interval = [0.0, 0.0]
        return loss / tokens if tokens else math.nan


def ranks_without_finite_loss(loss: torch.Tensor) -> dict[int, float]:
    """Return a dictionary from rank to loss for all ranks whose loss is not finite.

    Collective: all ranks must call this function.

    Args:
        loss: Loss of this rank, a scalar.
    """
    every = [torch.zeros_like(loss) for _ in range(dist.get_world_size())]
    dist.all_gather(every, loss)
    return {rank: float(value) for rank, value in enumerate(every) if not value.isfinite()}


def samples_record(stream: SampleStream, first: int, count: int) -> dict[str, Any]:
    """Return a metrics.jsonl entry that describes consecutive training samples.

    The entry contains the position of the first sample in the training order, the number of samples, and the index of
    each sample within its data source (the window index).
    """
    windows: dict[str, list[int]] = {}
    for source, window in stream.sample_ids(first, count):
        windows.setdefault(stream.sources[source].name, []).append(window)
    return {"first_sample": first, "samples": count, "windows": windows}


def samples_text(record: dict[str, Any]) -> str:
    """Format the result of `samples_record` as text, such as "samples 64 to 71 (text: windows 5, 17, 3)"."""
    first, last = record["first_sample"], record["first_sample"] + record["samples"] - 1
    sources = (
        f"{name}: windows {', '.join(map(str, windows[:MAX_LISTED_WINDOWS]))}"
        for name, windows in record["windows"].items()
    )
    return f"samples {first} to {last} ({'; '.join(sources)})"
