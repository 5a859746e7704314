"""train/engine/launchers.py: what srun and mpirun say of a rank, in the names of torch; what is refused."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from train import launch, train
from train.engine import launchers
from train.engine.launchers import DESCRIBED, Nodes, adopt, first_host, nodes_by_hostfile, nodes_of, port_of

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
TORCHRUN = dict(zip(DESCRIBED, ("3", "1", "4", "first", "1234"), strict=True))


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
        (
            {**SRUN, "SLURM_STEP_NUM_TASKS": "", "SLURM_NTASKS": "12", **THERE}
            | {"SLURM_STEP_TASKS_PER_NODE": "", "SLURM_TASKS_PER_NODE": "4(x3)"},
            {**SRUN_RANK, **THERE},
        ),
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
def test_a_rank_is_what_its_launcher_says(given: dict[str, str], described: dict[str, str]) -> None:
    environment = dict(given)
    adopt(environment)
    assert {name: text for name, text in environment.items() if name in described} == described
    assert {n: text for n, text in environment.items() if n not in described} == {
        name: text for name, text in given.items() if name not in described
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"RANK": "1"}, "RANK=1 is set, but LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not"),
        ({**TORCHRUN, "LOCAL_RANK": ""}, "RANK=3 is set, but LOCAL_RANK not, or to no number: start ranks with"),
        ({**TORCHRUN, "RANK": "a", "MASTER_PORT": "b"}, "RANK=a is set, but RANK, MASTER_PORT not, or to no number"),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set, but RANK not: .*; to train with one process, unset WORLD_SIZE"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 is set, but RANK not"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, r"one of several tasks \(SLURM_PROCID=1\)"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, r"one of several tasks \(PMI_RANK=1\).* with srun, with mpirun"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, r"one of several tasks \(PMI_SIZE=2\)"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, r"one of several tasks \(SLURM_STEP_NUM_TASKS=2\)"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun started .* but OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_LOCAL_RANK"),
        ({"PMIX_RANK": "1"}, r"one of several tasks \(PMIX_RANK=1\)"),
        ({**SRUN, "WORLD_SIZE": "16"}, "WORLD_SIZE=16 is set, and srun says 12; unset WORLD_SIZE"),
        ({**SRUN, "LOCAL_RANK": "0"}, "LOCAL_RANK=0 is set, and srun says 1"),
        # of one task, which would train alone
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "WORLD_SIZE": "16"}, "WORLD_SIZE=16 is set, and srun says 1; unset"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "LOCAL_RANK": "3"}, "LOCAL_RANK=3 is set, and srun says 0; unset"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1", "WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set, and mpirun says 1"),
        ({**SRUN, "SLURM_LOCALID": ""}, r"srun started this process \(SLURM_STEP_ID is set\), but SLURM_LOCALID not"),
        ({**SRUN, "SLURM_PROCID": "12"}, "as rank 12 of 12, 1 of 4 on its node, by SLURM_PROCID, "),
        ({**SRUN, "SLURM_LOCALID": "4"}, "as rank 9 of 12, 4 of 4 on its node"),
        ({**SRUN, "SLURM_NODEID": "2"}, "but SLURM_STEP_TASKS_PER_NODE not"),
        ({**SRUN, "SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}, "srun .* which has rank 0: set MASTER_ADDR"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": ""}, "mpirun started .*, but OMPI_COMM_WORLD_RANK not"),
        ({**HYDRA, "MPI_LOCALNRANKS": ""}, "but MPI_LOCALNRANKS not"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", **SRUN},
         r"mpirun started ranks on several hosts, .*\(mpirun -x MASTER_ADDR=HOST; MPICH and Intel MPI: -genv"),
    ],
)  # fmt: skip
def test_a_rank_that_is_described_in_part_is_refused(given: dict[str, str], said: str) -> None:
    environment = dict(given)
    with pytest.raises(ValueError, match=said):
        adopt(environment)
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
def test_the_first_host_of_a_list_of_slurms(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_ports_of_slurm_jobs() -> None:
    """Below 32768, from where systems take ports for connections; not those of the jobs and steps beside it."""
    ports = [int(port_of(str(job), str(step))) for job in range(9_999_990, 10_000_010) for step in range(4)]
    assert len(set(ports)) == len(ports) and min(ports) >= 20000 and max(ports) < 32000
    assert 20000 <= int(port_of("1", "4294967290")) < 32000, "an interactive step"


@pytest.mark.parametrize(
    ("text", "here", "nodes"),
    [
        ("a slots=8\nb slots=8\n", {"b", "b.site"}, (8, 2, 1, "a")),
        ("# ours\n\nb.site   slots=4  # the second\na slots=4", {"b", "b.site"}, (4, 2, 0, "b.site")),
        ("10.0.0.7 slots=2", {"c", "10.0.0.7"}, (2, 1, 0, "10.0.0.7")),
    ],
)
def test_a_hostfile(tmp_path: Path, text: str, here: set[str], nodes: tuple) -> None:
    (tmp_path / "hosts").write_text(text)
    assert nodes_of(tmp_path / "hosts", here) == Nodes(*nodes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "a slots=8\nb slots=4",
            "a has 8, b has 4 slots; ranks are numbered node by node, .*: give each the smallest",
        ),
        (
            "a slots=8\nc slots=8",
            r"names a, c, and this host is b, b\.site: name it there as it calls itself",
        ),
        ("a slots=8\na slots=8", "line 2: 'a slots=8' is there twice"),
        ("b 8", "line 1: 'b 8' is no \"host slots=N\""),
        ("b slots=0", "line 1: 'b slots=0' is no"),
        ("# b slots=1\n", "names no host"),
        (None, "No such file"),
    ],
)
def test_a_hostfile_that_says_nothing_usable(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "hosts").write_text(text)
    with pytest.raises(ValueError, match=f"hostfile .*hosts.*{said}"):
        nodes_of(tmp_path / "hosts", {"b", "b.site"})


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_single_host_may_be_localhost(host: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"{host} slots=2\n")
    assert nodes_of(tmp_path / "hosts", {"b"}) == Nodes(2, 1, 0, host)
    (tmp_path / "hosts").write_text(f"{host} slots=2\na slots=2\n")
    with pytest.raises(ValueError, match="this host is b: name it there"):
        nodes_of(tmp_path / "hosts", {"b"})


def test_a_hostfile_may_have_this_host_by_any_name_or_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "gethostname", lambda: "gpu7.site")
    monkeypatch.setattr(socket, "getfqdn", lambda: "gpu7.cluster.site")
    monkeypatch.setattr(socket, "gethostbyname_ex", lambda name: (name, [], ["127.0.1.1", "10.1.0.7"]))
    kinds = (socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "10.0.0.7"), (socket.AF_INET6, "fd00::7")
    interfaces = {"lo": kinds[:1], "eth0": (*kinds[1:], (socket.AF_PACKET, "02:42:ac:11:00:02"))}
    monkeypatch.setattr(
        launchers.psutil,
        "net_if_addrs",
        lambda: {
            name: [SimpleNamespace(family=family, address=address) for family, address in found]
            for name, found in interfaces.items()
        },
    )
    names, addresses = {"gpu7", "gpu7.site", "gpu7.cluster.site"}, {"10.0.0.7", "fd00::7"}
    assert launchers.names_of_this_host() == names | addresses | {"10.1.0.7"}
    monkeypatch.setattr(socket, "gethostbyname_ex", unknown)
    assert launchers.names_of_this_host() == names | addresses


def test_settings_of_a_hostfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hosts").write_text("a slots=8\nb slots=8\n")
    monkeypatch.setattr(launchers, "names_of_this_host", lambda: {"b"})
    hostfile = {"HOSTFILE": str(tmp_path / "hosts")}
    found = {"NPROC": "8", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a"}
    assert nodes_by_hostfile(hostfile) == found and nodes_by_hostfile({"NPROC": "2"}) == {}
    with pytest.raises(ValueError, match="HOSTFILE says what NODE_RANK would: set one of them"):
        nodes_by_hostfile(hostfile | {"NODE_RANK": "1"})
    nodes = f"--hostfile {tmp_path / 'hosts'}"
    monkeypatch.setattr(launch, "names_of_this_host", lambda: {"b"})
    monkeypatch.setenv("SLURM_PROCID", "0")
    options = launch.parse([*nodes.split(), "--master_port", "29500", __file__])
    assert (options.nproc, options.nnodes, options.node_rank, options.master_addr) == (8, 2, 1, "a")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "--nproc, the ranks on this node, or --hostfile is needed"),
        ("--hostfile hosts --nproc 2", "--hostfile says what --nproc would: give one of them"),
        ("--hostfile hosts --node_rank 0", "--hostfile says what --node_rank would"),
        ("--hostfile hosts", "hostfile hosts: "),
    ],
)
def test_the_launcher_takes_a_hostfile_or_its_own_options(
    given: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        launch.parse([*given.split(), __file__])
    assert said in capsys.readouterr().err


def test_a_process_of_which_little_is_known() -> None:
    assert (launchers.rank({}), launchers.world_size({}), launchers.local_world_size({})) == (0, 1, 1)
    described = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_SIZE": "4"}  # deepspeed
    assert launchers.rank(described) == 5 and launchers.world_size(described) == 8
    assert launchers.local_world_size(described) == 4
    assert launchers.local_world_size(described | {"LOCAL_WORLD_SIZE": "2"}) == 2
    assert launchers.rank({"RANK": "x"}) == 0 and launchers.world_size({"WORLD_SIZE": "0"}) == 1


def test_help_is_for_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "fail", lambda message, _: pytest.fail(message))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "16")
    with pytest.raises(SystemExit) as ended:
        train.main(["--help"])
    assert ended.value.code == 0


def test_arguments_that_are_refused_are_told_by_rank_0_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (dict.fromkeys((*DESCRIBED, *SRUN_RANK), "") | SRUN | THERE).items():
        monkeypatch.setenv(name, text)
    told: list[tuple[int, str]] = []
    monkeypatch.setattr(train, "fail", lambda message, _: told.append((launchers.rank(), message)))
    train.main(["no_such_configuration.json"])
    assert len(told) == 1 and told[0][0] == 9 and "no_such_configuration.json" in told[0][1]


def test_ranks_are_on_several_nodes_only_where_something_says_so() -> None:
    assert launchers.several_nodes({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})
    assert launchers.several_nodes({"WORLD_SIZE": "4", "LOCAL_SIZE": "2"})
    for here in ({}, {"LOCAL_WORLD_SIZE": "4"}, {"LOCAL_SIZE": ""}):
        assert not launchers.several_nodes({"WORLD_SIZE": "4"} | here)
