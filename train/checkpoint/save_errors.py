"""Errors of a save, which every rank must hear of before it waits for the others."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from train.checkpoint.files import CheckpointError

T = TypeVar("T")

# Between the first rank that has written its files and the last. A hang is for the watchdog to say, and comes first.
AGREE_TIMEOUT = datetime.timedelta(days=1)


class SaveError(CheckpointError):
    """A save that failed, the same on every rank. What was committed before it is as it was."""


class Ranks:
    """The ranks as those that save agree, over a gloo group of their own: a save runs while the others are used.

    Every rank builds it, and calls its methods in the same order.
    """

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(backend="gloo", timeout=AGREE_TIMEOUT) if self.world > 1 else None

    def every(self, value: T) -> list[T]:
        """The `value` of each rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self, action: Callable[[], T]) -> list[T]:
        """What `action` returns on each rank; it has no collectives in it.

        Raises SaveError on all ranks: it failed on one; the message says on which and why.
        """
        result, problem = None, None
        try:
            result = action()
        except Exception as error:  # whatever it is: the others would wait for this rank
            problem = f"{error}" if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        found = self.every((result, problem))
        if any(problem for _, problem in found):
            raise SaveError("; ".join(f"rank {r}: {p}" for r, (_, p) in enumerate(found) if p))
        return [result for result, _ in found]  # type: ignore[misc]  # None only where action gave that


class Taking:
    """In place of DeepSpeed's writer of files: what it would write goes to `take`, and nothing is written.

    What `take` raises is kept in `errors` instead of raised.
    """

    def __init__(self, writer: Any, take: Callable[[str, Any], None]):
        self.writer, self.take = writer, take
        self.errors: list[Exception] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.writer, name)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def save(self, state_dict: Any, path: str) -> None:
        self.attempt(lambda: self.take(Path(path).name, state_dict))

    def attempt(self, action: Callable[[], None]) -> None:
        if not self.errors:  # else the save has failed already
            try:
                action()
            except Exception as error:
                self.errors.append(error)


@contextlib.contextmanager
def nothing_written(engine: Any, take: Callable[[str, Any], None]) -> Iterator[Taking]:
    """Within it engine.save_checkpoint writes no file, but calls `take(name of the file, what is to be in it)` for
    each. It raises nothing that comes of that: a rank that left it early would let the others wait in its barriers, at
    ZeRO 3 in a gather of weights too.

    Nor does it copy its scripts into the folder of all checkpoints; train/export.py does what they do.
    """
    right = engine.checkpoint_engine
    engine.checkpoint_engine = taking = Taking(right, take)
    engine._copy_recovery_script = lambda save_path: None
    try:
        yield taking
    finally:
        engine.checkpoint_engine = right
        del engine._copy_recovery_script
