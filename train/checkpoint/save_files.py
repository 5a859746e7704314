"""The files of a save: room for them, writing them with their hashes, and removing what a failed one wrote."""

from __future__ import annotations

import hashlib
import os
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from train.checkpoint.files import (
    BEFORE,
    MANIFEST,
    committed,
    discard,
    size_text,
    step_of,
)

LARGE_BYTES = 1 << 20  # from which on hashing beside writing is worth a change of threads


def make_room(path: Path, needed: int) -> None:
    """Clear the place for a save, and check that the disk has `needed` bytes.

    Raises OSError: it has not.
    """
    if path.exists():
        if (path / MANIFEST).is_file():
            before = path.with_name(path.name + BEFORE)  # counts until this save is committed
            if before.exists():
                discard(before)
            path.rename(before)
        else:
            shutil.rmtree(path)  # left by a run that died in its save
    path.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(path.parent).free) < needed:
        raise OSError(
            f"the disk has not the room: {size_text(free)} are free and {size_text(needed)} are needed"
        )
    path.mkdir()


class _Hashed:
    """A file for torch.save, with the sha256 of what was written. An error is kept, for torch does not see one in what
    `write` returns, and an exception would pass through C code that knows none."""

    def __init__(self, file: FileIO, pool: ThreadPoolExecutor):
        self.file, self.pool = file, pool
        self.sha256, self.bytes = hashlib.sha256(), 0
        self.error: Exception | None = None

    def write(self, data: Any) -> int:
        data = memoryview(data)
        if self.error is None:
            try:
                self._write(data)
            except Exception as error:
                self.error = error
        return data.nbytes

    def _write(self, data: memoryview) -> None:
        # hashing and writing both release the interpreter's lock
        hashed = self.pool.submit(self.sha256.update, data) if data.nbytes >= LARGE_BYTES else None
        try:
            done = 0
            while done < data.nbytes:
                done += self.file.write(data[done:])
        finally:
            if hashed is not None:
                hashed.result()
        if hashed is None:
            self.sha256.update(data)
        self.bytes += data.nbytes

    def flush(self) -> None:
        pass


def write_tensors(path: Path, value: Any) -> dict[str, Any]:
    """torch.save to `path`, flushed to the disk; returns its entry in the manifest.

    Raises OSError with the file's name, whatever failed.
    """
    try:
        with open(path, "wb", buffering=0) as file, ThreadPoolExecutor(1) as pool:
            hashed = _Hashed(file, pool)
            torch.save(value, hashed)  # type: ignore[arg-type]  # it writes, and needs nothing else
            if hashed.error is not None:
                raise hashed.error
            os.fsync(file.fileno())
    except Exception as error:
        raise OSError(f"{path} could not be written: {error}") from error
    return {"name": path.name, "bytes": hashed.bytes, "sha256": hashed.sha256.hexdigest()}


def undo(path: Path, needed: int, error: Exception) -> str:
    """Remove what a failed save wrote, put back what it replaced; returns what to tell the user. Never raises."""
    full, removed = _free(path.parent), "what it wrote is removed"
    try:
        if path.exists() and not (path / MANIFEST).exists():  # with one it is what was there before
            shutil.rmtree(path)
        before = path.with_name(path.name + BEFORE)
        if before.exists() and not path.exists():
            before.rename(path)
    except OSError as reason:
        removed = f"what it wrote could not be removed ({reason})"
    return (
        f"the checkpoint {path} could not be saved: {error}. {path.parent} had {full} free then and has "
        f"{_free(path.parent)} now, a save needs about {size_text(needed)}; {removed}, the checkpoints before it are "
        "as they were. Make room there, lower save_total_limit, or choose another output_dir"
    )


def _free(folder: Path) -> str:
    try:
        return size_text(shutil.disk_usage(folder).free)
    except OSError as error:
        return f"an unknown size ({error})"


def discard_old(path: Path, keep: int) -> None:
    """Leave the `keep` newest checkpoints up to `path`, which was committed just now; 0: all."""
    replaced = path.with_name(path.name + BEFORE)
    older = [p for p in committed(path.parent) if step_of(p) < step_of(path)]
    surplus = older[: max(len(older) - (keep - 1), 0)] if keep else []
    for old in [*surplus, *([replaced] if replaced.exists() else [])]:
        try:
            discard(old)
        except OSError as error:  # the new one is committed all the same
            warnings.warn(f"the old checkpoint {old} could not be removed: {error}", stacklevel=2)
