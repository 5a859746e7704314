"""A checkpoint as files: what its manifest names, whether that is what is there, which one is the newest good one.

    output_dir/checkpoints/step-00000100/
        mp_rank_00_model_states.pt, *_optim_states.pt    DeepSpeed's: weights, optimizer state of each rank
        rank_00000.pt                                    ours, one a rank: random generators, FP8 scales and histories
        run_state.json                                   step, consumed samples, world size, resolved configuration
        manifest.json                                    written last: every file with its size and sha256, and its own

A folder without a manifest is not a checkpoint: whoever dies in a save leaves none, and the one before stays
the newest. A file `latest`, which DeepSpeed would read, has no meaning here. Nothing here needs torch.
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
import warnings
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from model.errors import UserError
from train.files import again, sha256_file, size_text, sync_folder, write_durably

logger = logging.getLogger(__name__)
SCHEMA = 2
MANIFEST = "manifest.json"
RUN_STATE = "run_state.json"
ROLLBACK = "rollback.json"  # beside the checkpoints
# What a machine keeps of a folder on a network file system, it keeps for so long at the most (NFS: acdirmax).
SEEN_WITHIN_S = 60.0
FOLDER = re.compile(r"step-(\d{8,})")


class CheckpointError(UserError):
    """A checkpoint that cannot be used; the message names the file and what to do."""

    code = "checkpoint"


@dataclass
class RunState:
    """What a run needs besides tensors: `consumed_samples` is the position in the order of samples."""

    step: int
    consumed_samples: int
    consumed_tokens: int
    world_size: int
    zero_stage: int
    train_config: dict[str, Any]
    model_config: dict[str, Any]
    data_fingerprint: dict[str, Any] = field(default_factory=dict)
    health: dict[str, Any] = field(default_factory=dict)  # what train/guard/health.py knows of recent steps
    # [first, end) of what rollbacks left out of the order of samples
    skipped_samples: list[list[int]] = field(default_factory=list)
    evaluation_due: bool = False  # that of this step was left, because the run was asked to stop
    # what resumes had otherwise (allow_changes_on_resume), oldest first: step, key, old, new
    changes: list[dict[str, Any]] = field(default_factory=list)
    # the checkpoint of another run that this one began at: path, manifest_sha256
    began_at: dict[str, str] = field(default_factory=dict)
    # the section "precision" that the last step was computed with, as a stage of its schedule has it
    precision: dict[str, Any] = field(default_factory=dict)
    # what precision.on_trouble has taken a level up (train/guard/escalation.py), oldest first
    escalations: list[dict[str, Any]] = field(default_factory=list)
    # steps that were saved because the next one has another precision: precision.schedule, on_trouble
    precision_changes: list[int] = field(default_factory=list)

    @property
    def levels(self) -> dict[str, str]:
        """For Precision: module -> the level that it is at."""
        return {change["module"]: change["to"] for change in self.escalations}

    @property
    def unscheduled(self) -> set[int]:
        """Steps that were saved because the precision changed, and not by save_steps."""
        every = self.train_config.get("save_steps")
        # a version that knew no `precision_changes` has left escalations alone
        steps = {*self.precision_changes, *(change["step"] for change in self.escalations)}
        return {step for step in steps if not every or step % every}

    def __post_init__(self) -> None:
        if not self.precision:  # of a version without schedules
            self.precision = dict(self.train_config.get("precision", {}))


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def rank_file(rank: int) -> str:
    """The name of the file that rank `rank` writes besides DeepSpeed's."""
    return f"rank_{rank:05d}.pt"


def step_of(path: Path) -> int:
    """The step in a checkpoint folder's name."""
    return int(path.name.removeprefix("step-"))


def step_folders(root: Path) -> list[Path]:
    """The folders of saves under `root`, committed or not, oldest step first. Raises CheckpointError: this user may not
    read what is there; as if nothing were, a run would begin anew."""
    readable = root.is_dir() and os.access(root, os.R_OK | os.X_OK)
    names = os.listdir(root) if readable else []
    found = [root / name for name in names if FOLDER.fullmatch(name) and (root / name).is_dir()]
    for place in (root, *found):
        if not os.access(place, os.R_OK | os.X_OK) and place.is_dir():
            raise CheckpointError(
                f"{place} cannot be read by this user; have it made readable, or give another folder"
            )
    return sorted(found, key=step_of)


def committed(root: Path) -> list[Path]:
    """The committed checkpoints under `root`, oldest first."""
    return [path for path in step_folders(root) if (path / MANIFEST).is_file()]


