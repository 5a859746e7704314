"""Read, write and verify the files in a checkpoint folder, and find the newest intact checkpoint.

    output_dir/checkpoints/
        rollback.json                                    samples to skip after a rollback, until the next save
        step-00000100/
            mp_rank_00_model_states.pt, *_optim_states.pt    DeepSpeed: weights, and the optimizer state of each rank
            rank_00000.pt                                    one per rank: random states, FP8 scales and amax histories
            run_state.json                                   step, consumed samples, world size, resolved configuration
            manifest.json                                    written last: size and sha256 of every other file

A folder without a manifest is not a checkpoint. An interrupted save leaves no manifest, so the previous checkpoint
remains the newest. DeepSpeed's file `latest` is not used. This module does not import torch.
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
from train.files import data_folder, sha256_file, sync_folder, write_durably

logger = logging.getLogger(__name__)

SCHEMA = 2
MANIFEST = "manifest.json"
RUN_STATE = "run_state.json"
ROLLBACK = "rollback.json"  # in the folder that contains the checkpoint folders
# Files that other nodes write to a network file system may become visible after this delay (NFS: acdirmax).
VISIBILITY_TIMEOUT_S = 60.0
FOLDER = re.compile(r"step-(\d{8,})")


class CheckpointError(UserError):
    """Error raised if a checkpoint cannot be used. The message names the path and explains what to do."""

    code = "checkpoint"


@dataclass
class RunState:
    """State of a training run, except for tensors. Each checkpoint stores the run state in run_state.json."""

    step: int
    consumed_samples: int  # position of the next sample in the global sample order
    consumed_tokens: int
    world_size: int
    zero_stage: int
    train_config: dict[str, Any]
    model_config: dict[str, Any]
    data_fingerprint: dict[str, Any] = field(default_factory=dict)
    # samples drawn from each data source before consumed_samples, by name (SampleStream.drawn_at)
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    health: dict[str, Any] = field(default_factory=dict)  # state of the loss spike detection
    # ranges [first, end) in the global sample order that the run skips after rollbacks
    skipped_samples: list[list[int]] = field(default_factory=list)
    evaluation_due: bool = False  # whether a stop request skipped the evaluation after this step
    # configuration changes made on resume (allow_changes_on_resume), oldest first: step, key, old, new
    changes: list[dict[str, Any]] = field(default_factory=list)
    # checkpoint of another run from which this run started: path, manifest_sha256
    began_at: dict[str, str] = field(default_factory=dict)
    # section "precision" of the configuration in the last step, with the overrides of its schedule phase
    precision: dict[str, Any] = field(default_factory=dict)
    # modules that precision.on_trouble moved to a safer recipe, oldest first: step, module, from, to, ...
    escalations: list[dict[str, Any]] = field(default_factory=list)
    # steps after which the precision changed; recorded only by earlier versions
    precision_changes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = [*self.data_fingerprint.get("sources", {})]
        if not self.sources and len(names) == 1:  # earlier versions did not write `sources`
            self.sources = {names[0]: {"samples": self.consumed_samples, "deficit": 0.0}}

    @property
    def fallbacks(self) -> dict[str, str]:
        """Return {module name: recipe} for the modules that fell back to a safer precision recipe."""
        return {change["module"]: change["to"] for change in self.escalations}

    @property
    def tokenizers(self) -> set[str]:
        """Return the SHA-256 hashes of the tokenizers that were used to prepare the training data."""
        return {source["tokenizer_sha256"] for source in self.data_fingerprint.get("sources", {}).values()}


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def rank_file(rank: int) -> str:
    """Return the name of the file with a rank's random number generator states and FP8 state."""
    return f"rank_{rank:05d}.pt"


def parse_step(path: Path) -> int:
    """Return the training step that is encoded in the name of a checkpoint folder."""
    return int(path.name.removeprefix("step-"))


def step_folders(root: Path) -> list[Path]:
    """Return all checkpoint folders in `root`, including incomplete ones, sorted by step.

    Raises:
        PermissionError: if `root` cannot be read. Ignoring this error would restart training from step 0.
    """
    names = os.listdir(root) if root.is_dir() else []
    return sorted(
        (root / name for name in names if FOLDER.fullmatch(name) and (root / name).is_dir()), key=parse_step
    )


def committed(root: Path) -> list[Path]:
    """Return the complete checkpoints in `root`, sorted by step. A complete checkpoint has a manifest."""
    return [path for path in step_folders(root) if (path / MANIFEST).is_file()]


# ---------------------------------------------------------------- manifest


