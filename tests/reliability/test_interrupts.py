"""Ctrl-C: the first stops a training as SIGTERM does, the second ends it at once; elsewhere the first does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import programs
from tests.reliability.launching import clean_environment
from tests.train.runs import ROOT
from train import job, launch
from train.checkpoint.files import committed
from train.guard import signals

ONCE_NO_STEPS = "Ctrl-C: ended; no training was under way, and what is saved is as it was\n"
ONCE = "Ctrl-C: the run stops after this step and saves; Ctrl-C again ends it at once, without a save\n"
TWICE = "Ctrl-C again: ended at once, without a save\n"


class Ended(Exception):
    """os._exit was called."""


@pytest.fixture
def no_exit(handlers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(status: int) -> None:
        assert status == 130
        raise Ended

    monkeypatch.setattr(os, "_exit", ends)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_first_is_a_request_to_stop_and_the_second_an_end(
    no_exit: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, rank: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    with signals.taking_steps():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)  # of a launcher
        assert signals._received[0] == "SIGINT"
        assert capfd.readouterr().err == (ONCE if rank == "0" else "")
        with pytest.raises(Ended):
            signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == (TWICE if rank == "0" else "")


def test_what_follows_a_request_to_stop_is_said_as_it_is(
    no_exit: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """The export, behind the last step, is written whatever is asked for."""
    monkeypatch.setattr(signals, "_over", False)
    for follows in (
        "the run stops after this step and saves",
        "no step is left, the run ends with its export",
    ):
        monkeypatch.setattr(signals, "_received", [])
        signal.raise_signal(signal.SIGTERM)
        assert capfd.readouterr().err == f"rank 0: SIGTERM: {follows}\n"
        with signals.taking_steps():
            pass


def test_torchrun_passes_each_on_so_that_two_are_one(no_exit: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with signals.taking_steps():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(signals.Interrupted):
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    assert signals._received == ["SIGINT"]


def test_what_a_script_started_in_its_background_goes_on(no_exit: None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals.install()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_before_and_after_the_steps_the_first_ends(
    no_exit: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(signals.Interrupted) as ended:
        signal.raise_signal(signal.SIGINT)
    assert ended.value.code == 130 and capfd.readouterr().err == ONCE_NO_STEPS
    assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL, "the second needs no Python"
    os.kill(os.getpid(), signal.SIGTERM)
    assert not capfd.readouterr().err and not signals._received


@pytest.mark.parametrize(
    ("trains", "came", "passed_on"),
    [
        (True, ["SIGINT"], ["SIGUSR1"]),
        (True, ["SIGINT", "SIGINT"], ["SIGUSR1", "SIGINT"]),
        (True, ["SIGTERM", "SIGINT"], ["SIGUSR1", "SIGINT"]),
        (False, ["SIGINT"], []),  # which came to it, too: another would interrupt its end
        (False, ["SIGINT", "SIGINT"], ["SIGINT"]),
        (False, ["SIGTERM"], ["SIGUSR1"]),
    ],
)
def test_what_a_job_passes_on(
    monkeypatch: pytest.MonkeyPatch, trains: bool, came: list[str], passed_on: list[str]
) -> None:
    sent: list[str] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(signal.Signals(number).name))
    of_job: Any = object.__new__(job.Job)
    of_job.child, of_job.trains = SimpleNamespace(pid=1, returncode=None), trains
    of_job.stop_asked = of_job.interrupted = False
    for name in came:
        of_job.pass_on(getattr(signal, name), None)
    assert sent == passed_on


@pytest.mark.parametrize(
    ("came", "passed_on", "ends"),
    [
        (["SIGINT", "SIGUSR1"], ["SIGTERM", "SIGUSR1"], False),
        (["SIGUSR1", "SIGINT"], ["SIGUSR1", "SIGTERM"], False),  # the job was faster than the terminal
        (["SIGINT", "SIGUSR1", "SIGINT"], ["SIGTERM", "SIGUSR1"], True),
    ],
)
def test_one_is_one_to_the_launcher_whichever_way_it_hears_of_it_first(
    monkeypatch: pytest.MonkeyPatch, came: list[str], passed_on: list[str], ends: bool
) -> None:
    sent: list[str] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(signal.Signals(number).name))
    launcher: Any = object.__new__(launch.Launcher)
    launcher.processes = [SimpleNamespace(pid=1, returncode=None)]
    launcher.asked_to_stop = launcher.interrupted = launcher.ends = False
    for name in came:
        launcher._pass_on(getattr(signal, name), None)
    assert (sent, launcher.ends) == (passed_on, ends)


def test_nothing_is_started_after_it(capsys: pytest.CaptureFixture) -> None:
    of_job: Any = object.__new__(job.Job)
    of_job.stop_asked, of_job.interrupted = False, True
    assert of_job.call(["false"]) == 130 and not of_job.wait()
    assert capsys.readouterr().err == "Ctrl-C: ended while nothing ran; the same command goes on\n" * 2


RANKS = """
import os, sys, time
from contextlib import nullcontext
from train.guard import signals

def mark(what):
    open(f"{what}-{os.environ['RANK']}", "w").close()

steps = sys.argv[1]
if steps == "before handlers":
    mark("ready")
    time.sleep(1e6)
signals.install()
with nullcontext() if steps == "none" else signals.taking_steps():
    mark("ready")
    # the terminal's Ctrl-C, and the launcher's request, which shows that it had the Ctrl-C too
    while not {"SIGINT", "SIGTERM"} <= set(signals._received):
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
def test_a_terminal_sends_it_to_launcher_and_ranks(
    tmp_path: Path, steps: str, presses: int, status: int
) -> None:
    """The second ends ranks that do not stop by themselves. The launcher may end a rank before it prints."""
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


@pytest.mark.slow
@pytest.mark.process
def test_a_whole_job_at_a_terminal(settings: dict, tmp_path: Path) -> None:
    """train/job.py, its launcher and two ranks: before the first step, then within the steps."""
    settings |= {"max_steps": 10**6, "gradient_accumulation_steps": 1, "logging_steps": 1}
    config, log = tmp_path / "config.json", tmp_path / "said.txt"
    config.write_text(json.dumps(settings))
    command = [sys.executable, str(ROOT / "train/job.py"), str(config)]
    for wait_for, status, told in ("FP8:", 130, ONCE_NO_STEPS), ("\nstep 3/", 75, ONCE):
        with log.open("w") as out:
            process = programs.Popen(
                command,
                cwd=tmp_path,
                env=clean_environment(NPROC="2"),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            with process:
                while wait_for not in log.read_text():
                    assert process.poll() is None, log.read_text()
                    time.sleep(0.01)
                os.killpg(process.pid, signal.SIGINT)
                assert process.wait(timeout=200) == status, log.read_text()
        said = log.read_text()
        assert said.count("Ctrl-C") == told.count("Ctrl-C") and told in said and "Traceback" not in said
    [saved] = committed(Path(settings["output_dir"]) / "checkpoints")
    assert f"training: stopped on request at {saved.name}; the same command goes on from there" in said
