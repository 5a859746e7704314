#!/usr/bin/env python3
"""Look at checkpoints: `python train/inspect_checkpoint.py DIR [--verify]`.

DIR is an output_dir, its folder checkpoints, or one checkpoint. Prints for each step's folder: whether it is committed,
tokens, ranks, ZeRO stage, size, time, changes on resumes, and files that are missing, truncated or altered. For a run
it also prints which checkpoint a resume with "auto" takes.
Sizes are always compared with the manifest; --verify also recomputes every hash.

The exit status is 0 if the newest committed checkpoint is good, 1 if it is not, 2 if there is nothing to look at.
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
    """Return what is wrong with a step's folder, with all hashes if `verify`, or None if it was never committed, or
    removed meanwhile by its run."""
    if not (path / MANIFEST).is_file():
        return None
    damage = problems(path, hashes=verify)
    try:
        rolled_back(path)
    except (CheckpointError, FileNotFoundError) as error:  # a resume would be refused
        damage.append(str(error))
    return damage if (path / MANIFEST).is_file() else None  # the manifest is removed first


def describe(path: Path) -> list[str]:
    """Return a line about the state and the files of a step's folder, and one for each change on a resume."""
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
            changes.append(f"by precision.on_trouble at {level}: {count} modules")
    files = [file.stat() for file in path.glob("*") if file.is_file()]
    size = size_text(sum(file.st_size for file in files))
    written = datetime.fromtimestamp(max((file.st_mtime for file in files), default=0))
    return [f"{path.name}  {description}, {size}, {written:%Y-%m-%d %H:%M}", *changes]


def is_checkpoint(given: Path) -> bool:
    """Return whether DIR is a checkpoint, perhaps copied under another name."""
    return bool(FOLDER.fullmatch(given.resolve().name)) or (given / RUN_STATE).is_file()


def folders_of(given: Path) -> list[Path]:
    """Return the step folders that DIR means, oldest first. Raises CheckpointError: there are none."""
    if given.is_dir() and is_checkpoint(given):
        return [given]
    root = RunFolder(given).checkpoints
    if found := step_folders(root if root.is_dir() else given):
        return found
    raise CheckpointError(f"{given} holds no checkpoint. Pass an output_dir, its checkpoints, or one of them")


def inspect(given: Path, verify: bool) -> bool:
    """Print a report about DIR. Return whether its newest committed checkpoint is good. Raises as `folders_of`."""
    found: dict[Path, list[str]] = {}  # damage of each committed checkpoint
    for path in folders_of(given):
        damage = find_damage(path, verify)
        verdict = f"not committed: no {MANIFEST} (its save is under way or failed, or its run has removed it)"
        if damage is not None:
            found[path] = damage
            good = "verified" if verify else "sizes hold (--verify computes the hashes)"
            verdict = f"committed, {'damaged' if damage else good}"
        print("\n    ".join([*describe(path), verdict, *(damage or [])]), flush=True)
    if not is_checkpoint(given):
        good_ones = [path.name for path, damage in found.items() if not damage]
        taken = f"takes {good_ones[-1]}" if good_ones else "is refused: no committed checkpoint is good"
        print(f'a resume with "auto" {taken if found else "starts anew: nothing is committed"}')
    return bool(found) and not list(found.values())[-1]


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", metavar="DIR", type=Path, help="an output_dir, its checkpoints, or one of them"
    )
    parser.add_argument("--verify", action="store_true", help="compute the hash of every file")
    args = parser.parse_args(argv)
    try:
        return 0 if inspect(args.folder, args.verify) else 1
    except (CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
