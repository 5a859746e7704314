#!/usr/bin/env python3
"""Inspect checkpoints: `python train/inspect_checkpoint.py DIR [--verify]`.

DIR is a run's output_dir, its checkpoints folder, or one checkpoint. For each checkpoint the program prints whether it
is committed, its tokens, ranks, ZeRO stage, size and time, the changes on resumes, and missing, truncated or altered
files. For a run it also prints which checkpoint `--resume_from_checkpoint auto` uses. File sizes are always compared
with the manifest; --verify also checks the hash of every file.

Exit status: 0 if the newest committed checkpoint is good, 1 if it is not, 2 if DIR contains no checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
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
from train.files import shown, size_text
from train.record.run_folder import RunFolder


def find_damage(path: Path, verify: bool) -> list[str] | None:
    """Return the problems of a checkpoint folder, or None if it is not committed.

    A running training may remove the checkpoint meanwhile, which also gives None.

    Args:
        verify: whether to check the hash of every file.
    """
    if not (path / MANIFEST).is_file():
        return None
    damage = problems(path, hashes=verify)
    try:
        rolled_back(path)
    except (CheckpointError, FileNotFoundError) as error:  # a resume would be refused
        damage.append(str(error))
    return damage if (path / MANIFEST).is_file() else None  # the manifest is removed first


def describe(path: Path) -> list[str]:
    """Return one line about the run state and the files of a checkpoint, and one for each change on a resume."""
    try:
        state = read_state(path)
    except CheckpointError:
        description, changes = "no readable run state", []
    else:
        ranks = f"{state.world_size} rank{'s' * (state.world_size > 1)}"
        description = f"{state.consumed_tokens:,} tokens, {ranks}, ZeRO {state.zero_stage}"
        changes = [f"began at {state.began_at['path']}"] if state.began_at else []
        changes += [
            f"changed at step {c['step']}: {c['key']}: {shown(c['old'])} -> {shown(c['new'])}"
            for c in state.changes
        ]
        for level, count in Counter(state.levels.values()).items():
            changes.append(f"fallback to {level} by precision.on_trouble: {count} modules")
    files = [file.stat() for file in path.glob("*") if file.is_file()]
    size = size_text(sum(file.st_size for file in files))
    written = datetime.fromtimestamp(max((file.st_mtime for file in files), default=0))
    return [f"{path.name}  {description}, {size}, {written:%Y-%m-%d %H:%M}", *changes]


def is_checkpoint(given: Path) -> bool:
    """Return whether DIR is a checkpoint, even if it was copied under another name."""
    return bool(FOLDER.fullmatch(given.resolve().name)) or (given / RUN_STATE).is_file()


def folders_of(given: Path) -> list[Path]:
    """Return the checkpoint folders in DIR, oldest first. Raises CheckpointError: there are none."""
    if given.is_dir() and is_checkpoint(given):
        return [given]
    root = RunFolder(given).checkpoints
    if found := step_folders(root if root.is_dir() else given):
        return found
    raise CheckpointError(
        f"{given} contains no checkpoint. Pass a run's output_dir or one of its checkpoints"
    )


def inspect(given: Path, verify: bool) -> bool:
    """Print a report about DIR. Return whether its newest committed checkpoint is good.

    Raises: CheckpointError: DIR contains no checkpoint."""
    found: dict[Path, list[str]] = {}  # damage of each committed checkpoint
    for path in folders_of(given):
        damage = find_damage(path, verify)
        verdict = f"not committed: no {MANIFEST} (a save is in progress or failed, or the run removed the checkpoint)"
        if damage is not None:
            found[path] = damage
            good = "verified" if verify else "sizes are correct (--verify also checks the hashes)"
            verdict = f"committed, {'damaged' if damage else good}"
        print("\n    ".join([*describe(path), verdict, *(damage or [])]), flush=True)
    if not is_checkpoint(given):
        good_ones = [path.name for path, damage in found.items() if not damage]
        taken = (
            f"resumes from {good_ones[-1]}" if good_ones else "is refused: no committed checkpoint is good"
        )
        print(
            f"--resume_from_checkpoint auto {taken if found else 'starts a new run: no checkpoint is committed'}"
        )
    return bool(found) and not list(found.values())[-1]


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder",
        metavar="DIR",
        type=Path,
        help="a run's output_dir, its checkpoints folder, or one checkpoint",
    )
    parser.add_argument("--verify", action="store_true", help="check the hash of every file")
    args = parser.parse_args(argv)
    try:
        return 0 if inspect(args.folder, args.verify) else 1
    except (CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
