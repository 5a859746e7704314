"""Which rank this process is, by whatever started it: the one place that knows the names of their variables.

torchrun, deepspeed, accelerate and train/launch.py describe each rank by the variables of torch (`DESCRIBED`). srun and
mpirun have names of their own (`LAUNCHERS`); `adopt` sets torch's from them, and everybody else reads those. Needs no
torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from model.errors import UserError

DESCRIBED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
HOW = (
    "start ranks with train/launch.py, torchrun or deepspeed, which set all of these, or with srun or mpirun; to train "
    "with one process, unset "
)
# Where nothing says another one, as torch's launchers have it.
PORT = "29500"
# Any host is this, so that it says something of a single one alone.
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class LauncherError(UserError, ValueError):
    """What started this process, or a hostfile, does not describe the ranks; `key` names the variable or file."""

    code = "launcher"


@dataclass(frozen=True)
class Launcher:
    """What starts one process a rank and describes it by other names than torch's."""

    name: str
    sign: str  # set in each process that it starts, and in no other
    rank: str
    size: str
    local_rank: str
    local_size: str


# The first whose sign is there has started this process: mpirun starts ranks on other nodes by srun, whose variables
# then count nodes. A batch script, and the shell of salloc, are no step of their Slurm job, though they may have a
# SLURM_PROCID; srun with MPI's PMI-2 sets PMI_RANK as well.
LAUNCHERS = (
    Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher("mpirun", "MPI_LOCALRANKID", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher(
        "srun",
        "SLURM_STEP_ID",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
    ),
)
# Of tasks of something that is not in the table, or whose sign was lost on the way.
ONE_OF_SEVERAL = {
    "SLURM_PROCID": 1,
    "SLURM_STEP_NUM_TASKS": 2,
    "PMI_RANK": 1,
    "PMI_SIZE": 2,
    "PMIX_RANK": 1,
}  # at least


def adopt(environment: MutableMapping[str, str] = os.environ) -> None:
    """Describe this process as torch's launchers do, if srun or mpirun started it as one of several; what is described
    already stays. A process that nothing describes is alone.

    Raises LauncherError: it is described in part, twice and differently, or nothing says where rank 0 is."""
    given = {name: environment.get(name, "") for name in DESCRIBED}
    if given["RANK"]:
        _check_described(given)
        return
    launcher = next((known for known in LAUNCHERS if environment.get(known.sign)), None)
    if launcher is None:
        _check_alone(environment)
        return
    found = _described_by(launcher, environment)
    for name, value in found.items():
        if environment.get(name, value) not in ("", value):
            raise LauncherError(
                f"{name}={environment[name]} is set, and {launcher.name} says {value}; unset {name}, or start as many "
                f"tasks as it says",
                code="launcher_contradicted",
                key=name,
            )
    if found["WORLD_SIZE"] == "1":
        return
    environment.update(found)
    several_hosts = found["LOCAL_WORLD_SIZE"] != found["WORLD_SIZE"]
    if not given["MASTER_ADDR"]:
        environment["MASTER_ADDR"] = _first_of(launcher, environment) if several_hosts else "127.0.0.1"
    if not given["MASTER_PORT"]:
        job = environment.get("SLURM_JOB_ID", "")
        of_job = launcher.name == "srun" and job.isdecimal()
        environment["MASTER_PORT"] = port_of(job, environment["SLURM_STEP_ID"]) if of_job else PORT


def rank(environment: Mapping[str, str] = os.environ) -> int:
    """Of this process, as far as it is described; 0 if it is not, or alone."""
    return _number(environment.get("RANK", ""), 0)


def world_size(environment: Mapping[str, str] = os.environ) -> int:
    """Ranks in all; 1 if nothing says it."""
    return _number(environment.get("WORLD_SIZE", ""), 1) or 1


def local_world_size(environment: Mapping[str, str] = os.environ) -> int:
    """Ranks on this node; 1 if nothing says it."""
    told = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE", "")  # DeepSpeed's name for it
    return _number(told, 1) or 1


def several_nodes(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the ranks are on more nodes than this one, as far as that is said."""
    told = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE")
    return bool(told) and local_world_size(environment) < world_size(environment)


def first_host(nodes: str) -> str:
    """The first host of a Slurm list such as "gpu[007-012,20],login1", as `scontrol show hostnames` has it."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else "")


def port_of(job: str, step: str = "0") -> str:
    """A port for rank 0 of a step of a Slurm job: the same on all nodes, another for jobs and steps that run beside it,
    and below those which systems give to outgoing connections."""
    return str(20000 + (int(job) + 101 * _number(step, 0)) % 12000)


@dataclass(frozen=True)
class Nodes:
    """What train/launch.py needs to know to start the ranks of one node of several."""

    nproc: int
    nnodes: int
    node_rank: int
    master_addr: str


def nodes_of(hostfile: str | Path, here: Collection[str]) -> Nodes:
    """By a file of DeepSpeed's, lines of `host slots=N`, the first that of rank 0; `here`: names of this host.

    Raises LauncherError: a line is no such line, hosts have unequal slots, this one is not among them."""
    slots: dict[str, int] = {}
    try:
        lines = Path(hostfile).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LauncherError(
            f"hostfile {hostfile}: {error}", code="hostfile_unreadable", key=str(hostfile)
        ) from error
    for number, line in enumerate(lines, 1):
        if not (text := line.partition("#")[0].strip()):
            continue
        match = re.fullmatch(r"(\S+)\s+slots=([1-9]\d*)", text)
        if not match or match[1] in slots:
            what = "is there twice" if match else 'is no "host slots=N"'
            raise LauncherError(
                f"hostfile {hostfile}, line {number}: {text!r} {what}",
                code="hostfile_line",
                key=str(hostfile),
            )
        slots[match[1]] = int(match[2])
    if not slots:
        raise LauncherError(
            f'hostfile {hostfile} names no host; each line is "host slots=N"',
            code="hostfile_empty",
            key=str(hostfile),
        )
    if len(set(slots.values())) > 1:
        raise LauncherError(
            f"hostfile {hostfile}: {', '.join(f'{host} has {n}' for host, n in slots.items())} slots; ranks are "
            "numbered node by node, as many on each, and the slowest node sets the pace: give each the smallest number",
            code="hostfile_unequal_slots",
            key=str(hostfile),
        )
    names = list(slots)
    if len(names) == 1 and names[0] in LOOPBACK:
        here = names
    if (found := next((host for host in names if host in here), None)) is None:
        raise LauncherError(
            f"hostfile {hostfile} names {', '.join(names)}, and this host is {', '.join(sorted(here))}: name it there "
            "as it calls itself",
            code="hostfile_without_this_host",
            key=str(hostfile),
        )
    return Nodes(slots[found], len(names), names.index(found), names[0])


def nodes_by_hostfile(environment: Mapping[str, str]) -> dict[str, str]:
    """What HOSTFILE says in the settings of run_training.sh by which that is said without one; {} if it is not set.

    Raises LauncherError: as nodes_of, or one of them is set."""
    if not (hostfile := environment.get("HOSTFILE")):
        return {}
    if given := [name for name in ("NPROC", "NNODES", "NODE_RANK", "MASTER_ADDR") if environment.get(name)]:
        raise LauncherError(
            f"HOSTFILE says what {given[0]} would: set one of them", code="hostfile_and_setting", key=given[0]
        )
    nodes = nodes_of(hostfile, names_of_this_host())
    return {name.upper(): str(value) for name, value in vars(nodes).items()}


def names_of_this_host() -> set[str]:
    """With and without its domain, and its addresses: of its interfaces, and where its name leads to."""
    name = socket.gethostname()
    names = {name, name.partition(".")[0], socket.getfqdn()}
    with contextlib.suppress(OSError):
        names.update(socket.gethostbyname_ex(name)[2])
    every = [address for of_one in psutil.net_if_addrs().values() for address in of_one]
    names.update(a.address for a in every if a.family in (socket.AF_INET, socket.AF_INET6))
    return {name for name in names if not name.startswith("127.") and name not in LOOPBACK}


def _number(text: str, default: int) -> int:
    return int(text) if text.isdecimal() else default


def _check_described(given: dict[str, str]) -> None:
    wrong = [n for n, text in given.items() if not (text if n == "MASTER_ADDR" else text.isdecimal())]
    if wrong:
        raise LauncherError(
            f"RANK={given['RANK']} is set, but {', '.join(wrong)} not, or to no number: {HOW}RANK",
            code="rank_described_in_part",
            key=wrong[0],
        )
    if int(given["RANK"]) >= int(given["WORLD_SIZE"]):
        raise LauncherError(
            f"RANK={given['RANK']} is not below WORLD_SIZE={given['WORLD_SIZE']}: {HOW}both, or mend them",
            code="rank_out_of_range",
            key="RANK",
        )


def _check_alone(environment: Mapping[str, str]) -> None:
    for name, alone in {"WORLD_SIZE": ("", "0", "1"), "LOCAL_RANK": ("", "0")}.items():
        if environment.get(name, "") not in alone:
            raise LauncherError(
                f"{name}={environment[name]} is set, but RANK not: {HOW}{name}",
                code="rank_described_in_part",
                key=name,
            )
    for name, least in ONE_OF_SEVERAL.items():
        if _number(environment.get(name, ""), 0) >= least:
            raise LauncherError(
                f"this is one of several tasks ({name}={environment[name]}), and what started it does not say of how "
                "many: each would train by itself. Start them with srun, with mpirun of Open MPI, MPICH or Intel MPI, "
                "or set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each",
                code="task_not_described",
                key=name,
            )


def _described_by(launcher: Launcher, environment: Mapping[str, str]) -> dict[str, str]:
    names = (launcher.rank, launcher.size, launcher.local_rank, launcher.local_size)
    told = {name: environment.get(name, "") for name in names}
    if launcher.name == "srun":
        # older ones say it for the step by the name of the job
        told[launcher.size] = told[launcher.size] or environment.get("SLURM_NTASKS", "")
        tasks = told[launcher.local_size] or environment.get("SLURM_TASKS_PER_NODE", "")
        told[launcher.local_size] = _tasks_here(tasks, environment.get("SLURM_NODEID", ""))
    if told[launcher.size] == "1":
        return {"WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    if wrong := [name for name, text in told.items() if not text.isdecimal()]:
        raise LauncherError(
            f"{launcher.name} started this process ({launcher.sign} is set), but {', '.join(wrong)} not, or to no "
            f"number: pass its whole environment on; to train with one process, unset {launcher.sign}",
            code="launcher_described_in_part",
            key=wrong[0],
        )
    number, size, local, here = map(int, told.values())
    if number >= size or local >= here or here > size:
        raise LauncherError(
            f"{launcher.name} started this process as rank {number} of {size}, {local} of {here} on its node, by "
            f"{', '.join(names)}: these do not go together; start it anew from a clean shell",
            code="rank_out_of_range",
            key=launcher.rank,
        )
    return {
        "RANK": str(number),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(here),
        "LOCAL_SIZE": str(here),
    }


def _tasks_here(tasks: str, node: str) -> str:
    """Tasks on the node of this number, of a Slurm list such as "8(x3),4"; "" if that does not say it."""
    counts = [
        count for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks) for _ in range(int(times or 1))
    ]
    index = _number(node, 0) if len(counts) > 1 else 0
    return counts[index] if index < len(counts) else ""


def _first_of(launcher: Launcher, environment: Mapping[str, str]) -> str:
    """The host of rank 0, of several."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    if launcher.name == "srun" and nodes:
        return first_host(nodes)
    how = "srun --export=ALL,MASTER_ADDR=HOST" if launcher.name == "srun" else "mpirun -x MASTER_ADDR=HOST"
    raise LauncherError(
        f"{launcher.name} started ranks on several hosts, and nothing says which has rank 0: set MASTER_ADDR to it "
        f"({how}; MPICH and Intel MPI: -genv MASTER_ADDR HOST)",
        code="no_master_addr",
        key="MASTER_ADDR",
    )
