"""Choose the checkpoint to resume from or to roll back to, and load it into the training engine.

The hash of every file is checked before loading, because DeepSpeed does not detect flipped bits.
"""

from __future__ import annotations

import logging
import random
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from model import conversion
from model.fp8.precision import Precision
from model.fp8.state import load_fp8_state
from train.checkpoint.files import (
    RunState,
    committed,
    find_start,
    parse_step,
    rank_file,
    read_state,
    record_rollback,
    remove_unfinished,
    step_folders,
)
from train.checkpoint.reshard import (
    load_resharded,
    load_shard,
    merge_fp8_states,
    model_file,
    read_partitioned_weights,
)
from train.checkpoint.resume import ALLOW_KEY, is_partitioned_differently, same_precision
from train.data.stream import SampleStream
from train.engine.process_group import call_on_rank_0
from train.engine.zero import preserve_settings, replace_loader, unlink_moments
from train.files import escape_glob_path, unused_backup_path
from train.monitor.spikes import Health, Spike, samples_record, samples_text
from train.record.metrics import MetricsLogger

logger = logging.getLogger(__name__)

# Keys in the section "precision" that determine which modules have FP8 state, and its shape and range.
FP8_STATE_KEYS = "compute recipe fp8_format amax_history_len reduce_amax bf16_modules".split()
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

# ---------------------------------------------------------------- choose


def choose_checkpoint(root: Path, setting: str) -> Path | None:
    """Choose and verify the checkpoint to resume from on rank 0, and return its path on all ranks.

    Collective: all ranks must call this function.

    Args:
        root: checkpoints folder of the run.
        setting: "never", "auto" for the newest intact checkpoint, or the path of a checkpoint. A checkpoint of another
            run is only used until this run has saved its own checkpoint.

    Returns:
        The checkpoint, or None for a new run.

    Raises:
        CheckpointError: on all ranks, if the given checkpoint is damaged or belongs to another run, or if all
            checkpoints in `root` are damaged.
    """

    return call_on_rank_0(lambda: find_start(root, setting))


def move_later_checkpoints(root: Path, after_step: int) -> Path | None:
    """Move the checkpoints after a training step to a backup folder next to `root`, and delete incomplete saves.

    A later resume with "auto" ignores the moved checkpoints.

    Args:
        root: checkpoints folder of the run.
        after_step: checkpoints with a larger step are moved.

    Returns:
        The backup folder, or None if no checkpoint was moved.
    """
    root = root.resolve()  # may be a link to another disk, and a rename does not work between disks
    for path in step_folders(root):
        remove_unfinished(path)
    newer = [p for p in committed(root) if parse_step(p) > after_step]
    if not newer:
        return None
    backup = unused_backup_path(root)
    backup.mkdir()
    for path in newer:
        path.rename(backup / path.name)
    return backup


# ---------------------------------------------------------------- load


def load_checkpoint(engine: Any, path: Path, precision: Precision, reshard: bool = False) -> None:
    """Load weights, optimizer state, RNG states and FP8 state from a checkpoint.

    Collective: all ranks must call this function.

    With the same number of ranks and ZeRO stage, the state is restored bit by bit. Otherwise, or with `reshard`, the
    weights, optimizer state and FP8 state are resharded, and additional ranks keep their current RNG states. The
    optimizer settings and the gradient clipping of the engine do not change. FP8 state is only loaded if it fits
    `precision` (`fits_fp8_state`).

    Args:
        path: the checkpoint.
        reshard: set to True if the files may be partitioned differently despite the same number of ranks and ZeRO stage
            (`is_partitioned_differently` in train/checkpoint/resume.py).

    Raises:
        CheckpointError: if a file contains a type that could execute code or does not have DeepSpeed's format, the
            files do not contain the whole model, or the number of ranks changed and their FP8 states differ.
    """
    saved, world, rank = read_state(path), dist.get_world_size(), dist.get_rank()
    if not reshard and (saved.world_size, saved.zero_stage) == (world, engine.zero_optimization_stage()):
        replace_loader(engine, load_shard)
        with preserve_settings(engine), escape_glob_path(path.parent) as root:
            loaded, _ = engine.load_checkpoint(str(root), tag=path.name)
        assert loaded is not None, f"DeepSpeed found no checkpoint in {path}"
    else:
        load_resharded(engine, path, saved)
    unlink_moments(engine)
    keeps_fp8, fp8 = fits_fp8_state(saved, precision), None
    if keeps_fp8 and saved.world_size != world:
        fp8 = merge_fp8_states(path, saved.world_size)
    if rank < saved.world_size:
        rank_state = load_shard(path / rank_file(rank))
        fp8 = fp8 or rank_state["fp8"]
        set_random_state(rank_state)
    if keeps_fp8:
        load_fp8_state(engine.module, precision, fp8 or {})


def fits_fp8_state(saved: RunState, precision: Precision) -> bool:
    """Return whether the FP8 state in a checkpoint can be used with the given precision."""
    return not saved.precision or same_precision(saved.precision, vars(precision.config), FP8_STATE_KEYS)


def set_random_state(rank_state: dict[str, Any]) -> None:
    torch.set_rng_state(rank_state["torch_rng"])
    if rank_state["cuda_rng"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(rank_state["cuda_rng"])
    version, internal, gauss = rank_state["python_rng"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = rank_state["numpy_rng"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


def read_hf_weights(path: Path, model_config: Any) -> dict[str, torch.Tensor]:
    """Load the weights of a checkpoint into CPU memory, and return them keyed by Hugging Face name.

    The weights have the training dtype, or float32 with ZeRO 3.

    Raises:
        CheckpointError: if the weights are missing or cannot be read.
    """
    weights, tied = read_weights(path), model_config.tie_word_embeddings
    weights = {k: v for k, v in weights.items() if not (tied and k == "lm_head.weight")}
    return conversion.to_hf(weights, model_config)


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Load the weights of a checkpoint into CPU memory, and return them keyed by parameter name.

    The weights have the training dtype, or float32 with ZeRO 3.

    Raises:
        CheckpointError: if the weights are missing or cannot be read.
    """
    if (state := read_state(path)).zero_stage == 3:
        return read_partitioned_weights(path, state)
    return load_shard(model_file(path, state))["module"]


# ---------------------------------------------------------------- roll back

# Skipped samples are stored in the run state of each checkpoint, as ranges of positions in the global sample order.
# Until the next save, they are also stored in rollback.json next to the checkpoints, in case the run crashes.


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
            f"{path.name} did not prevent new spikes. To lower the learning rate, stop the run and restart it with "
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
