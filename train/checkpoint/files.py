"""The files of checkpoints: manifest, run state, verification, and which checkpoint is the newest good one.

    output_dir/checkpoints/
        rollback.json                                    samples that a rollback skips, until the next save
        step-00000100/
            mp_rank_00_model_states.pt, *_optim_states.pt    DeepSpeed's: weights, optimizer state of each rank
            rank_00000.pt                                    one a rank: random generators, FP8 scales and histories
            run_state.json                                   step, consumed samples, world size, resolved configuration
            manifest.json                                    written last: every file with its size and sha256

A folder without a manifest is not a checkpoint: a save that was killed leaves none, and the checkpoint before it stays
the newest. DeepSpeed's file `latest` is not used. Nothing here imports torch.
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
# Seconds for which a client of a network file system may not see another machine's files (NFS: acdirmax).
SEEN_WITHIN_S = 60.0
FOLDER = re.compile(r"step-(\d{8,})")


class CheckpointError(UserError):
    """A checkpoint that cannot be used; the message names the file and what to do."""

    code = "checkpoint"


@dataclass
class RunState:
    """What a run needs besides tensors."""

    step: int
    consumed_samples: int  # the position in the order of samples
    consumed_tokens: int
    world_size: int
    zero_stage: int
    train_config: dict[str, Any]
    model_config: dict[str, Any]
    data_fingerprint: dict[str, Any] = field(default_factory=dict)
    health: dict[str, Any] = field(default_factory=dict)  # what the spike check knows of recent steps
    # ranges [first, end) of the order of samples that rollbacks skip
    skipped_samples: list[list[int]] = field(default_factory=list)
    evaluation_due: bool = False  # that of this step was skipped, because the run was asked to stop
    # changes that resumes allowed (allow_changes_on_resume), oldest first: step, key, old, new
    changes: list[dict[str, Any]] = field(default_factory=list)
    # the checkpoint of another run that this one began at: path, manifest_sha256
    began_at: dict[str, str] = field(default_factory=dict)
    # the section "precision" of the last step, as a phase of its schedule has it
    precision: dict[str, Any] = field(default_factory=dict)
    # fallbacks of modules by precision.on_trouble, oldest first: step, module, from, to, ...
    escalations: list[dict[str, Any]] = field(default_factory=list)
    # steps that were saved because the next one has another precision
    precision_changes: list[int] = field(default_factory=list)

    @property
    def levels(self) -> dict[str, str]:
        """Module -> its level, for Precision."""
        return {change["module"]: change["to"] for change in self.escalations}

    @property
    def unscheduled(self) -> set[int]:
        """Steps that were saved because the precision changed, and not by save_steps."""
        every = self.train_config.get("save_steps")
        return {step for step in self.precision_changes if not every or step % every}


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def rank_file(rank: int) -> str:
    """Return the name of the file that rank `rank` writes besides DeepSpeed's."""
    return f"rank_{rank:05d}.pt"


def step_of(path: Path) -> int:
    """Return the step in a checkpoint folder's name."""
    return int(path.name.removeprefix("step-"))


def step_folders(root: Path) -> list[Path]:
    """Return the folders of saves under `root`, committed or not, oldest step first. Raises PermissionError: as if it
    were empty, a run would start again."""
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
    """Commit the checkpoint in `path`: from here on it counts.

    Args:
        entries: of `describe_file`, of each file of the checkpoint.
        changes: those of its RunState, for readers.

    Raises:
        OSError: a file that another rank wrote is not visible here.
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
    """Wait until the files in `path` are visible with their sizes: a network file system may show those of other
    machines late. Raises OSError: one is not after SEEN_WITHIN_S."""
    deadline = time.monotonic() + SEEN_WITHIN_S
    for entry in entries:
        file = path / entry["name"]
        while not (file.is_file() and file.stat().st_size == entry["bytes"]):
            if time.monotonic() > deadline:
                raise OSError(
                    f"{file} ({entry['bytes']} bytes), which another rank wrote, is not visible here. Choose an "
                    "output_dir that all nodes share"
                )
            time.sleep(0.1)


def write_signed(file: Path, content: dict[str, Any]) -> None:
    """Write `content` as JSON with the sha256 of itself as last value, by which any flipped bit is found."""
    write_durably(file, _signed({"schema": SCHEMA, **content}))


def _signed(content: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1)


def read_signed(file: Path, *keys: str) -> list[Any]:
    """Return the values of `keys` in a file of `write_signed`, or [] if there is no such file.

    Raises CheckpointError: it is damaged, or has a schema that this version does not read.
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
    """Return name -> (bytes, sha256) of every file of the checkpoint `path`. Raises CheckpointError: it was not
    committed, or its folder has the name of another step; as `read_signed`."""
    found = read_signed(path / MANIFEST, "step", "files")
    if not found:
        raise CheckpointError(
            f"{path} has no {MANIFEST}: it was never committed", code="not_committed", key=str(path)
        )
    step, files = found
    if FOLDER.fullmatch(path.name) and step_of(path) != step:
        raise CheckpointError(
            f"{path} has the name of step {step_of(path)} and the {MANIFEST} of step {step}. Rename it to "
            f"{name_of(step)}",
            code="other_step",
            key=str(path),
        )
    return {e["name"]: (int(e["bytes"]), str(e["sha256"])) for e in files}


