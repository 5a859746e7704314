"""The process group that a run works in, and kernels that give the same bits each time."""

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

# The timeout of every process group, above hang_timeout_s: the watchdog ends a run that hangs and names the rank at
# fault. torch's own timeout, 10 minutes with NCCL, would abort an innocent rank before that.
GROUP_TIMEOUT = datetime.timedelta(days=1)

# The time that the ranks of several nodes have to arrive, and the setting for another one.
NODES_TIMEOUT_S, NODES_TIMEOUT = 50.0, "NODES_TIMEOUT_S"
ANSWER_S = 3.0

# Transformer Engine's advice to install what FlashAttention-4 replaces; that FlashAttention-4 is missing is told.
leave_out("DotProductAttention", "flash-attn v3 may provide", "flash-attn may provide")


def from_rank_0(make: Callable[[], T]) -> T:
    """Return on every rank what `make` returns on rank 0, which alone calls it. Collective.

    A UserError or OSError of `make` is raised on every rank; it must not raise others.
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
    """Join the process group that whatever started this process describes (train/launchers.py); alone, make one
    of one process.

    Raises ValueError: it is described in part, or another process has the port."""
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
    # torch's remarks on how DeepSpeed calls it drown what a user should read
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device", category=UserWarning)
    # and so do FlashAttention-4's on itself
    warnings.filterwarnings("ignore", message="Argument aux_data ", category=UserWarning)
    wait_out_a_dead_builder()
    if os.environ["LOCAL_RANK"] == "0":
        remove_dead_buffers()
        if (folder := build_folder()) and not any(folder.glob("*.so")):
            print("building DeepSpeed's CPU communication, once; it takes about a minute", flush=True)
    try:
        store = wait_for_ranks()  # shares its port with torch's while both are there
        # each rank would say at each start that this op was built
        with contextlib.redirect_stdout(io.StringIO()):
            deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    except DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise launchers.LauncherError(
            f"MASTER_PORT={os.environ['MASTER_PORT']} is in use on this host by another process; give another "
            "port, the same to every rank",
            code="port_in_use",
            key="MASTER_PORT",
        ) from error
    del store
    set_group_timeouts()


def wait_for_ranks(environment: Mapping[str, str] = os.environ) -> dist.TCPStore | None:
    """Wait until the ranks of all nodes have arrived, so that the missing ones are listed within a minute: torch would
    wait for half an hour and then name a socket. Every rank calls it.

    torchrun and accelerate, whose agents wait for each other, are left alone.

    Returns: the store at MASTER_PORT, None on one node. Keep it until the process group is initialized.

    Raises LauncherError: ranks were started with different numbers of ranks. ConnectionError: ranks, or rank 0,
    did not arrive in time."""
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
            f"MASTER_PORT={port}. That must be the host of rank 0, up and reachable, and the port the same on all nodes"
        ) from error
    if problem:
        if rank == 0:
            time.sleep(ANSWER_S)  # the store, from which the others read, ends with this process
        raise ConnectionError(problem) if is_late else launchers.LauncherError(problem, code="ranks_differ")
    return store


def _await_arrivals(store: dist.TCPStore, world: int, timeout_s: float) -> tuple[str, bool]:
    """Wait for all ranks; rank 0 calls it. Returns: what is wrong with them, or "", and whether some are late."""
    missing, deadline = set(range(world)), time.monotonic() + timeout_s
    first = json.loads(store.get("arrived/0"))
    while missing:
        for rank in sorted(missing):
            if store.check([f"arrived/{rank}"]):
                missing.remove(rank)
                found = json.loads(store.get(f"arrived/{rank}"))
                if found | {"host": ""} != first | {"host": ""}:
                    text = f"rank {rank} was started as {found}, and rank 0 as {first}; start as many on each node"
                    return text, False
        if missing and time.monotonic() > deadline:
            text = f"of {world} ranks {sorted(missing)} did not arrive within {timeout_s:g} s at {first['host']}. "
            return (
                f"{text}Start all nodes within that time, or set {NODES_TIMEOUT}=600; each needs its NODE_RANK",
                True,
            )
        time.sleep(0.1)
    return "", False


def set_group_timeouts() -> None:
    """Set GROUP_TIMEOUT for all process groups of this rank, whoever created them."""
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(GROUP_TIMEOUT, group)


def build_folder() -> Path | None:
    """Where torch builds DeepSpeed's shared-memory op; None: it is not for this machine."""
    builder = deepspeed.accelerator.get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is None or not deepspeed.ops.__compatible_ops__.get(builder.NAME, False):
        return None
    return Path(cpp_extension._get_build_directory(builder.NAME, verbose=False)).resolve()


def wait_out_a_dead_builder() -> None:
    """Remove the lock file of a process that was killed while it compiled DeepSpeed's shared-memory op, which its
    init_distributed does on a CPU machine's first start: torch's builder leaves it behind, and every later start would
    wait for it, for ever and without a word. A living builder has its file open (Linux; elsewhere there is no such op).
    """
    folder = build_folder()
    if folder is None:
        return
    lock, looks = folder / "lock", 0
    while lock.exists() and str(lock) not in open_files():
        looks += 1
        # not at the first looks: torch closes the file just before it removes it
        if looks > 3 and os.environ["LOCAL_RANK"] == "0":
            print(f"removed {lock}, left by a build that was killed", flush=True)
            lock.unlink(missing_ok=True)
            looks = 0
        time.sleep(0.5)


def make_deterministic() -> None:
    """Kernels that give the same bits each time: cuBLAS with workspaces of its own, cuDNN's attention backward without
    atomic additions (Transformer Engine follows torch's switch), and an error from what torch cannot make so."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # not needed for equal results, and it would fill every buffer that is allocated
    torch.utils.deterministic.fill_uninitialized_memory = False
