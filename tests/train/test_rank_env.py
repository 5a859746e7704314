"""train/rank_env.py: what srun and mpirun say of a rank, in the names of torch; what is refused."""

from __future__ import annotations

import pytest

from tests.conftest import refused
from train import rank_env, train
from train.rank_env import (
    TORCH_VARIABLES,
    LauncherError,
    export_torch_variables,
    first_hostname,
    step_port,
)

SRUN = {
    "SLURM_JOB_ID": "41234",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_STEP_NUM_TASKS": "12",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8,4",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_JOB_NODELIST": "gpu[001-008]",
}
SRUN_RANK = {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "12", "LOCAL_WORLD_SIZE": "4", "LOCAL_SIZE": "4"}
ONE_NODE = {"SLURM_STEP_TASKS_PER_NODE": "12", "SLURM_LOCALID": "9"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MPI_RANK = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
HERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
THERE = {"MASTER_ADDR": "first", "MASTER_PORT": "1234"}
TORCHRUN = dict(zip(TORCH_VARIABLES, ("3", "1", "4", "first", "1234"), strict=True))


@pytest.mark.parametrize(
    ("given", "described"),
    [
        ({}, {}),
        (SRUN, {**SRUN_RANK, "MASTER_ADDR": "gpu007", "MASTER_PORT": "25234"}),
        ({**SRUN, "SLURM_STEP_ID": "2"}, {**SRUN_RANK, "MASTER_ADDR": "gpu007", "MASTER_PORT": "25436"}),
        ({**SRUN, "SLURM_STEP_NODELIST": ""}, {**SRUN_RANK, "MASTER_ADDR": "gpu001", "MASTER_PORT": "25234"}),
        ({**SRUN, **THERE}, {**SRUN_RANK, **THERE}),
        ({**SRUN, "WORLD_SIZE": "12", **THERE}, {**SRUN_RANK, **THERE}),
        (
            {**SRUN, **ONE_NODE},
            {**SRUN_RANK, "LOCAL_RANK": "9", "LOCAL_WORLD_SIZE": "12", "LOCAL_SIZE": "12"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "25234"},
        ),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x3)", **THERE}, {**SRUN_RANK, **THERE}),
        # of srun --pty, and of salloc's interactive step, which keeps the SLURM_NTASKS of the job
        ({**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "12"}, {}),
        # of a batch script, and of salloc's shell
        ({"SLURM_JOB_ID": "41234", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, {}),
        ({"SLURM_JOB_ID": "41234", "SLURM_NTASKS": "8"}, {}),
        (OPEN_MPI, {**MPI_RANK, **HERE}),
        (HYDRA, {**MPI_RANK, **HERE}),
        ({**SRUN, **OPEN_MPI}, {**MPI_RANK, **HERE}),
        ({**SRUN, **HYDRA}, {**MPI_RANK, **HERE}),
        # srun --mpi=pmi2
        ({**SRUN, "PMI_RANK": "9", "PMI_SIZE": "12", **THERE}, {**SRUN_RANK, **THERE}),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", **THERE},
         {**MPI_RANK, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "LOCAL_SIZE": "1", **THERE}),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, {}),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, {}),
        # what a launcher of torch's set wins
        ({**SRUN, **OPEN_MPI, **TORCHRUN}, TORCHRUN),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "first"}, {}),
    ],
)  # fmt: skip
def test_torch_variables_by_launcher(given: dict[str, str], described: dict[str, str]) -> None:
    environment = dict(given)
    export_torch_variables(environment)
    assert {name: text for name, text in environment.items() if name in described} == described
    assert {n: text for n, text in environment.items() if n not in described} == {
        name: text for name, text in given.items() if name not in described
    }


PART, OTHER, TASK = "rank_described_in_part", "launcher_contradicted", "task_not_described"
BY_LAUNCHER = "launcher_described_in_part"


