"""Whether the ranks are alike and see the same, and which GPU or link is slow; each finding names rank and host."""

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
from itertools import pairwise
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
from train.preflight.devices import Health, Speed, health_of_gpu, speed_of_gpu
from train.record.provenance import sources_sha256
from train.record.run_folder import RunFolder

SEEN_WITHIN_S = 10.0  # a network file system shows a new file to others after a while
SLOW_GPU, SLOW_LINK = 1.15, 1.5  # times slower than the median of the others
LINK_BYTES = {"cuda": 2**28, "cpu": 2**20}
WARMUPS, REPEATS = 2, 5


@dataclass
class Found:
    """What keeps the run from starting, what to know, and for the log."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Rank:
    """What one rank has and sees. versions: packages and this code; machine: GPU and driver; data: a hash of what it
    would train on, or why it cannot; folder: whether it sees the file of rank 0."""

    host: str
    versions: dict[str, str]
    machine: dict[str, str]
    capability: tuple[int, int] | None  # of CUDA
    data: str
    data_problem: str
    folder: bool
    speed: Speed | None
    health: Health | None


def check_ranks(args: TrainingArguments) -> Found:
    """Every rank calls it; the same is found on all. Raises OSError, on rank 0: output_dir cannot be written."""
    mine = this_rank(args, folder=sees_rank_0s_file(args))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    found = judge(args, every)
    links = measure_links([rank.host for rank in every])
    judge_links(links, names_of(every), found, on_gpus=all(rank.capability for rank in every))
    if len(every) > 1:
        found.lines.append(f"all-reduce of all ranks: {all_reduce_gb_s():,.1f} GB/s through each rank's link")
    return found


def this_rank(args: TrainingArguments, folder: bool) -> Rank:
    machine, versions = describe()
    capability, data, problem = None, "", ""
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    # of nodes with a copy each
    versions["the sources in model/ and train/"] = sources_sha256("model", "train")[:12]
    try:
        its = args.data
        stream = open_stream(
            its.sources, its.weights, args.max_seq_length, args.seed, document_mask=its.document_mask
        )
        data = hashlib.sha256(
            json.dumps(stream.fingerprint(), sort_keys=True, default=str).encode()
        ).hexdigest()
    except (ValueError, OSError, UserError) as error:
        problem = str(error)
    names: list[str] = ["gpu", "gpu_memory_gib", "driver"]
    kept = {name: str(machine[name]) for name in names if name in machine}
    speed = speed_of_gpu()  # under whose load the clocks are looked at
    return Rank(
        socket.gethostname(),
        {name: str(version) for name, version in versions.items()},
        kept,
        capability,
        data,
        problem,
        folder,
        speed,
        health_of_gpu(),
    )


def sees_rank_0s_file(args: TrainingArguments) -> bool:
    """Where output_dir is, or will be made. Raises OSError, on rank 0: it cannot be written."""
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
    """Whether there is a file of that name where `folder` is, or will be made. A node that looked for the folder before
    rank 0 made it may be told by NFS for half a minute that it is not there, unless it lists what that would be in."""
    with contextlib.suppress(OSError):
        os.listdir(existing(folder))
    return (existing(folder) / name).is_file()


def names_of(ranks: list[Rank]) -> list[str]:
    return [f"rank {rank} ({its.host})" for rank, its in enumerate(ranks)]


def judge(args: TrainingArguments, ranks: list[Rank]) -> Found:
    """What is wrong with any of them."""
    found, where = Found(), names_of(ranks)
    problems, warnings = found.problems, found.warnings
    problems += unequal(
        [its.versions for its in ranks], where, "have the same packages and sources on all nodes"
    )
    warnings += unequal(
        [its.machine for its in ranks],
        where,
        "the slowest and smallest sets the pace of all; choose like nodes",
    )
    for rank, its in enumerate(ranks):
        if its.data_problem:
            problems.append(f"{where[rank]}: {its.data_problem}; data has to be where all nodes see it")
    hashes = [{"data": its.data} for its in ranks if not its.data_problem]
    readers = [where[rank] for rank, its in enumerate(ranks) if not its.data_problem]
    if different := unequal(hashes, readers):
        who = different[0].partition(": ")[0]
        problems.append(
            f"{who}: its data.sources are other data than the others'; give all nodes the same folder"
        )
    if blind := [where[rank] for rank, its in enumerate(ranks) if not its.folder]:
        problems.append(
            f"output_dir {args.output_dir} is not the same folder on all nodes: {', '.join(blind)} did not see a "
            "file of rank 0 in it; choose one on a file system that they share, by an absolute path"
        )
    sections = [p for p in precisions_of(args.precision) if p.compute == "fp8" and not p.emulated]
    for rank, its in enumerate(ranks):
        if sections and its.capability and (why := why_no_fp8(its.machine.get("gpu", "GPU"), its.capability)):
            problems.append(f"{where[rank]}: {why}, or leave the node out")
    judge_gpus(ranks, where, found)
    return found


def unequal(facts: list[dict[str, str]], where: list[str], advice: str = "") -> list[str]:
    """For each name the ranks that have it otherwise than most."""
    found = []
    for name in sorted(set().union(*facts)):
        values = [its.get(name, "none") for its in facts]
        (most, count), *others = Counter(values).most_common()
        for other, _ in others:
            odd = ", ".join(where[rank] for rank, value in enumerate(values) if value == other)
            found.append(
                f"{odd}: {name} {other}, and {most} on {count} other ranks" + f"; {advice}" * bool(advice)
            )
    return found


def slow(figures: dict[str, float], factor: float) -> dict[str, float]:
    """Those that are smaller than the median of the others by the factor, with that median."""
    found = {}
    for name, own in figures.items():
        others = [value for other, value in figures.items() if other != name]
        if others and own * factor < (usual := statistics.median(others)):
            found[name] = usual
    return found


def judge_gpus(ranks: list[Rank], where: list[str], found: Found) -> None:
    for what, unit in (
        ("gemm_tflops", "TFLOP/s of a bf16 GEMM"),
        ("copy_gb_s", "GB/s of a copy in its memory"),
    ):
        figures = {where[r]: getattr(its.speed, what) for r, its in enumerate(ranks) if its.speed is not None}
        if figures:
            found.lines.append(f"GPUs: {min(figures.values()):,.0f} to {max(figures.values()):,.0f} {unit}")
        for name, usual in slow(figures, SLOW_GPU).items():
            found.warnings.append(
                f"{name}: its GPU has {figures[name]:,.0f} {unit}, and the others {usual:,.0f}; all wait for it in "
                "each step. Look at its clocks, temperature and what else runs there (nvidia-smi -q -d PERFORMANCE), "
                "or leave the node out"
            )
    for rank, its in enumerate(ranks):
        if its.health is not None:
            found.warnings += [f"{where[rank]}: {text}" for text in its.health.findings()]
    blind = [where[r] for r, its in enumerate(ranks) if its.capability and its.health is None]
    if blind:
        found.lines.append(f"clocks and ECC errors are not known, without nvidia-smi: {', '.join(blind)}")


# ---------------------------------------------------------------- links


@dataclass(frozen=True)
class Link:
    """Between two ranks. kind: "within a node" or "between nodes"."""

    kind: str
    ranks: tuple[int, int]
    gb_s: float


def pairs_of(hosts: list[str]) -> list[list[tuple[str, tuple[int, int]]]]:
    """(kind, ranks) of pairs that are measured at one time, time after time: neighbours on each node, and the first
    ranks of neighbouring nodes. Pairs of one time have no rank in common, nor a node's network."""
    nodes = [[r for r, h in enumerate(hosts) if h == host] for host in dict.fromkeys(hosts)]
    times: list[list[tuple[str, tuple[int, int]]]] = [[], [], [], []]
    for ranks in nodes:
        for number, pair in enumerate(pairwise(ranks)):
            times[number % 2].append(("within a node", pair))
    for number, (one, other) in enumerate(pairwise(nodes)):
        times[2 + number % 2].append(("between nodes", (one[0], other[0])))
    return [pairs for pairs in times if pairs]


