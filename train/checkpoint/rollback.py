"""on_spike rollback: back to the last checkpoint before a spike, and on from there without the samples that led to it.

The samples left out are ranges of positions in the global order, kept in the state of each checkpoint. Until the next
of these, `rollback.json` beside them has what is left out after the one that the run went back to, for a start after a
crash.
"""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from model.fp8.precision import Precision
from train.checkpoint.files import (
    ROLLBACK,
    CheckpointError,
    RunState,
    committed,
    note_rollback,
    read_signed,
    read_state,
    rolled_back,
    step_of,
)
from train.checkpoint.load import choose_checkpoint, has_fp8_state_of, load_checkpoint, set_aside
from train.checkpoint.resume import at_half_the_rate, is_cut_otherwise
from train.data.order import count_passed_over
from train.data.stream import SampleStream
from train.engine.distributed import from_rank_0
from train.guard.health import Health, Spike, samples_record, samples_text
from train.record.metrics import MetricsLogger

logger = logging.getLogger(__name__)
# To one checkpoint, in all starts with the same changes since then (allow_changes_on_resume). What spikes that often is
# not the fault of some samples; with another learning rate it may be.
MOST_ROLLBACKS = 3
# What of a run's state a rollback leaves as it is.
OF_THIS_START = (
    "train_config",
    "world_size",
    "zero_stage",
    "model_config",
    "changes",
    "began_at",
    "precision",
    "escalations",  # the modules that run are at these levels
)


def told_besides(state: RunState, saved: RunState) -> list[str]:
    """For the log: that steps of another size than those of `saved` pass over more samples than were left out."""
    now, before = (s.train_config["train_batch_size_tokens"] for s in (state, saved))
    samples = now // state.train_config["max_seq_length"]
    besides = count_passed_over(state.consumed_samples, samples, state.skipped_samples)
    if not besides or now == before:
        return []
    return [
        f"on_spike rollback: {besides} samples more than it left out are not trained on: in front of those they fill "
        f"no step of {samples}; with train_batch_size_tokens {before} in place of {now} they would"
    ]


def left_out_since(path: Path, saved: RunState) -> list[list[int]]:
    """The samples that a run leaves out which goes on from the checkpoint `path` (its state: `saved`): those it had
    left out when it was saved, and those of rollbacks to it. Every rank calls it, with the same result. Raises
    CheckpointError: what is noted of a rollback is damaged."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            noted = rolled_back(path)
            found = [saved.skipped_samples if noted is None else noted]
        except CheckpointError as error:
            found = [error]
    dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], CheckpointError):
        raise found[0]
    return found[0]


def of_other_starts(path: Path, saved: RunState, changes: list[dict[str, Any]]) -> int:
    """How many rollbacks to the checkpoint `path` (its state: `saved`) are of starts with other `changes` since then
    than this one, by what is noted. For rank 0."""
    with contextlib.suppress(CheckpointError, OSError):
        if (ranges := rolled_back(path)) is not None:
            noted, others = [], 0
            with contextlib.suppress(CheckpointError):  # a version before this one noted neither
                noted, others = read_signed(path.parent / ROLLBACK, "changes", "of_other_starts")
            same = json.dumps(noted) == json.dumps(changes)
            return others if same else len(ranges) - len(saved.skipped_samples)
    return 0


@dataclass
class Rollback:
    """rollback = Rollback(root of the checkpoints, ...); rollback.after(spikes, samples) on every rank."""

    root: Path
    engine: Any
    precision: Precision
    state: RunState
    health: Health
    metrics: MetricsLogger
    stream: SampleStream
    advised: bool = False

    def after(self, spikes: list[Spike], samples: int) -> bool:
        """Go back to the last checkpoint; return False and log the reason where that cannot be done.

        The run then skips the samples from the step before the first spike to the last spike. The update of that step
        causes a spike of the loss as often as the spike's own samples do.

        Args:
            samples: of a step.

        Raises:
            CheckpointError: there are checkpoints, and none of them verifies.
        """
        path = choose_checkpoint(self.root, "auto")
        if path is None:
            logger.info("on_spike rollback: there is no checkpoint yet, the run goes on")
            return False
        saved = read_state(path)
        # its positions are of another order of samples
        if saved.data_fingerprint != self.state.data_fingerprint:
            logger.info(
                f"on_spike rollback: {path.name} was saved before the order of samples changed "
                "(allow_changes_on_resume), the run goes on"
            )
            return False
        if not has_fp8_state_of(saved, self.precision):
            logger.info(
                f"on_spike rollback: {path.name} was saved before the precision changed (precision.schedule, "
                "allow_changes_on_resume), the run goes on"
            )
            return False
        # each rollback to it left out a range more than it has itself, also before a crash, by what is noted
        others = from_rank_0(lambda: of_other_starts(path, saved, self._changes(saved)))
        if len(self.state.skipped_samples) - len(saved.skipped_samples) - others >= MOST_ROLLBACKS:
            logger.info(
                f"on_spike rollback: {MOST_ROLLBACKS} times from {path.name} were of no use, the run goes on as it is; "
                "a lower learning_rate or max_grad_norm may be: stop this run, and start it again with "
                + at_half_the_rate(path, self.state.train_config["learning_rate"])
            )
            return False
        first = max(spikes[0].previous_sample, saved.consumed_samples)
        end = max(spike.first_sample for spike in spikes) + samples
        self._load(path, saved, [*self.state.skipped_samples, [first, end]], others)
        record = samples_record(self.stream, first, end - first)
        logger.info(
            f"on_spike rollback: back to step {saved.step} ({path.name}); from here on the run leaves out "
            f"{samples_text(record)}"
        )
        back = {"from_step": spikes[-1].step, **record}
        self.metrics.log({"step": saved.step, "tokens": saved.consumed_tokens, "rollback": back})
        return True

    def advise(self, step: int) -> None:
        """Say once what there is to do about spikes, of which the first is in `step`."""
        before = [path for path in committed(self.root) if step_of(path) < step]
        if before and not self.advised:
            self.advised = True
            logger.info(
                "if the loss does not come back, stop this run and start it again from before the spike with a lower "
                "learning_rate: the same command with "
                + at_half_the_rate(before[-1], self.state.train_config["learning_rate"])
            )

    def _changes(self, saved: RunState) -> list[dict[str, Any]]:
        """What this start has otherwise than the checkpoint whose state is `saved`."""
        return self.state.changes[len(saved.changes) :]

    def _load(self, path: Path, saved: RunState, ranges: list[list[int]], others: int) -> None:
        if dist.get_rank() == 0:
            set_aside(self.root, saved.step)  # newer ones did not verify
            try:
                note_rollback(path, ranges, changes=self._changes(saved), of_other_starts=others)
            except OSError as error:
                logger.warning(
                    f"{self.root / ROLLBACK} cannot be written: {error}. A start after a crash before the "
                    "next save would take the samples that are left out"
                )
        self.metrics.rewind(saved.step)
        load_checkpoint(self.engine, path, self.precision, is_cut_otherwise(saved, self.state))
        own = {key: getattr(self.state, key) for key in OF_THIS_START}
        vars(self.state).update({**vars(saved), **own, "skipped_samples": ranges, "evaluation_due": False})
        self.health.load_state_dict(saved.health)
