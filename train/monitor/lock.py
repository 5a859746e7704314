"""Allow only one run at a time in an output_dir, with the lock file `run.lock`.

The file identifies the run that holds the lock. The holder rewrites the file every HEARTBEAT_INTERVAL_S seconds. A
second run on the same host checks the process of the holder. The second run is refused while that process exists.
Otherwise, it takes over the lock immediately. A second run on another host watches the file. It is refused if the file
changes, and takes over the lock after LEASE_S seconds without a change. A run that has lost its lock exits at its
next write. A run can lose its lock if it was suspended, or if two runs took over the lock at the same time.

Operating system locks are not used, because a network file system may not support them or may not share them between
hosts. The file is written in place, so that no host reads an older version.
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
LENGTH = 1024  # constant size of the file in bytes, so that each write replaces the whole content
LEASE_S = 60.0  # much longer than a write takes on a busy file system or under a busy GIL


class LockError(UserError):
    """An error raised if another run holds the lock on output_dir. The message identifies the other run."""

    code = "lock"


@contextlib.contextmanager
def hold_lock(folder: RunFolder) -> Iterator[None]:
    """Create the run folder and hold its lock during a `with` block.

    Collective: all ranks must call this function. Rank 0 holds the lock for all ranks.

    Raises (on all ranks):
        LockError: Another run holds the lock.
        OSError: The folder cannot be written.
    """
    from train.engine.process_group import call_on_rank_0

    lock = Lock(folder.lock)
    call_on_rank_0(lock.acquire)
    try:
        yield
    finally:
        lock.release()


class Lock:
    """Lock file that this process can acquire, renew and release."""

    def __init__(self, path: Path):
        self.path = path
        self.owner: dict[str, Any] = {
            "token": secrets.token_hex(8),
            "host": socket.gethostname(),
            "job": os.environ.get("SLURM_JOB_ID"),
            "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "beats": 0,
            "pid": os.getpid(),
            "machine": machine(),
            "process_started": process_started(os.getpid()),
        }
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lock", daemon=True)

    def acquire(self) -> None:
        """Acquire the lock, and renew it regularly in a background thread.

        Raises:
            LockError: Another run holds the lock.
            OSError: The lock file cannot be written.
        """
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
            if read_holder(self.path).get("token") == self.owner["token"]:
                self.path.unlink()

    def check_unlocked(self) -> None:
        """Check that no process on this host holds the lock. Locks of other hosts are checked only by `acquire`.

        Raises:
            LockError: A process on this host holds the lock.
        """
        holder = read_holder(self.path)
        if is_local(holder) and process_started(holder["pid"]) == holder["process_started"]:
            raise self._lock_error(holder)

    def _write(self, mode: str = "") -> None:
        """Write the owner to the lock file as a fixed-length record, in a single write call.

        A full disk therefore cannot truncate the file, and other processes never read an incomplete record.
        """
        with open(self.path, mode or ("r+b" if self.path.exists() else "xb"), buffering=0) as file:
            file.write(json.dumps(self.owner).encode().ljust(LENGTH))

    def _wait_for_end_of_holder(self) -> None:
        """Wait until it is certain that the run holding the lock has ended.

        Raises:
            LockError: The run is still in progress.
        """
        self.check_unlocked()
        holder = read_holder(self.path)
        left_s = 0.0 if is_local(holder) else LEASE_S
        while left_s > 0 and self.path.exists():
            time.sleep(CHECK_INTERVAL_S)
            left_s -= CHECK_INTERVAL_S
            found = read_holder(self.path)
            if found and found != holder:
                raise self._lock_error(found)

    def _lock_error(self, holder: dict[str, Any]) -> LockError:
        job = f" (Slurm job {holder['job']})" if holder.get("job") else ""
        return LockError(
            f"{self.path.parent} is in use by another run: process {holder.get('pid')} on {holder.get('host')}{job}, "
            f"since {holder.get('started')}. Wait until that run ends, stop it, or choose "
            f"another output_dir. If this folder is a copy of that run's folder, delete {self.path}",
            key=str(self.path),
        )

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_INTERVAL_S):
            with contextlib.suppress(OSError):  # the file system may be full or temporarily unavailable
                holder = read_holder(self.path)
                if holder and holder.get("token") != self.owner["token"]:
                    logger.error(
                        f"{self._lock_error(holder)}. The other run has taken over the lock, so this run stops"
                    )
                    os._exit(DO_NOT_RESTART)
                self.owner["beats"] += 1
                self._write()


def read_holder(path: Path) -> dict[str, Any]:
    """Return the record of the lock holder in the file `path`, or {} if no complete record exists."""
    try:
        return dict(json.loads(path.read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return {}


def is_local(holder: dict[str, Any]) -> bool:
    """Return whether the lock holder runs on this host, so that its process can be checked."""
    return bool(machine()) and holder.get("machine") == machine()


def machine() -> str:
    """Return an identifier for this boot of the host, the process namespace and the user, or "" without /proc.

    The process namespace is included because process ids are not comparable between containers.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    except OSError:
        return ""


def process_started(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since boot, or None if the process has exited.

    The start time distinguishes a process from a later process with the same process id.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]
