"""Who holds a folder, who is refused, and who takes it over from whom. Time is simulated where it decides."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.conftest import numbers, refused
from tests.reliability.launching import clean_environment
from tests.train.runs import ROOT
from train.guard import lock
from train.guard.lock import BEAT_S, FORMER_START_S, LEASE_S, LOOK_S, SETTLE_S, Lock, LockError, held
from train.preflight.check import CHECKED
from train.record.run_folder import RunFolder

DEAD = 2**30  # above what Linux gives


class Clock:
    """The module time of lock.py: sleeping takes none, and something happens in it."""

    def __init__(self, happens: Callable[[float], None]) -> None:
        self.now_s, self.happens = 0.0, happens

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.happens(self.now_s)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.lock"


def clock(monkeypatch: pytest.MonkeyPatch, happens: Callable[[float], None] = lambda now_s: None) -> Clock:
    monkeypatch.setattr(lock, "time", found := Clock(happens))
    return found


def left(path: Path, **changes: Any) -> dict[str, Any]:
    """What a run that holds `path` has written."""
    content = {**Lock(path).mine, "host": "far", "pid": 7, "job": "9", "job_restarts": "0", **changes}
    path.write_text(json.dumps(content))
    return content


def taken(path: Path) -> bool:
    """Whether a new one gets the lock, which it leaves again."""
    new = Lock(path)
    new.acquire()
    mine = json.loads(path.read_text())["token"] == new.mine["token"]
    new.release()
    return mine and not path.exists()


ELSEWHERE = "another machine"


# ---------------------------------------------------------------- whole runs


@pytest.mark.process
@pytest.mark.usefixtures("process_group")
def test_a_second_run_in_a_folder_is_refused_and_touches_nothing(settings: dict, tmp_path: Path) -> None:
    folder, config = RunFolder(settings["output_dir"]), tmp_path / "config.json"
    config.write_text(json.dumps(settings))
    command = [sys.executable, str(ROOT / "train/train.py"), str(config)]
    with held(folder):
        unchecked = clean_environment(**{CHECKED: "1"})  # by the lock, not by the look that comes before
        done = programs.run(command, capture_output=True, text=True, env=unchecked)
        assert [p.name for p in folder.path.iterdir()] == ["run.lock"]
    assert done.returncode == 2, done.stderr
    assert str(folder.path) in done.stderr and f" {os.getpid()} " in done.stderr
    assert not folder.path.exists(), "nothing was written"


@pytest.mark.usefixtures("process_group")
def test_what_is_written_stays_and_the_lock_goes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "new/run")
    with held(folder):
        folder.metrics.touch()
    assert [p.name for p in folder.path.iterdir()] == ["metrics.jsonl"]
    (tmp_path / "empty").mkdir()
    with held(RunFolder(tmp_path / "empty")):
        pass
    assert (tmp_path / "empty").is_dir(), "it was there before"


# ---------------------------------------------------------------- on the same machine


def test_a_look_refuses_only_what_needs_no_waiting(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And changes nothing."""
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    Lock(path).look()
    alive = {"pid": os.getpid()}
    for who in (
        {"pid": DEAD},
        {**alive, "machine": ELSEWHERE},
        alive,
    ):  # the last: a former start of this job
        content = left(path, **who)
        Lock(path).look()
        assert json.loads(path.read_text()) == content
    left(path, **alive, job="10")
    with refused(LockError, code="lock", key=str(path)) as error:
        Lock(path).look()
    assert {os.getpid(), 10} <= set(numbers(error.value)), "process and job of the holder"


@pytest.mark.parametrize("ended", [{"pid": DEAD}, {"pid": os.getpid(), "process_started": "1"}])
def test_the_lock_of_a_process_that_has_ended_is_taken_over(
    path: Path, monkeypatch: pytest.MonkeyPatch, ended: dict
) -> None:
    """Also where another process has its number now."""
    time_s = clock(monkeypatch)
    left(path, **ended)
    assert taken(path) and time_s.now_s < 5


def test_a_process_that_was_not_yet_waited_for_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr(lock, "Path", lambda _: stat)
    for state, expected in (("S", "12345"), ("Z", None)):
        stat.write_text(f"7 (a) b) {state} {' '.join('1' * 18)} 12345 0 0")
        assert lock.process_started(7) == expected


