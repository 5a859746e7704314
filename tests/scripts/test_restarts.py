"""run_training.sh after the training has ended: when it starts it again, when it requeues its Slurm job, when it stops.

The launcher is a script here. Each start of it does what the next line of plan.sh says and writes its arguments down.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.scripts.machine import ROOT, executable, run_training

STOPPED = "echo '{}' > run/stopped.json; exit 75"
ONLY_THE_MARK = "echo '{}' > run/stopped.json; exit 1"  # as torchrun, or srun of several nodes


def progress(step: int) -> str:
    """What a start leaves that came to `step`: a line in metrics.jsonl."""
    return f'mkdir -p run; echo \'{{"step": {step}, "loss": 1.0}}\' >> run/metrics.jsonl'


def checkpoint(step: int) -> str:
    folder = f"run/checkpoints/step-{step:08d}"
    return f"mkdir -p {folder}; echo '{{}}' > {folder}/manifest.json"


class Job:
    """run_training.sh with a launcher whose first start does plan[0], and so on; after the plan it exits with 0."""

    def __init__(self, machine: dict[str, str], folder: Path, config: Path):
        self.machine, self.folder, self.config = dict(machine), folder, config
        (folder / "run").mkdir()
        executable(folder / "slurm/scontrol", f'echo "$*" >> "{folder}/scontrol.txt"')

    def plan(self, *starts: str) -> None:
        cases = "\n".join(f"{number}) {do};;" for number, do in enumerate(starts, 1))
        lines = [
            f'[[ "$*" == *train/launch.py* ]] || exec {sys.executable} "$@"',
            f'echo "$*" >> "{self.folder}/starts.txt"',
            f'cd "{self.folder}"; number=0; while read -r line; do number=$((number + 1)); done < starts.txt',
            f"case $number in\n{cases}\n*) exit 0;;\nesac",
        ]
        executable(self.folder / "venv/bin/python", "\n".join(lines))

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        options = ("--output_dir", "run", "--save_strategy", "no", *arguments)
        return run_training({**self.machine, **environment}, self.folder, self.config, *options)

    def slurm(self) -> dict[str, str]:
        return {"SLURM_JOB_ID": "41234", "PATH": f"{self.folder}/slurm:{self.machine['PATH']}"}

    def starts(self) -> list[str]:
        return (self.folder / "starts.txt").read_text().splitlines()

    def requeued(self) -> bool:
        calls = self.folder / "scontrol.txt"
        return calls.exists() and calls.read_text() == "requeue 41234\n"


@pytest.fixture
def job(machine: dict[str, str], tmp_path: Path, config: Path) -> Job:
    return Job(machine, tmp_path, config)


def test_a_crash_is_followed_by_another_start_as_long_as_it_helps(job: Job) -> None:
    job.plan(f"{progress(3)}; exit 137", f"{checkpoint(5)}; exit 1", "exit 0")
    run = job.run("--resume_from_checkpoint", "never")
    assert run.returncode == 0, run.stderr
    first, second, third = job.starts()
    assert first.endswith("never") and second.endswith("never"), "there is no checkpoint to go on from yet"
    assert third.endswith("--resume_from_checkpoint never --resume_from_checkpoint auto")
    assert "ended with status 137; restart 1 of 3 from the beginning" in run.stderr
    assert "ended with status 1; restart 2 of 3 from step-00000005" in run.stderr


def test_a_start_that_comes_no_further_is_the_last(job: Job) -> None:
    job.plan(f"{progress(7)}; exit 1", f"{progress(7)}; exit 9", "exit 0")
    run = job.run()
    assert run.returncode == 9 and len(job.starts()) == 2
    assert "came no further than step 7" in run.stderr


def test_restarts_are_bounded(job: Job) -> None:
    job.plan(*[f"{progress(step)}; exit 134" for step in range(1, 9)])
    assert job.run(MAX_RESTARTS="2").returncode == 134
    assert len(job.starts()) == 3


@pytest.mark.parametrize("end", ["exit 2", STOPPED])
def test_what_another_start_would_not_help_is_not_started_again(job: Job, end: str) -> None:
    job.plan(f"{checkpoint(4)}; {end}")
    run = job.run()
    assert run.returncode == int(end.split()[-1])
    assert len(job.starts()) == 1
    assert ("the same command goes on" in run.stdout) == (end == STOPPED)


@pytest.mark.parametrize("end", [STOPPED, ONLY_THE_MARK])
def test_a_slurm_job_that_is_stopped_requeues_itself(job: Job, end: str) -> None:
    job.plan(f"{checkpoint(4)}; {end}")
    run = job.run(**job.slurm())
    assert run.returncode == 75 and len(job.starts()) == 1
    assert job.requeued()
    assert "Slurm job 41234 is requeued and goes on from there" in run.stdout


def test_requeueing_can_be_turned_off(job: Job) -> None:
    job.plan(STOPPED)
    assert job.run(REQUEUE="0", **job.slurm()).returncode == 75
    assert not job.requeued()


@pytest.mark.parametrize("before", [None, 9])
def test_a_requeued_job_goes_on_from_its_own_checkpoint(job: Job, before: int | None) -> None:
    """And not from one that was there before it, which its first start may not have come to set aside."""
    job.plan(STOPPED, f"rm -rf run/checkpoints; {checkpoint(4)}; {STOPPED}", "exit 0")
    if before:
        subprocess.run(["bash", "-ec", checkpoint(before)], cwd=job.folder, check=True)
    never = ("--resume_from_checkpoint", "never")
    for restart in range(3):
        job.run(*never, SLURM_RESTART_COUNT=str(restart), **job.slurm())
    first, second, third = job.starts()
    assert first.endswith("never") and second.endswith("never")
    assert third.endswith("--resume_from_checkpoint never --resume_from_checkpoint auto")


def test_a_requeued_job_that_never_began_begins_as_it_was_told(job: Job) -> None:
    """The note is of a job before it."""
    job.plan(f"{checkpoint(4)}; {STOPPED}", "exit 0")
    job.run(**job.slurm())
    job.run(
        "--resume_from_checkpoint", "never", SLURM_RESTART_COUNT="1", **{**job.slurm(), "SLURM_JOB_ID": "5"}
    )
    assert job.starts()[1].endswith("--resume_from_checkpoint never")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_reach_the_launcher(job: Job, number: signal.Signals) -> None:
    """bash passes the signal on and waits for the end of the save, however many signals follow."""
    trap = f"trap 'n=$((n + 1))' {number.name.removeprefix('SIG')}"
    wait = "while ((n == 0)); do read -rt 0.1 < <(:) || true; done; read -rt 0.5 <> <(:) || true"
    job.plan(f"n=0; {trap}; : > ready; {wait}; {checkpoint(4)}; {STOPPED}")
    command = [str(ROOT / "run_training.sh"), str(job.config), "--output_dir", "run"]
    environment = {**job.machine, **job.slurm()}
    with subprocess.Popen(command, cwd=job.folder, env=environment, stdout=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not (job.folder / "ready").exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        os.kill(process.pid, number)
        time.sleep(0.2)
        os.kill(process.pid, number)
        assert process.wait(timeout=30) == 75
    assert job.requeued() and len(job.starts()) == 1
    assert (job.folder / "run/checkpoints/step-00000004/manifest.json").exists()
