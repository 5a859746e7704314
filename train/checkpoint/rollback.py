"""Roll back after a spike (on_spike rollback): load the last checkpoint and skip the samples that led to the spike.

The skipped samples are ranges of positions in the order of samples, stored in the run state of each checkpoint. Until
the next save they are in `rollback.json` beside the checkpoints, in case of a crash.
"""

from __future__ import annotations

import logging
import shlex
from pathlib import Path
from typing import Any

import torch.distributed as dist

from model.fp8.precision import Precision
from train.checkpoint.files import RunState, read_state, record_rollback
from train.checkpoint.load import choose_checkpoint, fits_fp8_state, load_checkpoint, move_later_checkpoints
from train.checkpoint.resume import ALLOW_KEY, is_partitioned_differently
from train.data.stream import SampleStream
from train.monitor.health import Health, Spike, samples_record, samples_text
from train.record.metrics import MetricsLogger

logger = logging.getLogger(__name__)

MAX_ROLLBACKS = (
    3  # to one checkpoint, including restarts: after that many spikes, single samples are not the cause
)
# Fields of the run state that a rollback keeps.
KEPT_FIELDS = (
    "train_config",
    "world_size",
    "zero_stage",
    "model_config",
    "changes",
    "began_at",
    "precision",
    "escalations",
    "evaluation_due",
)


def roll_back(
    spikes: list[Spike],
    samples: int,
    *,
    root: Path,
    engine: Any,
    precision: Precision,
    state: RunState,
    health: Health,
    metrics: MetricsLogger,
    stream: SampleStream,
) -> bool:
    """Load the newest good checkpoint under `root` into `engine` and `state`. Collective.

    The run then skips the samples from the step before the first spike to the last spike. The step before is included
    because its update causes a spike of the loss as often as the samples of the spike itself.

    Args:
        samples: number of samples per step.

    Returns:
        Whether the run was rolled back. If not, the reason is logged as a warning.

    Raises:
        CheckpointError: there are checkpoints, but none is good.
        OSError: rollback.json cannot be written.
    """
    path = choose_checkpoint(root, "auto")
    saved = read_state(path) if path else None
    if path is None or saved is None:
        logger.warning("on_spike rollback: there is no checkpoint yet; the run continues")
        return False
    # otherwise positions refer to other samples, or the modules have no use for the FP8 state
    if saved.data_fingerprint != state.data_fingerprint or not fits_fp8_state(saved, precision):
        logger.warning(
            f"on_spike rollback: {path.name} was saved before the order of samples or the precision changed; the run "
            "continues"
        )
        return False
    if len(state.skipped_samples) - len(saved.skipped_samples) >= MAX_ROLLBACKS:
        rate = state.train_config["learning_rate"] / 2
        logger.warning(
            f"on_spike rollback: {MAX_ROLLBACKS} rollbacks to {path.name} did not help; the run continues. To "
            f"lower the learning rate, stop the run and start it again with --resume_from_checkpoint "
            f"{shlex.quote(str(path))} --learning_rate {rate:g} --{ALLOW_KEY} learning_rate"
        )
        return False
    first = max(spikes[0].previous_sample, saved.consumed_samples)
    end = max(spike.first_sample for spike in spikes) + samples
    ranges = [*state.skipped_samples, [first, end]]
    if dist.get_rank() == 0:
        move_later_checkpoints(root, saved.step)  # checkpoints after `path` are damaged
        record_rollback(path, ranges)
    metrics.rewind(saved.step)
    load_checkpoint(engine, path, precision, is_partitioned_differently(saved, state))
    vars(state).update({key: value for key, value in vars(saved).items() if key not in KEPT_FIELDS})
    state.skipped_samples, state.evaluation_due = ranges, False
    health.load_state_dict(saved.health)
    record = samples_record(stream, first, end - first)
    logger.info(
        f"on_spike rollback: back to step {saved.step} ({path.name}); the run skips {samples_text(record)}"
    )
    record = {"from_step": spikes[-1].step, **record}
    metrics.log({"step": saved.step, "tokens": saved.consumed_tokens, "rollback": record})
    return True
