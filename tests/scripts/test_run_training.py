"""run_training.sh from the shell to the launcher; what train/launch.py decides has its tests in
tests/train/test_launch.py.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.launching import until
from tests.scripts.machine import AWAIT, ROOT, executable, plan_of

pytestmark = pytest.mark.process


class Script:
    """run_training.sh in a Slurm job of two nodes, whose srun does plan[0] in its first start, and so on."""

    def __init__(self, machine: dict[str, str], folder: Path):
        self.folder = folder
        self.environment = machine | {
            "SLURM_JOB_ID": "41234",
            "SLURM_NNODES": "2",
            "SLURM_JOB_NODELIST": "n[1-2]",
        }
        self.environment["PATH"] = f"{folder}/slurm:{machine['PATH']}"
        executable(folder / "slurm/scontrol", f'echo "$*" >> "{folder}/scontrol.txt"')
        self.config = folder / "config.json"
        data = {"sources": {"x": str(folder / "x")}}
        self.config.write_text(json.dumps({"model": {"config": "tiny"}, "data": data, "max_steps": 10}))
        self.plan()

    def plan(self, *starts: str) -> None:
        executable(self.folder / "slurm/srun", plan_of(self.folder, starts))

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        command = [str(ROOT / "run_training.sh"), *arguments]
        return subprocess.Popen(command, env=self.environment, cwd=self.folder, text=True, **options)

    def run(self, *arguments: str, **options: Any) -> int:
        with self.start(*arguments, **options) as process:
            return process.wait(timeout=120)

    def starts(self) -> list[str]:
        file = self.folder / "starts.txt"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def script(machine: dict[str, str], tmp_path: Path) -> Script:
    return Script(machine, tmp_path)


OPTIONS = ("--output_dir", "run", "--save_strategy", "no")


def test_dry_run_starts_once(script: Script) -> None:
    """A stop that was is not forgotten. Of a shipped configuration, too, relative paths are from where it was called;
    without one they are from the repository's root. A console that is gone does not change the exit status."""
    script.plan(*['echo "$OLDPWD" > from.txt; exit 9'] * 2)
    (script.folder / "run").mkdir()
    (script.folder / "run/stopped.json").write_text("{}")
    shipped = (str(ROOT / "train_args/train_config_tiny.json"), "--data.sources", '{"x": "x"}')
    dry = ("--output_dir", str(script.folder / "run"), "--dry_run")
    for options, called_from in (shipped, script.folder), (shipped[1:], ROOT):
        with open("/dev/full", "w") as full:
            assert script.run(*options, *dry, stdout=full, stderr=full) == 9
        assert (script.folder / "from.txt").read_text() == f"{called_from}\n"
    assert [start.split()[-1] for start in script.starts()] == ["--dry_run"] * 2
    assert f"{ROOT}/train_args/train_config_tiny.json --data" in script.starts()[-1]
    assert [path.name for path in (script.folder / "run").iterdir()] == ["stopped.json"]


def test_killed_job_leaves_no_process(script: Script) -> None:
    """The launchers of the nodes save and stop, as on a signal."""
    script.plan(f"trap 'got=1' USR1; : > ready; {AWAIT}; : > stopped; exit 75")
    with script.start(str(script.config), *OPTIONS) as process:
        until((script.folder / "ready").exists)
        process.kill()
        until((script.folder / "stopped").exists)


def test_help() -> None:
    for script in ("run_training.sh", "run_tests.sh"):
        run = subprocess.run([str(ROOT / script), "--help"], capture_output=True, text=True, timeout=60)
        assert run.returncode == 0
        assert f"./{script}" in run.stdout and "set -euo" not in run.stdout


def test_slurm_copies_the_script(tmp_path: Path) -> None:
    """From its spool folder: the repository is where sbatch was called."""
    copy = tmp_path / "slurm_script"
    copy.write_bytes((ROOT / "run_training.sh").read_bytes())
    for submitted, status in ((ROOT, 0), (tmp_path, 1)):
        environment = {**os.environ, "SLURM_SUBMIT_DIR": str(submitted)}
        run = subprocess.run(["bash", str(copy), "--help"], env=environment, capture_output=True, text=True)
        assert run.returncode == status
        assert ("./run_training.sh" in run.stdout) == (status == 0)
    assert f"{tmp_path} is not the repository root" in run.stderr
