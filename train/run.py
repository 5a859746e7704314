"""What the loop works on: built by train/train.py, used by train/loop.py and train/evaluation.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.fp8.precision import Precision
from train.checkpoint.files import RunState, name_of
from train.checkpoint.save import Saver
from train.config.arguments import TrainingArguments
from train.data.stream import SampleStream
from train.engine.step import MicroStep
from train.guard.signals import StopVote
from train.guard.watchdog import Watchdog
from train.metrics import MetricsLogger


@dataclass
class Run:
    """A training run, from its resolved arguments to its last step."""

    arguments: TrainingArguments  # resolved
    output_dir: Path
    engine: Any  # deepspeed.DeepSpeedEngine
    micro_step: MicroStep
    precision: Precision
    train_stream: SampleStream
    eval_stream: SampleStream
    metrics: MetricsLogger
    state: RunState
    saver: Saver
    flops_per_token: float
    stop_vote: StopVote
    watchdog: Watchdog

    def log(self, values: dict[str, Any]) -> None:
        """Metrics of this step."""
        self.metrics.log({"step": self.state.step, "tokens": self.state.consumed_tokens, **values})

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint of this step, None with save_strategy no."""
        if self.arguments.save_strategy == "no":
            return None
        return self.output_dir / "checkpoints" / name_of(self.state.step)
