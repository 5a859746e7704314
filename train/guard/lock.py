"""One run at a time in an output_dir: `run.lock` there says who runs in it, and is written anew every BEAT_S.
In the same way one export at a time to a folder: `FOLDER.lock` beside it.

Who finds the file looks for its process, on the same machine; from elsewhere it watches the file: if that changes, the
run lives, and this one is refused; if it does not for LEASE_S, the run died, and the file is taken over. A run whose
file was taken, because it was suspended for so long, ends. No lock of the operating system: a network file system may
have none, or one that other machines do not see. The file is written in place, so that none of them sees an older one.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from model.errors import UserError
from train.guard.signals import NOT_AS_IT_IS
from train.record.run_folder import RunFolder

BEAT_S, LOOK_S = 5.0, 1.0
LEASE_S = 60.0  # far more than a beat takes where a file system or the interpreter's lock is busy
# Of two who take over the same file at once the one has it whose content stands after this time.
SETTLE_S = 1.0
# A requeued job may begin while its former start still ends.
FORMER_START_S = 300.0
LENGTH = 1024  # bytes, always as many: what is written replaces all of what was


class LockError(UserError):
    """Another run, or export, holds the folder; the message says which."""

    code = "lock"


@contextlib.contextmanager
def held(folder: RunFolder) -> Iterator[None]:
    """Hold the folder of a run, made if need be, which rank 0 does for all; every rank enters and leaves it.

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
    """The file `path`, for this process, which is a `user` of the folder `held` (None: that of the file), and could
    have been given another one as `option`. Only `acquire`, `release` and `look` are for others."""

    def __init__(self, path: Path, user: str = "run", held: Path | None = None, option: str = "output_dir"):
        self.path, self.user, self.held, self.option = path, user, held or path.parent, option
        self.mine: dict[str, Any] = {
            "token": secrets.token_hex(8),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "job": os.environ.get("SLURM_JOB_ID"),
            "job_restarts": os.environ.get("SLURM_RESTART_COUNT"),
            "started": f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}",
            "machine": machine(),
            "process_started": process_started(os.getpid()),
            "folder": self._folder(),
            "beats": 0,
        }
        self._made = False  # the folder, by `acquire`
        self._away = False  # the folder, and it was told
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Raises LockError: another one holds it. OSError: it cannot be written."""
        if not self.path.parent.is_dir():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._made = True
        self.mine["folder"] = self._folder()
        while not self._create():
            if self._gone():
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
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # whoever finds it looks for this process
            if self._is_mine():
                self.path.unlink()
            if self._made:
                self.path.parent.rmdir()  # unless something is in it

    def look(self) -> None:
        """Changes nothing. Raises LockError: another run of this machine holds it, and lives. Whether one of another
        machine does, or one that is a former start of this job, takes `acquire` longer to see."""
        found = self._holder()
        if (
            found
            and self._is_here(found)
            and not self._gone_from_here(found)
            and not self._is_former_start(found)
        ):
            raise self._refusal(found)

    def _is_here(self, holder: dict[str, Any]) -> bool:
        return bool(self.mine["machine"]) and holder.get("machine") == self.mine["machine"]

    def _gone_from_here(self, holder: dict[str, Any]) -> bool:
        return process_started(holder.get("pid", 0)) != holder.get("process_started")

    def _is_former_start(self, holder: dict[str, Any]) -> bool:
        """Of this Slurm job, which was requeued."""
        same = holder.get("job") is not None and holder["job"] == self.mine["job"]
        return same and holder.get("job_restarts") != self.mine["job_restarts"]

    def _folder(self) -> int | None:
        """What a folder keeps when it is renamed, and a copy of it does not have; None: there is none."""
        with contextlib.suppress(OSError):
            return self.path.parent.stat().st_ino
        return None

    def _refusal(self, holder: dict[str, Any]) -> LockError:
        if self._is_here(holder) and holder.get("folder") not in (None, self._folder()):
            return LockError(
                f"{self.path} seems to be a copy of that of another {self.user}, which goes on in another folder: "
                f"{describe(holder)}. If {self.path.parent} is a copy of that folder, remove {self.path} and start "
                f"again; else wait until that {self.user} ends, or stop it",
                code="lock_copied",
                key=str(self.path),
            )
        return LockError(
            f"{self.held} is in use by another {self.user}: {describe(holder)}. Wait until it ends, stop it, or choose "
            f"another {self.option}; its {self.path.name} goes with it",
            key=str(self.path),
        )

    def _create(self) -> bool:
        """Whether there was none."""
        try:
            with open(self.path, "xb"):
                pass
        except FileExistsError:
            return False
        try:
            self._write()
        except OSError:  # a full disk
            self.path.unlink()
            raise
        return True

    def _write(self) -> None:
        with open(self.path, "r+b", buffering=0) as file:
            file.write(json.dumps(self.mine).encode().ljust(LENGTH))

    def _holder(self) -> dict[str, Any] | None:
        """What is in the file; {} of one that cannot be read, as of one that is being made; None: there is none."""
        try:
            content = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}

    def _is_mine(self) -> bool:
        return (self._holder() or {}).get("token") == self.mine["token"]

    def _gone(self) -> bool:
        """Wait until it is known whether the run that holds the file has ended. False: somebody else has it now, or
        nobody. Raises LockError: it lives."""
        first = found = self._holder()
        if first is None or found is None:
            return False
        here, former_start = self._is_here(first), self._is_former_start(first)
        begun = beat = time.monotonic()
        while True:
            now = time.monotonic()
            if here:
                gone = self._gone_from_here(first)
                lives = not gone
            else:
                gone, lives = now - beat > LEASE_S, found != first
            if gone:
                return True
            if lives and not (former_start and now - begun < FORMER_START_S):
                raise self._refusal(first)
            if now == begun:
                waits = (
                    "waits for the end of this job's former start"
                    if former_start
                    else "looks whether it lives"
                )
                print(
                    f"{self.path} is of another {self.user}, this one {waits}: {describe(first)}", flush=True
                )
            time.sleep(LOOK_S)
            before, found = found, self._holder()
            if found is None or found.get("token") != first.get("token"):
                return False
            if found != before:
                beat = time.monotonic()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            with contextlib.suppress(OSError):  # a file system that is full, or away for a while
                found = self._holder()
                if found is None:  # removed by hand
                    self._tell_if_away()
                    self._create()
                elif found.get("token", self.mine["token"]) == self.mine["token"]:
                    self._away = False
                    self.mine["beats"] += 1
                    self._write()
                else:
                    print(
                        f"error: {self.path} was taken by another {self.user}, which saw no sign of life of this one "
                        f"for {LEASE_S:g} s: {describe(found)}. This one ends; checkpoints are as they were",
                        file=sys.stderr,
                        flush=True,
                    )
                    os._exit(NOT_AS_IT_IS)

    def _tell_if_away(self) -> None:
        """While there is still time to put the folder back: the next save would make one anew. Where one has, how to
        bring the two together."""
        here = self._folder()
        if here not in (None, self.mine["folder"]):
            self.mine["folder"], self._away = here, False
            print(
                f"warning: {self.path.parent} was renamed or removed, and what this {self.user} saved since then is in "
                "a new folder of that name: checkpoints and the export. Its metrics are in the former one, wherever "
                f"that is now. When the {self.user} has ended, move checkpoints/step-* and hf there, and go on there",
                file=sys.stderr,
                flush=True,
            )
        if self._away or here is not None:
            return
        self._away = True
        print(
            f"warning: {self.path.parent} is not there any more: renamed, removed, or its file system is away. The "
            f"{self.user} in it goes on. Put it back before the next save, which would go into a new folder of that "
            "name, without what is in it until now",
            file=sys.stderr,
            flush=True,
        )


def describe(holder: dict[str, Any]) -> str:
    """Who that is, for people."""
    if not holder:
        return "the file is empty or damaged"
    job = f", Slurm job {holder['job']}" if holder.get("job") else ""
    return f"process {holder.get('pid')} on {holder.get('host')}{job}, since {holder.get('started')}"


def machine() -> str:
    """This machine since its last boot, and whose processes can be seen (a container has its own); "" where there is no
    /proc."""
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
