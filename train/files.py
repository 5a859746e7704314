"""Files that are whole or absent, also after a power cut, hashes, locks, who has them open; plots."""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any, TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)

REPOSITORY = Path(__file__).resolve().parent.parent
AGAIN_S = 30.0
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# Faults of a file system that another start would meet as well, until somebody has mended them.
LASTING = (*NO_ROOM, errno.EROFS, errno.EACCES, errno.EPERM)
NO_FAULTS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)
FULL = os.strerror(errno.ENOSPC)  # the words of libraries that have no OSError of it, as safetensors


def again(action: Callable[[], T]) -> T:
    """What `action` returns, at the second try, AGAIN_S later, where the first meets a fault that may pass: for a
    moment of a network file system no checkpoint is to be passed over. Raises OSError."""
    try:
        return action()
    except OSError as error:
        if not may_pass(error):
            raise
    time.sleep(AGAIN_S)
    return action()


def discarded_name(path: Path) -> Path:
    """Where `path` is moved to when a run goes on without it: a name of this moment, which two starts within a second
    do not share."""
    return path.with_name(f"{path.name}.discarded-{datetime.now():%Y%m%d-%H%M%S-%f}")


def write_durably(path: Path, text: str) -> None:
    """Write `text` beside `path`, flush it to the disk and rename it there: `path` is whole or absent."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with naming(path), open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, path)
    sync_folder(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """A full disk in the block, which the system tells without a file, is one of `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM and error.filename is None:
            error.filename = str(path)
        raise


def shown(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """`value` as JSON for people, in which a name of theirs has its own letters; `default` as json.dumps takes it."""
    return json.dumps(value, default=default, ensure_ascii=False)


def reason(error: BaseException) -> str:
    """What a command that failed says of it; of a full or read-only disk also what to do."""
    number = getattr(error, "errno", None)
    if number in NO_ROOM or FULL in str(error):
        return f"{error}; make room there, or give a place on another disk"
    if number in LASTING:
        return f"{error}; have it made writable, or give another place"
    return str(error)


def lasts(error: OSError) -> bool:
    """Whether another start would meet it, too: a full disk, one that is read-only, a right that is missing. What a
    network file system or a bus has for a while (EIO, ESTALE, a time limit) may be over then."""
    return error.errno in LASTING or FULL in str(error)


def may_pass(error: BaseException | None) -> bool:
    """Whether what failed came from a fault of the system that does not last; by its chain of causes, the first of them
    that the system has numbered. What is not there, or in the way, is no fault."""
    while error is not None:
        if isinstance(error, OSError) and (error.errno is not None or isinstance(error, TimeoutError)):
            return not (lasts(error) or isinstance(error, NO_FAULTS))
        error = error.__cause__
    return False


def size_text(number: int) -> str:
    """Bytes, for people."""
    return f"{number / 1e9:,.1f} GB" if number >= 1e9 else f"{number / 1e6:,.1f} MB"


def bytes_of(*places: Path) -> int:
    """Of all files in these folders; of one that is not there, or goes meanwhile, none."""
    total = 0
    for place in places:
        for folder, _, names in os.walk(place, followlinks=True):
            for name in names:
                with suppress(OSError):
                    total += os.stat(os.path.join(folder, name)).st_size
    return total


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def blocking(folder: Path) -> Path | None:
    """What keeps `folder` from being made: itself, or the parent of it, that is there and is not a folder."""
    for place in (folder, *folder.parents):
        if os.path.isdir(place):
            return None
        if os.path.lexists(place):  # a link to nothing as well
            return place
    return None


def existing(folder: Path) -> Path:
    """The folder that `folder` is or will be made in."""
    place = folder.resolve()
    while not place.is_dir():
        place = place.parent
    return place


def data_folder(name: str) -> str:
    """The folder that a configuration names so: relative to here, else, where there is none, to the repository."""
    elsewhere = REPOSITORY / name
    return str(elsewhere) if not Path(name).exists() and elsewhere.exists() else name


@contextmanager
def without_patterns(folder: Path) -> Iterator[Path]:
    """A path to `folder` that no glob takes for a pattern, for libraries that do not escape theirs: itself, or, of
    "run[lr=3e-4]", a link in a temporary folder."""
    if not glob.has_magic(str(folder)):
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        link = Path(temporary) / "folder"
        link.symlink_to(folder.resolve())
        yield link


# What flock says where a file system has no locks, such as Lustre that is mounted without them.
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


def locks(file: IO) -> bool:
    """Lock the file for this process until it is closed; False: another one has it. Where there are no locks that is
    told, and nobody is kept out. Raises OSError: the system's own."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        logger.warning(
            f"the file system of {file.name} has no locks ({error.strerror}), so nothing keeps a second process "
            "from writing there at the same time: start one"
        )
    return True


def sha256_file(path: str | Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_files() -> set[str]:
    """What the processes that this one may look at have open (Linux)."""
    found = set()
    for descriptor in glob.iglob("/proc/[0-9]*/fd/*"):
        with suppress(OSError):  # closed meanwhile
            found.add(os.readlink(descriptor))
    return found


def remove_dead_buffers() -> None:
    """Remove the shared memory of ranks that were killed: DeepSpeed makes 66 MB a rank on a machine without a GPU, and
    a living rank has its own open from the moment that there is such a file."""
    shared = os.path.realpath("/dev/shm")  # as it is called in /proc
    if buffers := glob.glob(f"{shared}/deepspeed_allreduce_buffer_{os.getuid()}_*"):
        for path in set(buffers) - open_files():
            Path(path).unlink(missing_ok=True)


def unfinished(path: Path, pid: int) -> Path:
    """The file that the process `pid` writes in the place of the picture `path` until it is whole."""
    return path.with_name(f"{path.name}.{pid}.tmp")


@contextmanager
def drawing(path: str | Path, rows: int = 1, columns: int = 1, **options: Any) -> Iterator[tuple[Any, Any]]:
    """(figure, array [rows, columns] of axes) of matplotlib, drawn without a display, which the end of the block saves
    as the PNG `path`, whole or not at all, making its folder. `options` are those of pyplot.subplots."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, squeeze=False, layout="constrained", **options)
    try:
        yield figure, axes
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = unfinished(path, os.getpid())
        try:
            figure.savefig(temporary, format="png", dpi=120)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    finally:
        pyplot.close(figure)
