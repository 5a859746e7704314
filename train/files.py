"""Helpers for files: atomic and durable writes, hashes, locks, errors of the file system, and plots."""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any, TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)

REPOSITORY = Path(__file__).resolve().parent.parent
# Errors of a file system that persist until somebody fixes the cause.
PERSISTENT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
NO_FAULTS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)
FULL = os.strerror(errno.ENOSPC)  # libraries such as safetensors report a full disk only by this text


def discarded_name(path: Path) -> Path:
    """Return the path to which a run moves `path` when it discards it; the name holds the time in microseconds."""
    return path.with_name(f"{path.name}.discarded-{datetime.now():%Y%m%d-%H%M%S-%f}")


def write_durably(path: Path, text: str) -> None:
    """Write `text` to `path` atomically: write a temporary file, flush it to the disk and rename it."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def shown(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """Return `value` as JSON text for messages, without escaping non-ASCII letters.

    Args:
        default: as in json.dumps.
    """
    return json.dumps(value, default=default, ensure_ascii=False)


def reason(error: BaseException) -> str:
    """Return the message of an error, with a remedy if a disk is full or not writable."""
    if not is_persistent(error):
        return str(error)
    return f"{error}. Free disk space, change the permissions, or choose another folder"


def is_persistent(error: BaseException) -> bool:
    """Return whether this is a file system error that persists: a full or read-only disk, or missing permissions.

    Errors of a network file system or a bus, such as EIO, ESTALE or a timeout, may pass.
    """
    return getattr(error, "errno", None) in PERSISTENT_ERRORS or FULL in str(error)


def is_transient(error: BaseException | None) -> bool:
    """Return whether the error comes from a system error that may pass.

    The first OSError with an errno in the chain of causes decides. A missing file or an existing one never passes.
    """
    while error is not None:
        if isinstance(error, OSError) and (error.errno is not None or isinstance(error, TimeoutError)):
            return not (is_persistent(error) or isinstance(error, NO_FAULTS))
        error = error.__cause__
    return False


def format_size(number: int) -> str:
    """Return a number of bytes as text in GB or MB."""
    return f"{number / 1e9:,.1f} GB" if number >= 1e9 else f"{number / 1e6:,.1f} MB"


def bytes_of(*places: Path) -> int:
    """Return the total size of all files in these folders, in bytes; missing files and folders count as 0."""
    paths = (
        os.path.join(folder, name)
        for place in places
        for folder, _, names in os.walk(place, followlinks=True)
        for name in names
    )
    return sum(os.path.getsize(path) for path in paths if os.path.isfile(path))


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to the disk, so that a rename in it survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def nearest_existing_path(path: Path) -> Path:
    """Return `path`, or its nearest parent that exists, which may be a file or a broken link."""
    place = path.absolute()
    while not os.path.lexists(place):
        place = place.parent
    return place


def data_folder(name: str) -> str:
    """Resolve a data folder of a configuration: relative to the working folder, or else to the repository."""
    elsewhere = REPOSITORY / name
    return str(elsewhere) if not Path(name).exists() and elsewhere.exists() else name


@contextmanager
def escape_glob_path(folder: Path) -> Iterator[Path]:
    """Yield a path to `folder` that has no glob patterns, for libraries that do not escape them.

    It is a link in a temporary folder, because the name may be something like "run[lr=3e-4]".
    """
    with tempfile.TemporaryDirectory() as temporary:
        link = Path(temporary) / "folder"
        link.symlink_to(folder.resolve())
        yield link


def try_lock(file: IO) -> bool:
    """Lock the file for this process until it is closed. Return False if another process has the lock.

    On a file system without locks, such as Lustre mounted without them, log a warning and return True."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning(
            f"{file.name} cannot be locked ({error.strerror}). Do not start a second process that writes there at the "
            "same time"
        )
    return True


def sha256_file(path: str | Path) -> str:
    """Return the sha256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_dead_buffers() -> None:
    """Remove the shared memory of killed ranks: on a machine without a GPU, DeepSpeed creates 66 MB per rank.

    A running rank keeps its file open from its creation, so files that no process has open are left over (Linux).
    """
    shared = os.path.realpath("/dev/shm")  # /proc shows the real path
    if buffers := set(glob.glob(f"{shared}/deepspeed_allreduce_buffer_{os.getuid()}_*")):
        for descriptor in glob.iglob("/proc/[0-9]*/fd/*"):
            with suppress(OSError):  # closed meanwhile
                buffers.discard(os.readlink(descriptor))
        for path in buffers:
            Path(path).unlink(missing_ok=True)


@contextmanager
def open_figure(path: Path, rows: int = 1, columns: int = 1, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a matplotlib figure and its axes, array [rows, columns], and save it as the PNG `path` after the block.

    Needs no display. The file is written atomically, and its folder is created.

    Args:
        options: options of pyplot.subplots.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, squeeze=False, layout="constrained", **options)
    yield figure, axes
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    figure.savefig(temporary, format="png", dpi=120)
    os.replace(temporary, path)
    pyplot.close(figure)
