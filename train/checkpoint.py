"""Save, choose and load checkpoints; what one is as files, and how it is verified: train/checkpoint_files.py.

A save that fails, on whatever rank, fails on all of them with one message, and leaves what was there before. DeepSpeed
waits for all ranks inside its own save, so an error is kept until that is over (`errors_kept`), and told to all ranks
before any of them goes on (`together`). Every file's hash is checked before anything is loaded, because DeepSpeed
loads a shard with flipped bits without a word.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from model import conversion
from model.fp8_state import fp8_state, load_fp8_state
from model.precision import Precision
from train.checkpoint_files import (
    BEFORE,
    MANIFEST,
    RUN_STATE,
    CheckpointError,
    RunState,
    committed,
    describe_all,
    discard,
    identity,
    name_of,
    newest_good,
    problems,
    read_manifest,
    read_state,
    size_text,
    step_folders,
    step_of,
    write_manifest,
)
from train.files import write_durably
from train.save_errors import SaveError, errors_kept, named, together

__all__ = [
    "MANIFEST",
    "RUN_STATE",
    "CheckpointError",
    "RunState",
    "SaveError",
    "choose",
    "committed",
    "identity",
    "load",
    "name_of",
    "problems",
    "read_hf_weights",
    "read_state",
    "save",
    "set_aside",
]

# A save may need more than the last one did: a longer configuration, blocks that are not full.
DISK_MARGIN = 1.05
# Before the first save: bytes of AdamW's two float32 moments and the float32 weights, of each parameter; and of what
# each rank writes besides tensors, as the states of its random generators.
OPTIMIZER_BYTES = 12
RANK_BYTES = 128 * 1024


# ---------------------------------------------------------------- save


def save(engine: Any, root: Path, state: RunState, precision: Precision, keep: int) -> Path:
    """Write the checkpoint of `state.step` under `root` and commit it; every rank calls it. Afterwards only the `keep`
    newest committed checkpoints stay (0 keeps all): the hashes of this one were computed in this very call.

    Raises SaveError, on all ranks: one of them could not write, or `root` has not the room. What this save wrote is
    removed, and no other checkpoint.
    """
    path, rank = root / name_of(state.step), dist.get_rank()
    needed = needed_bytes(engine, root, precision) if rank == 0 else 0
    try:
        together(lambda: _make_room(path, needed) if rank == 0 else None)
        with errors_kept(engine) as errors:
            engine.save_checkpoint(str(root), tag=path.name, save_latest=False)
        together(lambda: _write_ours(path, engine.module, state, precision, errors))
        _commit(path, state.step)
    except SaveError as error:
        message = [_undo(path, needed, error) if rank == 0 else None]
        dist.broadcast_object_list(message, src=0)
        raise SaveError(message[0]) from error
    if rank == 0:
        _discard_old(path, keep)
    dist.barrier()
    return path


def needed_bytes(engine: Any, root: Path, precision: Precision) -> int:
    """Bytes that the next save will take: as the newest committed checkpoint, with a margin; before the first, what
    weights, AdamW's and the FP8 state take."""
    for path in reversed(committed(root)):
        with contextlib.suppress(CheckpointError):  # a damaged manifest; resuming will tell
            return int(DISK_MARGIN * sum(size for size, _ in read_manifest(path).values()))
    # at ZeRO 3 a parameter is empty between steps, and DeepSpeed's attribute has its size
    numbers = [(getattr(p, "ds_numel", p.numel()), p.element_size()) for p in engine.module.parameters()]
    tensors = sum(n * (size + OPTIMIZER_BYTES) for n, size in numbers)
    of_rank = RANK_BYTES + sum(
        t.numel() * t.element_size() for t in fp8_state(engine.module, precision).values()
    )
    return int(DISK_MARGIN * (tensors + dist.get_world_size() * of_rank))


