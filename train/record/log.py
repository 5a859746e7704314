"""Configure logging of runs and commands: the console, and in a run one file per rank.

Modules log with `logging.getLogger(__name__)`. The console of rank 0 shows messages of `log_level` and above. The file
of each rank also has debug messages, such as the traceback of an error that the console reports in one line.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import sys
import time
from pathlib import Path
from typing import Any, Literal

LogLevel = Literal["debug", "info", "warning", "error"]
# Only these loggers show levels below "warning": other packages report every request and compilation there.
OWN_LOGGERS = ("__main__", "fp8_inference_demo", "model", "test_fp8", "train")
PREFIXES = {logging.WARNING: "warning: ", logging.ERROR: "error: ", logging.CRITICAL: "error: "}

logger = logging.getLogger(__name__)
_handlers: list[logging.Handler] = []  # handlers added by the last configure_logging


def configure_logging(
    level: LogLevel = "info",
    rank: int = 0,
    console: Literal["stdout", "stderr"] = "stdout",
    has_file: bool = False,
) -> None:
    """Send log messages to the console. A second call replaces the first.

    Args:
        level: The minimum level on the console.
        rank: The rank of this process. On ranks other than 0, the console shows only errors.
        console: The stream for messages below "error". Errors always go to stderr.
        has_file: Keep all messages until `open_log_file` writes them.
    """
    logging.captureWarnings(True)
    root = logging.getLogger()
    while _handlers:
        handler = _handlers.pop()
        root.removeHandler(handler)
        handler.close()
    lowest = logging.getLevelNamesMapping()[level.upper()]
    errors = _ConsoleHandler("stderr")
    errors.setLevel(logging.ERROR)
    _add(errors)
    if rank == 0:
        others = _ConsoleHandler(console)
        others.setLevel(lowest)
        others.addFilter(lambda record: record.levelno < logging.ERROR)
        _add(others)
    if has_file:
        # without a target, this handler keeps all messages
        _add(logging.handlers.MemoryHandler(0, flushLevel=logging.CRITICAL + 1))
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(logging.DEBUG if has_file else lowest)


def open_log_file(path: Path) -> None:
    """Start to append log messages to the file `path`.

    Writes a line with time and command, the messages kept by `configure_logging`, and all later messages. If the file
    cannot be written, the console shows a warning and the run continues.
    """
    (memory,) = (h for h in _handlers if isinstance(h, logging.handlers.MemoryHandler))
    try:
        path.parent.mkdir(exist_ok=True)
        file = _FileHandler(path, encoding="utf-8", errors="replace")
        header = f"======== {time.strftime('%Y-%m-%d %H:%M:%S')}: {' '.join(sys.argv)}"
        print(header, file=file.stream, flush=True)
    except OSError as error:
        logger.warning("%s cannot be written: %s", path, error)
        return
    file.setFormatter(_Formatter("%(asctime)s %(prefix)s%(message)s", "%H:%M:%S"))
    memory.setTarget(file)
    memory.flush()
    logging.getLogger().removeHandler(memory)
    _handlers.remove(memory)
    _add(file)


def link_log_file(path: Path, target: Path) -> None:
    """Create a relative link `path` to the log file `target`, unless `path` exists.

    Logs a warning if the file system does not support links.
    """
    if os.path.lexists(path):
        return
    try:
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(os.path.relpath(target, path.parent))
    except OSError as error:
        logger.warning("cannot create the link %s to %s: %s", path, target, error)


def _add(handler: logging.Handler) -> None:
    if handler.formatter is None:
        handler.setFormatter(_Formatter("%(prefix)s%(message)s"))
    _handlers.append(handler)
    logging.getLogger().addHandler(handler)


class _Formatter(logging.Formatter):
    """A formatter with %(prefix)s, which marks warnings and errors."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.prefix = PREFIXES.get(record.levelno, "")
        return super().formatMessage(record)


class _ConsoleHandler(logging.StreamHandler):
    """A handler for the current sys.stdout or sys.stderr. Ignores a console that is closed."""

    def __init__(self, name: str):
        logging.Handler.__init__(self)
        self.stream_name = name

    @property
    def stream(self) -> Any:  # type: ignore[override]
        return getattr(sys, self.stream_name)

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


class _FileHandler(logging.FileHandler):
    """A file handler that reports a full disk once and continues."""

    has_failed = False

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.has_failed:
            self.has_failed = True
            logger.warning("%s cannot be written: %s", self.baseFilename, error)
