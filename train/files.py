"""File helpers: atomic and durable writes, hashes, locks, file system errors, and plot files."""

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
# File system errors that persist until the user fixes the cause.
PERSISTENT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
NO_FAULTS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)
FULL = os.strerror(errno.ENOSPC)  # libraries such as safetensors report a full disk only by this text


def unused_backup_path(path: Path) -> Path:
    """Return an unused path next to `path`, to which the discarded file or folder `path` can be moved.

    The name contains the current time, including microseconds.
    """
    return path.with_name(f"{path.name}.discarded-{datetime.now():%Y%m%d-%H%M%S-%f}")


def write_durably(path: Path, text: str) -> None:
    """Write `text` to the file `path` atomically.

    The text is written to a temporary file, which is flushed to disk and renamed. After a crash or power failure,
    `path` therefore has either its old or its new content.
    """
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def to_json_text(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """Return `value` as JSON text for messages, with non-ASCII letters unescaped.

    Args:
        default: Function that converts other types, as in json.dumps.
    """
    return json.dumps(value, default=default, ensure_ascii=False)


def describe_error(error: BaseException) -> str:
    """Return the message of an error, with advice if the disk is full or read-only, or a permission is missing."""
    advice = ". Free disk space, change the permissions, or choose another folder"
    return f"{error}{advice if is_persistent(error) else ''}"


def is_persistent(error: BaseException) -> bool:
    """Return whether a file system error persists until the user acts.

    This is true for a full or read-only disk and for missing permissions. Other errors may be temporary, for example
    EIO, ESTALE or a timeout.
    """
    return getattr(error, "errno", None) in PERSISTENT_ERRORS or FULL in str(error)


def is_transient(error: BaseException | None) -> bool:
    """Return whether an error was caused by a temporary system error, so that a retry may succeed.

    The result depends on the first OSError with an errno in the chain of causes. A missing or already existing file is
    not temporary.
    """
    while error is not None:
        if isinstance(error, OSError) and (error.errno is not None or isinstance(error, TimeoutError)):
            return not (is_persistent(error) or isinstance(error, NO_FAULTS))
        error = error.__cause__
    return False


def format_size(number: int) -> str:
    """Format a number of bytes in GB or MB."""
    return f"{number / 1e9:,.1f} GB" if number >= 1e9 else f"{number / 1e6:,.1f} MB"


def sync_folder(folder: Path) -> None:
    """Flush the directory entries of a folder to disk, so that a rename in the folder survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # not implemented, for example on CIFS
            raise
    finally:
        os.close(descriptor)


def nearest_existing_path(path: Path) -> Path:
    """Return `path` if it exists, otherwise its nearest existing parent. The result may be a file or a broken link."""
    place = path.absolute()
    while not os.path.lexists(place):
        place = place.parent
    return place


def data_folder(name: str) -> str:
    """Return the path of a data folder that is named in a configuration.

    A relative path refers to the current working directory or, if the folder does not exist there, to the root of the
    repository.
    """
    elsewhere = REPOSITORY / name
    return str(elsewhere) if not Path(name).exists() and elsewhere.exists() else name


@contextmanager
def escape_glob_path(folder: Path) -> Iterator[Path]:
    """Yield a path to `folder` that contains no glob patterns, for libraries that do not escape them.

    The path is a symbolic link in a temporary folder. This is needed for run folders with names such as "run[lr=3e-4]".
    """
    with tempfile.TemporaryDirectory() as temporary:
        link = Path(temporary) / "folder"
        link.symlink_to(folder.resolve())
        yield link


def try_lock(file: IO) -> bool:
    """Lock an open file until it is closed. Return False if another process holds the lock.

    If the file system does not support locks, log a warning and return True. For example, Lustre can be mounted without
    lock support.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning(
            f"cannot lock {file.name} ({error.strerror}); continuing without a lock. Make sure that no other "
            "process writes to the same folder"
        )
    return True


def sha256_file(path: str | Path) -> str:
    """Return the SHA-256 hash of a file as a hexadecimal string."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_dead_buffers() -> None:
    """Remove shared-memory files that killed ranks have left behind (Linux).

    On a host without a GPU, DeepSpeed creates a 66 MB file in /dev/shm for each rank. A running rank keeps its file
    open, so a file that no process has open can be removed.
    """
    shared = os.path.realpath("/dev/shm")  # /proc shows the real path
    if buffers := set(glob.glob(f"{shared}/deepspeed_allreduce_buffer_{os.getuid()}_*")):
        for descriptor in glob.iglob("/proc/[0-9]*/fd/*"):
            with suppress(OSError):  # the process may have closed the file meanwhile
                buffers.discard(os.readlink(descriptor))
        for path in buffers:
            Path(path).unlink(missing_ok=True)


@contextmanager
def open_figure(path: Path, rows: int = 1, columns: int = 1, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Create a matplotlib figure for a `with` block, and save it to the PNG file `path` after the block.

    Yields the figure and its axes, an array of shape [rows, columns]. Needs no display. The file is written atomically,
    and its folder is created.

    Args:
        options: Keyword arguments for pyplot.subplots.
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
