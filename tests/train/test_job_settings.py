"""train/job.py: what its environment variables say, and what of them it cannot do with."""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from pathlib import Path

import pytest

from tests.train.runs import ROOT
from train import job
from train.config.arguments import ConfigurationError

NAMES = (
    "MAX_RESTARTS NPROC HAS_GPU NNODES NODE_RANK MASTER_ADDR MASTER_PORT SLURM_JOB_ID SLURM_NNODES "
    "SLURM_JOB_NODELIST SLURM_CPUS_PER_TASK HOSTFILE CONTAINER_IMAGE CONTAINER_MOUNTS CONTAINER_PYTHON"
).split()
LAUNCH = [sys.executable, str(ROOT / "train/launch.py"), "--nproc", "2"]


@pytest.mark.parametrize("empty", [True, False])
def test_an_empty_setting_counts_as_not_set(monkeypatch: pytest.MonkeyPatch, empty: bool) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")
        if not empty:
            monkeypatch.delenv(name)
    of_job = job.Job([])
    assert (of_job.max_restarts, of_job.slurm_job, of_job.first_node) == (3, "", True)
    assert job.processes_per_node() == 2 and job.launch_command(2) == LAUNCH


@pytest.mark.parametrize(("gpus", "processes"), [(8, 2), (1, 1)])
def test_without_a_configuration_two_gpus_at_most(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, gpus: int, processes: int
) -> None:
    """More cannot share its batch. A number that is asked for is taken."""
    for name in NAMES:
        monkeypatch.setenv(name, {"HAS_GPU": "1"}.get(name, ""))
    monkeypatch.setattr(job, "output_of", lambda command: f"{gpus}\n")
    monkeypatch.setattr(job, "set_environment", stop_with)
    monkeypatch.setattr(job, "run_state", lambda arguments: ("new", ""))
    few = "training: without CONFIG on 2 of 8 GPUs; a configuration takes all\n"
    for argv, wanted, said in (([], processes, few * (gpus == 8)), ([str(job.TINY)], gpus, "")):
        with pytest.raises(StopIteration, match=f"^{wanted}$"):
            job.Job(argv).run()
        assert capsys.readouterr().out == said
    monkeypatch.setenv("NPROC", "8")
    with pytest.raises(StopIteration, match="^8$"):
        job.Job([]).run()


def stop_with(processes: int) -> None:
    raise StopIteration(processes)


@pytest.mark.parametrize("ranks", [{"NPROC": "8"}, {"NPROC": "2", "NNODES": "2"}, {"SLURM_NNODES": "4"}])
def test_a_batch_that_so_many_cannot_share_is_refused_before_the_corpus_is_prepared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: dict[str, str]
) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, ranks.get(name, ""))
    monkeypatch.setattr(job, "set_environment", lambda processes: None)
    monkeypatch.setattr(job.Job, "prepare", lambda self, corpus: pytest.fail("prepares the corpus"))
    argv = [str(job.TINY), "--data.sources.python-stdlib", str(tmp_path / job.EMBEDDED_CORPUS)]
    with pytest.raises(
        ConfigurationError, match="train_batch_size_tokens: 4096 is not divisible by .* ranks"
    ):
        job.Job(argv).run()


def test_a_slurm_job_without_its_nodes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 would be looked for at no host."""
    for name in NAMES:
        monkeypatch.setenv(name, {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}.get(name, ""))
    with pytest.raises(job.JobError, match="SLURM_JOB_NODELIST is not set: which nodes has Slurm job 7"):
        job.launch_command(2)


@pytest.mark.parametrize("cpus", ["", "64"])
def test_srun_is_given_the_cpus_of_the_job(monkeypatch: pytest.MonkeyPatch, cpus: str) -> None:
    """It does not take them from sbatch: all ranks of a node would share one."""
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    for name in NAMES:
        monkeypatch.setenv(name, (slurm | {"SLURM_CPUS_PER_TASK": cpus}).get(name, ""))
    command = job.launch_command(8)
    of_srun = command[: command.index(sys.executable)]
    assert [word for word in of_srun if "cpus" in word] == (["--cpus-per-task=64"] if cpus else [])


@pytest.mark.parametrize("nodes", ["1", "4"])
def test_ranks_in_a_container_of_pyxis(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nodes: str, capsys: pytest.CaptureFixture
) -> None:
    """Also of one node: srun is what enters it."""
    monkeypatch.chdir(tmp_path)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NNODES": nodes, "SLURM_JOB_NODELIST": "n[1-4]"}
    container = {"CONTAINER_IMAGE": "team/image.sqsh", "CONTAINER_MOUNTS": "/scratch:/data"}
    for name in NAMES:
        monkeypatch.setenv(name, (slurm | container).get(name, ""))
    command = job.launch_command(8)
    assert command[0] == "srun" and f"--nodes={nodes}" in command
    assert [word for word in command if word.startswith("--container")] == [
        "--container-image=team/image.sqsh",
        f"--container-mounts={ROOT}:{ROOT},{tmp_path}:{tmp_path},/scratch:/data",
        f"--container-workdir={tmp_path}",
    ]
    inside = command[command.index("python3") :]
    assert inside[1:4] == [str(ROOT / "train/launch.py"), "--nproc", "8"] and sys.executable not in command
    monkeypatch.setenv("CONTAINER_PYTHON", "python3.12")
    assert "python3.12" in job.launch_command(8)
    monkeypatch.setenv("SLURM_JOB_ID", "")
    with pytest.raises(job.JobError, match="CONTAINER_IMAGE is for Slurm jobs with Pyxis"):
        job.launch_command(8)


def test_the_demo_is_told_as_a_shell_takes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for name in (*NAMES, "DEMO_PROMPT"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(job, "set_environment", lambda processes: None)
    monkeypatch.setattr(job, "run_state", lambda arguments: ("finished", "step-00000250"))
    monkeypatch.setattr(os, "execv", lambda path, command: None)
    folder, own_data = tmp_path / "my run", ["--data.sources", '{"mine": "data/mine"}']
    assert job.Job([str(job.TINY), *own_data, "--output_dir", str(folder)]).run() == 0
    (told,) = re.findall("^demo: (.*)$", capsys.readouterr().out, re.M)
    _, program, *words = shlex.split(told)
    assert Path(program).samefile(ROOT / "fp8_inference_demo/fp8_inference.py")
    assert words == ["--model", str(folder), "--prompt", "def __init__(self, "]


def test_a_hostfile_sets_the_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")
    hosts = tmp_path / "hosts"
    hosts.write_text(f"elsewhere slots=3\n{socket.gethostname()} slots=3\n")
    monkeypatch.setenv("HOSTFILE", str(hosts))
    assert not job.Job([]).first_node and job.processes_per_node() == 3
    where = ["--nnodes", "2", "--node_rank", "1", "--master_addr", "elsewhere", "--master_port", "29500"]
    assert job.launch_command(3)[2:] == ["--nproc", "3", *where]
    with pytest.raises(job.JobError, match="HOSTFILE says what NPROC would"):
        job.Job([])


def test_the_image_is_made_of_files_that_are_there() -> None:
    copied = re.findall(r"^COPY (.*) \S+$", (ROOT / "Dockerfile").read_text(), re.M)
    assert len(copied) == 2 and all((ROOT / name).exists() for line in copied for name in line.split())