def rolled_back(path: Path) -> list[list[int]] | None:
    """Return the samples that a run skips which was rolled back to the checkpoint `path`, or None if none was. Raises
    CheckpointError: rollback.json is damaged."""
    found = read_signed(path.parent / ROLLBACK, "checkpoint", "skipped_samples")
    return found[1] if found and found[0] == identity(path) else None


def note_rollback(path: Path, ranges: list[list[int]]) -> None:
    """Write rollback.json, for `rolled_back`. Raises OSError."""
    write_signed(path.parent / ROLLBACK, {"checkpoint": identity(path), "skipped_samples": ranges})


def identity(path: Path) -> str:
    """Return the sha256 of the manifest of `path`, which holds those of all its files."""
    return sha256_file(path / MANIFEST)


# ---------------------------------------------------------------- the place of a save


def remove(path: Path) -> None:
    """Remove the folder of a save; of a link to one, the link alone. Raises OSError.

    The manifest goes first: if the process is killed meanwhile, no half checkpoint counts."""
    if path.is_symlink():
        path.unlink()
        return
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)


def make_room(path: Path, needed: int) -> None:
    """Make the empty folder `path` for a save. Raises OSError: the disk has not `needed` bytes, or there is a
    checkpoint of this step."""
    if path.exists() and not (path / MANIFEST).exists():
        remove(path)  # of a save that was killed
    path.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(path.parent).free) < needed:
        raise OSError(
            f"the disk has not the room: {size_text(free)} are free and {size_text(needed)} are needed"
        )
    path.mkdir()


def undo_save(path: Path) -> None:
    """Remove what a failed save wrote to `path`, if that can be removed."""
    with contextlib.suppress(OSError):
        if path.exists() and not (path / MANIFEST).exists():  # with one it is what was there before
            remove(path)


def discard_old(path: Path, keep: int, unscheduled: Collection[int] = ()) -> None:
    """Keep the `keep` newest checkpoints up to `path`, which counts as one of them; 0: all. Those of steps
    `unscheduled` go first, so that a schedule of many phases does not push out the others."""
    older = [p for p in committed(path.parent) if step_of(p) < step_of(path)]
    older.sort(key=lambda p: (step_of(p) not in unscheduled, step_of(p)))
    for old in older[: max(len(older) - (keep - 1), 0)] if keep else []:
        try:
            remove(old)
        except OSError as error:  # the new one counts all the same
            logger.warning(f"the old checkpoint {old} could not be removed: {error}")


# ---------------------------------------------------------------- verify


def problems(path: Path, hashes: bool = True) -> list[str]:
    """Return why `path` is not a good checkpoint: each missing, truncated or altered file. Without `hashes` only sizes
    are compared, which takes no time."""
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
    try:
        with ThreadPoolExecutor(8) as pool:  # hashing releases the interpreter lock
            actual = list(pool.map(sha256_file, present))
    except OSError as error:
        return [*found, f"{path} cannot be read: {error}"]
    altered = [f for f, now in zip(present, actual, strict=True) if now != expected[f.name][1]]
    return found + [f"{file} is altered: its sha256 is not the manifest's" for file in altered]


