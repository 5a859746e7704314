"""Read the rank and the world size from the environment variables of any launcher.

torchrun, deepspeed, accelerate and train/launch.py set the environment variables of torch (`TORCH_VARIABLES`). srun and
mpirun set their own variables (`LAUNCHERS`). `export_torch_variables` translates these to torch's variables, which all
other modules read. Only this module uses the variables of Slurm and MPI. It does not import torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from model.errors import UserError

TORCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCH_HINT = (
    "Start the ranks with train/launch.py, torchrun, deepspeed, srun or mpirun (Open MPI, MPICH, Intel MPI)."
)
# Default port of torch's launchers.
PORT = "29500"


class LauncherError(UserError, ValueError):
    """An error raised if the environment does not describe this rank correctly, or a launcher setting is invalid.

    `key` names the variable or configuration key to fix.
    """

    code = "launcher"


@dataclass(frozen=True)
class Launcher:
    """Environment variable names for a launcher that does not set PyTorch's variables, such as srun."""

    name: str
    sign: str  # variable that is set only in the processes that this launcher starts
    rank: str
    size: str
    local_rank: str
    local_size: str


# The first launcher whose `sign` is set has started this process. mpirun comes first because it may use srun to start
# processes on other nodes, and srun's variables then count nodes. SLURM_PROCID cannot be the sign, because batch
# scripts and salloc's shell may also have it. PMI_RANK cannot be the sign, because srun sets it with PMI-2.
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
# A variable with at least this value shows that there are several processes or nodes. Without RANK, each of them would
# train a separate model.
OTHER_LAUNCHERS = {
    "WORLD_SIZE": 2,
    "LOCAL_RANK": 1,
    "SLURM_PROCID": 1,
    "SLURM_STEP_NUM_TASKS": 2,
    "PMI_RANK": 1,
    "PMI_SIZE": 2,
    "PMIX_RANK": 1,
    "PET_NNODES": 2,
    "PET_NODE_RANK": 1,
}
# The same for the nodes of a job. In pods of Kubeflow and Vertex AI, RANK and WORLD_SIZE describe the node. Kubeflow
# also sets PET_* for torchrun. PET_NNODES may be a range, such as 1:2.
NODE_VARIABLES = {"WORLD_SIZE": 2, "RANK": 1, "PET_NNODES": 2, "PET_NODE_RANK": 1}


