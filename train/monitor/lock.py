"""Allow only one run at a time in an output_dir, with the lock file `run.lock`.

The file names the run that holds the lock. That run rewrites the file every HEARTBEAT_INTERVAL_S seconds. A second run
on the same machine checks the process of the holder: it is refused while the process exists, and otherwise takes the
lock over at once. A second run on another machine watches the file: it is refused if the file changes, and takes the
lock over after LEASE_S seconds without a change. A run that lost its lock, because it was suspended or two runs took
the lock over at once, ends at its next write.

Locks of the operating system are not used: a network file system may not support them, or may not share them between
machines. The file is written in place, so that no machine reads an older file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from model.errors import UserError
from train.monitor.signals import DO_NOT_RESTART
from train.record.run_folder import RunFolder

logger = logging.getLogger(__name__)
HEARTBEAT_INTERVAL_S, CHECK_INTERVAL_S = 5.0, 1.0
LENGTH = 1024  # bytes of the file, constant, so that a write replaces the whole content
LEASE_S = 60.0  # much longer than a write takes on a busy file system or under a busy GIL


class LockError(UserError):
    """The folder is locked by another run, which the message names."""

    code = "lock"


@contextlib.contextmanager
def hold_lock(folder: RunFolder) -> Iterator[None]:
    """Create and lock the folder of a run in the block. Collective: rank 0 holds the lock for all ranks.

    Raises, on all ranks:
        LockError: another run holds the lock.
        OSError: the folder cannot be written.
    """
    from train.engine.distributed import call_on_rank_0

    lock = Lock(folder.lock)
    call_on_rank_0(lock.acquire)
    try:
        yield
    finally:
        lock.release()


class Lock:
    """The lock file `path`, as seen by this process."""

    def __init__(self, path: Path):
        self.path = path
        self.owner: dict[str, Any] = {
            "token": secrets.token_hex(8),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "job": os.environ.get("SLURM_JOB_ID"),
            "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "machine": machine(),
            "process_started": process_started(os.getpid()),
            "beats": 0,
        }
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lock", daemon=True)

    def acquire(self) -> None:
        """Acquire the lock and keep it alive in a thread.

        Raises: LockError: another run holds it. OSError: the file cannot be written."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._write("xb")
        except FileExistsError:
            self._wait_for_end_of_holder()
            self._write()
        self._thread.start()

    def release(self) -> None:
        """Release the lock if this process holds it."""
        if not self._thread.is_alive():
            return
        self._released.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # the next run finds that this process has ended
            if self.read().get("token") == self.owner["token"]:
                self.path.unlink()

    def check_unlocked(self) -> None:
        """Check whether a process on this machine holds the lock. Only `acquire` checks other machines, by waiting.

        Raises: LockError: it does."""
        self._check_holder(self.read())

    def _check_holder(self, holder: dict[str, Any]) -> None:
        if is_local(holder) and process_started(holder["pid"]) == holder["process_started"]:
            raise self._lock_error(holder)

    def read(self) -> dict[str, Any]:
        """Return the owner in the file; {} if the file is missing, damaged or being written."""
        try:
            return dict(json.loads(self.path.read_bytes()))
        except (FileNotFoundError, ValueError, TypeError):
            return {}

    def _write(self, mode: str = "") -> None:
        """Write the owner with a fixed length in one call: a full disk cannot truncate it, a reader sees all of it."""
        with open(self.path, mode or ("r+b" if self.path.exists() else "xb"), buffering=0) as file:
            file.write(json.dumps(self.owner).encode().ljust(LENGTH))

    def _wait_for_end_of_holder(self) -> None:
        """Return when the holder has certainly ended.

        Raises: LockError: the holder is running."""
        holder = self.read()
        self._check_holder(holder)
        left_s = 0.0 if is_local(holder) else LEASE_S
        while left_s > 0 and self.path.exists():
            time.sleep(CHECK_INTERVAL_S)
            left_s -= CHECK_INTERVAL_S
            found = self.read()
            if found and found != holder:
                raise self._lock_error(found)

    def _lock_error(self, holder: dict[str, Any]) -> LockError:
        return LockError(
            f"{self.path.parent} is in use by another run: process {holder.get('pid')} on {holder.get('host')} (Slurm "
            f"job {holder.get('job')}), since {holder.get('started')}. Wait until it ends, stop it, or choose another "
            f"output_dir. If this folder is a copy of the folder of that run, delete {self.path}",
            key=str(self.path),
        )

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_INTERVAL_S):
            with contextlib.suppress(OSError):  # the file system may be full or temporarily unavailable
                holder = self.read()
                if holder and holder.get("token") != self.owner["token"]:
                    logger.error(
                        f"{self._lock_error(holder)}. That run has taken the lock over; this run ends"
                    )
                    os._exit(DO_NOT_RESTART)
                self.owner["beats"] += 1
                self._write()


def is_local(holder: dict[str, Any]) -> bool:
    """Return whether the holder is on this machine, where its process is visible."""
    return bool(machine()) and holder.get("machine") == machine()


def machine() -> str:
    """Return an id of this boot of the machine, its process namespace (containers have their own) and user.

    Returns "" without /proc.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    except OSError:
        return ""


def process_started(pid: int) -> str | None:
    """Return the start time of a process in ticks since boot, or None if it has ended.

    The start time distinguishes processes that reuse the same process id.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]
