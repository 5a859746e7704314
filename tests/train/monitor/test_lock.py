"""Who holds a folder, who is refused, and who takes it over from whom. Waiting takes no time where it decides."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.conftest import numbers, refused
from tests.reliability.launching import clean_environment, until
from tests.train.runs import ROOT
from train.monitor import lock
from train.monitor.lock import (
    CHECK_INTERVAL_S,
    HEARTBEAT_INTERVAL_S,
    LEASE_S,
    Lock,
    LockError,
    hold_lock,
    read_holder,
)
from train.record.run_folder import RunFolder

DEAD = {"pid": 2**30}  # above what Linux gives
ALIVE = {"pid": os.getpid()}
ELSEWHERE = {"machine": "another machine"}


class Clock:
    """The module time of lock.py: sleeping takes none, and something happens in it."""

    strftime = staticmethod(time.strftime)

    def __init__(self, happens: Callable[[float], object]) -> None:
        self.now_s, self.happens = 0.0, happens

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.happens(self.now_s)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.lock"


def simulate_time(
    monkeypatch: pytest.MonkeyPatch, happens: Callable[[float], object] = lambda now_s: None
) -> Clock:
    monkeypatch.setattr(lock, "time", found := Clock(happens))
    return found


def leave(path: Path, **changes: Any) -> dict[str, Any]:
    """Write what a run that holds `path` has written."""
    content = {**Lock(path).owner, "host": "far", "job": "9", **changes}
    path.write_text(json.dumps(content))
    return content


def is_taken(path: Path) -> bool:
    """Whether a new run gets the lock, which it releases."""
    new = Lock(path)
    new.acquire()
    mine = json.loads(path.read_text())["token"] == new.owner["token"]
    new.release()
    return mine and not path.exists()


def test_second_run_is_refused(process_group: None, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with hold_lock(folder):
        with refused(LockError, code="lock", key=str(folder.lock)), hold_lock(folder):
            pytest.fail("it has the lock")
        assert list(tmp_path.iterdir()) == [folder.lock]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("holder", "is_refused", "waits_s"),
    [
        (DEAD, False, 0),
        ({**ALIVE, "process_started": "1"}, False, 0),  # another process has its number now
        (ALIVE, True, 0),
        ({**ALIVE, **ELSEWHERE}, False, LEASE_S),
        ("", False, LEASE_S),  # of a run that died while it wrote
        ("[]", False, LEASE_S),
        ("\0" * 100, False, LEASE_S),
    ],
)
def test_existing_lock(
    path: Path, monkeypatch: pytest.MonkeyPatch, holder: Any, is_refused: bool, waits_s: float
) -> None:
    clock = simulate_time(monkeypatch)
    if isinstance(holder, str):
        path.write_text(holder)
    else:
        leave(path, **holder)
    if is_refused:
        with refused(LockError, code="lock", key=str(path)) as error:
            is_taken(path)
        assert {os.getpid(), 9} <= set(numbers(error.value)) and path.exists(), (
            "process and job of the holder"
        )
    else:
        assert is_taken(path)
    assert waits_s <= clock.now_s < waits_s + 5


def test_living_remote_lock_is_not_taken_over(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = leave(path, **ELSEWHERE)
    clock = simulate_time(monkeypatch, lambda now_s: leave(path, **{**there, "beats": now_s // 5}))
    with refused(LockError, code="lock"):
        is_taken(path)
    assert clock.now_s < 10
    simulate_time(monkeypatch, lambda now_s: path.unlink(missing_ok=True))
    assert is_taken(path), "it has ended meanwhile"


def test_check_unlocked(path: Path) -> None:
    """And changes nothing."""
    Lock(path).check_unlocked()
    for holder in DEAD, ALIVE | ELSEWHERE:
        content = leave(path, **holder)
        Lock(path).check_unlocked()
        assert json.loads(path.read_text()) == content
    leave(path, **ALIVE)
    with refused(LockError, code="lock", key=str(path)):
        Lock(path).check_unlocked()


@pytest.mark.process
def test_zombie_has_ended() -> None:
    process = subprocess.Popen(["true"])
    until(lambda: lock.process_started(process.pid) is None)
    process.wait()
    assert lock.process_started(os.getpid()) is not None


def test_heartbeat_interval_is_below_the_lease() -> None:
    """Also where a busy file system is late with ten of its signs."""
    assert 10 * HEARTBEAT_INTERVAL_S < LEASE_S <= 60 and CHECK_INTERVAL_S < HEARTBEAT_INTERVAL_S


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_lost_lock_ends_the_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def end(status: int) -> None:
        assert status == 2
        ended.set()
        raise SystemExit

    monkeypatch.setattr(lock, "HEARTBEAT_INTERVAL_S", 0.01)
    monkeypatch.setattr(os, "_exit", end)
    holder = Lock(path)
    holder.acquire()

    def beats() -> int:
        return read_holder(holder.path).get("beats", 0)

    until(lambda: beats() > 2)
    path.unlink()  # by hand
    until(lambda: path.exists() and beats())
    path.write_text("damaged")
    until(beats)
    assert not ended.is_set()
    taker = leave(path, **ALIVE)
    while not ended.wait(1.0):  # a write that was under way may have undone it
        taker = leave(path, **ALIVE)
    holder.release()
    assert json.loads(path.read_text())["token"] == taker["token"], "it is the other's"


HOLDER = """
import sys, time
from pathlib import Path
from train.monitor import lock
lock.HEARTBEAT_INTERVAL_S, lock.LEASE_S, lock.CHECK_INTERVAL_S = 0.1, 1.5, 0.1
lock.machine = lambda: sys.argv[1]
lock.Lock(Path("run.lock")).acquire()
Path(sys.argv[1]).touch()
time.sleep(1e6)
"""


@pytest.mark.process
def test_suspended_run_ends_after_takeover(tmp_path: Path) -> None:
    """By a second run on another machine."""

    def start(machine: str) -> subprocess.Popen:
        (tmp_path / machine).unlink(missing_ok=True)
        command = [sys.executable, "-c", HOLDER, machine]
        process = programs.Popen(
            command, cwd=tmp_path, env=clean_environment(PYTHONPATH=str(ROOT)), stderr=subprocess.DEVNULL
        )
        until((tmp_path / machine).exists)
        return process

    with start("a") as first:
        first.send_signal(signal.SIGSTOP)
        with start("b") as second:
            first.send_signal(signal.SIGCONT)
            assert first.wait(timeout=100) == 2
            second.kill()
