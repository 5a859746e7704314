"""run_training.sh from the shell to the launcher; what train/job.py decides has its tests in tests/train/test_job.py.

The launcher is a script, as there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.scripts.machine import AWAIT, ROOT, STOPPED, checkpoint, executable, launcher, progress

pytestmark = pytest.mark.process


class Script:
    """run_training.sh on a machine whose launcher does plan[0] in its first start, and so on."""

    def __init__(self, machine: dict[str, str], folder: Path):
        self.folder, self.environment = folder, dict(machine)
        self.config = folder / "config.json"
        data = {"sources": {"x": str(folder / "x")}}
        self.config.write_text(json.dumps({"model": {"config": "tiny"}, "data": data, "max_steps": 10}))

    def plan(self, *starts: str) -> None:
        """In a virtual environment with this one's packages: what job.py starts is that environment's Python again."""
        beginning, venv = launcher(self.folder, starts), self.folder / "venv"
        executable(venv / "bin/python", f'{beginning}\nexec -a "$0" {sys._base_executable} "$@"')  # type: ignore[attr-defined]
        (venv / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix, 'bin')}\n")
        if not (venv / "lib").exists():
            (venv / "lib").symlink_to(Path(sys.prefix, "lib"))

    def slurm(self) -> None:
        executable(self.folder / "slurm/scontrol", f'echo "$*" >> "{self.folder}/scontrol.txt"')
        self.environment["SLURM_JOB_ID"] = "41234"
        self.environment["PATH"] = f"{self.folder}/slurm:{self.environment['PATH']}"

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(ROOT / "run_training.sh"), *arguments],
            env=self.environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        with self.start(*arguments) as process:
            out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def starts(self) -> list[str]:
        file = self.folder / "starts.txt"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def script(machine: dict[str, str], tmp_path: Path) -> Script:
    return Script(machine, tmp_path)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


OPTIONS = ("--output_dir", "run", "--save_strategy", "no")


def test_from_a_crash_to_the_end(script: Script) -> None:
    """Its arguments reach train.py as they were given; a start that came further is followed by another."""
    script.plan(f"{progress(3)}; {checkpoint(3)}; exit 137", "exit 0")
    run = script.run(str(script.config), *OPTIONS, "--run_name", "two words")
    assert run.returncode == 0, run.stderr
    assert run.stdout == "training: 2 processes\n"
    first, second = script.starts()
    command = f"{ROOT}/train/launch.py --nproc 2 {ROOT}/train/train.py {script.config}"
    assert first == f"{command} {' '.join(OPTIONS)} --run_name two words"
    assert second == f"{first} --resume_from_checkpoint auto"
    assert "ended with status 137; restart 1 of 3 from step-00000003" in run.stderr


def test_a_wrong_key_stops_before_anything_starts(script: Script) -> None:
    script.plan()
    run = script.run(str(script.config), "--max_stepz", "3")
    assert run.returncode == 2
    assert "did you mean max_steps" in run.stderr
    assert not script.starts()


def test_a_dry_run_is_one_start_and_no_demo(script: Script) -> None:
    """Also of a Slurm job, which notes nothing then; a stop that was is not forgotten. Of a shipped configuration, too,
    relative paths are from where it was called."""
    script.plan("exit 0", 'echo "$OLDPWD" > from.txt; exit 9')
    script.slurm()
    (script.folder / "run").mkdir()
    (script.folder / "run/stopped.json").write_text("{}")
    shipped = (str(ROOT / "train_args/train_config_tiny.json"), "--data.sources", '{"x": "x"}')
    for status, config in ((0, (str(script.config),)), (9, shipped)):
        assert script.run(*config, "--output_dir", "run", "--dry_run").returncode == status
    assert (script.folder / "from.txt").read_text() == f"{script.folder}\n"
    assert [start.split()[-1] for start in script.starts()] == ["--dry_run"] * 2
    assert [path.name for path in (script.folder / "run").iterdir()] == ["stopped.json"]


def test_without_a_configuration_the_tiny_one_from_the_root(script: Script) -> None:
    script.plan('echo "$OLDPWD" > from.txt; exit 9')
    options = ("--data.sources", '{"x": "x"}', "--output_dir", str(script.folder / "run"), "--dry_run")
    assert script.run(*options).returncode == 9
    assert (script.folder / "from.txt").read_text() == f"{ROOT}\n"
    (start,) = script.starts()
    assert f"--nproc 2 {ROOT}/train/train.py {ROOT}/train_args/train_config_tiny.json --data" in start


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_signal_of_a_slurm_job_reaches_the_launcher(script: Script, number: signal.Signals) -> None:
    """Slurm sends it to the process that run_training.sh began as; its end is waited for, and the job requeued."""
    script.plan(f"mkdir -p run; trap 'got=1' USR1; : > ready; {AWAIT}; {checkpoint(4)}; {STOPPED}")
    script.slurm()
    with script.start(str(script.config), *OPTIONS) as process:
        wait_for(script.folder / "ready")
        os.kill(process.pid, number)
        assert process.wait(timeout=120) == 75
    assert (script.folder / "scontrol.txt").read_text() == "requeue 41234\n" and len(script.starts()) == 1
    assert (script.folder / "run/checkpoints/step-00000004/manifest.json").exists()


def test_a_job_that_is_killed_leaves_nothing_that_trains_on(script: Script) -> None:
    """Its launcher saves and stops, as on a signal."""
    script.plan(f"trap 'got=1' USR1; : > ready; {AWAIT}; : > stopped; exit 75")
    with script.start(str(script.config), *OPTIONS) as process:
        wait_for(script.folder / "ready")
        process.kill()
        wait_for(script.folder / "stopped")


def test_a_console_that_is_gone_does_not_change_how_it_ends(script: Script) -> None:
    """A terminal that is closed sends SIGHUP and takes no more lines."""
    script.plan(STOPPED)
    command = [str(ROOT / "run_training.sh"), str(script.config), *OPTIONS]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, env=script.environment, cwd=script.folder, stdout=full, stderr=full)
    assert done.returncode == 75


def test_help() -> None:
    for script in ("run_training.sh", "run_tests.sh"):
        run = subprocess.run([str(ROOT / script), "--help"], capture_output=True, text=True, timeout=60)
        assert run.returncode == 0
        assert f"./{script}" in run.stdout and "set -euo" not in run.stdout


def test_slurm_runs_a_copy_of_the_script(tmp_path: Path) -> None:
    """From its spool folder: the repository is where sbatch was called."""
    copy = tmp_path / "slurm_script"
    copy.write_bytes((ROOT / "run_training.sh").read_bytes())
    for submitted, status in ((ROOT, 0), (tmp_path, 1)):
        environment = {**os.environ, "SLURM_SUBMIT_DIR": str(submitted)}
        run = subprocess.run(["bash", str(copy), "--help"], env=environment, capture_output=True, text=True)
        assert run.returncode == status
        assert ("./run_training.sh" in run.stdout) == (status == 0)
    assert f"{tmp_path} is not the repository's root" in run.stderr
