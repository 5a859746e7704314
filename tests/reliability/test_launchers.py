"""Tests that a configuration gives the same losses with every launcher.

Scripts that set the same environment variables replace srun, sbatch and mpirun.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import programs
from tests.reliability.launching import clean_environment
from tests.scripts.machine import executable
from tests.train.runs import ROOT, curve
from train.launch import free_port

TRAIN = str(ROOT / "train/train.py")
# Tasks one beside the other; the status of the last that fails.
TASKS = """
echo "$(basename "$0") $*" >> "$STARTS"
while [[ $1 == -* ]]; do [[ $1 == -n ]] && shift; shift; done
status=0; pids=()
for i in 0 1; do env {described} "$@" & pids+=($!); done
for pid in "${{pids[@]}}"; do wait "$pid" || status=$?; done
exit $status
"""
SRUN = "SLURM_STEP_ID=0 SLURM_PROCID=$i SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost"
ONE_NODE = f"{SRUN} SLURM_LOCALID=$i SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=2"
TWO_NODES = f"{SRUN} SLURM_LOCALID=0 SLURM_NODEID=$i SLURM_STEP_TASKS_PER_NODE='1(x2)'"
MPI = "OMPI_COMM_WORLD_RANK=$i OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=$i OMPI_COMM_WORLD_LOCAL_SIZE=2"
SBATCH = """
script=$1; shift
cp "$script" "$PWD/spooled"
export SLURM_JOB_ID=77 SLURM_NNODES=2 SLURM_JOB_NODELIST=localhost SLURM_PROCID=0 SLURM_NTASKS=2
SLURM_SUBMIT_DIR={root} exec bash "$PWD/spooled" "$@"
"""


class Ways:
    """Helper that runs train.py with different launchers, each in its own working folder with the output_dir `run`."""

    def __init__(self, folder: Path, settings: dict):
        self.folder, self.python = folder, folder / "bin/python"
        settings |= {
            "output_dir": "run",
            "train_batch_size_tokens": 256,
            "max_steps": 2,
            "save_strategy": "no",
        }
        # scales of each micro-batch by itself, whichever rank has it
        settings |= {"gradient_accumulation_steps": None, "precision": {"recipe": "current"}}
        self.config = folder / "config.json"
        self.config.write_text(json.dumps(settings))
        programs.python_at(self.python)
        for name, text in ("mpirun", TASKS.format(described=MPI)), ("sbatch", SBATCH.format(root=ROOT)):
            executable(folder / f"bin/{name}", text)
        self.srun(ONE_NODE)

    def srun(self, described: str) -> None:
        executable(self.folder / "bin/srun", TASKS.format(described=described))

    def start(self, name: str, command: list[str], **environment: str) -> subprocess.Popen:
        cwd = self.folder / name
        cwd.mkdir(exist_ok=True)
        given = clean_environment(STARTS=str(self.folder / "starts.txt"), **environment)
        given["PATH"] = f"{self.folder}/bin:{given['PATH']}"
        with (cwd / "said.txt").open("a") as out:
            return programs.Popen(command, env=given, cwd=cwd, stdout=out, stderr=subprocess.STDOUT)

    def run(self, name: str, command: list[str], **environment: str) -> list[tuple]:
        with self.start(name, command, **environment) as process:
            assert process.wait(timeout=280) == 0, self.said(name)
        return curve(self.folder / name / "run")

    def said(self, name: str) -> str:
        return (self.folder / name / "said.txt").read_text()


@pytest.fixture
def ways(settings: dict, tmp_path: Path) -> Ways:
    return Ways(tmp_path, settings)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(900)
def test_all_launchers_train_alike(ways: Ways) -> None:
    config, launch = str(ways.config), str(ROOT / "train/launch.py")
    alone = ways.run("alone", [sys.executable, TRAIN, config])
    two = ways.run("two", [sys.executable, launch, "--nproc", "2", TRAIN, config])
    assert [m[0] for m in alone] == [1, 2]
    assert alone[0][1] == pytest.approx(two[0][1], rel=1e-5)

    logs = ways.folder / "two/run/logs"
    assert [p.name for p in logs.iterdir()] == ["rank-001.log"]
    assert "step 2/2" in (logs.parent / "train.log").read_text()
    assert (logs / "rank-001.log").read_text().startswith("======== ")
    assert not (ways.folder / "alone/run/logs").exists()

    port = str(free_port())
    nodes = ["--nproc", "1", "--nnodes", "2", "--master_addr", "localhost", "--master_port", port]
    second = ways.start("nodes", [sys.executable, launch, *nodes, "--node_rank", "1", TRAIN, config])
    first = ways.run("nodes", [sys.executable, launch, *nodes, "--node_rank", "0", TRAIN, config])
    assert second.wait(timeout=60) == 0 and first == two, ways.said("nodes")

    python = str(ways.python)
    assert ways.run("srun", ["srun", "-n", "2", python, TRAIN, config], SLURM_JOB_ID="77") == two
    assert (
        ways.run("mpirun", ["mpirun", "-n", "2", python, TRAIN, config], MASTER_PORT=str(free_port())) == two
    )

    ways.srun(TWO_NODES)
    shutil.copytree(ways.folder / "bin", ways.folder / "venv/bin")
    job = {"VIRTUAL_ENV": str(ways.folder / "venv"), "NPROC": "1", "DEMO_PROMPT": "x"}
    assert ways.run("sbatch", ["sbatch", str(ROOT / "run_training.sh"), config], **job) == two
    container = {"CONTAINER_IMAGE": "image.sqsh", "CONTAINER_PYTHON": python}
    # the same ranks, were there an image
    executable(ways.folder / "bin/srun", 'echo "$(basename "$0") $*" >> "$STARTS"')
    boxed = ["sbatch", str(ROOT / "run_training.sh"), config]
    with ways.start("container", boxed, **job, **container) as process:
        assert process.wait(timeout=280) == 0, ways.said("container")
    started = (ways.folder / "starts.txt").read_text().splitlines()
    assert [line.split()[0] for line in started] == ["srun", "mpirun", "srun", "srun"]
    launched = f" {launch} --nnodes 2 --master_addr localhost "
    assert launched in started[-2] and python + launched in started[-1]
    assert "--container-image=image.sqsh" in started[-1] and "--container" not in started[-2]
