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
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from model.errors import UserError
from train.files import sha256_file, size_text, sync_folder, write_durably

logger = logging.getLogger(__name__)

SCHEMA = 2
MANIFEST = "manifest.json"
RUN_STATE = "run_state.json"
ROLLBACK = "rollback.json"  # beside the checkpoints
# A client of a network file system may see the files of other machines this many seconds late (NFS: acdirmax).
SEEN_WITHIN_S = 60.0
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
    # steps that were saved because the next one has another precision
    precision_changes: list[int] = field(default_factory=list)

    @property
    def levels(self) -> dict[str, str]:
        """The fallback recipe of each module that has one, for Precision."""
        return {change["module"]: change["to"] for change in self.escalations}

    @property
    def unscheduled(self) -> set[int]:
        """Steps that were saved only because the precision changed, not by save_steps."""
        every = self.train_config.get("save_steps")
        return {step for step in self.precision_changes if not every or step % every}


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def rank_file(rank: int) -> str:
    """Return the name of the file with this project's state of rank `rank`."""
    return f"rank_{rank:05d}.pt"


def step_of(path: Path) -> int:
    """Return the step in a checkpoint folder's name."""
    return int(path.name.removeprefix("step-"))


def step_folders(root: Path) -> list[Path]:
    """Return the checkpoint folders under `root`, committed or not, oldest step first.

    Raises: PermissionError: `root` cannot be read. Returning nothing would make the run start over."""
    names = os.listdir(root) if root.is_dir() else []
    return sorted(
        (root / name for name in names if FOLDER.fullmatch(name) and (root / name).is_dir()), key=step_of
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
    try:
        sync_folder(path.parent)  # the checkpoint folder is new in it
        write_signed(path / MANIFEST, {"step": step_of(path), "changes": list(changes), "files": entries})
    except OSError:
        (path / MANIFEST).unlink(missing_ok=True)  # a failed save commits nothing
        raise


def wait_for_files(path: Path, entries: list[dict[str, Any]]) -> None:
    """Wait until the files in `path` are visible with their full sizes.

    A network file system may show the files of other machines late.

    Raises: OSError: a file is not visible after SEEN_WITHIN_S seconds."""
    deadline = time.monotonic() + SEEN_WITHIN_S
    for entry in entries:
        file = path / entry["name"]
        while not (file.is_file() and file.stat().st_size == entry["bytes"]):
            if time.monotonic() > deadline:
                raise OSError(
                    f"{file} ({entry['bytes']} bytes) was written by another rank, but is not visible on this node. "
                    "Choose an output_dir that all nodes share"
                )
            time.sleep(0.1)


def write_signed(file: Path, content: dict[str, Any]) -> None:
    """Write `content` as JSON with its own sha256 as the last value, so that `read_signed` detects any flipped bit."""
    write_durably(file, _signed({"schema": SCHEMA, **content}))


def _signed(content: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1)


def read_signed(file: Path, *keys: str) -> list[Any]:
    """Return the values of `keys` in a file written by `write_signed`, or [] if the file does not exist.

    Raises: CheckpointError: the file is damaged, or this version does not support its schema.
    """
    try:
        text = file.read_text()
        content = json.loads(text)
        values = [content[key] for key in keys]
        if (schema := content["schema"]) != SCHEMA:
            raise CheckpointError(
                f"{file} has schema {schema}; this version supports only schema {SCHEMA}",
                code="other_schema",
                key=str(file),
            )
        del content["sha256"]
        if text != _signed(content):
            raise CheckpointError(
                f"{file} is altered: its content does not match its sha256", code="altered", key=str(file)
            )
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged: {error!r}", code="damaged", key=str(file)) from error
    return values


def read_manifest(path: Path) -> dict[str, tuple[int, str]]:
    """Return name -> (bytes, sha256) for every file of the checkpoint `path`.

    Raises: CheckpointError: the checkpoint is not committed, its folder has the name of another step, or its manifest
    is damaged."""
    found = read_signed(path / MANIFEST, "step", "files")
    if not found:
        raise CheckpointError(
            f"{path} has no {MANIFEST}: the save did not complete", code="not_committed", key=str(path)
        )
    step, files = found
    if FOLDER.fullmatch(path.name) and step_of(path) != step:
        raise CheckpointError(
            f"{path} is named after step {step_of(path)}, but its {MANIFEST} is from step {step}. Rename the folder to "
            f"{name_of(step)}",
            code="other_step",
            key=str(path),
        )
    return {e["name"]: (int(e["bytes"]), str(e["sha256"])) for e in files}


def rolled_back(path: Path) -> list[list[int]] | None:
    """Return the samples to skip if the run was rolled back to the checkpoint `path`, or None if it was not.

    Raises: CheckpointError: rollback.json is damaged."""
    found = read_signed(path.parent / ROLLBACK, "checkpoint", "skipped_samples")
    return found[1] if found and found[0] == identity(path) else None


def note_rollback(path: Path, ranges: list[list[int]]) -> None:
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


def make_room(path: Path, needed: int) -> None:
    """Create the empty folder `path` for a save.

    Raises: OSError: the disk has less than `needed` free bytes, or a checkpoint of this step exists."""
    if path.exists() and not (path / MANIFEST).exists():
        remove(path)  # left by a killed save
    path.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(path.parent).free) < needed:
        raise OSError(f"not enough disk space: {size_text(free)} are free and {size_text(needed)} are needed")
    path.mkdir()


