#!/usr/bin/env python3
"""Look at checkpoints: `python train/inspect_checkpoint.py DIR [--verify]`.

DIR is an output_dir, its folder checkpoints, or one checkpoint. Prints each step's folder: committed or why not,
tokens, ranks, ZeRO stage, size, time, what resumes changed, what is missing, truncated or altered, and of a run which
one a resume with "auto" takes.
Sizes are always compared with the manifest; --verify also recomputes every hash.

Ends with status 0 when the newest committed checkpoint is good, 1 when it is not, 2 where nothing
is to be looked at.
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


def report(path: Path, verify: bool) -> list[str] | None:
    """Print what is in one folder of a step; with `verify` all its hashes are computed. Returns what is wrong with it;
    None: it was never committed, or a run that goes on has removed it meanwhile (save_total_limit)."""
    was_committed = (path / MANIFEST).is_file()
    try:
        damage, lines = look_at(path, verify)
    except FileNotFoundError:
        damage, lines = None, []
    # the manifest is what goes first
    if not lines or (was_committed and not (path / MANIFEST).is_file()):
        damage, lines = None, [f"{path.name}  is gone: a run has removed or moved it meanwhile"]
    print("\n    ".join(lines), flush=True)
    return damage


def look_at(path: Path, verify: bool) -> tuple[list[str] | None, list[str]]:
    """What is wrong with a folder, None if it was never committed, and what to print of it. Raises FileNotFoundError:
    it went meanwhile."""
    damage = None
    if (path / MANIFEST).is_file():
        damage = problems(path, hashes=verify)
        try:
            rolled_back(path)
        except CheckpointError as error:  # a resume would be refused
            damage.append(str(error))
    try:
        state = read_state(path)
        changes = [
            f"changed at step {c['step']}: {c['key']}: {shown(c['old'])} -> {shown(c['new'])}"
            for c in state.changes
        ]
        for level, count in Counter(state.levels.values()).items():
            changes.append(f"by precision.on_trouble at level {level}: {count} modules")
        if state.began_at:
            changes.insert(0, f"began at {state.began_at['path']}")
        ranks = f"{state.world_size} rank{'s' * (state.world_size > 1)}"
        description = f"{state.consumed_tokens:,} tokens, {ranks}, ZeRO {state.zero_stage}"
    except CheckpointError:
        changes, description = [], "no readable run state"
    files = [file.stat() for file in path.rglob("*") if file.is_file()]
    size = sum(file.st_size for file in files)
    written = datetime.fromtimestamp(max((f.st_mtime for f in files), default=path.stat().st_mtime))
    head = f"{path.name}  {description}, {size_text(size)}, {written:%Y-%m-%d %H:%M}"
    if damage is None:
        verdict = f"not committed: no {MANIFEST} (its save is under way, was killed or failed)"
    elif damage:
        verdict = "committed, damaged"
    else:
        verdict = f"committed, {'verified' if verify else 'sizes hold (--verify computes the hashes)'}"
    return damage, [head, verdict, *changes, *(damage or [])]


def is_one(given: Path) -> bool:
    """Whether DIR is a checkpoint, which may have been copied under another name."""
    return bool(FOLDER.fullmatch(given.resolve().name)) or (given / RUN_STATE).is_file()


def folders_of(given: Path) -> list[Path]:
    """The step folders that DIR means, oldest first. Raises CheckpointError: there are none."""
    if not given.is_dir():
        raise CheckpointError(f"{given} is not a folder; give an output_dir, its checkpoints, or one of them")
    if is_one(given):
        return [given]
    root = RunFolder(given).checkpoints
    if found := step_folders(root if root.is_dir() else given):
        return found
    nearby = sorted(path.parent.name for path in given.glob("*/checkpoints"))
    hint = f"; in it are {', '.join(nearby[:8])}" if nearby else ""
    raise CheckpointError(
        f"{given} holds no checkpoint: neither it nor its checkpoints/ has a step-* folder{hint}"
    )


def inspect(given: Path, verify: bool) -> bool:
    """Print all about DIR; returns whether its newest committed checkpoint is good. Raises as `folders_of`."""
    reports = [(path, report(path, verify)) for path in folders_of(given)]
    candidates = [(path, damage) for path, damage in reports if damage is not None]
    if not is_one(given):  # of a run's others nothing is known by one
        good = [path for path, damage in candidates if not damage]
        takes = "starts anew: nothing is committed"
        if candidates:
            takes = f"takes {good[-1].name}" if good else "is refused: no committed checkpoint is good"
        print(f'a resume with "auto" {takes}')
    return bool(candidates) and not candidates[-1][1]


def main(argv: list[str] | None = None) -> int:
    """Run the command; the status as the module says."""
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
