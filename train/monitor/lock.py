"""One run at a time in an output_dir: `run.lock` there names the run that holds it, which rewrites it every BEAT_S.

A second run on the same machine looks for the process of the holder: it is refused while that lives, and takes the lock
over at once when it has ended. From another machine it watches the file: it is refused when the file is rewritten, and
takes the lock over after LEASE_S without a change. A run whose lock was taken over, because it was suspended for so
long, ends at its next write of the file.

This uses no lock of the operating system: a network file system may have none, or one that other machines do not see.
The file is written in place, so that no machine reads an older one.
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
from datetime import datetime
from pathlib import Path
from typing import Any

from model.errors import UserError
from train.monitor.signals import NOT_AS_IT_IS
from train.record.run_folder import RunFolder

logger = logging.getLogger(__name__)
BEAT_S, LOOK_S = 5.0, 1.0
LEASE_S = 60.0  # far more than a write takes where a file system or the interpreter's lock is busy
# Of two runs that take over the same file at once, the one whose content is there after this time has it.
SETTLE_S = 1.0
LENGTH = 1024  # bytes of the file, always as many: what is written replaces all of what was


class LockError(UserError):
    """Another run holds the folder; the message names it."""

    code = "lock"


@contextlib.contextmanager
def held(folder: RunFolder) -> Iterator[None]:
    """Hold the folder of a run, which rank 0 makes if need be and locks for all; every rank enters and leaves.

    Raises LockError, OSError, on all ranks: another run holds it; it cannot be written.
    """
    import torch.distributed as dist

    lock, problem = Lock(folder.lock), list[Any]([None])
    if dist.get_rank() == 0:
        try:
            lock.acquire()
        except (LockError, OSError) as error:
            problem = [error]
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise problem[0]
    try:
        yield
    finally:
        lock.release()


class Lock:
    """The file `path`, for this process."""

    def __init__(self, path: Path):
        self.path = path
        self.owner: dict[str, Any] = {
            "token": secrets.token_hex(8),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "job": os.environ.get("SLURM_JOB_ID"),
            "started": f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}",
            "machine": machine(),
            "process_started": process_started(os.getpid()),
            "beats": 0,
        }
        self._released = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Raises LockError: another run holds it. OSError: it cannot be written."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while not self._create():
            holder = self.read()
            if holder is not None and self._has_ended(holder):
                self._write()
                time.sleep(SETTLE_S)
                if self._is_mine():
                    break
        self._thread = threading.Thread(target=self._beat, name="lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Does nothing where it is not held."""
        if self._thread is None:
            return
        self._released.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # whoever finds it looks for this process
            if self._is_mine():
                self.path.unlink()

    def refuse_if_in_use(self) -> None:
        """Raises LockError: a living process of this machine holds it. Only `acquire` waits to see whether one of
        another machine does."""
        holder = self.read()
        if holder and is_here(holder) and is_alive(holder):
            raise self._refusal(holder)

    def read(self) -> dict[str, Any] | None:
        """Return the owner in the file; {} if it is damaged or just being written, None if there is no file."""
        try:
            content = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}

    def _create(self) -> bool:
        """Returns whether there was no file."""
        with contextlib.suppress(FileExistsError):
            self._write("xb")
            return True
        return False

    def _write(self, mode: str = "r+b") -> None:
        with open(self.path, mode, buffering=0) as file:
            file.write(json.dumps(self.owner).encode().ljust(LENGTH))

    def _is_mine(self) -> bool:
        return (self.read() or {}).get("token") == self.owner["token"]

    def _has_ended(self, holder: dict[str, Any]) -> bool:
        """Wait until it is known whether the holder has ended. Returns False if the file is gone meanwhile.

        Raises LockError: it lives."""
        if is_here(holder):
            if is_alive(holder):
                raise self._refusal(holder)
            return True
        deadline = time.monotonic() + LEASE_S
        while (found := self.read()) == holder:
            if time.monotonic() > deadline:
                return True
            time.sleep(LOOK_S)
        if found is None:
            return False
        raise self._refusal(found)

    def _refusal(self, holder: dict[str, Any]) -> LockError:
        job = f", Slurm job {holder['job']}" if holder.get("job") else ""
        who = f"process {holder.get('pid')} on {holder.get('host')}{job}, since {holder.get('started')}"
        return LockError(
            f"{self.path.parent} is in use by another run: {who}. Wait until it ends, stop it, or choose another "
            f"output_dir; if this is a copy of that folder, delete {self.path}",
            key=str(self.path),
        )

    def _beat(self) -> None:
        while not self._released.wait(BEAT_S):
            with contextlib.suppress(OSError):  # a file system that is full, or away for a while
                holder = self.read()
                if holder and holder.get("token") != self.owner["token"]:
                    logger.error(f"{self._refusal(holder)}. It has taken the lock over; this run ends")
                    os._exit(NOT_AS_IT_IS)
                else:
                    self.owner["beats"] += 1
                    self._write("r+b" if holder is not None else "xb")  # deleted by hand


def is_here(holder: dict[str, Any]) -> bool:
    """Whether the holder is of this machine, where its process can be looked for."""
    return bool(machine()) and holder.get("machine") == machine()


def is_alive(holder: dict[str, Any]) -> bool:
    return process_started(holder.get("pid", 0)) == holder.get("process_started")


def machine() -> str:
    """This machine since its last boot, and whose processes can be seen (a container has its own); "" without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    except OSError:
        return ""


def process_started(pid: int) -> str | None:
    """When a process of this machine began, in ticks since the boot, so that another one of the same number is told
    apart; None: it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]