# ---------------------------------------------------------------- manifest


def describe_file(file: Path) -> dict[str, Any]:
    """Its entry in the manifest."""
    return {"name": file.name, "bytes": file.stat().st_size, "sha256": sha256_file(file)}


def write_manifest(path: Path, entries: list[dict[str, Any]], changes: Sequence[dict[str, Any]] = ()) -> None:
    """Commit the checkpoint in `path`, whose files are `entries` as of `describe_file`: from here on it counts.
    changes: those of its RunState, for who looks.

    Raises OSError: a file that another rank wrote is not to be seen from here.
    """
    entries = sorted(entries, key=lambda e: e["name"])
    wait_for_files(path, entries)
    try:
        sync_folder(path.parent)  # the folder itself is new there
        write_signed(path / MANIFEST, {"step": step_of(path), "changes": list(changes), "files": entries})
    except OSError:
        (path / MANIFEST).unlink(missing_ok=True)  # a failed save commits nothing
        raise


def wait_for_files(path: Path, entries: list[dict[str, Any]]) -> None:
    """Until the files in `path` are there with their sizes: a network file system may show those of other machines
    late. Raises OSError: one is not after SEEN_WITHIN_S."""
    deadline = time.monotonic() + SEEN_WITHIN_S
    for entry in entries:
        file = path / entry["name"]
        while not (file.is_file() and file.stat().st_size == entry["bytes"]):
            if time.monotonic() > deadline:
                raise OSError(
                    f"{file}, of {entry['bytes']} bytes, was written by another rank and is not here: output_dir must "
                    "be a folder that all nodes share"
                )
            time.sleep(0.1)


def write_signed(file: Path, content: dict[str, Any]) -> None:
    """`content` as JSON with the sha256 of itself as last value: a flipped bit shows, wherever it is."""
    write_durably(file, _signed({"schema": SCHEMA, **content}))


def _signed(content: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1)


def read_signed(file: Path, *keys: str) -> list[Any]:
    """The values of `keys` in what `write_signed` wrote; [] if there is no such file.

    Raises CheckpointError: it is damaged, or of a schema that this version does not read.
    """
    try:
        text = file.read_text()
        content = json.loads(text)
        values = [content[key] for key in keys]
        if (schema := content["schema"]) != SCHEMA:
            raise CheckpointError(
                f"{file} has schema {schema}; this version reads {SCHEMA}", code="other_schema", key=str(file)
            )
        del content["sha256"]
        if text != _signed(content):
            raise CheckpointError(
                f"{file} is altered: its sha256 is not the one in it", code="altered", key=str(file)
            )
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged: {error!r}", code="damaged", key=str(file)) from error
    return values


def read_manifest(path: Path) -> dict[str, tuple[int, str]]:
    """name -> (bytes, sha256) of every file of the checkpoint `path`. Raises CheckpointError: there is no manifest, or
    the folder was given the name of another step; as `read_signed`."""
    found = read_signed(path / MANIFEST, "step", "files")
    if not found:
        raise CheckpointError(
            f"{path} has no {MANIFEST}: it was never committed", code="not_committed", key=str(path)
        )
    step, files = found
    if FOLDER.fullmatch(path.name) and step_of(path) != step:
        raise CheckpointError(
            f"{path} is named as of step {step_of(path)} and is of step {step}, as its {MANIFEST} says: rename it to "
            f"{name_of(step)}",
            code="other_step",
            key=str(path),
        )
    return {e["name"]: (int(e["bytes"]), str(e["sha256"])) for e in files}


def rolled_back(path: Path) -> list[list[int]] | None:
    """The samples that a run leaves out which was rolled back to the checkpoint `path`: RunState.skipped_samples as of
    then. None: it was not. Raises CheckpointError: the note of it is damaged."""
    note = path.parent / ROLLBACK
    try:
        checkpoint, ranges = read_signed(note, "checkpoint", "skipped_samples") or (None, None)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. It says which samples a rollback leaves out. Restore it, or remove it to go on with what the "
            "checkpoint itself says",
            code=error.code,
            key=error.key,
        ) from error
    return ranges if checkpoint == identity(path) else None


def note_rollback(path: Path, ranges: list[list[int]], **more: Any) -> None:
    """For `rolled_back`; `more`: what else the note is to have. Raises OSError."""
    write_signed(path.parent / ROLLBACK, {"checkpoint": identity(path), "skipped_samples": ranges, **more})