def check_given(path: Path, root: Path, hashes: bool = True) -> None:
    """Raise CheckpointError: `path`, which resume_from_checkpoint of a run with its checkpoints in `root` names, is no
    good checkpoint; see `problems`."""
    if found := problems(path, hashes):
        raise CheckpointError(
            f"resume_from_checkpoint {str(path)!r}: {'; '.join(found)}; give auto, never, or the path of a checkpoint"
            + name_others(path, root),
            code="no_checkpoint",
            key="resume_from_checkpoint",
        )


def name_others(path: Path, *roots: Path) -> str:
    """Return the end of a message about `path`, which is no checkpoint: the newest five committed ones of the run that
    `path` is or lies in, else of the first of `roots` that has any."""
    near = [root for folder in (path, path.parent) for root in (folder / "checkpoints", folder)]
    for root in (*near, *roots):
        if others := [p.name for p in committed(root) if p.resolve() != path.resolve()]:
            return f"; committed in {root}: {', '.join(others[-5:])}"
    return ""


def newest_good(root: Path) -> Path | None:
    """Return the newest committed checkpoint under `root` whose hashes hold, or None if nothing is committed; log why
    newer ones are skipped.

    Raises CheckpointError: something is committed, and none of it is good.
    """
    candidates = committed(root)
    for path in reversed(candidates):
        # sizes first: they need no hashing of gigabytes
        found = problems(path, hashes=False) or problems(path)
        if not found:
            return path
        logger.warning(f"checkpoint {path.name} is not used: " + "; ".join(found))
    if candidates:
        raise CheckpointError(
            f"none of the {len(candidates)} checkpoints in {root} verifies; restore one, or start anew with "
            "--resume_from_checkpoint never",
            code="none_verifies",
            key=str(root),
        )
    return None


def find_checkpoint(given: Path) -> Path | None:
    """Return the checkpoint `given`, or the newest good one of a run, of which `given` is the output_dir or its
    checkpoints/. None: it is neither, or a run without any.

    Raises CheckpointError: what is there is not good.
    """
    if not given.is_dir() or FOLDER.fullmatch(given.resolve().name) or (given / RUN_STATE).is_file():
        if found := problems(given):
            raise CheckpointError("; ".join(found) + name_others(given), code="no_checkpoint", key=str(given))
        return given
    root = given / "checkpoints"
    return newest_good(root if root.is_dir() else given)


def belongs_to(path: Path, root: Path) -> bool:
    """Return whether the checkpoint `path` lies in `root`, the checkpoints of a run."""
    return path.resolve().parent == root.resolve()


def origin(path: Path) -> dict[str, str]:
    """Return RunState.began_at of a run that begins at the checkpoint `path` of another one."""
    return {"path": str(path.resolve()), "manifest_sha256": identity(path)}


def branch_at(root: Path, path: Path) -> Path | None:
    """Return the newest committed checkpoint under `root` of a run that began at the checkpoint `path` of another run,
    or None without any. `path` itself may be gone.

    Raises CheckpointError: what is committed under `root` did not begin there.
    """
    own = committed(root)
    if not own or belongs_to(path, root):
        return None
    began: dict[str, str] = {}
    for each in reversed(own):
        with contextlib.suppress(CheckpointError):  # a damaged one is skipped later
            began = read_state(each).began_at
            break
    if not (path / MANIFEST).is_file():
        return own[-1] if began.get("path") == str(path.resolve()) else None
    if began.get("manifest_sha256") == identity(path):
        return own[-1]
    raise CheckpointError(
        f"resume_from_checkpoint {path} is of another run, and {root} has checkpoints of a run that did not begin "
        "there. Choose another output_dir, or continue that run with --resume_from_checkpoint auto",
        code="other_run",
        key="resume_from_checkpoint",
    )


def read_state(path: Path) -> RunState:
    """Return the run state of a committed checkpoint.

    Raises CheckpointError: it has none, or one of another version.
    """
    try:
        values = json.loads((path / RUN_STATE).read_text())
        if unknown := sorted(values.keys() - {key.name for key in fields(RunState)}):
            raise CheckpointError(
                f"{path / RUN_STATE} has {', '.join(unknown)}, which this version of the program does not know. Resume "
                "with the version that wrote it",
                code="other_version",
                key=unknown[0],
            )
        return RunState(**values)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path / RUN_STATE} cannot be read: {error}", code="damaged", key=str(path / RUN_STATE)
        ) from error
