"""Numbers that go wrong: steps that are not finite, and spikes of the loss or of the gradient norm.

    non-finite on any rank    the step is skipped on all: weights, optimizer and FP8 state stay as they were, bit by bit
    spike                     flagged at the next look, which is when the loop waits for the GPU anyway

DeepSpeed's optimizer decides that a step is skipped, by the norm of the reduced gradients (train/engine/zero.py gives
that check to the one that has none; MicroStep makes a gradient NaN where the loss is not finite). Here that is seen by
the engine's count, and the FP8 state put back; train/loop.py tells of it, and ends the run when they are too many.

What is known of recent steps is saved with the run: a resumed one judges as one that was not interrupted, and its first
line of metrics has the mean loss of the whole interval, also of the steps before the stop.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from model.fp8.precision import Precision
from model.fp8.state import fp8_state, reset_fp8_state
from train.data.stream import SampleStream
from train.guard.fp8_alarms import FP8Alarms

logger = logging.getLogger(__name__)

# Of the spread below, a threshold of 10 leaves 600 clean steps of a 0.4B model without an alarm by a factor of 1.3 in
# the gradient norm and 5 in the loss (tests/reliability/test_numbers.py), and is a loss 20% over its median.
SPREAD_OF_MAD = 1.4826  # standard deviations of a normal distribution in its median absolute deviation
SMALLEST_SPREAD = 0.02  # of the median: a flat stretch must not make noise an alarm
LONGEST_WAIT = 1000  # steps that are kept on the device between two looks
# Of the run, whatever else is due: what a step computes may depend on it.
MEND_STEPS = 10
NAMED_WINDOWS = 8  # of each source, in a message; metrics.jsonl has all


@dataclass(frozen=True)
class Spike:
    """A step whose loss or gradient norm is far above those before it."""

    step: int
    first_sample: int
    previous_sample: (
        int  # first sample of the last step before it that changed weights; its own where not known
    )
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
        """(median, threshold) if `value` is above the threshold; then remembers it. Values that are not finite belong
        to skipped steps: they are neither."""
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
    """Watches the steps of a run. Nothing but `look` and `mended` waits for the GPU."""

    def __init__(self, engine: Any, precision: Precision, window: int, factor: float) -> None:
        self.engine, self.precision = engine, precision
        self.detectors = {"loss": SpikeDetector(window, factor), "grad_norm": SpikeDetector(window, factor)}
        self._live: list[torch.Tensor] = []
        self._kept: list[torch.Tensor] = []
        self._histories: list[torch.Tensor] = []  # of the live ones
        self._mended = torch.zeros((), dtype=torch.int64, device=precision.device)
        self.fp8_alarms = FP8Alarms()
        self.load_state_dict({})

    def state_dict(self) -> dict[str, Any]:
        """JSON values; call it after `look`."""
        return {
            "skipped_in_a_row": self.skipped_in_a_row,
            "spikes": self.spikes,
            "interval": self._interval,
            "data_weights": self._data_weights,
            "fp8_alarms": self.fp8_alarms.state_dict(),
            **{what: list(detector.recent) for what, detector in self.detectors.items()},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """What `state_dict` gave; {} of a run that begins. Steps that were not looked at are forgotten."""
        # step, its first sample, weights of the sources, of this rank [2]: loss and share of tokens with a label, norm
        self._steps: list[tuple[int, int, dict[str, float], torch.Tensor, torch.Tensor]] = []
        self._previous_sample: int | None = None
        self._data_weights: dict[str, float] | None = saved.get("data_weights")
        self.skipped = self.engine.skipped_steps  # DeepSpeed's count, which its checkpoints keep
        self.skipped_in_a_row = saved.get("skipped_in_a_row", 0)
        self.spikes = saved.get("spikes", 0)
        # of the steps looked at since the last line of metrics: loss times tokens with a label, and these tokens
        self._interval: list[float] = list(saved.get("interval", [0.0, 0.0]))
        self.fp8_alarms.load_state_dict(saved.get("fp8_alarms", {}))
        for what, detector in self.detectors.items():
            detector.recent.clear()
            detector.recent.extend(saved.get(what, []))

    def before_step(self) -> None:
        """Keep the FP8 state. An amax of inf would stop its scale from moving for as long as it is in the history
        (16 passes by default), and one that is finite but enormous, of a step that is about to overflow, would make
        everything after it underflow as long."""
        if not self._live:  # allocated in the modules' first forward; from then on it stays where it is
            state = fp8_state(self.engine.module, self.precision)
            self._live = list(state.values())
            self._kept = [torch.empty_like(t) for t in self._live]
            self._histories = [t for key, t in state.items() if key.endswith(".amax_history")]
        if self._live:
            torch._foreach_copy_(self._kept, self._live)

    @torch.no_grad()
    def after_step(
        self,
        step: int,
        first_sample: int,
        data_weights: dict[str, float],
        loss: torch.Tensor,
        share: torch.Tensor | None,
    ) -> bool:
        """Record a step. All ranks get the same answer. If the step was skipped, restore the FP8 state from before it.

        Args:
            data_weights: of the sources in the mixture (SampleStream.weights_at).
            loss: scalar, the mean over this rank's micro-batches.
            share: scalar, the share of tokens that have a label; None: all have one.

        Returns:
            Whether the step was skipped.
        """
        skipped = self.engine.skipped_steps > self.skipped
        self.skipped = self.engine.skipped_steps
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if skipped:
            if self._live:
                torch._foreach_copy_(self._live, self._kept)
            else:
                reset_fp8_state(self.engine.module, self.precision)
        if step % MEND_STEPS == 0 and self._histories:
            self._mend_histories()
        if skipped:
            return True
        norm = self.engine.get_global_grad_norm()
        of_rank = torch.stack([loss, torch.ones_like(loss) if share is None else share])
        # a copy: what DeepSpeed hands out is its own
        norm = torch.as_tensor(math.nan if norm is None else norm, dtype=torch.float32).clone()
        self._steps.append((step, first_sample, data_weights, of_rank, norm))
        return False

    def full(self) -> bool:
        """Whether so many steps wait to be looked at that it should not be left to the next log line."""
        return len(self._steps) >= LONGEST_WAIT

    def look(self, tokens: int) -> list[Spike]:
        """Return the spikes among the steps since the last call, each of `tokens` tokens over all ranks.

        Collective: all ranks must call it, and all get the same result. A step whose sources have other weights than
        those of the step before starts a new window: the loss of other data says nothing about this one.
        """
        if not self._steps:
            return []
        steps, first_samples, data_weights, of_rank, norms_alone = zip(*self._steps, strict=True)
        values = torch.cat([torch.stack(of_rank), torch.stack(norms_alone).to(of_rank[0])[:, None]], 1)
        # In float64 the sum has the same bits in whatever order the ranks are added, which depends on how many steps
        # are looked at together. The norms, too, though each rank has the same: all must judge by the same bits.
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
        """Mean loss over all tokens of the steps since the last call that were looked at and not skipped; NaN without
        any."""
        loss, tokens = self._interval
        self._interval = [0.0, 0.0]
        return loss / tokens if tokens else math.nan

    def end_alarms(self, step: int) -> dict[str, Any]:
        """After a step without a look at FP8: where none follows, all its alarms are over. For
        metrics.jsonl, "fp8_alarms" (FP8Alarms.judge); {} without alarms."""
        if self.precision.health_steps or not self.fp8_alarms.active:
            return {}
        of = "health_steps 0" if self.precision.fp8 else f"compute {self.precision.config.compute}"
        logger.info(
            f"step {step}: with precision.{of} nothing looks at FP8 any more, and its alarms are over"
        )
        return self.fp8_alarms.judge(step, {})

    def _mend_histories(self) -> None:
        """Take amaxes that are not finite out of the histories. FP8 casts saturate, so that an inf need not make a
        gradient infinite and its step need not be skipped."""
        amaxes = torch.cat([history.flatten() for history in self._histories])
        bad = ~amaxes.isfinite()
        self._mended += bad.sum()
        right = amaxes.masked_fill(bad, 0.0).split([history.numel() for history in self._histories])
        torch._foreach_copy_(
            self._histories, [r.view_as(h) for r, h in zip(right, self._histories, strict=True)]
        )

    def mended(self) -> int:
        """How many amaxes were taken out of the histories since the last call. Waits for the GPU."""
        count = int(self._mended)
        self._mended.zero_()
        return count


def ranks_without_finite_loss(loss: torch.Tensor) -> dict[int, float]:
    """Rank -> its loss, of those whose loss (scalar) is not finite; every rank calls it."""
    every = [torch.zeros_like(loss) for _ in range(dist.get_world_size())]
    dist.all_gather(every, loss)
    losses = torch.stack(every).tolist()
    return {rank: value for rank, value in enumerate(losses) if not math.isfinite(value)}


def samples_record(stream: SampleStream, first: int, count: int) -> dict[str, Any]:
    """For metrics.jsonl: which samples these are, as positions in the global order and as windows of each source."""
    windows: dict[str, list[int]] = {}
    for source, window in stream.sample_ids(first, count):
        windows.setdefault(stream.sources[source].name, []).append(window)
    return {"first_sample": first, "samples": count, "windows": windows}


def samples_text(record: dict[str, Any]) -> str:
    """The same in a message: "samples 64 to 71 (text: windows 5, 17, ... of 8)"."""
    first, last = record["first_sample"], record["first_sample"] + record["samples"] - 1
    sources = []
    for name, windows in record["windows"].items():
        more = f", ... ({len(windows)} in all)" if len(windows) > NAMED_WINDOWS else ""
        sources.append(f"{name}: windows {', '.join(map(str, windows[:NAMED_WINDOWS]))}{more}")
    return f"samples {first} to {last} ({'; '.join(sources)})"
