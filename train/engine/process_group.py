"""Initialize the process group of a run, and select deterministic kernels."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import io
import json
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError, distributed_c10d
from torch.utils import cpp_extension

from model.errors import UserError
from train import rank_env
from train.files import try_lock

T = TypeVar("T")

# The timeout of every process group, larger than any hang_timeout_s, so that the watchdog ends a hanging run and names
# the rank at fault. torch's default, 10 minutes with NCCL, would first abort a rank that only waits.
GROUP_TIMEOUT = datetime.timedelta(days=1)

# Time limit in seconds for the ranks of several nodes to connect, and the environment variable that overrides it.
NODES_TIMEOUT_S, NODES_TIMEOUT = 50.0, "NODES_TIMEOUT_S"
ANSWER_S = 3.0


def call_on_rank_0(make: Callable[[], T]) -> T:
    """Call `make` on rank 0 and return its result on every rank.

    Collective: all ranks must call this function.

    If `make` raises a UserError or OSError, every rank raises this error. `make` must not raise other errors.
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


def call_on_all_ranks(make: Callable[[], T]) -> T:
    """Call `make` on every rank and return its result on that rank.

    Collective: all ranks must call this function.

    If `make` raises a UserError or OSError on some ranks, every rank raises an error, so that no rank waits for the
    others. A rank on which `make` succeeded raises the error of the lowest failed rank. `make` must not raise other
    errors.
    """
    made: Any = None
    error: UserError | OSError | None = None
    try:
        made = make()
    except (UserError, OSError) as raised:
        error = raised
    for first in (error, *all_gather(error)):
        if first is not None:
            raise first
    return made


def all_gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather a value from every rank of a process group, and return all values in rank order.

    Collective: all ranks of the group must call this function.
    """
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, value, group)
    return every


def init_distributed() -> None:
    """Initialize the process group from the environment variables that the launcher sets.

    Without these variables, the process group has one process.

    Raises:
        LauncherError: The environment variables are incomplete.
        ConnectionError: Some ranks did not connect in time, or rank 0 cannot be reached.
    """
    rank_env.export_torch_variables()
    if not os.environ.get("RANK"):  # port 0: any free port
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # torch warns about calls inside DeepSpeed, which users cannot change
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device", category=UserWarning)
    # FlashAttention-4 warns about its own code
    warnings.filterwarnings("ignore", message="Argument aux_data ", category=UserWarning)
    # number of collectives in NCCL's flight recorder, which the watchdog writes after a hang
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    # default timeouts of torch for all new groups, including those that DeepSpeed creates
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = GROUP_TIMEOUT
    try:
        store = wait_for_ranks()  # shares its port with torch's store
        with compile_exclusively(), suppress_prints():
            deepspeed.init_distributed(
                dist_backend="nccl" if torch.cuda.is_available() else "gloo",
                auto_mpi_discovery=False,
                verbose=False,
                timeout=GROUP_TIMEOUT,
            )
    except DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise rank_env.LauncherError(
            f"MASTER_PORT={os.environ['MASTER_PORT']} is in use by another process on this host. Set "
            "MASTER_PORT to a free port, and use the same value for all ranks",
            code="port_in_use",
            key="MASTER_PORT",
        ) from error
    del store


@contextlib.contextmanager
def suppress_prints() -> Iterator[None]:
    """Suppress the output that DeepSpeed prints when it compiles an op, or creates or destroys an engine."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


class BuildLock:
    """A flock-based lock that PyTorch uses while it builds an extension.

    The class replaces torch.utils.file_baton.FileBaton. If a process is killed, its FileBaton is never released, and
    all later runs wait forever.
    """

    def __init__(self, path: str, **_: object):
        self.path = f"{path}.flock"

    def try_acquire(self) -> bool:
        self.file = open(self.path, "w")  # noqa: SIM115, closed by release()
        return try_lock(self.file)

    def wait(self) -> None:
        fcntl.flock(self.file, fcntl.LOCK_EX)
        self.release()

    def release(self) -> None:
        self.file.close()


@contextlib.contextmanager
def compile_exclusively() -> Iterator[None]:
    """Allow only one process at a time to compile DeepSpeed's CPU communication op during a `with` block.

    DeepSpeed compiles the op only once, in the first run. A message announces the compilation. PyTorch's build lock is
    replaced with `BuildLock`.
    """
    builder = deepspeed.accelerator.get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is not None and os.environ["LOCAL_RANK"] == "0":
        folder = Path(cpp_extension._get_build_directory(builder.NAME, verbose=False))
        if deepspeed.ops.__compatible_ops__.get(builder.NAME, False) and not any(folder.glob("*.so")):
            print(
                "compiling DeepSpeed's extension for CPU communication. This takes about a minute and is done "
                "only once",
                flush=True,
            )
    with mock.patch.object(cpp_extension, "FileBaton", BuildLock):
        yield


def wait_for_ranks(environment: Mapping[str, str] = os.environ) -> dist.TCPStore | None:
    """Wait until the ranks of all nodes have connected, and report missing ranks within a minute.

    Collective: all ranks must call this function.

    Without this function, PyTorch would wait for half an hour and then report only a socket error. With torchrun and
    accelerate, this function does nothing, because their agents wait for each other.

    Returns:
        The TCPStore at MASTER_PORT, or None if there is no need to wait. Keep a reference to the store until the
        process group is initialized.

    Raises:
        ConnectionError: See `init_distributed`.
    """
    if not rank_env.is_multi_node(environment) or environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    rank, world = rank_env.rank(environment), rank_env.world_size(environment)
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    timeout_s = float(environment.get(NODES_TIMEOUT) or NODES_TIMEOUT_S)
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(
            address, port, None, rank == 0, timeout, wait_for_workers=False, multi_tenant=True
        )
        store.set(f"arrived/{rank}", "")
        if rank == 0:
            deadline, missing = time.monotonic() + timeout_s, [*range(world)]
            while missing and time.monotonic() < deadline:
                missing = [other for other in missing if not store.check([f"arrived/{other}"])]
                time.sleep(0.1)
            store.set("missing", json.dumps(missing))
        store.wait(["missing"], timeout + datetime.timedelta(seconds=ANSWER_S))
        missing = json.loads(store.get("missing"))
    except (dist.DistStoreError, DistNetworkError) as error:
        if rank == 0:
            raise
        raise ConnectionError(
            f"rank {rank} on {socket.gethostname()} could not connect to rank 0 within {timeout_s:g} s at "
            f"MASTER_ADDR={address}, MASTER_PORT={port}. Check that MASTER_ADDR is the host of rank 0, that "
            "this node can reach it, and that all nodes use the same MASTER_PORT"
        ) from error
    if missing:
        if rank == 0:
            time.sleep(ANSWER_S)  # other ranks still read from the store of this process
        raise ConnectionError(
            f"ranks {missing} of {world} did not connect to {address} within {timeout_s:g} s. Start all nodes "
            f"within that time, or set {NODES_TIMEOUT}=600 to wait 600 s. Each node needs a different NODE_RANK and "
            "the same number of ranks"
        )
    return store


def make_deterministic() -> None:
    """Select deterministic kernels, so that a repeated run gives bit-identical results.

    cuBLAS uses fixed workspaces, and cuDNN's attention backward pass uses no atomic additions. Transformer Engine
    follows torch's setting. Operations without a deterministic kernel raise an error.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # not needed for equal results, and it would fill every new buffer
    torch.utils.deterministic.fill_uninitialized_memory = False