def describe_file(file: Path) -> dict[str, Any]:
    """Return the manifest entry of a file: its name, its size in bytes and its sha256."""
    return {"name": file.name, "bytes": file.stat().st_size, "sha256": sha256_file(file)}


def write_manifest(path: Path, entries: list[dict[str, Any]], changes: Sequence[dict[str, Any]] = ()) -> None:
    """Write the manifest, which marks the checkpoint in `path` as complete.

    Args:
        entries: manifest entry of each file, from `describe_file`.
        changes: `RunState.changes`, copied to the manifest for information.

    Raises:
        OSError: if a file written by another rank is not visible on this node.
    """
    entries = sorted(entries, key=lambda e: e["name"])
    wait_for_files(path, entries)
    sync_folder(path.parent)  # the parent folder has a new entry
    write_signed(path / MANIFEST, {"step": parse_step(path), "changes": list(changes), "files": entries})


def wait_for_files(path: Path, entries: list[dict[str, Any]]) -> None:
    """Wait until the files listed in `entries` are visible in `path` with their full sizes.

    On a network file system, files written by other nodes may become visible late.

    Raises:
        OSError: if a file is not visible after VISIBILITY_TIMEOUT_S seconds.
    """
    deadline = time.monotonic() + VISIBILITY_TIMEOUT_S
    for entry in entries:
        while not has_size(path / entry["name"], entry["bytes"]):
            if time.monotonic() > deadline:
                raise OSError(
                    f"{path / entry['name']} ({entry['bytes']} bytes) was written by another rank, but is not visible "
                    "on this node. Choose an output_dir on a file system that all nodes share"
                )
            time.sleep(0.1)


def has_size(file: Path, size: int) -> bool:
    """Return whether `file` exists and has a size of `size` bytes."""
    return file.is_file() and file.stat().st_size == size


def write_signed(file: Path, content: dict[str, Any]) -> None:
    """Write `content` as JSON together with its sha256, so that `read_signed` can detect a damaged file."""
    write_durably(file, _signed({"schema": SCHEMA, **content}))


def _signed(content: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1)


def read_signed(file: Path, *keys: str) -> list[Any]:
    """Read values from a JSON file that `write_signed` wrote.

    Args:
        keys: keys of the values to return.

    Returns:
        The values in the order of `keys`, or [] if the file does not exist.

    Raises:
        CheckpointError: if the file is damaged, or has another format.
    """
    try:
        text = file.read_text()
        content = json.loads(text)
        del content["sha256"]
        if text != _signed(content):
            raise ValueError("the sha256 field does not match the content")
        if content["schema"] != SCHEMA:
            raise CheckpointError(
                f"{file} has the format {content['schema']}, but this version of the code reads only {SCHEMA}. Use the "
                "version that wrote the checkpoint",
                code="other_format",
                key=str(file),
            )
        return [content[key] for key in keys]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file} is damaged: {error!r}. Restore the file, or use a checkpoint from another folder",
            code="damaged",
            key=str(file),
        ) from error


def read_manifest(path: Path) -> dict[str, tuple[int, str]]:
    """Read the manifest of a checkpoint.

    Returns:
        {file name: (size in bytes, sha256)} for every file in the checkpoint.

    Raises:
        CheckpointError: if the checkpoint is incomplete, or its manifest is damaged.
    """
    found = read_signed(path / MANIFEST, "files", "step")
    if not found:
        raise CheckpointError(
            f"{path} has no {MANIFEST}. The folder is not a checkpoint, or the save did not complete. Choose another "
            "checkpoint",
            code="not_committed",
            key=str(path),
        )
    entries, step = found
    if path.name.startswith("step-") and path.name != checkpoint_name(step):
        raise CheckpointError(
            f"{path} contains the checkpoint for step {step}, which does not match the folder name. Rename the folder "
            f"to {checkpoint_name(step)}",
            code="damaged",
            key=str(path),
        )
    return {e["name"]: (int(e["bytes"]), str(e["sha256"])) for e in entries}


def rolled_back(path: Path) -> list[list[int]] | None:
    """Return the samples to skip if the run was rolled back to the checkpoint `path`.

    Returns:
        Ranges [first, end) in the global sample order, or None if the run was not rolled back to this checkpoint.

    Raises:
        CheckpointError: if rollback.json is damaged.
    """
    found = read_signed(path.parent / ROLLBACK, "checkpoint", "skipped_samples")
    return found[1] if found and found[0] == identity(path) else None