def undo_save(path: Path) -> None:
    """Remove the files of a failed save from `path`, if possible."""
    with contextlib.suppress(OSError):
        if path.exists() and not (path / MANIFEST).exists():  # a manifest means an earlier checkpoint
            remove(path)


def discard_old(path: Path, keep: int, unscheduled: Collection[int] = ()) -> None:
    """Remove old checkpoints, so that `keep` checkpoints up to and including `path` remain; 0 keeps all.

    Checkpoints of the steps `unscheduled` are removed first. Otherwise a precision schedule with many phases would
    displace the regular ones.
    """
    older = [p for p in committed(path.parent) if step_of(p) < step_of(path)]
    older.sort(key=lambda p: (step_of(p) not in unscheduled, step_of(p)))
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
    if not path.is_dir():
        return [f"{path} is not a folder"]
    try:
        expected = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    found, present = [], []
    for name, (size, _) in expected.items():
        file = path / name
        if not file.is_file():
            found.append(f"{file} is missing")
        elif file.stat().st_size != size:
            found.append(f"{file} has {file.stat().st_size} bytes, but the manifest says {size}")
        else:
            present.append(file)
    if not hashes:
        return found
    try:
        with ThreadPoolExecutor(8) as pool:  # hashing releases the interpreter lock
            actual = list(pool.map(sha256_file, present))
    except OSError as error:
        return [*found, f"{path} cannot be read: {error}"]
    altered = [f for f, now in zip(present, actual, strict=True) if now != expected[f.name][1]]
    return found + [f"{file} is altered: its sha256 differs from the manifest" for file in altered]


def check_given(path: Path, root: Path, hashes: bool = True) -> None:
    """Check the path that resume_from_checkpoint names.

    Args:
        root: checkpoints of the run, to suggest from.
        hashes: as in `problems`.

    Raises: CheckpointError: `path` is not a good checkpoint."""
    if found := problems(path, hashes):
        raise CheckpointError(
            f"resume_from_checkpoint {str(path)!r}: {'; '.join(found)}. Use auto, never, or the path of a checkpoint"
            + name_others(path, root),
            code="no_checkpoint",
            key="resume_from_checkpoint",
        )


def name_others(path: Path, *roots: Path) -> str:
    """Return the end of a message about a bad `path`: the five newest committed checkpoints nearby, or "".

    They are those of the run that is or contains `path`, or else of the first of `roots` that has any.
    """
    near = [root for folder in (path, path.parent) for root in (folder / "checkpoints", folder)]
    for root in (*near, *roots):
        if others := [p.name for p in committed(root) if p.resolve() != path.resolve()]:
            return f". Checkpoints in {root}: {', '.join(others[-5:])}"
    return ""


def newest_good(root: Path) -> Path | None:
    """Return the newest committed checkpoint under `root` with correct hashes, or None if none is committed.

    Log why newer checkpoints are skipped.

    Raises: CheckpointError: there are committed checkpoints, but none is good.
    """
    candidates = committed(root)
    for path in reversed(candidates):
        # sizes first, because hashing reads gigabytes
        found = problems(path, hashes=False) or problems(path)
        if not found:
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
        if found := problems(given):
            raise CheckpointError("; ".join(found) + name_others(given), code="no_checkpoint", key=str(given))
        return given
    root = given / "checkpoints"
    return newest_good(root if root.is_dir() else given)


def belongs_to(path: Path, root: Path) -> bool:
    """Return whether the checkpoint `path` is in `root`, the checkpoints folder of a run."""
    return path.resolve().parent == root.resolve()


def origin(path: Path) -> dict[str, str]:
    """Return the RunState.began_at of a run that begins from the checkpoint `path` of another run."""
    return {"path": str(path.resolve()), "manifest_sha256": identity(path)}


def branch_at(root: Path, path: Path) -> Path | None:
    """Return the newest committed checkpoint under `root` if that run began from the checkpoint `path` of another run.

    `path` itself may have been removed since.

    Returns: None if nothing is committed under `root`, or if `path` is one of its own checkpoints.

    Raises: CheckpointError: the run of `root` did not begin from `path`.
    """
    own = committed(root)
    if not own or belongs_to(path, root):
        return None
    began: dict[str, str] = {}
    for each in reversed(own):
        with contextlib.suppress(CheckpointError):  # a damaged checkpoint is skipped later
            began = read_state(each).began_at
            break
    if not (path / MANIFEST).is_file():
        return own[-1] if began.get("path") == str(path.resolve()) else None
    if began.get("manifest_sha256") == identity(path):
        return own[-1]
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
        values = json.loads((path / RUN_STATE).read_text())
        if unknown := sorted(values.keys() - {key.name for key in fields(RunState)}):
            raise CheckpointError(
                f"{path / RUN_STATE} has unknown keys: {', '.join(unknown)}. Resume with the version of this program "
                "that wrote it",
                code="other_version",
                key=unknown[0],
            )
        return RunState(**values)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path / RUN_STATE} cannot be read: {error}", code="damaged", key=str(path / RUN_STATE)
        ) from error
