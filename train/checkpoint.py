"""Save, verify, choose and load checkpoints.

    output_dir/checkpoints/step-00000100/
        mp_rank_00_model_states.pt, *_optim_states.pt    DeepSpeed's: weights, optimizer state of each rank
        rank_00000.pt                                    ours, one a rank: random generators, FP8 scales and histories
        run_state.json                                   step, consumed samples, world size, resolved configuration
        manifest.json                                    written last: every file with its size and sha256

A folder without a manifest is not a checkpoint: whoever dies in a save leaves none, and the one before stays
the newest. Every file's hash is checked before anything is loaded, because DeepSpeed loads a shard with flipped
bits without a word.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from model import conversion
from model.fp8_state import fp8_state, load_fp8_state
from model.precision import Precision
from train.files import sha256_file, write_durably

SCHEMA = 1
MANIFEST = "manifest.json"
RUN_STATE = "run_state.json"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; the message names the file and what to do."""


@dataclass
class RunState:
    """What a run needs besides tensors: `consumed_samples` is the whole state of the sampler."""

    step: int
    consumed_samples: int
    consumed_tokens: int
    world_size: int
    zero_stage: int
    train_config: dict[str, Any]
    model_config: dict[str, Any]
    data_fingerprint: dict[str, Any] = field(default_factory=dict)


def name_of(step: int) -> str:
    return f"step-{step:08d}"


# ---------------------------------------------------------------- save


def save(engine: Any, root: Path, state: RunState, precision: Precision, keep: int) -> Path:
    """Write the checkpoint of `state.step` under `root` and commit it; every rank calls it. Afterwards only the `keep`
    newest committed checkpoints stay (0 keeps all)."""
    path = root / name_of(state.step)
    rank = dist.get_rank()
    if rank == 0 and path.exists():
        # left by a run that died in its save, or of a run that was resumed from an earlier step
        _discard(path)
    dist.barrier()
    engine.save_checkpoint(str(root), tag=path.name, save_latest=False)
    torch.save(_rank_state(engine.module, precision), path / f"rank_{rank:05d}.pt")
    if rank == 0:
        write_durably(path / RUN_STATE, json.dumps(asdict(state), indent=1))
    dist.barrier()
    _commit(path, state.step)
    if rank == 0 and keep:
        for old in committed(root)[:-keep]:
            _discard(old)
    dist.barrier()
    return path


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


def _commit(path: Path, step: int) -> None:
    """Hash all files, the work shared among the ranks; rank 0 writes the manifest."""
    rank, world = dist.get_rank(), dist.get_world_size()
    # rank 0's listing is the one that counts: on network file systems another node's may be stale
    listing: list[Any] = [sorted(f for f in path.rglob("*") if f.is_file()) if rank == 0 else None]
    dist.broadcast_object_list(listing, src=0)
    mine = _describe_all(listing[0][rank::world], path)
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, mine)
    if rank == 0:
        entries = sorted((entry for part in gathered for entry in part), key=lambda e: e["name"])
        write_durably(
            path / MANIFEST, json.dumps({"schema": SCHEMA, "step": step, "files": entries}, indent=1)
        )


def _describe_all(files: list[Path], root: Path) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(8) as pool:  # hashing releases the interpreter lock
        return list(pool.map(lambda f: describe_file(f, root), files))


def describe_file(file: Path, root: Path) -> dict[str, Any]:
    """Name relative to `root`, bytes and sha256 of a file, flushed to disk first."""
    with open(file, "rb") as f:
        os.fsync(f.fileno())
    return {
        "name": file.relative_to(root).as_posix(),
        "bytes": file.stat().st_size,
        "sha256": sha256_file(file),
    }


def identity(path: Path) -> str:
    """What tells this checkpoint from any other: the sha256 of its manifest, which holds those of all its files."""
    return sha256_file(path / MANIFEST)


