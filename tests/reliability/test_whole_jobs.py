"""Tests of whole jobs with run_training.sh and real ranks.

A run that is preempted many times, or in which a rank is killed, gives the same results as an uninterrupted run. Ctrl-C
saves a checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import programs
from tests.reliability.conftest import assert_equal_runs
from tests.reliability.launching import clean_environment, launch
from tests.scripts.machine import executable
from tests.train.runs import ROOT, metrics
from train.checkpoint.files import committed, read_state
from train.monitor import signals

LAUNCHED = "starting {} ranks"
A_STEP = "\nstep "


class Job:
    """Job that runs run_training.sh with a configuration, in a simulated Slurm allocation that provides only scontrol.

    forked: whether Python processes are forked. Processes that are not forked can be found by their command line in
    /proc.
    """

    def __init__(self, folder: Path, settings: dict, ranks: int, forked: bool = True):
        self.folder, self.ranks = folder, ranks
        self.config = folder / "config.json"
        self.config.write_text(json.dumps(settings))
        executable(folder / "bin/scontrol", f'echo "$*" >> "{folder}/requeues.txt"')
        environment = clean_environment(SLURM_JOB_ID="77", DEMO_PROMPT="x", NPROC=str(ranks))
        path = f"{folder}/bin:{environment['PATH']}"
        self.environment = environment | {"PATH": path, "VIRTUAL_ENV": str(folder)}
        if forked:
            programs.python_at(folder / "bin/python")
        else:
            executable(folder / "bin/python", f'exec "{sys.executable}" "$@"')

    def edit_config(self) -> None:
        """Edit the configuration file for another experiment."""
        edits = {"output_dir": str(self.folder / "other"), "max_steps": 5, "learning_rate": 1e-6}
        self.config.write_text(json.dumps(json.loads(self.config.read_text()) | edits))

    def requeued(self) -> int:
        path = self.folder / "requeues.txt"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def run(self, restart: int, disturb: Callable[[subprocess.Popen, Path], None] | None) -> int:
        """Run the job once, and return its exit status.

        restart: the number of earlier starts (SLURM_RESTART_COUNT). disturb: function called with the process and its
        log file.
        """
        log = self.folder / f"job-{restart}.txt"
        environment = self.environment | {"SLURM_RESTART_COUNT": str(restart)}
        with log.open("w") as out:
            job = programs.Popen(
                [str(ROOT / "run_training.sh"), str(self.config)],
                env=environment,
                cwd=self.folder,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            if disturb:
                disturb(job, log)
            return job.wait(timeout=300)


def wait_for(job: subprocess.Popen, log: Path, text: str, times: int = 1, most_s: float = 300.0) -> None:
    """Wait until the log contains `text` at least `times` times, the job exits, or `most_s` seconds have passed."""
    deadline = time.monotonic() + most_s
    while log.read_text().count(text) < times and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


def uninterrupted(folder: Path, settings: dict, ranks: int) -> Path:
    """Run the training without interruptions, and return its output folder."""
    config, whole = folder / "whole.json", folder / "whole"
    config.write_text(json.dumps({**settings, "output_dir": str(whole)}))
    done = launch(ranks, "train/train.py", str(config))
    assert done.returncode == 0, done.stdout
    return whole


@pytest.mark.parametrize(
    "preemptions",
    [
        pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
        pytest.param(20, marks=[pytest.mark.reliability, pytest.mark.timeout(3600)]),
    ],
)  # fmt: skip
@pytest.mark.process
def test_repeated_preemption_and_requeue(settings: dict, tmp_path: Path, preemptions: int) -> None:
    """A run that is preempted repeatedly has the weights of an uninterrupted run, and uses each sample once.

    An edit of its configuration file has no effect.

    Two ranks train in FP8 with ZeRO 1. The signals arrive at random moments between the launch and the second step, and
    again a little later. A script replaces scontrol.
    """
    steps = 12 * preemptions
    settings |= {"max_steps": steps, "gradient_accumulation_steps": 1}
    whole = uninterrupted(tmp_path, settings, 2)
    chance, job = random.Random(5), Job(tmp_path, settings, 2)

    def preempt(process: subprocess.Popen, log: Path) -> None:
        wait_for(process, log, LAUNCHED.format(2))
        job.edit_config()
        if wanted := chance.randint(0, 2):
            wait_for(process, log, A_STEP, wanted)
        else:  # it begins to import, builds the model, loads the checkpoint
            wait_for(process, log, A_STEP, most_s=12 * chance.random())
        process.send_signal(chance.choice(signals.SIGNALS))
        time.sleep(chance.random() / 5)
        process.send_signal(signal.SIGTERM)

    for preempted in range(preemptions):
        assert job.run(preempted, preempt) == signals.STOPPED, f"see job-{preempted}.txt"
        assert job.requeued() == preempted + 1
    assert job.run(preemptions, None) == 0
    folder = Path(settings["output_dir"])
    assert [m["step"] for m in metrics(folder)] == list(range(1, steps + 1)), "each step once"
    assert_equal_runs(folder, whole, steps)
    states = [read_state(f / f"checkpoints/step-{steps:08d}") for f in (folder, whole)]
    assert states[0].consumed_samples == states[1].consumed_samples == steps * 4


def pid_of_rank(config: Path, rank: int) -> int:
    """Return the process id of a rank in the run that uses the file `config`."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode().split("\0")
            environment = (process / "environ").read_bytes().decode().split("\0")
        except OSError:  # not ours, or gone
            continue
        if str(config) in command and f"RANK={rank}" in environment:
            return int(process.name)
    raise AssertionError(f"no rank {rank} of {config}")


