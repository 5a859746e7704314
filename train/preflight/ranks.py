"""Check that all ranks have the same configuration, software and files, and measure the speed of GPUs and links.

Each message contains the affected ranks and their hosts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import MistralConfig

from model.config import numeric_settings
from model.fp8.machine import describe
from train import rank_env
from train.config.arguments import TrainingArguments
from train.config.schema import flatten
from train.data.format import count
from train.data.stream import SampleStream
from train.engine.process_group import all_gather
from train.files import nearest_existing_path
from train.preflight.check import PreflightError
from train.record.provenance import NOT_HASHED, sources_sha256
from train.record.run_folder import RunFolder

logger = logging.getLogger(__name__)
VISIBILITY_TIMEOUT_S = 10.0  # on a network file system, new files appear on other nodes with a delay
SLOW = 1.15  # warn about GPUs that are slower than the median by this factor
GEMM, WARMUPS, REPEATS = 8192, 3, 10
ALL_REDUCE_BYTES = {"cuda": 2**28, "cpu": 2**20}


@dataclass(frozen=True)
class Rank:
    """The properties of one rank that are compared with the other ranks.

    Attributes:
        host: Host name of the rank.
        equal: Values that must be the same on all ranks, such as package versions and a hash of the data.
        machine: GPU and driver. Differences between ranks cause a warning.
        gemm_tflops: Measured speed of a bf16 GEMM in TFLOP/s, or None on a CPU.
    """

    host: str
    equal: dict[str, str]
    machine: dict[str, str]
    gemm_tflops: float | None


def is_enabled(args: TrainingArguments) -> bool:
    """Return whether the preflight checks run. By default, they run if the ranks are on several nodes."""
    return rank_env.is_multi_node() if args.preflight is None else args.preflight


def check_configured_alike(args: TrainingArguments, config: MistralConfig) -> None:
    """Check that all ranks have the same resolved training arguments and the same model configuration.

    Collective: all ranks must call this function.

    The arguments can differ if a user starts each node with its own command and configuration file. Paths, and keys
    that only rank 0 uses, are not compared.

    Raises:
        PreflightError: On all ranks, if the arguments or the model configurations differ.
    """
    values = {key: value for key, value in args.to_dict().items() if key not in NOT_HASHED}
    values["data"] |= {key: [*(values["data"][key] or {})] for key in ("sources", "eval_sources")}
    values["model"] |= {"config": numeric_settings(config), "init_from": None}
    mine = {key: json.dumps(value) for key, value in flatten(values).items()}
    every = all_gather((socket.gethostname(), mine))
    names = [f"rank {rank} ({host})" for rank, (host, _) in enumerate(every)]
    if found := unequal([facts for _, facts in every], names):
        title = "the ranks have different configurations; use the same command and configuration file for all ranks:"
        raise PreflightError([ValueError("\n  ".join([title, *found]))])


def check_alike(args: TrainingArguments, train: SampleStream) -> None:
    """Compare software, hardware and files of all ranks, and log the speed of GPUs and links.

    Collective: all ranks must call this function.

    Raises:
        PreflightError: On all ranks, if software or files differ.
        OSError: On rank 0, if output_dir cannot be written.
    """
    every = all_gather(this_rank(train, sees_file_of_rank_0(args)))
    problems, warnings = compare_ranks(every)
    if speeds := [rank.gemm_tflops for rank in every if rank.gemm_tflops]:
        logger.info(f"preflight: bf16 GEMM: {min(speeds):,.0f} to {max(speeds):,.0f} TFLOP/s per GPU")
    if len(every) > 1:
        logger.info(f"preflight: all-reduce bus bandwidth: {all_reduce_gb_s():,.1f} GB/s per rank")
    for warning in warnings:
        logger.warning(f"preflight: {warning}")
    if problems:
        raise PreflightError([ValueError(f"preflight: {problem}") for problem in problems])


def this_rank(train: SampleStream, sees_file: bool) -> Rank:
    """Return the properties of this rank: software, files and hardware, including the measured speed of its GPU.

    Args:
        train: The training data.
        sees_file: The result of `sees_file_of_rank_0`.
    """
    machine, versions = describe()
    data = json.dumps(train.fingerprint(), sort_keys=True)
    on_gpu = torch.cuda.is_available()
    equal = {name: str(version) for name, version in versions.items()} | {
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else "none",
        "the hash of model/ and train/": sources_sha256("model", "train")[:12],
        "the hash of data.sources": hashlib.sha256(data.encode()).hexdigest()[:12],
        "output_dir": "shared" if sees_file else "not shared (a file that rank 0 wrote there is not visible)",
    }
    return Rank(
        host=socket.gethostname(),
        equal=equal,
        machine={name: str(machine[name]) for name in ("gpu", "gpu_memory_gib", "driver") if name in machine},
        gemm_tflops=gemm_tflops() if on_gpu else None,
    )


def sees_file_of_rank_0(args: TrainingArguments) -> bool:
    """Return whether this rank sees a file that rank 0 writes to output_dir.

    Collective: all ranks must call this function.

    If output_dir does not exist yet, rank 0 writes the file to the nearest existing parent folder.

    Raises:
        OSError: On rank 0, if the file cannot be written.
    """
    folder, is_main = RunFolder(args.output_dir).path, dist.get_rank() == 0
    with (
        tempfile.NamedTemporaryFile(dir=nearest_existing_path(folder), prefix=".preflight-")
        if is_main
        else nullcontext() as file
    ):
        name = [Path(file.name).name if file else None]
        dist.broadcast_object_list(name, src=0)
        deadline = time.monotonic() + VISIBILITY_TIMEOUT_S
        # List the folder instead of opening the file, because NFS caches for half a minute that a file does not exist.
        while (
            not (seen := name[0] in os.listdir(nearest_existing_path(folder))) and time.monotonic() < deadline
        ):
            time.sleep(0.2)
        dist.barrier()
    return seen


def compare_ranks(ranks: list[Rank]) -> tuple[list[str], list[str]]:
    """Compare the properties of all ranks.

    Returns:
        Two lists: the problems that prevent the run from starting, and the warnings.
    """
    names = [f"rank {index} ({rank.host})" for index, rank in enumerate(ranks)]
    problems = unequal(
        [rank.equal for rank in ranks],
        names,
        "use the same package versions and source code on all nodes, and put data and output_dir on a shared file "
        "system",
    )
    warnings = unequal(
        [rank.machine for rank in ranks],
        names,
        "use nodes with identical GPUs and drivers, because all ranks wait for the slowest GPU",
    )
    usual = statistics.median([rank.gemm_tflops for rank in ranks if rank.gemm_tflops] or [0])
    warnings += [
        f"{name}: the GPU reaches {rank.gemm_tflops:,.0f} TFLOP/s in a bf16 GEMM, but the median over all ranks is "
        f"{usual:,.0f} TFLOP/s. All ranks wait for this GPU. Check with nvidia-smi whether its clocks are reduced "
        "(-q -d PERFORMANCE) or other processes use it, or exclude the node"
        for name, rank in zip(names, ranks, strict=True)
        if rank.gemm_tflops and rank.gemm_tflops * SLOW < usual
    ]
    return problems, warnings


def unequal(facts: list[dict[str, str]], where: list[str], advice: str = "") -> list[str]:
    """Return a message for each value on a rank that differs from the most frequent value among all ranks.

    Args:
        facts: One dictionary per rank with the values to compare, by name.
        where: One description per rank for the messages.
        advice: Text to append to each message.
    """
    found = []
    for name in sorted(set().union(*facts)):
        ranks_by_value: dict[str, list[str]] = {}
        for rank, fact in zip(where, facts, strict=True):
            ranks_by_value.setdefault(fact.get(name, "none"), []).append(rank)
        most = max(ranks_by_value, key=lambda value: len(ranks_by_value[value]))
        usual = f"but it is {most} on {count(len(ranks_by_value.pop(most)), 'other rank')}"
        usual += f"; {advice}" * bool(advice)
        found += [f"{', '.join(odd)}: {name} is {value}, {usual}" for value, odd in ranks_by_value.items()]
    return found


def gemm_tflops() -> float:
    """Measure the speed of a bf16 GEMM on this rank's GPU, in TFLOP/s."""
    a, b = (torch.randn(GEMM, GEMM, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * GEMM**3 / _seconds(lambda: torch.mm(a, b)) / 1e12


def all_reduce_gb_s() -> float:
    """Measure the all-reduce bus bandwidth per rank, in GB/s.

    Collective: all ranks must call this function.
    """
    device, ranks = "cuda" if torch.cuda.is_available() else "cpu", dist.get_world_size()
    tensor = torch.zeros(ALL_REDUCE_BYTES[device] // 4, device=device)
    return 2 * (ranks - 1) / ranks * tensor.nbytes / _seconds(lambda: dist.all_reduce(tensor)) / 1e9


def _seconds(call: Callable[[], object]) -> float:
    """Return the mean time of a function call in seconds, after WARMUPS warm-up calls."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(WARMUPS):
        call()
    synchronize()
    start = time.perf_counter()
    for _ in range(REPEATS):
        call()
    synchronize()
    return (time.perf_counter() - start) / REPEATS
