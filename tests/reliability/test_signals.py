"""Tests of stop requests and of Ctrl-C.

All ranks stop after the same step and save a checkpoint, from which the next start resumes. If an evaluation was
stopped, the next start repeats it. During training, the first Ctrl-C requests a stop like
SIGTERM, and the second terminates the process immediately. Outside of training, the first Ctrl-C terminates the
process.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import programs
from tests.reliability.conftest import assert_equal_runs, stop_when
from tests.reliability.launching import clean_environment, launch, until
from tests.train.runs import PRECISIONS, ROOT, metrics, run
from train import launch as launch_module
from train import phase, trainer
from train.checkpoint import save
from train.checkpoint.files import committed, problems, read_state
from train.launch import parse_arguments, run_ranks
from train.monitor import signals
from train.monitor.lock import process_started
from train.preflight import check


@pytest.mark.parametrize(
    ("owner", "method", "count", "number"),
    [
        (trainer.MicroBatches, "get", 6, signal.SIGTERM),  # the second micro-batch of step 3
        # the save of step 2; noticed after step 3
        pytest.param(save.Saver, "begin", 1, signal.SIGUSR1, marks=pytest.mark.slow),
    ],
)
def test_stopped_run_resumes_bit_exactly(
    trained: Path,
    settings: dict,
    handlers: None,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    method: str,
    count: int,
    number: int,
) -> None:
    settings["save_steps"] = 2
    with monkeypatch.context() as patch:
        stop_when(patch, owner, method, count, number)
        with pytest.raises(signals.Stopped):
            run(settings)
    folder = Path(settings["output_dir"])
    assert json.loads((folder / "stopped.json").read_text()) == {"step": 3, "checkpoint": "step-00000003"}
    assert [problems(path) for path in committed(folder / "checkpoints")] == [[], []]
    signals.received.clear()
    run(settings)
    assert not (folder / "stopped.json").exists()
    assert_equal_runs(folder, trained)


@pytest.mark.parametrize("number", [1, 2])
def test_stop_during_calibration(
    settings: dict, handlers: None, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """No further step is taken. The second phase starts from the checkpoint of the first."""
    stop_when(monkeypatch, phase, "calibrate_scales", number, signal.SIGUSR1)
    schedule = [{"until_step": 1, **PRECISIONS["bf16"]}, PRECISIONS["delayed"]]
    with pytest.raises(signals.Interrupted) as stopped:
        run(settings, precision={"schedule": schedule})
    assert stopped.value.code == signals.STOPPED
    folder = Path(settings["output_dir"])
    assert [path.name for path in committed(folder / "checkpoints")] == ["step-00000001"][: number - 1]
    assert len(metrics(folder) if number == 2 else list(folder.glob("*"))) == number - 1


def test_stop_without_checkpoints(settings: dict, handlers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_when(monkeypatch, trainer.MicroBatches, "get", 2, signal.SIGTERM)
    with pytest.raises(signals.Stopped) as stopped:
        run(settings, save_strategy="no")
    assert (stopped.value.step, stopped.value.checkpoint) == (1, None)
    assert not (Path(settings["output_dir"]) / "checkpoints").exists()


@pytest.mark.parametrize(("evaluation", "step"), [(1, 2), pytest.param(3, 6, marks=pytest.mark.slow)])
def test_stopped_evaluation_runs_on_resume(
    settings: dict,
    tmp_path: Path,
    handlers: None,
    monkeypatch: pytest.MonkeyPatch,
    evaluation: int,
    step: int,
) -> None:
    """A stopped evaluation is repeated even if the run crashes before the next save, or if no steps are left to train.

    Each evaluation has three batches here.
    """
    settings["eval_steps"] = 2
    whole = run({**settings, "output_dir": str(tmp_path / "whole")})
    with monkeypatch.context() as patch:
        stop_when(patch, trainer.Trainer, "_evaluate", evaluation, signal.SIGUSR1)
        with pytest.raises(signals.Stopped) as stopped:
            run(settings)
    assert stopped.value.step == step
    folder = Path(settings["output_dir"])
    assert [m.get("eval_loss") for m in metrics(folder) if m["step"] == step] == [None]
    signals.received.clear()
    right = trainer.Trainer._evaluate_first

    def crashes(*arguments: Any) -> None:
        right(*arguments)
        raise RuntimeError("a crash")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(trainer.Trainer, "_evaluate_first", crashes)
        run(settings)
    assert [m.get("eval_loss") is None for m in metrics(folder) if m["step"] == step] == [True, False]
    run(settings)  # which makes up for it once more
    evaluated = [m for m in metrics(folder) if m.get("eval_loss") is not None]
    made_up = [(m["step"], m["eval_loss"]) for m in evaluated]
    assert all(m["unigram_loss"] > 0 for m in evaluated)
    expected = [(m["step"], m["eval_loss"]) for m in metrics(whole) if m.get("eval_loss") is not None]
    assert [s for s, _ in expected] == [2, 4, 6] and made_up == expected
    # only a checkpoint that was saved before its evaluation has one due
    assert read_state(committed(folder / "checkpoints")[-1]).evaluation_due == (step == 6)
    assert (folder / "hf/config.json").exists()


@pytest.mark.process
def test_stop_request_to_one_rank_stops_all() -> None:
    done = launch(3, "tests/reliability/meeting_ranks.py", "asked", "60")
    assert done.returncode == signals.STOPPED, done.stdout
    left = re.findall(r"rank (\d) left after step (\d+)", done.stdout)
    assert sorted(left) == [("0", "20"), ("1", "20"), ("2", "20")]
    saved = re.findall(r"rank (\d) saves step (\d+)", done.stdout)
    assert sorted(saved) == [("0", "7"), ("1", "7"), ("2", "7")], "rank 0 alone finds it due"


def test_nohup_run_survives_hangup(handlers: None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals.install()
    os.kill(os.getpid(), signal.SIGHUP)
    assert signals.received == []


# Rank 1 goes on until the launcher has seen rank 0 end, and then says so.
STOPS_LATER = """
if rank == 0:
    Path("pid.new").write_text(str(os.getpid()))
    os.rename("pid.new", "pid")
    sys.exit(75)
