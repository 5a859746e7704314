"""Roll back after a loss spike (on_spike rollback): load the last checkpoint and skip the samples around the spike.

Skipped samples are stored in the run state of each checkpoint, as ranges of positions in the global sample order. Until
the next save, they are also stored in rollback.json next to the checkpoints, in case the run crashes.
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
from train.monitor.spikes import Health, Spike, samples_record, samples_text
from train.record.metrics import MetricsLogger

logger = logging.getLogger(__name__)

# Maximum number of rollbacks to the same checkpoint, including restarts. Single samples do not cause more spikes.
MAX_ROLLBACKS = 3
# Fields of the run state that a rollback does not restore from the checkpoint.
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
    """Load the newest intact checkpoint and skip the samples that led to spikes.

    Collective: all ranks must call this function.

    The run skips the samples from the step before the first spike to the last spike. The preceding step is included,
    because its weight update is as likely to cause a spike as the samples of the step in which the loss spikes.

    Args:
        spikes: the loss spikes, oldest first.
        samples: number of samples per step.
        root: checkpoints folder of the run.

    Returns:
        Whether the run was rolled back. If not, a warning with the reason is logged.

    Raises:
        CheckpointError: if all checkpoints are damaged.
        OSError: if rollback.json cannot be written.
    """
    path = choose_checkpoint(root, "auto")
    saved = read_state(path) if path else None
    if path is None or saved is None:
        logger.warning(
            "on_spike rollback: the run continues without a rollback, because there is no checkpoint yet"
        )
        return False
    # after such a change, positions refer to other samples, or the FP8 state does not fit the modules
    if saved.data_fingerprint != state.data_fingerprint or not fits_fp8_state(saved, precision):
        logger.warning(
            f"on_spike rollback: the run continues without a rollback, because {path.name} was saved before the sample "
            "order or the precision changed"
        )
        return False
    if len(state.skipped_samples) - len(saved.skipped_samples) >= MAX_ROLLBACKS:
        rate = state.train_config["learning_rate"] / 2
        logger.warning(
            f"on_spike rollback: the run continues without a rollback, because {MAX_ROLLBACKS} rollbacks to "
            f"{path.name} did not prevent new spikes. To lower the learning rate, stop the run and start it again with "
            f"--resume_from_checkpoint {shlex.quote(str(path))} --learning_rate {rate:g} --{ALLOW_KEY} learning_rate"
        )
        return False
    first = max(spikes[0].previous_sample, saved.consumed_samples)
    end = max(spike.first_sample for spike in spikes) + samples
    ranges = [*state.skipped_samples, [first, end]]
    if dist.get_rank() == 0:
        move_later_checkpoints(root, saved.step)  # the checkpoints after `path` are damaged
        record_rollback(path, ranges)
    metrics.rewind(saved.step)
    load_checkpoint(engine, path, precision, is_partitioned_differently(saved, state))
    vars(state).update({key: value for key, value in vars(saved).items() if key not in KEPT_FIELDS})
    state.skipped_samples, state.evaluation_due = ranges, False
    stream.seek(state.consumed_samples, state.sources)
    health.load_state_dict(saved.health)
    record = samples_record(stream, first, end - first)
    logger.info(
        f"on_spike rollback: returned to step {saved.step} ({path.name}); skipping {samples_text(record)}"
    )
    record = {"from_step": spikes[-1].step, **record}
    metrics.log({"step": saved.step, "tokens": saved.consumed_tokens, "rollback": record})
    return True
