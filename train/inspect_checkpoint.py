#!/usr/bin/env python3
"""Look at checkpoints: `python train/inspect_checkpoint.py DIR [--verify]`.

DIR is an output_dir, its folder checkpoints, or one checkpoint. Prints each step's folder: committed or why not,
tokens, ranks, ZeRO stage, size, age, what is missing, truncated or altered, and which one a resume with "auto" takes.
Sizes are always compared with the manifest; --verify also recomputes every hash.

Ends with status 0 when the newest committed checkpoint is good, else with 1.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from train.checkpoint.files import (
    FOLDER,
    MANIFEST,
    CheckpointError,
    problems,
    read_state,
    size_text,
    step_folders,
)
from train.run_folder import RunFolder

AGES = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))
NOT_COMMITTED = f"not committed: no {MANIFEST} (its save is under way, was killed or failed)"


@dataclass
class Found:
    """One folder of a step, and why it is no checkpoint (`damage`)."""

    path: Path
    committed: bool
    damage: list[str]
    description: str  # what its run state says
    bytes: int
    changed: float  # seconds since the epoch


def examine(path: Path, verify: bool) -> Found:
    """Look at one folder; with `verify` all its hashes are computed."""
    is_committed = (path / MANIFEST).is_file()
    damage = problems(path, hashes=verify) if is_committed else []
    try:
        state = read_state(path)
        description = f"{state.consumed_tokens:,} tokens, {state.world_size} ranks, ZeRO {state.zero_stage}"
    except CheckpointError:
        description = "no readable run state"
    files = [file.stat() for file in path.rglob("*") if file.is_file()]
    changed = max((f.st_mtime for f in files), default=path.stat().st_mtime)
    return Found(path, is_committed, damage, description, sum(f.st_size for f in files), changed)


def lines_of(found: Found, verify: bool) -> list[str]:
    """The folder as text."""
    whole = "verified" if verify else "sizes hold (--verify computes the hashes)"
    verdict = "damaged" if found.damage else whole
    head = [found.description, size_text(found.bytes), f"{age(time.time() - found.changed)} old"]
    state = f"committed, {verdict}" if found.committed else NOT_COMMITTED
    return [f"{found.path.name}  {', '.join(head)}", f"    {state}", *(f"    {d}" for d in found.damage)]


def folders_of(given: Path) -> list[Path]:
    """The step folders that DIR means, oldest first.

    Raises CheckpointError: there is no such folder.
    """
    if not given.is_dir():
        raise CheckpointError(f"{given} is not a folder; give an output_dir, its checkpoints, or one of them")
    if FOLDER.fullmatch(given.resolve().name) or (given / MANIFEST).is_file():
        return [given]
    root = RunFolder(given).checkpoints
    return step_folders(root if root.is_dir() else given)


def age(seconds: float) -> str:
    """A duration in its largest whole unit."""
    unit, name = next(((s, n) for s, n in AGES if seconds >= 2 * s), AGES[-1])
    return f"{max(seconds, 0) // unit:,.0f} {name}"


def inspect(given: Path, verify: bool) -> bool:
    """Print all about DIR; returns whether its newest committed checkpoint is good.

    Raises CheckpointError: there is no such folder, or no folder of a step in it.
    """
    folders = folders_of(given)
    if not folders:
        raise CheckpointError(
            f"{given} holds no checkpoint: neither it nor its checkpoints/ has a step-* folder"
        )
    found = []
    for path in folders:
        found.append(examine(path, verify))
        print("\n".join(lines_of(found[-1], verify)), flush=True)
    candidates = [f for f in found if f.committed]
    good = [f for f in candidates if not f.damage]
    free = size_text(shutil.disk_usage(given).free)
    print(
        f"\n{len(found)} folders, {len(candidates)} committed, {size_text(sum(f.bytes for f in found))}; {free} free"
    )
    if good:
        print(f'a resume with "auto" takes {good[-1].path.name}')
    elif candidates:
        print('a resume with "auto" is refused: no committed checkpoint is good')
    else:
        print('a resume with "auto" starts anew: nothing is committed')
    return bool(candidates) and not candidates[-1].damage


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
        return 1


if __name__ == "__main__":
    sys.exit(main())
