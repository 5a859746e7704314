"""End a run in which a rank hangs, and report which rank hangs and where.

The ranks synchronize at least once per step (signals.StopVote), between the parts of startup, and before the
export (Watchdog.phase). A thread on each rank measures the time since the last synchronization. After the timeout, each
rank sends its position to the other ranks through the store of the process group, reports the ranks at fault, and
exits. The launcher terminates the remaining processes.

Each rank also writes its stack traces, and the last collectives from NCCL's flight recorder, to the run folder.

The ranks at fault are determined in this order:

1. Ranks that do not send their position. Their process is stopped, or their host is down.
2. Ranks that are not in a collective, if others are.
3. Ranks that are furthest behind.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HUNG = 1  # like any crash: a restart from the last checkpoint may succeed
# Timeout of the first step and of each part of startup, which compile kernels, capture graphs and connect NCCL.
FIRST_STEP_S = 1800.0
GATHER_S = 3.0  # how long to wait for the positions of the other ranks, and for the files of this rank
# Endings of file paths. A rank with a stack frame in one of these files is waiting for other ranks.
COLLECTIVES = ("torch/distributed/distributed_c10d.py", "deepspeed/comm/comm.py", "deepspeed/comm/torch.py")


class Watchdog:
    """Context manager that terminates the process after `timeout_s` seconds without progress.

    A timeout of 0 disables the watchdog. All ranks must call `phase`, `renew` and `set_position` at the same points,
    because the number of calls shows which rank is behind.

    The watchdog thread adds up its own waits instead of reading a clock, so that the timeout does not include time in
    which the process is suspended (scontrol suspend).

    Args:
        folder: Folder for the stack traces and the flight recorder. If None, no files are written.

    Attributes:
        limit_s: The current timeout in seconds. Until the first step is done, it is at least FIRST_STEP_S.
    """

    def __init__(self, timeout_s: float, folder: Path | None = None):
        self.timeout_s, self.folder = timeout_s, folder
        self.limit_s = max(timeout_s, FIRST_STEP_S)
        self._waited_s = 0.0
        self._position, self._progress = "starting", 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self.timeout_s:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        if self.timeout_s:
            self._thread.join()

    def phase(self, name: str) -> None:
        """Wait for all ranks, then restart the timeout for the next part of startup or shutdown.

        Args:
            name: What the ranks do in this part, for hang reports, such as "opening the output folder".
        """
        self.set_position(f"waiting for all ranks before {name}")
        dist.barrier()
        self.renew(name)

    def renew(self, name: str, after_step: bool = False) -> None:
        """Restart the timeout after the ranks have synchronized.

        Args:
            name: What this rank is doing now, shown in hang reports.
            after_step: Whether a training step has finished. The timeout is longer until the first step has finished.
        """
        self.set_position(name)
        if after_step:
            self.limit_s = self.timeout_s
        self._waited_s = 0.0

    def set_position(self, name: str) -> None:
        """Record what this rank is doing now, for hang reports."""
        self._position = name
        self._progress += 1

    def is_late(self, waited_s: float) -> bool:
        """Add `waited_s` seconds to the time without progress. Return whether this time exceeds the timeout."""
        self._waited_s += waited_s
        return self._waited_s > self.limit_s

    def _watch(self) -> None:
        interval_s = min(1.0, self.timeout_s / 4)
        while not self._closed.wait(interval_s):
            if self.is_late(interval_s):
                try:
                    self._report()
                finally:
                    os._exit(HUNG)

    def _report(self) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        found = {rank: self._describe_rank()}
        # In threads, because calls to the store block if the process that hosts the store is stopped, and calls to a
        # file system block if its server is down.
        gather = threading.Thread(target=_exchange, args=(found, rank, world), daemon=True)
        write = threading.Thread(target=_write_files, args=(self.folder, rank), daemon=True)
        write.start()
        gather.start()
        write.join(GATHER_S)
        gather.join(GATHER_S)
        found = dict(found)
        blamed = find_ranks_at_fault(found, world)
        if rank in blamed or not blamed:
            print(f"rank {rank}: stack traces of all threads:", file=sys.__stderr__, flush=True)
            faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
        if rank == min(set(found) - set(blamed), default=rank):
            text = hang_message(found, blamed, world, self.limit_s, self.folder)
            print(text, file=sys.__stderr__, flush=True)
        if rank not in blamed or rank == 0:
            # The launcher ends all ranks when the first one ends, so leave the rank at fault time to print its stack.
            # Rank 0 hosts the store, from which other ranks may still read.
            time.sleep(1.0)

    def _describe_rank(self) -> dict[str, Any]:
        """Return the status of this rank: its progress, current activity, host and code location.

        "waits" is true if a thread of this rank is in a collective, where it waits for other ranks.
        """
        stacks = {ident: traceback.extract_stack(frame) for ident, frame in sys._current_frames().items()}
        frames = [frame for stack in stacks.values() for frame in stack]
        last = stacks[threading.main_thread().ident or 0][-1]
        return {
            "progress": self._progress,
            "doing": self._position,
            "waits": any(frame.filename.endswith(COLLECTIVES) for frame in frames),
            "host": socket.gethostname(),
            "at": f'File "{last.filename}", line {last.lineno}, in {last.name}',
        }


def _write_files(folder: Path | None, rank: int) -> None:
    """Write the stack traces of all threads to `folder`, and, with NCCL, the flight recorder as a pickle file.

    The file names are those that torch's analyzer expects (torchfrtrace FOLDER).
    """
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"stacks_rank_{rank}.txt").open("w") as file:
        faulthandler.dump_traceback(file)
    if dist.get_backend() == "nccl":
        trace = torch._C._distributed_c10d._dump_nccl_trace()
        (folder / f"nccl_trace_rank_{rank}").write_bytes(trace)


def _exchange(found: dict[int, dict[str, Any]], rank: int, world: int) -> None:
    """Publish the status of this rank, and add the status of each other rank to `found`.

    Returns when all ranks have responded.
    """
    store = dist.distributed_c10d._get_default_store().clone()
    store.set(f"hang/{rank}", json.dumps(found[rank]))
    while len(found) < world:
        for other in set(range(world)) - set(found):
            if store.check([f"hang/{other}"]):
                found[other] = json.loads(store.get(f"hang/{other}"))
        time.sleep(0.1)


def find_ranks_at_fault(found: dict[int, dict[str, Any]], world: int) -> list[int]:
    """Return the ranks that caused the hang, or [] if they are unknown.

    Args:
        found: Status of each rank that responded, keyed by rank.
        world: Number of ranks.
    """
    silent = [rank for rank in range(world) if rank not in found]
    if silent:
        # if no other rank has answered, the store on rank 0 cannot be reached
        return [0] if 0 in silent and len(silent) == world - 1 else silent
    least = min(sent["progress"] for sent in found.values())
    for candidates in (
        [rank for rank, sent in found.items() if not sent["waits"]],
        [rank for rank, sent in found.items() if sent["progress"] == least],
    ):
        if 0 < len(candidates) < world:
            return sorted(candidates)
    return []


def hang_message(
    found: dict[int, dict[str, Any]], blamed: list[int], world: int, limit_s: float, folder: Path | None
) -> str:
    """Return the error message about a hang, with the current activity of each rank at fault.

    If the ranks at fault are unknown, all ranks are listed. The message also names the files written to `folder`.
    """
    places = {
        rank: f"rank {rank} on {sent['host']}: {sent['doing']}; {sent['at']}" for rank, sent in found.items()
    }
    gone = "does not answer: its process is stopped, or its host or network connection is down"
    cause = f". All {world} ranks answer, so the rank at fault is unknown"
    if blamed:
        cause = f"; the other ranks wait for rank {', '.join(map(str, blamed))} of {world}"
    lines = [f"error: no progress for {limit_s:g} s (hang_timeout_s){cause}:"]
    lines += [f"  {places.get(rank, f'rank {rank} {gone}')}" for rank in blamed or sorted(places)]
    if folder is not None:
        lines.append(
            f"Stack traces of each rank: {folder}/stacks_rank_*.txt. With NCCL, the last collectives of each rank: "
            f"{folder}/nccl_trace_rank_* (torchfrtrace {folder})"
        )
    return "\n".join([*lines, "This job stops. Run the same command to resume from the last checkpoint"])