def measure_links(hosts: list[str]) -> list[Link]:
    """By what each pair sends each other; every rank calls it, and gets all of them.

    In the group of all ranks: NCCL makes groups of pairs by a split of that one, for which all ranks have to wait, a
    group after another.
    """
    rank, mine = dist.get_rank(), []
    for pairs in pairs_of(hosts):
        for kind, pair in pairs:
            if rank in pair:
                speed = exchange_gb_s(sum(pair) - rank)
                if rank == pair[0]:
                    mine.append(Link(kind, pair, speed))
        dist.barrier()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return [link for links in every for link in links]


def exchange_gb_s(peer: int) -> float:
    """Bytes that this rank sends to rank `peer`, and at the same time receives, in a second, in GB; the peer calls it
    too."""
    sent = _to_send()
    received = torch.empty_like(sent)

    def exchange() -> None:
        both = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return sent.nbytes / _seconds(exchange) / 1e9


def all_reduce_gb_s() -> float:
    """What a ring of all ranks sends and receives through each of them in a second; every rank calls it."""
    tensor, ranks = _to_send(), dist.get_world_size()
    return 2 * (ranks - 1) / ranks * tensor.nbytes / _seconds(lambda: dist.all_reduce(tensor)) / 1e9


def _to_send() -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.zeros(LINK_BYTES[device] // 4, device=device)


def _seconds(call: Callable[[], object]) -> float:
    for repeat in range(WARMUPS + REPEATS):
        if repeat == WARMUPS:
            _wait_for_gpu()
            start = time.perf_counter()
        call()
    _wait_for_gpu()
    return (time.perf_counter() - start) / REPEATS


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def judge_links(links: list[Link], where: list[str], found: Found, on_gpus: bool) -> None:
    """Slow ones are named between GPUs alone: ranks that share cores wait for their turns, not for a link."""
    for kind in dict.fromkeys(link.kind for link in links):
        figures = {
            " and ".join(where[r] for r in link.ranks): link.gb_s for link in links if link.kind == kind
        }
        low, high = min(figures.values()), max(figures.values())
        found.lines.append(f"links {kind}: {low:,.1f} to {high:,.1f} GB/s each way, of {len(figures)} pairs")
        for pair, usual in slow(figures, SLOW_LINK).items() if on_gpus else ():
            found.warnings.append(
                f"the link {kind} between {pair} has {figures[pair]:,.1f} GB/s, and the others {usual:,.1f}: all wait "
                "for it. NCCL_DEBUG=INFO says which way NCCL takes (nvidia-smi topo -m, nvidia-smi nvlink -s; between "
                "nodes ibstat); leave one of the two out"
            )