def record_rollback(path: Path, ranges: list[list[int]]) -> None:
    """Write rollback.json, which records a rollback to the checkpoint `path` and the sample ranges to skip.

    Raises:
        OSError: if the file cannot be written.
    """
    write_signed(path.parent / ROLLBACK, {"checkpoint": identity(path), "skipped_samples": ranges})


def identity(path: Path) -> str:
    """Return the SHA-256 of the manifest of the checkpoint `path`, which identifies the content of the checkpoint."""
    return sha256_file(path / MANIFEST)


# ---------------------------------------------------------------- folders of saves


def remove(path: Path) -> None:
    """Remove a checkpoint folder, or only the link if `path` is a symbolic link.

    The manifest is removed first, so that an interrupted removal never leaves a folder that looks like a complete
    checkpoint.

    Raises:
        OSError: if a file cannot be removed.
    """
    if path.is_symlink():
        path.unlink()
        return
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)


def remove_unfinished(path: Path) -> None:
    """Remove the folder `path` if it contains an incomplete save. A complete checkpoint is kept.

    Raises:
        OSError: if a file cannot be removed.
    """
    if path.exists() and not (path / MANIFEST).exists():
        remove(path)


def excess_checkpoints(paths: list[Path], keep: int, keep_every: int) -> list[Path]:
    """Return the checkpoints to delete after a save.

    Args:
        paths: all checkpoints, sorted by step.
        keep: number of recent checkpoints to keep, or 0 to keep all.
        keep_every: checkpoints whose step is a multiple of this number are also kept. 0 has no effect.
    """
    return [path for path in paths[:-keep] if not keep_every or parse_step(path) % keep_every]


def discard_old(path: Path, keep: int, keep_every: int = 0) -> None:
    """Remove the checkpoints that need not be kept after the checkpoint `path` was saved.

    `excess_checkpoints` explains the arguments `keep` and `keep_every`.
    """
    paths: list[Path] = []
    try:  # no error affects the new checkpoint
        paths = [p for p in committed(path.parent) if parse_step(p) <= parse_step(path)]
    except OSError as error:
        logger.warning(f"old checkpoints could not be listed: {error}. The next save removes them")
    for old in excess_checkpoints(paths, keep, keep_every):
        try:
            remove(old)
        except OSError as error:
            logger.warning(
                f"the old checkpoint {old} could not be removed: {error}. The next save tries again"
            )


# ---------------------------------------------------------------- verify


def problems(path: Path, hashes: bool = True) -> list[str]:
    """Return the problems found in a checkpoint: missing, truncated or altered files.

    Args:
        hashes: whether to compare the sha256 of every file. If False, only the sizes are compared, which is fast.
    """
    try:
        expected = read_manifest(path)
        found = [
            f"{path / name} is missing or does not have {size} bytes"
            for name, (size, _) in expected.items()
            if not has_size(path / name, size)
        ]
        if found or not hashes:  # computing the hashes reads gigabytes
            return found
        with ThreadPoolExecutor(8) as pool:  # hashlib releases the GIL
            actual = list(pool.map(sha256_file, (path / name for name in expected)))
    except (CheckpointError, OSError) as error:
        return [str(error)]
    return [
        f"{path / name} is altered: the sha256 of the file differs from the manifest"
        for (name, (_, sha256)), now in zip(expected.items(), actual, strict=True)
        if now != sha256
    ]


def check_named_checkpoint(path: Path, key: str, hashes: bool = True) -> None:
    """Check that a path given by the user is an intact checkpoint.

    Args:
        key: configuration key or option to report in the error.
        hashes: whether to compare the sha256 of every file. If False, only the sizes are compared.

    Raises:
        CheckpointError: if the checkpoint is missing, incomplete or damaged.
    """
    if found := problems(path, hashes):
        raise CheckpointError("; ".join(found), code="no_checkpoint", key=key)


def newest_intact(root: Path, hashes: bool = True) -> Path | None:
    """Return the newest checkpoint in `root` whose files are intact, or None if there is no complete checkpoint.

    Newer checkpoints that are damaged are skipped with a warning.

    Args:
        hashes: see `problems`.

    Raises:
        CheckpointError: if all checkpoints are damaged.
    """
    candidates = committed(root)
    for path in reversed(candidates):
        if not (found := problems(path, hashes)):
            return path
        logger.warning(f"checkpoint {path.name} is skipped: " + "; ".join(found))
    if candidates:
        raise CheckpointError(
            f"none of the {len(candidates)} checkpoints in {root} is intact. Restore one from a backup, or start over "
            "with --resume_from_checkpoint never",
            code="none_verifies",
            key=str(root),
        )
    return None