@pytest.mark.reliability
@pytest.mark.timeout(900)
@pytest.mark.process
def test_killed_rank_restarts_from_the_last_checkpoint(settings: dict, tmp_path: Path) -> None:
    """If one of four ranks is killed, run_training.sh restarts the run from the last checkpoint.

    The final weights equal those of an uninterrupted run, although the configuration file was edited.
    """
    settings |= {"max_steps": 30, "gradient_accumulation_steps": 1, "save_steps": 5}
    settings |= {"per_device_train_batch_size": 1}
    whole = uninterrupted(tmp_path, settings, 4)
    job = Job(tmp_path, settings, 4, forked=False)

    def kill(process: subprocess.Popen, log: Path) -> None:
        wait_for(process, log, A_STEP, 8)
        job.edit_config()
        os.kill(pid_of_rank(job.config, 2), signal.SIGKILL)
        wait_for(process, log, "restart 1 of 3")

    assert job.run(0, kill) == 0
    said = (tmp_path / "job-0.txt").read_text()
    assert job.requeued() == 0
    assert re.search("rank 2 .*SIGKILL", said) and re.search("status 137; .*restart 1 of 3", said)
    assert_equal_runs(Path(settings["output_dir"]), whole, 30)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.process
@pytest.mark.interpreter
def test_ctrl_c_saves_a_checkpoint(settings: dict, tmp_path: Path) -> None:
    """A terminal sends SIGINT to the launcher and to all ranks."""
    job = Job(tmp_path, settings | {"max_steps": 1000}, 2, forked=False)

    def press_ctrl_c(process: subprocess.Popen, log: Path) -> None:
        wait_for(process, log, A_STEP, 2)
        os.killpg(process.pid, signal.SIGINT)

    assert job.run(0, press_ctrl_c) == signals.STOPPED, "see job-0.txt"
    assert "Traceback" not in (tmp_path / "job-0.txt").read_text()
    folder = Path(settings["output_dir"])
    last = metrics(folder)[-1]["step"]
    assert last < 1000 and [path.name for path in committed(folder / "checkpoints")] == [f"step-{last:08d}"]
