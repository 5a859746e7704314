"""Check that the ranks are alike and see the same files, and measure their GPUs and links."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from model.errors import UserError
from model.fp8.machine import describe
from model.fp8.recipes import why_no_fp8
from train.config.arguments import TrainingArguments
from train.config.schedule import precisions_of
from train.data.stream import open_stream
from train.files import existing
from train.record.provenance import sources_sha256
from train.record.run_folder import RunFolder

SEEN_WITHIN_S = 10.0  # a network file system shows a new file to other nodes after a while
SLOW = 1.15  # a GPU or link this many times slower than the median of the others is reported
GEMM, WARMUPS, REPEATS = 8192, 3, 10
ALL_REDUCE_BYTES = {"cuda": 2**28, "cpu": 2**20}


@dataclass
class Found:
    """What refuses the run, what to warn about, and lines for the log."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Rank:
    """What one rank has and sees. versions: packages and this code. machine: GPU and driver. data: a hash of what it
    would train on, or "" and data_problem. sees_file: it sees a file of rank 0 in output_dir. gemm_tflops: of a bf16
    GEMM on its GPU; None on a CPU."""

    host: str
    versions: dict[str, str]
    machine: dict[str, str]
    capability: tuple[int, int] | None
    data: str
    data_problem: str
    sees_file: bool
    gemm_tflops: float | None


def check_ranks(args: TrainingArguments) -> Found:
    """Compare all ranks; the result is the same on each. Collective.

    Raises OSError, on rank 0: output_dir cannot be written.
    """
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, this_rank(args, sees_file_of_rank_0(args)))
    found = judge(args, every)
    if len(every) > 1:
        found.lines.append(f"all-reduce bus bandwidth: {all_reduce_gb_s():,.1f} GB/s per rank")
    return found


def this_rank(args: TrainingArguments, sees_file: bool) -> Rank:
    machine, versions = describe()
    capability, data, problem = None, "", ""
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    versions["the sources in model/ and train/"] = sources_sha256("model", "train")[:12]
    try:
        d = args.data
        stream = open_stream(
            d.sources, d.weights, args.max_seq_length, args.seed, document_mask=d.document_mask
        )
        fingerprint = json.dumps(stream.fingerprint(), sort_keys=True, default=str)
        data = hashlib.sha256(fingerprint.encode()).hexdigest()
    except (ValueError, OSError, UserError) as error:
        problem = str(error)
    return Rank(
        host=socket.gethostname(),
        versions={name: str(version) for name, version in versions.items()},
        machine={name: str(machine[name]) for name in ("gpu", "gpu_memory_gib", "driver") if name in machine},
        capability=capability,
        data=data,
        data_problem=problem,
        sees_file=sees_file,
        gemm_tflops=gemm_tflops(),
    )


def sees_file_of_rank_0(args: TrainingArguments) -> bool:
    """Whether this rank sees a file that rank 0 writes where output_dir is, or will be. Collective.

    Raises OSError, on rank 0: it cannot be written.
    """
    folder, main = RunFolder(args.output_dir).path, dist.get_rank() == 0
    place = existing(folder) if main else None
    with tempfile.NamedTemporaryFile(dir=place, prefix=".preflight-") if main else nullcontext() as file:
        name = [Path(file.name).name if file else None]
        dist.broadcast_object_list(name, src=0)
        deadline = time.monotonic() + SEEN_WITHIN_S
        while not (seen := sees(folder, str(name[0]))) and time.monotonic() < deadline:
            time.sleep(0.2)
        dist.barrier()
    return seen


def sees(folder: Path, name: str) -> bool:
    """Whether `folder`, or the folder it will be made in, has the file. Lists the folder first: NFS caches for half a
    minute that a name is not there."""
    with contextlib.suppress(OSError):
        os.listdir(existing(folder))
    return (existing(folder) / name).is_file()


