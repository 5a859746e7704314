"""Initialize the process group of a run, and select deterministic kernels."""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import os
import socket
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError, distributed_c10d
from torch.utils import cpp_extension

from model.errors import UserError
from model.fp8.machine import leave_out
from train import launchers
from train.files import open_files, remove_dead_buffers

T = TypeVar("T")

# The timeout of every process group, larger than any hang_timeout_s, so that the watchdog ends a hanging run and names
# the rank at fault. torch's default, 10 minutes with NCCL, would first abort a rank that only waits.
GROUP_TIMEOUT = datetime.timedelta(days=1)

# Time in which the ranks of several nodes must arrive, and the environment variable that overrides it.
NODES_TIMEOUT_S, NODES_TIMEOUT = 50.0, "NODES_TIMEOUT_S"
ANSWER_S = 3.0

# Suppress Transformer Engine's advice to install packages that FlashAttention-4 replaces.
leave_out("DotProductAttention", "flash-attn v3 may provide", "flash-attn may provide")


def from_rank_0(make: Callable[[], T]) -> T:
    """Call `make` on rank 0 and return its result on every rank. Collective.

    A UserError or OSError of `make` is raised on every rank. `make` must not raise other errors.
    """
    made: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            made[0] = make()
        except (UserError, OSError) as error:
            made[1] = error
    dist.broadcast_object_list(made, src=0)
    if made[1] is not None:
        raise made[1]
    return made[0]


def init_distributed() -> None:
    """Initialize the process group that the launcher describes (train/launchers.py), or a group of one process.

    Raises: LauncherError: the launcher's description is incomplete, or another process uses MASTER_PORT."""
    launchers.adopt()
    if not os.environ.get("RANK"):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    # torch warns about calls inside DeepSpeed, which users cannot change
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device", category=UserWarning)
    # FlashAttention-4 warns about its own code
    warnings.filterwarnings("ignore", message="Argument aux_data ", category=UserWarning)
    wait_out_a_dead_builder()
    if os.environ["LOCAL_RANK"] == "0":
        remove_dead_buffers()
        if (folder := build_folder()) and not any(folder.glob("*.so")):
            print(
                "compiling DeepSpeed's CPU communication; only the first run does this (about a minute)",
                flush=True,
            )
    try:
        store = wait_for_ranks()  # shares its port with torch's store
        # each rank would print at each start that this op is built
        with contextlib.redirect_stdout(io.StringIO()):
            deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    except DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise launchers.LauncherError(
            f"MASTER_PORT={os.environ['MASTER_PORT']} is in use on this host by another process; set MASTER_PORT to "
            "another free port, the same for all ranks",
            code="port_in_use",
            key="MASTER_PORT",
        ) from error
    del store
    set_group_timeouts()


def wait_for_ranks(environment: Mapping[str, str] = os.environ) -> dist.TCPStore | None:
    """Wait until the ranks of all nodes have arrived, and report missing ranks within a minute. Collective.

    torch would wait for half an hour and then name only a socket. Does nothing under torchrun and accelerate, whose
    agents wait for each other.

    Returns: the store at MASTER_PORT, or None on one node. Keep it until the process group is initialized.

    Raises:
        LauncherError: ranks were started with different numbers of ranks.
        ConnectionError: some ranks did not arrive in time, or rank 0 cannot be reached.
    """
    if not launchers.several_nodes(environment) or environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    rank, world = launchers.rank(environment), launchers.world_size(environment)
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    try:
        timeout_s = float(environment.get(NODES_TIMEOUT) or NODES_TIMEOUT_S)
    except ValueError as error:
        raise launchers.LauncherError(f"{NODES_TIMEOUT}: {error}", key=NODES_TIMEOUT) from error
    timeout = datetime.timedelta(seconds=timeout_s)
    mine = {
        "host": socket.gethostname(),
        "ranks": world,
        "on its node": launchers.local_world_size(environment),
    }
    try:
        store = dist.TCPStore(
            address, port, None, rank == 0, timeout, wait_for_workers=False, multi_tenant=True
        )
        store.set(f"arrived/{rank}", json.dumps(mine))
        if rank == 0:
            store.set("verdict", json.dumps(_await_arrivals(store, world, timeout_s)))
        store.wait(["verdict"], timeout + datetime.timedelta(seconds=ANSWER_S))
        problem, is_late = json.loads(store.get("verdict"))
    except (dist.DistStoreError, DistNetworkError) as error:
        if "EADDRINUSE" in str(error):
            raise
        raise ConnectionError(
            f"rank {rank} on {mine['host']} did not reach rank 0 within {timeout_s:g} s at MASTER_ADDR={address}, "
            f"MASTER_PORT={port}. Check that this is the host of rank 0, that it is up and reachable, and that all "
            "nodes use the same port"
        ) from error
    if problem:
        if rank == 0:
            time.sleep(ANSWER_S)  # other ranks still read from the store, which ends with this process
        raise ConnectionError(problem) if is_late else launchers.LauncherError(problem, code="ranks_differ")
    return store


