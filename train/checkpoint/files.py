"""The files of a checkpoint: manifest, run state, verification, and the search for the newest good checkpoint.

    output_dir/checkpoints/
        rollback.json                                    samples that a rollback skips, until the next save
        step-00000100/
            mp_rank_00_model_states.pt, *_optim_states.pt    DeepSpeed: weights, and the optimizer state of each rank
            rank_00000.pt                                    one per rank: random states, FP8 scales and histories
            run_state.json                                   step, consumed samples, world size, resolved configuration
            manifest.json                                    written last: size and sha256 of every file

A folder without a manifest is not a checkpoint. A killed save leaves no manifest, so the previous checkpoint stays the
newest. DeepSpeed's file `latest` is not used. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model.errors import UserError
from train.files import sha256_file, sync_folder, write_durably

logger = logging.getLogger(__name__)

SCHEMA = 2
MANIFEST = "manifest.json"
RUN_STATE = "run_state.json"
ROLLBACK = "rollback.json"  # beside the checkpoints
# A client of a network file system may see the files of other machines this many seconds late (NFS: acdirmax).
VISIBILITY_TIMEOUT_S = 60.0
FOLDER = re.compile(r"step-(\d{8,})")


class CheckpointError(UserError):
    """A checkpoint that cannot be used. The message names the file and the remedy."""

    code = "checkpoint"


@dataclass
class RunState:
    """The state of a run, except for tensors."""

    step: int
    consumed_samples: int  # the position in the order of samples
    consumed_tokens: int
    world_size: int
    zero_stage: int
    train_config: dict[str, Any]
    model_config: dict[str, Any]
    data_fingerprint: dict[str, Any] = field(default_factory=dict)
    health: dict[str, Any] = field(default_factory=dict)  # state of the spike detection
    # ranges [first, end) in the order of samples that rollbacks skip
    skipped_samples: list[list[int]] = field(default_factory=list)
    evaluation_due: bool = False  # a stop request skipped the evaluation of this step
    # changes allowed on resumes (allow_changes_on_resume), oldest first: step, key, old, new
    changes: list[dict[str, Any]] = field(default_factory=list)
    # the checkpoint of another run from which this run began: path, manifest_sha256
    began_at: dict[str, str] = field(default_factory=dict)
    # the section "precision" in the last step, with the changes of its phase
    precision: dict[str, Any] = field(default_factory=dict)
    # fallbacks of modules by precision.on_trouble, oldest first: step, module, from, to, ...
    escalations: list[dict[str, Any]] = field(default_factory=list)
    # written by earlier versions: steps after which the precision changed
    precision_changes: list[int] = field(default_factory=list)

    @property
    def fallbacks(self) -> dict[str, str]:
        """The fallback recipe of each module that has one, for Precision."""
        return {change["module"]: change["to"] for change in self.escalations}


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def rank_file(rank: int) -> str:
    """Return the name of the file with this project's state of rank `rank`."""
    return f"rank_{rank:05d}.pt"


def parse_step(path: Path) -> int:
    """Return the step in a checkpoint folder's name."""
    return int(path.name.removeprefix("step-"))


def step_folders(root: Path) -> list[Path]:
    """Return the checkpoint folders under `root`, committed or not, oldest step first.

    Raises: PermissionError: `root` cannot be read. Returning nothing would make the run start over."""
    names = os.listdir(root) if root.is_dir() else []
    return sorted(
        (root / name for name in names if FOLDER.fullmatch(name) and (root / name).is_dir()), key=parse_step
    )


def committed(root: Path) -> list[Path]:
    """Return the committed checkpoints under `root`, oldest first."""
    return [path for path in step_folders(root) if (path / MANIFEST).is_file()]


# ---------------------------------------------------------------- manifest


def describe_file(file: Path) -> dict[str, Any]:
    """Return the entry of `file` in a manifest."""
    return {"name": file.name, "bytes": file.stat().st_size, "sha256": sha256_file(file)}


def write_manifest(path: Path, entries: list[dict[str, Any]], changes: Sequence[dict[str, Any]] = ()) -> None:
    """Commit the checkpoint in `path` by writing its manifest.

    Args:
        entries: the entry of each file, from `describe_file`.
        changes: the changes of the RunState, for readers.

    Raises:
        OSError: a file that another rank wrote is not visible here.
    """
    entries = sorted(entries, key=lambda e: e["name"])
    wait_for_files(path, entries)
    sync_folder(path.parent)  # the checkpoint folder is new in it
    write_signed(path / MANIFEST, {"step": parse_step(path), "changes": list(changes), "files": entries})