def export_torch_variables(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torch's environment variables if srun or mpirun started this process as one of several ranks.

    Variables that are already set are kept. Without any launcher variables, this process is the only rank.

    Raises:
        LauncherError: Variables are missing or contradict each other, or the host of rank 0 is unknown.
    """
    if environment.get("RANK"):
        _check_torch_variables(environment)
        return
    launcher = next((known for known in LAUNCHERS if environment.get(known.sign)), None)
    if launcher is None:
        _check_absent(
            OTHER_LAUNCHERS,
            environment,
            f"several processes were started, but RANK is not set. {LAUNCH_HINT}",
            "task_not_described",
        )
        return
    found = _torch_variables(launcher, environment)
    for name, value in found.items():
        if environment.get(name, value) not in ("", value):
            raise LauncherError(
                f"{name} is {environment[name]}, but {launcher.name} reports {value}. Unset {name} to use the "
                f"value of {launcher.name}, or correct the launch command",
                code="launcher_contradicted",
                key=name,
            )
    if found["WORLD_SIZE"] == "1":
        return
    environment.update(found)
    if not environment.get("MASTER_ADDR"):
        environment["MASTER_ADDR"] = _rank_0_host(launcher, environment)
    if not environment.get("MASTER_PORT"):
        environment["MASTER_PORT"] = (
            step_port(environment["SLURM_JOB_ID"], environment["SLURM_STEP_ID"])
            if launcher.name == "srun"
            else PORT
        )


def check_only_node(environment: Mapping[str, str] = os.environ) -> None:
    """Check that no environment variable describes this node as one of several.

    Raises:
        LauncherError: A variable describes several nodes, each of which would train a separate model.
    """
    _check_absent(
        NODE_VARIABLES,
        environment,
        "this command was started on several nodes, which would train separate models. Set NNODES, NODE_RANK and "
        "MASTER_ADDR for run_training.sh (in most pods: NNODES=$WORLD_SIZE NODE_RANK=$RANK), or pass --nnodes, "
        "--node_rank, --master_addr and --master_port to train/launch.py.",
        "node_not_described",
    )


def rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return the rank of this process, or 0 if RANK is not set."""
    return _number(environment.get("RANK", ""), 0)


def world_size(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks, or 1 if WORLD_SIZE is not set."""
    return _number(environment.get("WORLD_SIZE", ""), 1) or 1


def local_world_size(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks on this node, or 1 if no environment variable specifies it."""
    text = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE", "")  # DeepSpeed's name for it
    return _number(text, 1) or 1


def is_multi_node(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment variables describe ranks on more than one node."""
    is_known = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE")
    return bool(is_known) and local_world_size(environment) < world_size(environment)


def first_hostname(nodes: str) -> str:
    """Return the first host of a Slurm node list such as "gpu[007-012,20],login1"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else "")


def step_port(job: str, step: str = "0") -> str:
    """Return the TCP port of rank 0 for a Slurm job step.

    The port is the same on all nodes and differs between concurrent jobs and steps. It is below the range of ephemeral
    ports.
    """
    return str(20000 + (int(job) + 101 * _number(step, 0)) % 12000)


def _number(text: str, default: int) -> int:
    return int(text) if text.isdecimal() else default


def _check_torch_variables(environment: Mapping[str, str]) -> None:
    given = {name: environment.get(name, "") for name in TORCH_VARIABLES}
    wrong = [n for n, text in given.items() if not (text if n == "MASTER_ADDR" else text.isdecimal())]
    if wrong:
        raise LauncherError(
            f"RANK is set, but these variables are missing or invalid: {', '.join(wrong)}. {LAUNCH_HINT} "
            "To train with one process, unset RANK",
            code="rank_described_in_part",
            key=wrong[0],
        )


def _check_absent(smallest: Mapping[str, int], environment: Mapping[str, str], text: str, code: str) -> None:
    """Check that no variable reaches its value in `smallest`, which would indicate several processes or nodes."""
    numbers = {name: _number(environment.get(name, "").rpartition(":")[2], 0) for name in smallest}
    if found := [name for name, least in smallest.items() if numbers[name] >= least]:
        values = ", ".join(f"{name}={environment[name]}" for name in found)
        raise LauncherError(
            f"according to {values}, {text} If this is not the case, unset {', '.join(found)}",
            code=code,
            key=found[0],
        )


def _torch_variables(launcher: Launcher, environment: Mapping[str, str]) -> dict[str, str]:
    names = (launcher.rank, launcher.local_rank, launcher.size, launcher.local_size)
    values = {name: environment.get(name, "") for name in names}
    if values[launcher.size] == "1":
        return {"WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    if launcher.name == "srun":
        values[launcher.local_size] = _tasks_on_node(
            values[launcher.local_size], environment.get("SLURM_NODEID", "")
        )
    if wrong := [name for name, text in values.items() if not text.isdecimal()]:
        raise LauncherError(
            f"{launcher.name} started this process ({launcher.sign} is set), but these variables are missing or "
            f"invalid: {', '.join(wrong)}. Pass all environment variables of {launcher.name} to the process. To train "
            f"with one process, unset {launcher.sign}",
            code="launcher_described_in_part",
            key=wrong[0],
        )
    described = dict(
        zip(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"), values.values(), strict=True)
    )
    return described | {"LOCAL_SIZE": described["LOCAL_WORLD_SIZE"]}


def _tasks_on_node(tasks: str, node: str) -> str:
    """Return the number of tasks on a node from a Slurm task list such as "8(x3),4".

    Args:
        tasks: The task list, with the number of tasks on each node.
        node: The index of the node in the job.

    Returns:
        The number as text, or "" if the list has no entry for the node.
    """
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
    counts = [count for count, times in found for _ in range(int(times or 1))]
    index = _number(node, 0) if len(counts) > 1 else 0
    return counts[index] if index < len(counts) else ""


def _rank_0_host(launcher: Launcher, environment: Mapping[str, str]) -> str:
    """Return the host of rank 0.

    Raises:
        LauncherError: The ranks run on several hosts, and the host of rank 0 is unknown.
    """
    if environment["LOCAL_WORLD_SIZE"] == environment["WORLD_SIZE"]:
        return "127.0.0.1"
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    if launcher.name == "srun" and nodes:
        return first_hostname(nodes)
    raise LauncherError(
        f"{launcher.name} started ranks on several hosts, but the host of rank 0 is unknown. Set MASTER_ADDR "
        "to the host of rank 0 (srun --export=ALL,MASTER_ADDR=HOST; mpirun -x MASTER_ADDR=HOST; MPICH and Intel MPI: "
        "-genv MASTER_ADDR HOST)",
        code="no_master_addr",
        key="MASTER_ADDR",
    )
