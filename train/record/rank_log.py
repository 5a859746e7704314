"""logs/rank-NNN.log: what a rank other than 0 has for the console from its first step on, also what libraries and a
crash write there (NCCL, CUDA), of all starts of a run. The console is rank 0's, whose log is train.log.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from train.files import tell
from train.record.run_folder import RunFolder
from train.record.train_log import first_line

_console: TextIO | None = None


def console() -> TextIO:
    """Where last words go, which people are to see whatever is redirected."""
    return _console or sys.__stderr__ or sys.stderr


class RankLog:
    """with RankLog(folder, rank, expected) as log: ... log.open() ...: what follows goes to the rank's file. An
    exception that ends the block is written there with its traceback, unless it is of a type `expected`, which rank 0
    tells. After the block the console is the console again, where train.py says why a rank ends."""

    def __init__(self, folder: RunFolder, rank: int, expected: tuple[type[BaseException], ...] = ()):
        self.path, self.expected = folder.rank_log(rank), expected
        self.begun = time.time()
        self._before: tuple[TextIO, TextIO] | None = None

    def __enter__(self) -> RankLog:
        return self

    def open(self) -> None:
        """From here on it is written; where that fails, the console goes on, and one line says so."""
        global _console
        try:
            self.path.parent.mkdir(exist_ok=True)
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            if self.path.parent.is_dir():  # else rank 0 says it, once
                tell(f"warning: {self.path} cannot be written: {error}; its lines stay on the console")
            return
        _console = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace")
        self._out = os.dup(1)
        self._before = sys.stdout, sys.stderr
        _flush()
        os.dup2(file, 1), os.dup2(file, 2)
        os.close(file)
        sys.stdout, sys.stderr = (self._stream(number) for number in (1, 2))
        tell(first_line(self.begun))

    def _stream(self, descriptor: int) -> TextIO:
        raw: Any = _Forgiving(descriptor, self.path)
        return io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True, write_through=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        global _console
        if self._before is None or _console is None:
            return
        if kind is not None and not issubclass(kind, self.expected):
            tell("".join(traceback.format_exception(kind, error, where)).rstrip())
        _flush()
        os.dup2(self._out, 1), os.dup2(_console.fileno(), 2)
        os.close(self._out)
        _console.close()
        _console = None
        sys.stdout, sys.stderr = self._before


class _Forgiving(io.FileIO):
    """A descriptor to which a full disk ends nothing: one line on the console, and the run goes on."""

    def __init__(self, descriptor: int, path: Path):
        super().__init__(descriptor, "w", closefd=False)
        self.path = path

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if self.path not in _told:
                _told.add(self.path)
                message = f"warning: {self.path} cannot be written: {error}; it lacks lines from here on"
                tell(message, file=console())
            return len(data)


_told: set[Path] = set()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def name_rank_0(folder: RunFolder) -> None:
    """In logs/ the log of rank 0 has its place beside the others, as a link to train.log; rank 0 calls it."""
    path = folder.rank_log(0)
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError as error:
        tell(f"warning: {path.parent} cannot be written: {error}; the lines of all ranks stay on the console")
        return
    try:
        if not path.is_symlink():
            path.symlink_to(os.path.relpath(folder.log, path.parent))
    except OSError as error:  # a file of that name, as of a copied run, or a file system without links
        tell(
            f"warning: {path} cannot be made a link to {folder.log}: {error}; rank 0's lines are in the latter"
        )


def last_lines(path: Path, since: int, most: int = 20) -> list[str]:
    """The last lines of a log without those before the byte `since`; [] where there are none."""
    try:
        with path.open("rb") as file:
            file.seek(max(since, os.fstat(file.fileno()).st_size - 64 * 1024))
            return file.read().decode(errors="replace").splitlines()[-most:]
    except OSError:
        return []