def wait_for_files(path: Path, entries: list[dict[str, Any]]) -> None:
    """Wait until the files in `path` are visible with their full sizes.

    A network file system may show the files of other machines late.

    Raises: OSError: a file is not visible after VISIBILITY_TIMEOUT_S seconds."""
    deadline = time.monotonic() + VISIBILITY_TIMEOUT_S
    for entry in entries:
        while not has_size(path / entry["name"], entry["bytes"]):
            if time.monotonic() > deadline:
                raise OSError(
                    f"{path / entry['name']} ({entry['bytes']} bytes) was written by another rank, but is not visible "
                    "on this node. Choose an output_dir that all nodes share"
                )
            time.sleep(0.1)


def has_size(file: Path, size: int) -> bool:
    """Return whether `file` exists with this number of bytes."""
    return file.is_file() and file.stat().st_size == size


def write_signed(file: Path, content: dict[str, Any]) -> None:
    """Write `content` as JSON with its own sha256 as the last value, so that `read_signed` detects any flipped bit."""
    write_durably(file, _signed({"schema": SCHEMA, **content}))


def _signed(content: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1)


def read_signed(file: Path, *keys: str) -> list[Any]:
    """Return the values of `keys` in a file written by `write_signed`, or [] if the file does not exist.

    Raises: CheckpointError: the file is damaged.
    """
    try:
        text = file.read_text()
        content = json.loads(text)
        del content["sha256"]
        if text != _signed(content):
            raise ValueError("its content does not match its sha256")
        return [content[key] for key in keys]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged: {error!r}", code="damaged", key=str(file)) from error


def read_manifest(path: Path) -> dict[str, tuple[int, str]]:
    """Return name -> (bytes, sha256) for every file of the checkpoint `path`.

    Raises: CheckpointError: the checkpoint is not committed, or its manifest is damaged."""
    found = read_signed(path / MANIFEST, "files", "step")
    if not found:
        raise CheckpointError(
            f"{path} has no {MANIFEST}: it is no checkpoint, or its save did not complete",
            code="not_committed",
            key=str(path),
        )
    entries, step = found
    if path.name.startswith("step-") and path.name != checkpoint_name(step):
        raise CheckpointError(
            f"{path} contains a checkpoint of step {step}. Rename the folder to {checkpoint_name(step)}",
            code="damaged",
            key=str(path),
        )
    return {e["name"]: (int(e["bytes"]), str(e["sha256"])) for e in entries}


def rolled_back(path: Path) -> list[list[int]] | None:
    """Return the samples to skip if the run was rolled back to the checkpoint `path`, or None if it was not.

    Raises: CheckpointError: rollback.json is damaged."""
    found = read_signed(path.parent / ROLLBACK, "checkpoint", "skipped_samples")
    return found[1] if found and found[0] == identity(path) else None


def record_rollback(path: Path, ranges: list[list[int]]) -> None:
    """Write rollback.json, which `rolled_back` reads. Raises OSError."""
    write_signed(path.parent / ROLLBACK, {"checkpoint": identity(path), "skipped_samples": ranges})


def identity(path: Path) -> str:
    """Return the sha256 of the manifest of `path`, which contains the sha256 of all its files."""
    return sha256_file(path / MANIFEST)


# ---------------------------------------------------------------- folders of saves


def remove(path: Path) -> None:
    """Remove a checkpoint folder. If `path` is a link, remove only the link. Raises OSError.

    The manifest is removed first, so that an interrupted removal leaves no checkpoint that looks complete."""
    if path.is_symlink():
        path.unlink()
        return
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)


def remove_unfinished(path: Path) -> None:
    """Remove what a failed or killed save left in `path`. A committed checkpoint stays. Raises OSError."""
    if path.exists() and not (path / MANIFEST).exists():
        remove(path)


def discard_old(path: Path, keep: int) -> None:
    """Remove the oldest checkpoints, so that `keep` checkpoints up to and including `path` remain; 0 keeps all."""
    older = [p for p in committed(path.parent) if parse_step(p) < parse_step(path)]
    for old in older[: max(len(older) - (keep - 1), 0)] if keep else []:
        try:
            remove(old)
        except OSError as error:  # the new checkpoint is valid regardless
            logger.warning(f"the old checkpoint {old} could not be removed: {error}")