def judge(args: TrainingArguments, ranks: list[Rank]) -> Found:
    """Compare the ranks."""
    found, where = Found(), [f"rank {rank} ({its.host})" for rank, its in enumerate(ranks)]
    problems, warnings = found.problems, found.warnings
    problems += unequal(
        [its.versions for its in ranks], where, "install the same packages and sources on all nodes"
    )
    warnings += unequal(
        [its.machine for its in ranks], where, "the slowest GPU sets the pace; use equal nodes"
    )
    problems += [
        f"{where[rank]}: {its.data_problem}; put the data where all nodes see it"
        for rank, its in enumerate(ranks)
        if its.data_problem
    ]
    readers = [rank for rank, its in enumerate(ranks) if not its.data_problem]
    problems += unequal(
        [{"data.sources": ranks[rank].data} for rank in readers],
        [where[rank] for rank in readers],
        "give all nodes the same folder",
    )
    if blind := [where[rank] for rank, its in enumerate(ranks) if not its.sees_file]:
        problems.append(
            f"output_dir {args.output_dir} is not shared: {', '.join(blind)} did not see a file of rank 0 in it. Use "
            "an absolute path on a file system that all nodes share"
        )
    uses_fp8 = any(p.compute == "fp8" and not p.emulated for p in precisions_of(args.precision))
    for rank, its in enumerate(ranks):
        if uses_fp8 and its.capability and (why := why_no_fp8(its.machine.get("gpu", "GPU"), its.capability)):
            problems.append(f"{where[rank]}: {why}, or leave the node out")
    speeds = {where[rank]: its.gemm_tflops for rank, its in enumerate(ranks) if its.gemm_tflops}
    if speeds:
        low, high = min(speeds.values()), max(speeds.values())
        found.lines.append(f"bf16 GEMM: {low:,.0f} to {high:,.0f} TFLOP/s per GPU")
    warnings += [
        f"{name}: its GPU makes {speeds[name]:,.0f} TFLOP/s in a bf16 GEMM, the others {usual:,.0f}, and all wait for "
        "it. Check clocks, temperature and other processes (nvidia-smi -q -d PERFORMANCE), or leave the node out"
        for name, usual in slow(speeds).items()
    ]
    return found


def unequal(facts: list[dict[str, str]], where: list[str], advice: str = "") -> list[str]:
    """For each name, the ranks whose value differs from that of most ranks."""
    found = []
    for name in sorted(set().union(*facts)):
        values = [its.get(name, "none") for its in facts]
        (most, count), *others = Counter(values).most_common()
        for other, _ in others:
            odd = ", ".join(where[rank] for rank, value in enumerate(values) if value == other)
            text = f"{odd}: {name} is {other}, and {most} on {count} other ranks"
            found.append(f"{text}; {advice}" if advice else text)
    return found


def slow(figures: dict[str, float]) -> dict[str, float]:
    """The figures that are SLOW times below the median of the others, with that median."""
    found = {}
    for name, own in figures.items():
        others = [value for other, value in figures.items() if other != name]
        if others and own * SLOW < (usual := statistics.median(others)):
            found[name] = usual
    return found


def gemm_tflops() -> float | None:
    """bf16 GEMM speed of this rank's GPU, TFLOP/s; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    a, b = (torch.randn(GEMM, GEMM, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * GEMM**3 / _seconds(lambda: torch.mm(a, b)) / 1e12


def all_reduce_gb_s() -> float:
    """All-reduce bus bandwidth per rank, GB/s. Collective."""
    device, ranks = "cuda" if torch.cuda.is_available() else "cpu", dist.get_world_size()
    tensor = torch.zeros(ALL_REDUCE_BYTES[device] // 4, device=device)
    return 2 * (ranks - 1) / ranks * tensor.nbytes / _seconds(lambda: dist.all_reduce(tensor)) / 1e9


def _seconds(call: Callable[[], object]) -> float:
    """Mean time of a call after WARMUPS."""
    for repeat in range(WARMUPS + REPEATS):
        if repeat == WARMUPS:
            _synchronize()
            start = time.perf_counter()
        call()
    _synchronize()
    return (time.perf_counter() - start) / REPEATS


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