def test_that_of_a_living_process_is_not(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    time_s = clock(monkeypatch)
    left(path, pid=os.getpid(), started="noon")
    with refused(LockError, code="lock", key=str(path)):
        taken(path)
    assert path.exists() and time_s.now_s == 0


def test_of_two_who_take_it_over_at_once_one_has_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left(path, pid=DEAD)
    other = []

    def overtakes(now_s: float) -> None:
        if not other:
            other.append(left(path, pid=os.getpid()))

    clock(monkeypatch, overtakes)
    with refused(LockError, code="lock"):
        taken(path)
    assert json.loads(path.read_text()) == other[0]


# ---------------------------------------------------------------- on another machine


@pytest.mark.parametrize("content", [None, "", "{", "[]", "\0" * 100])
def test_without_a_sign_of_life_it_is_taken_over_after_a_while(
    path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    """Whatever is in it: a run may have died while it made it."""
    time_s = clock(monkeypatch)
    left(path, machine=ELSEWHERE)
    if content is not None:
        path.write_text(content)
    assert taken(path) and LEASE_S < time_s.now_s < LEASE_S + 5


def test_where_processes_cannot_be_looked_for_all_machines_are_others(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "machine", lambda: "")
    time_s = clock(monkeypatch)
    left(path, pid=DEAD)
    assert taken(path) and time_s.now_s > LEASE_S


def test_with_one_it_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also within one job: two commands of an allocation."""
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    there = left(path, machine=ELSEWHERE)
    beats = lambda now_s: left(path, **{**there, "beats": now_s // 5})  # noqa: E731
    time_s = clock(monkeypatch, beats)
    with refused(LockError, code="lock"):
        taken(path)
    assert time_s.now_s < 10


@pytest.mark.parametrize("ends_s", [100, 1e9])
def test_the_former_start_of_a_requeued_job_is_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch, ends_s: float
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    there = left(path, machine=ELSEWHERE)

    def happens(now_s: float) -> None:
        if now_s < ends_s:
            left(path, **{**there, "beats": now_s // 5})
        elif now_s == ends_s:
            path.unlink()

    time_s = clock(monkeypatch, happens)
    if ends_s < FORMER_START_S:
        assert taken(path) and time_s.now_s == ends_s
    else:
        with pytest.raises(LockError):
            taken(path)
        assert FORMER_START_S <= time_s.now_s < FORMER_START_S + 5


def test_a_living_run_shows_itself_long_before_it_is_taken_for_dead() -> None:
    """Also where a busy file system is late with ten of its signs; the last seconds of a former start are more."""
    assert LEASE_S > 10 * BEAT_S and LOOK_S < BEAT_S and SETTLE_S >= LOOK_S
    assert LEASE_S <= 60 and FORMER_START_S > 2 * LEASE_S


# ---------------------------------------------------------------- while it is held


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_is_written_anew_and_a_run_that_lost_it_ends(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(lock, "BEAT_S", 0.01)
    monkeypatch.setattr(os, "_exit", lambda status: ended.set() if status == 2 else None)
    holder = Lock(path)
    holder.acquire()

    def beats() -> int:
        return (holder._holder() or {}).get("beats", 0)

    until(lambda: beats() > 2)
    path.unlink()  # by hand
    until(lambda: path.exists() and beats())
    path.write_text("damaged")
    until(beats)
    assert not ended.is_set()
    taker = left(path, pid=os.getpid())
    while not ended.wait(1.0):  # a beat that was under way may have undone it
        taker = left(path, pid=os.getpid())
    holder.release()
    assert json.loads(path.read_text()) == taker, "it is the other's"


@pytest.fixture
def holder(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lock]:
    """Of a run in the folder "run", whose beats come quickly."""
    monkeypatch.setattr(lock, "BEAT_S", 0.01)
    held = Lock(path.parent / "run" / path.name)
    held.acquire()
    yield held
    held.release()


def test_a_folder_that_is_renamed_while_its_run_goes_on_is_told_once(
    holder: Lock, capfd: pytest.CaptureFixture
) -> None:
    here = holder.path.parent
    there = here.with_name("renamed")
    for _ in range(2):  # each time
        here.rename(there)
        until(lambda: holder._away)
        there.rename(here)
        beats = holder._holder()["beats"]
        until(lambda now=beats: holder._holder().get("beats", 0) > now + 3 and not holder._away)
    assert capfd.readouterr().err.count(f"warning: {here} ") == 2


def test_a_folder_that_a_save_made_in_the_place_of_a_renamed_one_is_told_once(
    holder: Lock, capfd: pytest.CaptureFixture
) -> None:
    """Also where no beat has seen that there was none."""
    here = holder.path.parent
    there = here.with_name("renamed")
    (there / "checkpoints").mkdir(parents=True)
    here.rename(here.with_name("former"))
    there.rename(here)
    until(lambda: (holder._holder() or {}).get("beats", 0) > 3)
    assert holder._holder()["folder"] == here.stat().st_ino  # so that it is taken for no copy
    assert capfd.readouterr().err.count(f"warning: {here} ") == 1


def test_who_copied_a_folder_while_its_run_goes_on_is_told_what_to_remove(tmp_path: Path) -> None:
    """Else the copy could not be used until the run in the other folder has ended."""
    here, copied = tmp_path / "run", tmp_path / "copy"
    holder = Lock(here / "run.lock")
    holder.acquire()
    shutil.copytree(here, copied)
    here.rename(here := tmp_path / "renamed")
    try:
        with refused(LockError, code="lock_copied", key=str(copied / "run.lock")):
            Lock(copied / "run.lock").look()
        with refused(LockError, code="lock"):
            Lock(here / "run.lock").look()
        (copied / "run.lock").unlink()
        assert taken(copied / "run.lock")
    finally:
        here.rename(tmp_path / "run")
        holder.release()


def test_a_disk_without_room_leaves_no_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Lock) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Lock, "_write", full)
    with pytest.raises(OSError):
        Lock(path).acquire()
    assert not path.exists()