# ---------------------------------------------------------------- verify


def problems(path: Path, hashes: bool = True) -> list[str]:
    """Return the reasons why `path` is not a good checkpoint: missing, truncated or altered files.

    Args:
        hashes: whether to check the hash of every file. Otherwise only sizes are compared, which is fast.
    """
    try:
        expected = read_manifest(path)
        found = [
            f"{path / name} is missing or does not have {size} bytes"
            for name, (size, _) in expected.items()
            if not has_size(path / name, size)
        ]
        if found or not hashes:  # hashing reads gigabytes
            return found
        with ThreadPoolExecutor(8) as pool:  # hashing releases the interpreter lock
            actual = list(pool.map(sha256_file, (path / name for name in expected)))
    except (CheckpointError, OSError) as error:
        return [str(error)]
    return [
        f"{path / name} is altered: its sha256 differs from the manifest"
        for (name, (_, sha256)), now in zip(expected.items(), actual, strict=True)
        if now != sha256
    ]


def check_named_checkpoint(path: Path, key: str, hashes: bool = True) -> None:
    """Check a checkpoint that the user names.

    Args:
        key: the key of the error.
        hashes: as in `problems`.

    Raises: CheckpointError: `path` is not a good checkpoint."""
    if found := problems(path, hashes):
        raise CheckpointError("; ".join(found), code="no_checkpoint", key=key)


def newest_intact(root: Path) -> Path | None:
    """Return the newest committed checkpoint under `root` with correct hashes, or None if none is committed.

    Log why newer checkpoints are skipped.

    Raises: CheckpointError: there are committed checkpoints, but none is good.
    """
    candidates = committed(root)
    for path in reversed(candidates):
        if not (found := problems(path)):
            return path
        logger.warning(f"checkpoint {path.name} is skipped: " + "; ".join(found))
    if candidates:
        raise CheckpointError(
            f"none of the {len(candidates)} checkpoints in {root} is intact. Restore one, or start over with "
            "--resume_from_checkpoint never",
            code="none_verifies",
            key=str(root),
        )
    return None


def find_checkpoint(given: Path) -> Path | None:
    """Return the checkpoint `given`, or the newest good checkpoint of a run.

    Args:
        given: a checkpoint, the output_dir of a run, or its folder checkpoints/.

    Returns: None if `given` is none of these, or a run without checkpoints.

    Raises: CheckpointError: `given` is not a good checkpoint, or the run has no good one.
    """
    if not given.is_dir() or FOLDER.fullmatch(given.resolve().name) or (given / RUN_STATE).is_file():
        check_named_checkpoint(given, key=str(given))
        return given
    root = given / "checkpoints"
    return newest_intact(root if root.is_dir() else given)


def is_in_folder(path: Path, root: Path) -> bool:
    """Return whether the checkpoint `path` is in `root`, the checkpoints folder of a run."""
    return path.resolve().parent == root.resolve()


def is_branch(root: Path, path: Path) -> bool:
    """Return whether the run with the checkpoints `root` began from the checkpoint `path` of another run.

    `path` itself may have been removed since. False also if the run has no checkpoint, or `path` is one of them.

    Raises: CheckpointError: the run of `root` did not begin from `path`.
    """
    own = committed(root)
    if not own or is_in_folder(path, root):
        return False
    for checkpoint in own:
        with contextlib.suppress(CheckpointError):  # if it is damaged, the next one has the same origin
            began_at = read_state(checkpoint).began_at
            is_same = path.is_dir() and began_at.get("manifest_sha256") == identity(path)  # its run was moved
            if is_same or began_at.get("path") == str(path.resolve()):
                return True
            break
    raise CheckpointError(
        f"resume_from_checkpoint {path} is a checkpoint of another run, but the run in {root} did not begin from it. "
        "Choose another output_dir, or continue the run there with --resume_from_checkpoint auto",
        code="other_run",
        key="resume_from_checkpoint",
    )


def read_state(path: Path) -> RunState:
    """Return the run state of a committed checkpoint.

    Raises: CheckpointError: the run state is missing, damaged, or from another version.
    """
    try:
        return RunState(**json.loads((path / RUN_STATE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path / RUN_STATE} is damaged or from another version of this program: {error}",
            code="damaged",
            key=str(path / RUN_STATE),
        ) from error
