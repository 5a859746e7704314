"""train.log: what the console of rank 0 said, of all starts of a run, and what only the file has.

What is told before the run may write in its folder is kept until then: a start that is refused leaves no trace there.
"""

from __future__ import annotations

import sys
import time
import traceback
from types import TracebackType

from train.files import heard, tell
from train.record.run_folder import RunFolder


def first_line(begun: float) -> str:
    """Of what a start writes in a log: when it was, and its command."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(begun))
    return f"======== {at}: {' '.join(sys.argv)}"


class TrainLog:
    """with TrainLog(folder, expected) as log: ... log.open() ... : everything that is told meanwhile. An exception that
    ends the block is written with its traceback, unless it is of a type `expected`, which was told."""

    def __init__(self, folder: RunFolder, expected: tuple[type[BaseException], ...] = ()):
        self.path, self.expected = folder.log, expected
        self.begun = time.time()
        self._kept: list[str] = []
        self._is_open = self._failed = False

    def __enter__(self) -> TrainLog:
        heard.append(self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if kind is not None and not issubclass(kind, self.expected):
            self._hear("".join(traceback.format_exception(kind, error, where)).rstrip())
        heard.remove(self._hear)

    def open(self) -> None:
        """Write what was told so far, below a line that says when the start was and what its command."""
        self._is_open = True
        kept, self._kept = self._kept, []
        self._hear("\n".join([first_line(self.begun), *kept]), stamp="")

    def _hear(self, text: str, stamp: str | None = None) -> None:
        line = f"{time.strftime('%H:%M:%S ') if stamp is None else stamp}{text}"
        if not self._is_open:
            self._kept.append(line)
            return
        try:
            with self.path.open("a", encoding="utf-8", errors="replace") as file:
                file.write(line + "\n")
        except OSError as error:
            if not self._failed:
                self._failed = True
                tell(f"warning: {self.path} cannot be written: {error}; it lacks lines from here on")
