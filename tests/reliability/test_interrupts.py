"""Tests of Ctrl-C.

During training, the first Ctrl-C requests a stop like SIGTERM, and the second terminates the process immediately.
Outside of training, the first Ctrl-C terminates the process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import programs
from tests.reliability.launching import clean_environment
from tests.train.runs import ROOT
from train.monitor import signals


class Ended(Exception):
    """An exception raised in place of a call to os._exit."""


@pytest.fixture
def no_exit(handlers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(status: int) -> None:
        assert status == 130
        raise Ended

    monkeypatch.setattr(os, "_exit", ends)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)


def test_second_interrupt_ends_the_run(no_exit: None) -> None:
    with signals.defer_stop():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGUSR1)  # of a launcher
        assert signals.received[0] == "SIGINT"
        with pytest.raises(Ended):
            signal.raise_signal(signal.SIGINT)


def test_torchrun_forwards_interrupts(no_exit: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with signals.defer_stop():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(signals.Interrupted):
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    assert signals.received == ["SIGINT"]


def test_background_job_ignores_interrupts(no_exit: None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals.install()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_interrupt_outside_of_training_ends_the_run(no_exit: None) -> None:
    with pytest.raises(signals.Interrupted) as ended:
        signal.raise_signal(signal.SIGINT)
    assert ended.value.code == 130
    assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL, "the second needs no Python"
    os.kill(os.getpid(), signal.SIGTERM)
    assert not signals.received


RANKS = """
import os, sys, time
from contextlib import nullcontext
from train.monitor import signals

def mark(what):
    open(f"{what}-{os.environ['RANK']}", "w").close()

steps = sys.argv[1]
if steps == "before handlers":
    mark("ready")
    time.sleep(1e6)
signals.install()
with nullcontext() if steps == "none" else signals.defer_stop():
    mark("ready")
    # the terminal's Ctrl-C, and the launcher's request, which shows that it had the Ctrl-C too
    while not {"SIGINT", "SIGUSR1"} <= set(signals.received):
        time.sleep(0.01)
    mark("requested")
    if steps == "never end":
        time.sleep(1e6)
sys.exit(signals.STOPPED)
"""


@pytest.mark.parametrize(
    ("steps", "presses", "status"),
    [("before handlers", 1, 130), ("none", 1, 130), ("taken", 1, 75), ("never end", 2, 130)],
)
@pytest.mark.process
def test_ctrl_c_reaches_launcher_and_ranks(tmp_path: Path, steps: str, presses: int, status: int) -> None:
    """A second Ctrl-C terminates ranks that do not stop after the first one.

    A rank may be terminated before it prints anything.
    """
    (tmp_path / "ranks.py").write_text(RANKS)
    command = [sys.executable, str(ROOT / "train/launch.py"), "--nproc", "2", "ranks.py", steps]
    log = tmp_path / "log.txt"
    with log.open("w") as out:
        process = programs.Popen(
            command,
            cwd=tmp_path,
            env=clean_environment(PYTHONPATH=str(ROOT)),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        with process:
            for marked in ("ready", "requested")[:presses]:
                while not all((tmp_path / f"{marked}-{rank}").exists() for rank in range(2)):
                    assert process.poll() is None
                    time.sleep(0.02)
                os.killpg(process.pid, signal.SIGINT)
            assert process.wait(timeout=200) == status
    assert "Traceback" not in log.read_text()