@pytest.mark.parametrize(
    ("given", "code", "key"),
    [
        ({"RANK": "1"}, PART, "LOCAL_RANK"),
        ({**TORCHRUN, "LOCAL_RANK": ""}, PART, "LOCAL_RANK"),
        ({**TORCHRUN, "RANK": "a", "MASTER_PORT": "b"}, PART, "RANK"),
        ({**TORCHRUN, "MASTER_PORT": "b"}, PART, "MASTER_PORT"),
        ({"WORLD_SIZE": "2"}, TASK, "WORLD_SIZE"),
        ({"LOCAL_RANK": "1"}, TASK, "LOCAL_RANK"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, TASK, "SLURM_PROCID"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, TASK, "PMI_RANK"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, TASK, "PMI_SIZE"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, TASK, "SLURM_STEP_NUM_TASKS"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, BY_LAUNCHER, "OMPI_COMM_WORLD_RANK"),
        ({"PMIX_RANK": "1"}, TASK, "PMIX_RANK"),
        ({"PET_NNODES": "1:2"}, TASK, "PET_NNODES"),
        ({**SRUN, "WORLD_SIZE": "16"}, OTHER, "WORLD_SIZE"),
        ({**SRUN, "LOCAL_RANK": "0"}, OTHER, "LOCAL_RANK"),
        # of one task, which would train alone
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "WORLD_SIZE": "16"}, OTHER, "WORLD_SIZE"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "LOCAL_RANK": "3"}, OTHER, "LOCAL_RANK"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1", "WORLD_SIZE": "4"}, OTHER, "WORLD_SIZE"),
        ({**SRUN, "SLURM_LOCALID": ""}, BY_LAUNCHER, "SLURM_LOCALID"),
        ({**SRUN, "SLURM_NODEID": "2"}, BY_LAUNCHER, "SLURM_STEP_TASKS_PER_NODE"),
        ({**SRUN, "SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}, "no_master_addr", "MASTER_ADDR"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": ""}, BY_LAUNCHER, "OMPI_COMM_WORLD_RANK"),
        ({**HYDRA, "MPI_LOCALNRANKS": ""}, BY_LAUNCHER, "MPI_LOCALNRANKS"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", **SRUN},
         "no_master_addr", "MASTER_ADDR"),
    ],
)  # fmt: skip
def test_incomplete_torch_variables_raise(given: dict[str, str], code: str, key: str) -> None:
    environment = dict(given)
    with refused(LauncherError, code=code, key=key):
        export_torch_variables(environment)
    assert set(environment) - {"RANK", *SRUN_RANK} == set(given) - {"RANK", *SRUN_RANK}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("", ""),
        ("login1", "login1"),
        ("gpu[007-012,20],login1", "gpu007"),
        ("gpu[7,9-12]", "gpu7"),
        ("rack[2-3]n[05-08],x", "rack2n05"),
        ("node-3-ib,node-4-ib", "node-3-ib"),
        ("n[1-2]-ib", "n1-ib"),
    ],
)
def test_first_hostname(nodes: str, first: str) -> None:
    assert first_hostname(nodes) == first


def test_step_port() -> None:
    """Below 32768, from where systems take ports for connections; not those of the jobs and steps beside it."""
    ports = [int(step_port(str(job), str(step))) for job in range(9_999_990, 10_000_010) for step in range(4)]
    assert len(set(ports)) == len(ports) and min(ports) >= 20000 and max(ports) < 32000
    assert 20000 <= int(step_port("1", "4294967290")) < 32000, "an interactive step"


def test_ranks_without_launcher_variables() -> None:
    assert (rank_env.rank({}), rank_env.world_size({}), rank_env.local_world_size({})) == (0, 1, 1)
    described = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_SIZE": "4"}  # deepspeed
    assert rank_env.rank(described) == 5 and rank_env.world_size(described) == 8
    assert rank_env.local_world_size(described) == 4
    assert rank_env.local_world_size(described | {"LOCAL_WORLD_SIZE": "2"}) == 2
    assert rank_env.rank({"RANK": "x"}) == 0 and rank_env.world_size({"WORLD_SIZE": "0"}) == 1


def test_help_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "end_after_error", lambda error, _: pytest.fail(str(error)))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "16")
    with pytest.raises(SystemExit) as ended:
        train.main(["--help"])
    assert ended.value.code == 0


def test_only_rank_0_reports_invalid_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (dict.fromkeys((*TORCH_VARIABLES, *SRUN_RANK), "") | SRUN | THERE).items():
        monkeypatch.setenv(name, text)
    ended = list[int]()
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    monkeypatch.setattr(train.time, "sleep", lambda _: None)  # so that rank 0 is first
    monkeypatch.setattr(train.os, "_exit", lambda status: ended.append(rank_env.rank()))
    train.main(["no_such_configuration.json"])
    assert ended == [9]


def test_multi_node_detection() -> None:
    assert rank_env.is_multi_node({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})
    assert rank_env.is_multi_node({"WORLD_SIZE": "4", "LOCAL_SIZE": "2"})
    for here in ({}, {"LOCAL_WORLD_SIZE": "4"}, {"LOCAL_SIZE": ""}):
        assert not rank_env.is_multi_node({"WORLD_SIZE": "4"} | here)
