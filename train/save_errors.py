"""Errors of a save, which every rank must hear of before it waits for the others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from train.checkpoint_files import CheckpointError

T = TypeVar("T")


class SaveError(CheckpointError):
    """A save that failed, the same on every rank. What was committed before it is as it was."""


def together(action: Callable[[], T]) -> T:
    """`action` on every rank, which has no collectives in it; returns when all are done.

    Raises SaveError on all ranks: it failed on one; the message says on which and why.
    """
    result, problem = None, None
    try:
        result = action()
    except Exception as error:  # whatever it is: the others would wait for this rank
        problem = f"{error}" if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, problem)
    if any(every):
        raise SaveError("; ".join(f"rank {r}: {p}" for r, p in enumerate(every) if p))
    return result  # type: ignore[return-value]  # None only where action gave that


class _Writer:
    """DeepSpeed's writer of files, with the errors of a save kept in a list instead of raised."""

    def __init__(self, writer: Any, errors: list[OSError]):
        self.writer, self.errors = writer, errors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.writer, name)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._keep(path, lambda: self.writer.makedirs(path, exist_ok=exist_ok))

    def save(self, state_dict: Any, path: str) -> None:
        self._keep(path, lambda: self.writer.save(state_dict, path))

    def _keep(self, path: str, write: Callable[[], Any]) -> None:
        if self.errors:
            return  # the save has failed already
        try:
            named(path, write)
        except OSError as error:
            self.errors.append(error)


def named(path: Path | str, write: Callable[[], Any]) -> None:
    """Raises OSError with the file's name, whatever failed: torch tells a full disk as a RuntimeError without one."""
    try:
        write()
    except Exception as error:
        raise OSError(f"{path} could not be written: {error}") from error


@contextlib.contextmanager
def errors_kept(engine: Any) -> Iterator[list[OSError]]:
    """Within it engine.save_checkpoint raises nothing that comes of writing: a rank that left it early would let the
    others wait in its barriers, at ZeRO 3 in a gather of weights too. Yields the list of such errors.

    Nor does it copy its scripts into the folder of all checkpoints; train/export.py does what they do.
    """
    errors: list[OSError] = []
    writer = engine.checkpoint_engine
    engine.checkpoint_engine = _Writer(writer, errors)
    engine._copy_recovery_script = lambda save_path: None
    try:
        yield errors
    finally:
        engine.checkpoint_engine = writer
        del engine._copy_recovery_script
