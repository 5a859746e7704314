"""Configure logging of runs and commands: the console, and in a run one file per rank.

Modules log with `logging.getLogger(__name__)`. The console of rank 0 shows messages of `log_level` and above. The file
of each rank also has debug messages, such as the traceback of an error that the console reports in one line.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import sys
import time
from pathlib import Path
from typing import Literal

LogLevel = Literal["debug", "info", "warning", "error"]
# Only these loggers show levels below "warning". Other packages log every request and compilation at these levels.
OWN_LOGGERS = ("__main__", "fp8_inference_demo", "model", "test_fp8", "train")
PREFIXES = {logging.WARNING: "warning: ", logging.ERROR: "error: ", logging.CRITICAL: "error: "}
_handlers: list[logging.Handler] = []  # handlers added by the last configure_logging


def configure_logging(
    level: LogLevel = "info",
    rank: int = 0,
    console: Literal["stdout", "stderr"] = "stdout",
    has_file: bool = False,
) -> None:
    """Configure logging to the console. A second call replaces the configuration of the first.

    If the console is closed or the disk is full, messages are lost, but the program continues.

    Args:
        level: The minimum level on the console.
        rank: The rank of this process. On ranks other than 0, the console shows only errors.
        console: The stream for messages below "error". Errors always go to stderr.
        has_file: Whether `open_log_file` will be called. All messages are kept until then.
    """
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # do not print a traceback for a message that cannot be written
    while _handlers:
        handler = _handlers.pop()
        logging.getLogger().removeHandler(handler)
        handler.close()
    lowest = logging.getLevelNamesMapping()[level.upper()]
    errors = _ConsoleHandler(sys.stderr)
    errors.setLevel(logging.ERROR)
    _add(errors)
    if rank == 0:
        others = _ConsoleHandler(getattr(sys, console))
        others.setLevel(lowest)
        others.addFilter(lambda record: record.levelno < logging.ERROR)
        _add(others)
    if has_file:
        _add(logging.handlers.MemoryHandler(0))  # without a target, it keeps all messages
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(logging.DEBUG if has_file else lowest)


def open_log_file(path: Path) -> None:
    """Append log messages to the file `path`, after a header line with the time and the command.

    Messages logged since `configure_logging` was called are also written to the file.

    Raises:
        OSError: The file cannot be written.
    """
    (memory,) = (h for h in _handlers if isinstance(h, logging.handlers.MemoryHandler))
    path.parent.mkdir(parents=True, exist_ok=True)  # rank 0 may not have created the run folder yet
    file = logging.FileHandler(path, encoding="utf-8", errors="replace")
    header = f"======== {time.strftime('%Y-%m-%d %H:%M:%S')}: {' '.join(sys.argv)}"
    print(header, file=file.stream, flush=True)
    file.setFormatter(_Formatter("%(asctime)s %(prefix)s%(message)s", "%H:%M:%S"))
    memory.setTarget(file)
    memory.flush()
    _handlers.append(file)


def _add(handler: logging.Handler) -> None:
    handler.setFormatter(_Formatter("%(prefix)s%(message)s"))
    _handlers.append(handler)
    logging.getLogger().addHandler(handler)


class _ConsoleHandler(logging.StreamHandler):
    """Handler for the console that prints messages above a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm = sys.modules.get("tqdm")  # if it is not imported, there is no bar
        with tqdm.tqdm.external_write_mode(file=self.stream) if tqdm else contextlib.nullcontext():
            super().emit(record)


class _Formatter(logging.Formatter):
    """Log formatter that provides %(prefix)s, a prefix for warnings and errors."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.prefix = PREFIXES.get(record.levelno, "")
        return super().formatMessage(record)