def identity(path: Path) -> str:
    """What tells this checkpoint from any other: the sha256 of its manifest, which holds those of all its files."""
    return sha256_file(path / MANIFEST)


# ---------------------------------------------------------------- the place of a save


def remove(path: Path) -> None:
    """Remove the folder of a save; of a link to one, which is somebody else's, the link alone.

    The manifest goes first: a kill half way leaves no half checkpoint that counts. Raises OSError."""
    if path.is_symlink():
        path.unlink()
        return
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)


def make_room(path: Path, needed: int) -> None:
    """Clear the place for a save, and check that the disk has `needed` bytes.

    Raises OSError: it has not, or there is a checkpoint of this step (`set_aside` has moved those of later steps).
    """
    if path.exists() and not (path / MANIFEST).exists():
        remove(path)  # left by a run that died in its save
    path.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(path.parent).free) < needed:
        raise OSError(
            f"the disk has not the room: {size_text(free)} are free and {size_text(needed)} are needed"
        )
    path.mkdir()


def undo_save(path: Path, needed: int, error: UserError) -> str:
    """Remove what a failed save wrote; returns what to tell the user. Never raises."""
    removed = "what it wrote is removed"
    try:
        if path.exists() and not (path / MANIFEST).exists():  # with one it is what was there before
            remove(path)
    except OSError as reason:
        removed = f"what it wrote could not be removed ({reason})"
    remedy = "Make room there, or have it made writable, lower save_total_limit, or choose another output_dir"
    if error.may_pass:
        remedy = (
            "It may pass: another start, which run_training.sh makes by itself, goes on from the last of them"
        )
    said = f"the checkpoint {path} could not be saved: {error}. In {path.parent} a save needs about {size_text(needed)}"
    return f"{said}; {removed}, the checkpoints before it are as they were. {remedy}"


def discard_old(path: Path, keep: int, unscheduled: Collection[int] = ()) -> None:
    """Leave the `keep` newest checkpoints up to `path`, which counts as one of them; 0: all. Those of steps
    `unscheduled` go first, so that a module in trouble, which saves at each level, or a schedule of many stages does
    not push out what was saved before it."""
    older = [p for p in committed(path.parent) if step_of(p) < step_of(path)]
    older.sort(key=lambda p: (step_of(p) not in unscheduled, step_of(p)))
    for old in older[: max(len(older) - (keep - 1), 0)] if keep else []:
        try:
            remove(old)
        except OSError as error:  # the new one can be committed all the same
            warnings.warn(f"the old checkpoint {old} could not be removed: {error}", stacklevel=2)


def discard_surplus(path: Path, keep: int, unscheduled: Collection[int] = ()) -> None:
    """Before `path` is written: leave the `keep` newest before it, of which an earlier start with a higher limit may
    have left more; 0: all."""
    if keep:
        discard_old(path, keep + 1, unscheduled)


# ---------------------------------------------------------------- verify


def problems(path: Path, hashes: bool = True) -> list[str]:
    """Why `path` is not a usable checkpoint: each missing, truncated or altered file. Empty when all hashes hold;
    without `hashes` only sizes are compared, which takes no time."""
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
            found.append(f"{file} has {file.stat().st_size} bytes, the manifest says {size}")
        else:
            present.append(file)
    if not hashes:
        return found

    def hashed() -> list[str]:
        with ThreadPoolExecutor(8) as pool:  # hashing releases the interpreter lock
            return list(pool.map(sha256_file, present))

    try:
        hashes_now = again(hashed)
    except OSError as error:
        return [*found, f"{path} cannot be read: {error}"]
    altered = [f for f, now in zip(present, hashes_now, strict=True) if now != expected[f.name][1]]
    return found + [f"{file} is altered: its sha256 is not the manifest's" for file in altered]


def check_given(path: Path, root: Path, hashes: bool = True) -> None:
    """Raises CheckpointError: `path`, which resume_from_checkpoint of a run with its checkpoints in `root` names, is
    none; see `problems`. Of a run's folder it says which: a newer one, when the same command starts again, would not be
    what the run began at."""
    if found := problems(path, hashes):
        inside = committed(path / "checkpoints") or committed(path)
        if newest := next((p for p in reversed(inside) if not problems(p, hashes=False)), None):
            own = "auto, which goes on from this run's newest good one, or " if is_of(newest, root) else ""
            raise CheckpointError(
                f"resume_from_checkpoint {str(path)!r} is a run's folder: give {own}the path of one of its "
                f"{len(inside)} checkpoints; the newest good one is {newest}",
                code="run_folder",
                key="resume_from_checkpoint",
            )
        raise CheckpointError(
            f"resume_from_checkpoint {str(path)!r}: {'; '.join(found)}; give auto, never, or the path of a checkpoint"
            + others_than(path, root),
            code="no_checkpoint",
            key="resume_from_checkpoint",
        )