def _discard(path: Path) -> None:
    """Remove a checkpoint, its manifest first, so that a kill half way leaves no half checkpoint that counts."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)


# ---------------------------------------------------------------- verify and choose


def committed(root: Path) -> list[Path]:
    """The committed checkpoints under `root`, oldest first."""
    return sorted(p.parent for p in root.glob(f"step-*/{MANIFEST}"))


def problems(path: Path) -> list[str]:
    """Why `path` is not a usable checkpoint: each missing, truncated or altered file. Empty when all hashes hold."""
    if not path.is_dir():
        return [f"{path} is not a folder"]
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        expected = {e["name"]: (int(e["bytes"]), str(e["sha256"])) for e in manifest["files"]}
        schema = manifest["schema"]
    except FileNotFoundError:
        return [f"{path} has no {MANIFEST}: it was never committed"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{path / MANIFEST} is damaged: {error!r}"]
    if schema != SCHEMA:
        return [f"{path / MANIFEST} has schema {schema}; this version reads {SCHEMA}"]
    found, present = [], []
    for name, (size, _) in expected.items():
        file = path / name
        if not file.is_file():
            found.append(f"{file} is missing")
        elif file.stat().st_size != size:
            found.append(f"{file} has {file.stat().st_size} bytes, the manifest says {size}")
        else:
            present.append(file)
    try:
        hashed = _describe_all(present, path)
    except OSError as error:
        return [*found, f"{path} cannot be read: {error}"]
    altered = [e["name"] for e in hashed if e["sha256"] != expected[e["name"]][1]]
    return found + [f"{path / name} is altered: its sha256 is not the manifest's" for name in altered]


def choose(root: Path, setting: str, log: Any) -> Path | None:
    """The checkpoint to resume from, the same on every rank: rank 0 decides and verifies, the others follow.

    setting: "never" -> None; "auto" -> the newest committed one whose hashes hold, or None; else a path.
    Raises CheckpointError: a path given that does not verify; committed checkpoints, none of which verifies.
    """
    decision: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            decision[0] = _choose_on_rank_0(root, setting, log)
        except CheckpointError as error:
            decision[1] = str(error)
    dist.broadcast_object_list(decision, src=0)
    if decision[1]:
        raise CheckpointError(decision[1])
    return decision[0]


def _choose_on_rank_0(root: Path, setting: str, log: Any) -> Path | None:
    if setting == "never":
        return None
    if setting != "auto":
        path = Path(setting)
        found = problems(path)
        if found:
            raise CheckpointError(f"resume_from_checkpoint {setting!r}: " + "; ".join(found))
        return path
    candidates = committed(root)
    for path in reversed(candidates):
        found = problems(path)
        if not found:
            return path
        log(f"checkpoint {path.name} is not used: " + "; ".join(found))
    if candidates:
        raise CheckpointError(
            f"none of the {len(candidates)} checkpoints in {root} verifies; restore one, or start anew with "
            "--resume_from_checkpoint never"
        )
    return None


def set_aside(root: Path, after_step: int) -> Path | None:
    """Move the checkpoints of steps after `after_step` out of the way, into a folder beside `root`, so that a later
    "auto" does not continue a future that this run has left; what a killed save left is deleted. Returns the folder,
    None if there was nothing to move."""
    for path in root.glob("step-*"):
        if path.is_dir() and not (path / MANIFEST).exists():
            shutil.rmtree(path)
    newer = [p for p in committed(root) if p.name > name_of(after_step)]
    if not newer:
        return None
    aside = root.with_name(f"{root.name}.discarded-{time.strftime('%Y%m%d-%H%M%S')}")
    aside.mkdir()
    for path in newer:
        path.rename(aside / path.name)
    return aside


# ---------------------------------------------------------------- load


def read_state(path: Path) -> RunState:
    """The run state of a committed checkpoint.

    Raises CheckpointError: it has none, or not in this form.
    """
    try:
        return RunState(**json.loads((path / RUN_STATE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path / RUN_STATE} cannot be read: {error}") from error


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
