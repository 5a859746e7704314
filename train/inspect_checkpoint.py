#!/usr/bin/env python3
"""Inspect checkpoints: `python train/inspect_checkpoint.py DIR [--verify]`.

DIR is a run's output_dir, its checkpoints folder, or one checkpoint. For each checkpoint, the command prints

- whether the checkpoint is committed, which means that its save was completed,
- the number of tokens and ranks, the ZeRO stage, the size and the time,
- configuration changes that were made when the run was resumed,
- missing, truncated or modified files.

For a run, the command also prints which checkpoint `--resume_from_checkpoint auto` would use. File sizes are always
compared with the manifest. --verify also checks the hash of every file.

Exit status: 0 if the newest committed checkpoint is undamaged; 1 if it is damaged, or no checkpoint is committed; 2 if
DIR contains no checkpoint.
"""

from __future__ import annotations

import argparse
import functools
import sys
from datetime import datetime
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from train.checkpoint.files import (
    FOLDER,
    MANIFEST,
    RUN_STATE,
    CheckpointError,
    problems,
    read_state,
    rolled_back,
    step_folders,
)
from train.command import command
from train.files import format_size, to_json_text


def find_damage(path: Path, verify: bool) -> list[str] | None:
    """Return the problems found in a checkpoint folder, or None if the checkpoint has no manifest.

    The result is also None if a running job removes the checkpoint during the check.

    Args:
        verify: Whether to check the hash of every file.
    """
    if not (path / MANIFEST).is_file():
        return None
    damage = problems(path, hashes=verify)
    try:
        rolled_back(path)
    except (CheckpointError, FileNotFoundError) as error:  # a resume would be refused
        damage.append(str(error))
    return (
        damage if (path / MANIFEST).is_file() else None
    )  # a run removes the manifest before the other files


def describe(path: Path) -> list[str]:
    """Return lines of text about a checkpoint: its state and size, its origin, and each configuration change."""
    files = [file.stat() for file in path.glob("*") if file.is_file()]
    size = format_size(sum(file.st_size for file in files))
    written = datetime.fromtimestamp(max((file.st_mtime for file in files), default=0))
    try:
        state = read_state(path)
    except CheckpointError:
        return [f"{path.name}  no readable run state, {size}, {written:%Y-%m-%d %H:%M}"]
    return [
        f"{path.name}  {state.consumed_tokens:,} tokens, {state.world_size} ranks, ZeRO {state.zero_stage}, {size}, "
        f"{written:%Y-%m-%d %H:%M}",
        *([f"started from {state.began_at['path']}"] if state.began_at else []),
        *(
            f"changed at step {c['step']}: {c['key']}: {to_json_text(c['old'])} -> {to_json_text(c['new'])}"
            for c in state.changes
        ),
    ]


def inspect(given: Path, verify: bool) -> bool:
    """Print a report about the checkpoints in the folder `given`.

    Returns:
        Whether the newest committed checkpoint is undamaged.

    Raises:
        CheckpointError: The folder contains no checkpoint.
    """
    is_one = bool(FOLDER.fullmatch(given.resolve().name)) or (given / RUN_STATE).is_file()
    root = given / "checkpoints"
    folders = [given] if is_one and given.is_dir() else step_folders(root if root.is_dir() else given)
    if not folders:
        raise CheckpointError(
            f"{given} contains no checkpoint. Pass a run's output_dir or one of its checkpoint folders"
        )
    found: dict[Path, list[str]] = {}  # damage of each committed checkpoint
    for path in folders:
        damage = find_damage(path, verify)
        verdict = (
            f"not committed, because {MANIFEST} is missing: the save is in progress or failed, or the run removed the "
            "checkpoint"
        )
        if damage is not None:
            found[path] = damage
            good = "verified" if verify else "file sizes are correct (--verify also checks the hashes)"
            verdict = f"committed, {'damaged' if damage else good}"
        print("\n    ".join([*describe(path), verdict, *(damage or [])]), flush=True)
    if not is_one:
        usable = [path.name for path, damage in found.items() if not damage]
        print(f"undamaged checkpoints (--resume_from_checkpoint auto uses the newest): {usable}")
    return bool(found) and not list(found.values())[-1]


@functools.partial(command, system_error=2)
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder",
        metavar="DIR",
        type=Path,
        help="a run's output_dir, its checkpoints folder, or one checkpoint",
    )
    parser.add_argument(
        "--verify", action="store_true", help="check the hash of every file in each checkpoint"
    )
    args = parser.parse_args(argv)
    return 0 if inspect(args.folder, args.verify) else 1


if __name__ == "__main__":
    sys.exit(main())
