"""Choose and load checkpoints. Every file's hash is checked first: DeepSpeed loads flipped bits without an error."""

from __future__ import annotations

import contextlib
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from model import conversion
from model.fp8.precision import Precision
from model.fp8.state import load_fp8_state
from train.checkpoint.files import (
    MANIFEST,
    ROLLBACK,
    CheckpointError,
    RunState,
    branch_at,
    check_given,
    committed,
    identity,
    newest_good,
    rank_file,
    read_state,
    remove,
    rolled_back,
    step_folders,
    step_of,
)
from train.checkpoint.reshard import (
    fp8_of_all_ranks,
    load_resharded,
    load_shard,
    model_file,
    read_partitioned_weights,
)
from train.config.differences import same_precision
from train.engine.distributed import from_rank_0
from train.engine.zero import forget_moments, own_settings, use_loader
from train.files import discarded_name, may_pass, without_patterns

logger = logging.getLogger(__name__)
# Keys of the section "precision" that decide which modules have FP8 state, of which shape and for which range.
FP8_STATE_OF = "compute recipe fp8_format amax_history_len reduce_amax bf16_modules".split()

# ---------------------------------------------------------------- choose


def choose_checkpoint(root: Path, setting: str) -> Path | None:
    """Return the checkpoint to resume from, the same on every rank: rank 0 chooses and verifies. Collective.

    Args:
        setting: "never" -> None; "auto" -> the newest good one, or None; else a path. A checkpoint of another run
            counts only until this run has some of its own.

    Raises:
        CheckpointError, on all ranks: the given path is not good, or of another run than those in `root`; none in
            `root` is good; a rank does not see what rank 0 chose.
    """
    path = from_rank_0(lambda: _choose_on_rank_0(root, setting))
    if path is None:
        return None
    seen: str | None = None
    with contextlib.suppress(OSError):
        seen = identity(path)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, seen)
    if blind := [rank for rank, found in enumerate(every) if found is None or found != every[0]]:
        raise CheckpointError(
            f"ranks {blind} do not see the checkpoint {path} that rank 0 sees; output_dir must be a folder that all "
            "nodes share",
            code="not_shared",
            key=str(path),
        )
    return path


def _choose_on_rank_0(root: Path, setting: str) -> Path | None:
    try:
        if setting == "never":
            return None
        if setting == "auto":
            return newest_good(root)
        path = Path(setting)
        if branch_at(root, path) and (own := newest_good(root)):
            logger.info(
                f"this run began at {path} and resumes from its own {own.name}; to begin there again choose another "
                "output_dir"
            )
            return own
        check_given(path, root)
        return path
    except OSError as error:
        refusal = CheckpointError(str(error))
        refusal.may_pass = may_pass(error)
        raise refusal from error


def move_later_checkpoints(root: Path, after_step: int) -> Path | None:
    """Move the checkpoints of steps after `after_step` into a new folder beside `root`, so that a later "auto" does not
    take them, and delete what killed saves left. Return the folder, or None if there was nothing to move."""
    root = root.resolve()  # a link to another disk, to which nothing can be moved
    for path in step_folders(root):
        if not (path / MANIFEST).exists():
            remove(path)
    newer = [p for p in committed(root) if step_of(p) > after_step]
    if not newer:
        return None
    aside = discarded_name(root)
    aside.mkdir()
    with contextlib.suppress(CheckpointError):  # a damaged note is an error only for a run that needs it
        if any(rolled_back(path) is not None for path in newer):
            (root / ROLLBACK).rename(aside / ROLLBACK)
    for path in newer:
        path.rename(aside / path.name)
    return aside


# ---------------------------------------------------------------- load


def load_checkpoint(engine: Any, path: Path, precision: Precision, reshard: bool = False) -> None:
    """Load weights, optimizer, random generators and FP8 state of `path`. Collective.

    With the number of ranks and the ZeRO stage of the save all of it is restored bit by bit. Else, or with
    `reshard` (train/checkpoint/resume.py), weights, optimizer and FP8 state are resharded, and new ranks keep
    their random generators. The settings of the optimizer and of clipping stay the engine's. FP8 state that does not
    fit `precision` is not loaded (`fits_fp8_state`).

    Raises CheckpointError: a file holds a type that may execute code, or not what DeepSpeed writes; the files do not
    hold the whole model; ranks had different FP8 states, and there are now more or fewer of them.
    """
    saved, world, rank = read_state(path), dist.get_world_size(), dist.get_rank()
    if not reshard and (saved.world_size, saved.zero_stage) == (
        world,
        engine.zero_optimization_stage(),
    ):
        use_loader(engine, load_shard)
        with own_settings(engine), without_patterns(path.parent) as root:
            loaded, _ = engine.load_checkpoint(str(root), tag=path.name)
        if loaded is None:
            raise CheckpointError(f"DeepSpeed found nothing to load in {path}")
    else:
        load_resharded(engine, path, saved)
    forget_moments(engine)
    keeps_fp8, fp8 = fits_fp8_state(saved, precision), None
    if keeps_fp8 and saved.world_size != world:
        fp8 = fp8_of_all_ranks(path, saved.world_size)
    if rank < saved.world_size:
        rank_state = load_shard(path / rank_file(rank))
        fp8 = fp8 or rank_state["fp8"]
        set_random_state(rank_state)
    if keeps_fp8:
        load_fp8_state(engine.module, precision, fp8 or {})


def fits_fp8_state(saved: RunState, precision: Precision) -> bool:
    """Return whether modules of `precision` can use the FP8 state of a checkpoint."""
    before = saved.precision  # {} where a test left it out
    return not before or same_precision(before, vars(precision.config), FP8_STATE_OF)


def set_random_state(rank_state: dict[str, Any]) -> None:
    torch.set_rng_state(rank_state["torch_rng"])
    if rank_state["cuda_rng"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(rank_state["cuda_rng"])
    version, internal, gauss = rank_state["python_rng"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = rank_state["numpy_rng"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


def read_hf_weights(path: Path, model_config: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint by Hugging Face's names, on the CPU, in the dtype that they were trained in.
    Raises CheckpointError: there are none."""
    weights, tied = read_weights(path), model_config.tie_word_embeddings
    weights = {k: v for k, v in weights.items() if not (tied and k == "lm_head.weight")}
    return conversion.to_hf(weights, model_config)


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint by the names of its model, on the CPU. Raises CheckpointError: there are
    none."""
    if (state := read_state(path)).zero_stage == 3:
        return read_partitioned_weights(path, state)
    return load_shard(model_file(path, state))["module"]