while not Path("pid").exists() or Path("/proc", Path("pid").read_text()).exists():
    time.sleep(0.01)
Path("later").touch()
sys.exit(75)
"""


@pytest.mark.parametrize(
    ("script", "status", "left"),
    [
        (STOPS_LATER, 75, {"pid", "later"}),
        ("sys.exit(2) if rank else time.sleep(1e6)", 2, set()),
        ("", 0, set()),
    ],
)
@pytest.mark.process
def test_launcher_exit_status(tmp_path: Path, script: str, status: int, left: set[str]) -> None:
    head = "import os, sys, time; from pathlib import Path; rank = int(os.environ['RANK'])"
    (tmp_path / "ranks.py").write_text(f"{head}; os.chdir({str(tmp_path)!r})\n{script}")
    assert launch(2, str(tmp_path / "ranks.py"), hasty=True).returncode == status
    assert {path.name for path in tmp_path.iterdir()} == {"ranks.py", *left}


def test_startup_on_a_second_node(settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(check.CHECKED, "")
    checked: list[tuple] = []
    monkeypatch.setattr(
        launch_module, "check", lambda args, *given: checked.append((args.output_dir, *given)) or []
    )
    (tmp_path / "config.json").write_text(json.dumps(settings))
    nodes = "--nproc 2 --nnodes 3 --node_rank 1 --master_addr first --master_port 29500"
    options = parse_arguments([*nodes.split(), str(ROOT / "train/train.py"), str(tmp_path / "config.json")])
    children: Any = SimpleNamespace(run_ranks=lambda command, environments: environments)
    found: Any = run_ranks(options, children)
    assert [given[:3] for given in checked] == [(settings["output_dir"], 6, 2)]
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
    described = [" ".join(environment[name] for name in names) for environment in found]
    assert described == ["2 0 6 2 first 29500", "3 1 6 2 first 29500"]
    assert os.environ[check.CHECKED] == "1"


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 75), (signal.SIGINT, 75), (signal.SIGKILL, -9)],
)
def test_launcher_forwards_signals(tmp_path: Path, number: int, status: int) -> None:
    """The ranks also exit if the launcher is killed by SIGKILL."""
    (tmp_path / "ranks.py").write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))\n"
        "with open('new', 'w') as file: file.write(str(os.getpid()))\n"
        "os.rename('new', f'ready-{os.environ[\"RANK\"]}')\n"
        "while True: time.sleep(0.01)\n"  # a long sleep would miss the signal that comes as it begins
    )
    command = [sys.executable, str(ROOT / "train/launch.py"), "--nproc", "1", "ranks.py"]
    with programs.Popen(command, cwd=tmp_path, env=clean_environment()) as process:
        while not (ready := tmp_path / "ready-0").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(timeout=200) == status
    until(lambda: not process_started(int(ready.read_text())))


# ---------------------------------------------------------------- Ctrl-C


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


def test_second_request_does_not_end_a_stopping_rank(no_exit: None) -> None:
    with signals.defer_stop():
        signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(signals.Interrupted):
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