def find_start(root: Path, setting: str, hashes: bool = True) -> Path | None:
    """Find the checkpoint from which a run resumes, or return None for a new run.

    Args:
        root: checkpoints folder of the run.
        setting: value of resume_from_checkpoint: "never", "auto" for the newest intact checkpoint, or the path of a
            checkpoint. A checkpoint of another run is only used until this run has saved its own checkpoint.
        hashes: see `problems`.

    Raises:
        CheckpointError: if the given checkpoint is damaged or belongs to another run, or if all checkpoints in `root`
            are damaged.
    """
    if setting == "never":
        return None
    path = Path(setting)
    if setting == "auto" or is_branch(root, path):
        return newest_intact(root, hashes)
    check_named_checkpoint(path, "resume_from_checkpoint", hashes)
    return path


def find_checkpoint(given: Path) -> Path | None:
    """Find the checkpoint at a path given by the user.

    Args:
        given: a checkpoint, the output_dir of a run, or the checkpoints folder of a run.

    Returns:
        `given` if it is a checkpoint, or the newest intact checkpoint of the run. None if there is no checkpoint.

    Raises:
        CheckpointError: if `given` is a damaged checkpoint, or all checkpoints of the run are damaged.
    """
    if not given.is_dir() or FOLDER.fullmatch(given.resolve().name) or (given / RUN_STATE).is_file():
        check_named_checkpoint(given, key=str(given))
        return given
    root = given / "checkpoints"
    return newest_intact(root if root.is_dir() else given)


def is_in_folder(path: Path, root: Path) -> bool:
    """Return whether the checkpoint `path` is stored in `root`, the checkpoints folder of a run."""
    return path.resolve().parent == root.resolve()


def is_branch(root: Path, path: Path) -> bool:
    """Return whether a run started from the checkpoint `path` of another run.

    Args:
        root: checkpoints folder of the run.
        path: checkpoint of the other run. It may have been removed or moved in the meantime.

    Returns:
        False if the run has no checkpoints, or if `path` is one of its own checkpoints.

    Raises:
        CheckpointError: if the run has checkpoints, but did not start from `path`.
    """
    own = committed(root)
    if not own or is_in_folder(path, root):
        return False
    for checkpoint in own:
        with contextlib.suppress(CheckpointError):  # skip a damaged one: all checkpoints have the same origin
            began_at = read_state(checkpoint).began_at
            is_same = path.is_dir() and began_at.get("manifest_sha256") == identity(path)  # also if moved
            if is_same or began_at.get("path") == str(path.resolve()):
                return True
            break
    raise CheckpointError(
        f"resume_from_checkpoint {path} belongs to another run, and {root} already contains checkpoints of a run that "
        "did not start from this checkpoint. Choose another output_dir, or continue the run in this output_dir with "
        "--resume_from_checkpoint auto",
        code="other_run",
        key="resume_from_checkpoint",
    )


def read_state(path: Path) -> RunState:
    """Read the run state of a complete checkpoint.

    Raises:
        CheckpointError: if run_state.json is missing, damaged, or was written by an incompatible version.
    """
    try:
        return RunState(**json.loads((path / RUN_STATE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path / RUN_STATE} cannot be read ({error}). The file is damaged or was written by an incompatible "
            "version of the code. Choose another checkpoint",
            code="damaged",
            key=str(path / RUN_STATE),
        ) from error


def trained_tokenizer(path: Path, state: RunState) -> Path:
    """Return the folder that contains the tokenizer used in training, in the training data or the run's hf/ folder.

    Raises:
        DataError: if none of the folders contains the tokenizer used in training.
    """
    # imported here, because inspect_checkpoint.py works without numpy
    from train.data.encoder import TOKENIZER_FILES
    from train.data.format import TOKENIZER_FOLDER, DataError

    sources = state.train_config["data"]["sources"].values()
    folders = [Path(data_folder(source)) / TOKENIZER_FOLDER for source in sources]
    folders.append(path.absolute().parent.parent / "hf")
    for folder in folders:
        files = [file for name in TOKENIZER_FILES[:2] if (file := folder / name).is_file()]
        if files and sha256_file(files[0]) in state.tokenizers:
            return folder
    raise DataError(
        f"the tokenizer used in training is not in {' or '.join(map(str, folders))}. The data may have been removed or "
        "prepared again. Restore the data, or pass the original tokenizer to train/export.py or train/evaluate.py with "
        "--tokenizer",
        code="no_tokenizer",
        key=str(folders[0]),
    )