def _await_arrivals(store: dist.TCPStore, world: int, timeout_s: float) -> tuple[str, bool]:
    """Wait on rank 0 for all ranks.

    Returns: a message about the problem, or "", and whether the problem is late ranks."""
    missing, deadline = set(range(world)), time.monotonic() + timeout_s
    first = json.loads(store.get("arrived/0"))
    while missing:
        for rank in sorted(missing):
            if store.check([f"arrived/{rank}"]):
                missing.remove(rank)
                found = json.loads(store.get(f"arrived/{rank}"))
                if found | {"host": ""} != first | {"host": ""}:
                    text = (
                        f"rank {rank} was started as {found}, but rank 0 as {first}. Start the same number of ranks on "
                        "each node"
                    )
                    return text, False
        if missing and time.monotonic() > deadline:
            text = f"of {world} ranks {sorted(missing)} did not arrive within {timeout_s:g} s at {first['host']}. "
            return (
                f"{text}Start all nodes within that time, or set {NODES_TIMEOUT}=600. Each node needs a NODE_RANK",
                True,
            )
        time.sleep(0.1)
    return "", False


def set_group_timeouts() -> None:
    """Set GROUP_TIMEOUT for all existing process groups of this rank."""
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(GROUP_TIMEOUT, group)


def build_folder() -> Path | None:
    """Return the folder where torch builds DeepSpeed's shared-memory op, or None if this machine does not use it."""
    builder = deepspeed.accelerator.get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is None or not deepspeed.ops.__compatible_ops__.get(builder.NAME, False):
        return None
    return Path(cpp_extension._get_build_directory(builder.NAME, verbose=False)).resolve()


def wait_out_a_dead_builder() -> None:
    """Remove the lock file of a process that was killed while compiling DeepSpeed's shared-memory op.

    DeepSpeed compiles the op in the first init_distributed on a CPU machine. torch's builder does not remove the lock
    of a killed process, and later starts would wait for it forever without a message. A running builder keeps the file
    open, which is visible on Linux; DeepSpeed uses the op only there.
    """
    folder = build_folder()
    if folder is None:
        return
    lock, looks = folder / "lock", 0
    while lock.exists() and str(lock) not in open_files():
        looks += 1
        # wait a moment: torch closes the file just before it removes it
        if looks > 3 and os.environ["LOCAL_RANK"] == "0":
            print(f"removed {lock}, which a killed build had left", flush=True)
            lock.unlink(missing_ok=True)
            looks = 0
        time.sleep(0.5)


def make_deterministic() -> None:
    """Select deterministic kernels, so that a run gives the same bits every time.

    cuBLAS uses fixed workspaces. cuDNN's attention backward uses no atomic additions; Transformer Engine follows
    torch's switch. Operations without a deterministic kernel raise an error.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # not needed for equal results, and it would fill every new buffer
    torch.utils.deterministic.fill_uninitialized_memory = False