def _make_room(path: Path, needed: int) -> None:
    """Clear the place for a save, and check that the disk has `needed` bytes.

    Raises OSError: it has not.
    """
    if path.exists():
        if (path / MANIFEST).is_file():
            before = path.with_name(path.name + BEFORE)  # counts until this save is committed
            if before.exists():
                discard(before)
            path.rename(before)
        else:
            shutil.rmtree(path)  # left by a run that died in its save
    path.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(path.parent).free) < needed:
        raise OSError(
            f"the disk has not the room: {size_text(free)} are free and {size_text(needed)} are needed"
        )


def _write_ours(
    path: Path, module: nn.Module, state: RunState, precision: Precision, errors: list[OSError]
) -> None:
    """The files that are not DeepSpeed's. Raises the first of DeepSpeed's errors instead, if it had any."""
    if errors:
        raise errors[0]
    rank = dist.get_rank()
    own = path / f"rank_{rank:05d}.pt"
    named(own, lambda: torch.save(_rank_state(module, precision), own))
    if rank == 0:
        write_durably(path / RUN_STATE, json.dumps(asdict(state), indent=1))


def _commit(path: Path, step: int) -> None:
    """Flush and hash all files, the work shared among the ranks; rank 0 writes the manifest.

    Raises SaveError: a file cannot be read or flushed, the manifest not be written.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    # rank 0's listing is the one that counts: on network file systems another node's may be stale
    listing: list[Any] = [None]
    if rank == 0:
        listing[0] = sorted(f for f in path.rglob("*") if f.is_file())
    dist.broadcast_object_list(listing, src=0)
    mine = together(lambda: describe_all(listing[0][rank::world], path, flush=True))
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, mine)
    entries = [entry for part in gathered for entry in part]
    together(lambda: write_manifest(path, step, entries) if rank == 0 else None)


def _undo(path: Path, needed: int, error: SaveError) -> str:
    """Remove what a failed save wrote, put back what it replaced; returns what to tell the user. Never raises."""
    full, removed = _free(path.parent), "what it wrote is removed"
    try:
        if path.exists() and not (path / MANIFEST).exists():  # with one it is what was there before
            shutil.rmtree(path)
        before = path.with_name(path.name + BEFORE)
        if before.exists() and not path.exists():
            before.rename(path)
    except OSError as reason:
        removed = f"what it wrote could not be removed ({reason})"
    return (
        f"the checkpoint {path} could not be saved: {error}. {path.parent} had {full} free then and has "
        f"{_free(path.parent)} now, a save needs about {size_text(needed)}; {removed}, the checkpoints before it are "
        "as they were. Make room there, lower save_total_limit, or choose another output_dir"
    )


def _free(folder: Path) -> str:
    try:
        return size_text(shutil.disk_usage(folder).free)
    except OSError as error:
        return f"an unknown size ({error})"


def _discard_old(path: Path, keep: int) -> None:
    """Leave the `keep` newest checkpoints up to `path`, which was committed just now; 0: all."""
    replaced = path.with_name(path.name + BEFORE)
    older = [p for p in committed(path.parent) if step_of(p) < step_of(path)]
    surplus = older[: max(len(older) - (keep - 1), 0)] if keep else []
    for old in [*surplus, *([replaced] if replaced.exists() else [])]:
        try:
            discard(old)
        except OSError as error:  # the new one is committed all the same
            warnings.warn(f"the old checkpoint {old} could not be removed: {error}", stacklevel=2)


def _rank_state(module: nn.Module, precision: Precision) -> dict[str, Any]:
    numpy_state = np.random.get_state(legacy=True)
    assert isinstance(numpy_state, tuple)
    return {
        "torch_rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python_rng": random.getstate(),
        "numpy_rng": [v.tolist() if isinstance(v, np.ndarray) else v for v in numpy_state],
        "fp8": {key: tensor.detach().cpu().clone() for key, tensor in fp8_state(module, precision).items()},
    }


# ---------------------------------------------------------------- choose


def choose(root: Path, setting: str, log: Callable[[str], None]) -> Path | None:
    """The checkpoint to resume from, the same on every rank: rank 0 decides and verifies, the others follow.

    setting: "never" -> None; "auto" -> the newest committed one whose hashes hold, or None; else a path.
    Raises CheckpointError, on all ranks: a path given that does not verify; committed checkpoints, none of which
    verifies; a rank that does not see what rank 0 chose.
    """
    decision: list[Any] = [None, None, None]
    if dist.get_rank() == 0:
        try:
            path = _choose_on_rank_0(root, setting, log)
            decision[:2] = path, None if path is None else identity(path)
        except (CheckpointError, OSError) as error:
            decision[2] = str(error)
    dist.broadcast_object_list(decision, src=0)
    path, chosen, problem = decision
    if problem:
        raise CheckpointError(problem)
    if path is None:
        return None
    try:
        seen: str | None = identity(path)
    except OSError:
        seen = None
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, seen)
    if blind := [rank for rank, found in enumerate(every) if found != chosen]:
        raise CheckpointError(
            f"ranks {blind} do not see the checkpoint {path} that rank 0 sees; output_dir must be a folder that all "
            "nodes share"
        )
    return path


def _choose_on_rank_0(root: Path, setting: str, log: Callable[[str], None]) -> Path | None:
    if setting == "never":
        return None
    if setting != "auto":
        path = Path(setting)
        found = problems(path)
        if found:
            raise CheckpointError(f"resume_from_checkpoint {setting!r}: " + "; ".join(found))
        return path
    return newest_good(root, log)


def set_aside(root: Path, after_step: int) -> Path | None:
    """Move the checkpoints of steps after `after_step` out of the way, into a folder beside `root`, so that a later
    "auto" does not continue a future that this run has left; what a killed save left is deleted. Returns the folder,
    None if there was nothing to move."""
    for path in step_folders(root):
        if not (path / MANIFEST).exists():
            shutil.rmtree(path)
    newer = [p for p in committed(root) if step_of(p) > after_step]
    if not newer:
        return None
    aside = root.with_name(f"{root.name}.discarded-{time.strftime('%Y%m%d-%H%M%S')}")
    aside.mkdir()
    for path in newer:
        path.rename(aside / path.name)
    return aside


# ---------------------------------------------------------------- load


def load(engine: Any, path: Path, precision: Precision) -> None:
    """Put weights, optimizer, random generators and FP8 state of `path` back; every rank calls it.

    The number of ranks must be the one that wrote it (train.py compares).

    Raises CheckpointError: DeepSpeed could not load it.
    """
    loaded, _ = engine.load_checkpoint(str(path.parent), tag=path.name)
    if loaded is None:
        raise CheckpointError(f"DeepSpeed found nothing to load in {path}")
    rank_state = torch.load(path / f"rank_{dist.get_rank():05d}.pt", weights_only=True)
    load_fp8_state(engine.module, precision, rank_state["fp8"])
    torch.set_rng_state(rank_state["torch_rng"])
    if rank_state["cuda_rng"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(rank_state["cuda_rng"])
    version, internal, gauss = rank_state["python_rng"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = rank_state["numpy_rng"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


def read_hf_weights(path: Path, model_config: Any) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint under Hugging Face's names, on the CPU, in the dtype they were trained in.

    Raises CheckpointError: no weights there.
    """
    files = sorted(path.glob("*model_states.pt"))
    if not files:
        raise CheckpointError(f"{path} holds no *model_states.pt")
    if read_state(path).zero_stage == 3:
        # the weights are spread over the ranks' optimizer shards, as the float32 master copy
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        weights = get_fp32_state_dict_from_zero_checkpoint(str(path.parent), tag=path.name)
    else:
        weights = torch.load(files[0], map_location="cpu", weights_only=False)["module"]
    tied = model_config.tie_word_embeddings
    weights = {k: v for k, v in weights.items() if not (tied and k == "lm_head.weight")}
    return conversion.to_hf(weights, model_config)