def others_than(path: Path, *roots: Path) -> str:
    """The end of a message about `path`, which was given as a checkpoint and is none: '; committed in FOLDER: ...' with
    the newest five of the run that `path` is or lies in, else of the first of `roots` that has any; '' without any."""
    near = [root for folder in (path, path.parent) for root in (folder / "checkpoints", folder)]
    for root in (*near, *roots):
        if others := [p.name for p in committed(root) if p.resolve() != path.resolve()]:
            return f"; committed in {root}: {', '.join(others[-5:])}"
    return ""


def newest_good(root: Path) -> Path | None:
    """The newest committed checkpoint under `root` whose hashes hold; logs why newer ones are not used. None
    if nothing is committed.

    Raises CheckpointError: something is committed, and none of it verifies.
    """
    candidates = committed(root)
    for path in reversed(candidates):
        # sizes first: a missing or truncated file is told at once, without hashing the gigabytes beside it
        found = problems(path, hashes=False) or problems(path)
        if not found:
            return path
        if not (path / MANIFEST).is_file():  # its run goes on, and has a newer one instead
            return newest_good(root)
        logger.warning(f"checkpoint {path.name} is not used: " + "; ".join(found))
    if candidates:
        raise CheckpointError(
            f"none of the {len(candidates)} checkpoints in {root} verifies; restore one, or start anew with "
            "--resume_from_checkpoint never",
            code="none_verifies",
            key=str(root),
        )
    return None


def meant_by(given: Path) -> Path | None:
    """The checkpoint that a user means by a folder: itself, or of a run, its output_dir or its checkpoints/, the newest
    whose hashes hold; logs why newer ones are not used. None: it is neither, or a run without any.

    Raises CheckpointError: what is there does not verify, or is no folder.
    """
    if not given.is_dir() or FOLDER.fullmatch(given.resolve().name) or (given / RUN_STATE).is_file():
        if found := problems(given):
            raise CheckpointError("; ".join(found), code="no_checkpoint", key=str(given))
        return given
    root = given / "checkpoints"
    return newest_good(root if root.is_dir() else given)


def is_of(path: Path, root: Path) -> bool:
    """Whether the checkpoint `path` lies in `root`, the checkpoints of a run."""
    return path.resolve().parent == root.resolve()


def origin(path: Path) -> dict[str, str]:
    """RunState.began_at of a run that begins at the checkpoint `path` of another one."""
    return {"path": str(path.resolve()), "manifest_sha256": identity(path)}


def branch_at(root: Path, path: Path) -> Path | None:
    """The newest committed checkpoint under `root` of a run that began at the checkpoint `path` of another run; None
    without any. `path` itself may be gone meanwhile.

    Raises CheckpointError: what is committed under `root` did not begin there.
    """
    own = committed(root)
    if not own or is_of(path, root):
        return None
    began: dict[str, str] = {}
    for each in reversed(own):
        with contextlib.suppress(CheckpointError):  # one that is damaged is for its verification to name
            began = read_state(each).began_at
            break
    if not (path / MANIFEST).is_file():
        return own[-1] if began.get("path") == str(path.resolve()) else None
    if began.get("manifest_sha256") == identity(path):
        return own[-1]
    raise CheckpointError(
        f"resume_from_checkpoint {path} is of another run, and {root} has checkpoints ({own[-1].name} is the newest) "
        "of a run that did not begin there: choose another output_dir, or go on with that run, with "
        "--resume_from_checkpoint auto",
        code="other_run",
        key="resume_from_checkpoint",
    )


def read_state(path: Path) -> RunState:
    """The run state of a committed checkpoint.

    Raises CheckpointError: it has none, or not in this form.
    """
    try:
        values = json.loads((path / RUN_STATE).read_text())
        if unknown := sorted(values.keys() - {key.name for key in fields(RunState)}):
            raise CheckpointError(
                f"{path / RUN_STATE} is of another version of this program, with {', '.join(unknown)}, which this one "
                "does not know: go on with that version",
                code="other_version",
                key=unknown[0],
            )
        return RunState(**values)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path / RUN_STATE} cannot be read: {error}", code="damaged", key=str(path / RUN_STATE)
        ) from error
