"""End a run in which a rank hangs, and report which rank hangs and where.

The ranks synchronize at least once per step (signals.StopVote), between the phases of the startup, and before the
export (Watchdog.phase). A thread of each rank measures the time since then. After the timeout, each rank sends the
position of its main thread to the others through the store of the process group, reports the ranks at fault, and ends
its process. The launcher ends the remaining processes.

A rank that sends nothing is at fault: its process is stopped, or its machine is down. Otherwise it is a rank that is
not in a collective while the others are. Otherwise it is the ranks that are furthest behind.
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
from types import FrameType
from typing import Any

import torch.distributed as dist

HUNG = 1  # like any crash: a restart from the last checkpoint may succeed
# The first step and the phases of the startup compile kernels, capture graphs and connect NCCL.
FIRST_STEP_S = 1800.0
# A phase of the startup or the export gets additional time for reading its files at this rate, in bytes/s.
SLOWEST = 20e6
GATHER_S = 3.0  # how long to wait for the positions of the other ranks
# If rank 0, which hosts the store, is down, the ranks cannot exchange positions. Then rank 1 prints the verdict, and
# the other ranks wait this long, so that their launcher ends them first.
LATER_S = 8.0
# If C code holds the GIL, the watchdog thread cannot run. Then faulthandler's own thread prints the stacks, this much
# later, and the other ranks end the job.
WITHOUT_PYTHON_S = 2.0
SUSPENDED_S = 5.0
# A thread with a frame in one of these files (ends of paths) waits for other ranks.
COLLECTIVES = ("torch/distributed/distributed_c10d.py", "deepspeed/comm/comm.py", "deepspeed/comm/torch.py")


class Watchdog:
    """Ends the process after `timeout_s` seconds without progress: `with Watchdog(timeout_s) as watchdog: ...`.

    A timeout of 0 turns it off. All ranks must call `phase`, `renew` and `at` at the same points: the number of calls
    shows which rank is behind.
    """

    _watches = 0  # number of watchdogs in this process, for unique keys in the store

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self._phase, self._progress = "starting", 0
        self._allowed_s = max(timeout_s, FIRST_STEP_S)  # until the first step is done
        self.limit_s = self._allowed_s
        self._deadline = float("inf")
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def __enter__(self) -> Watchdog:
        if self.timeout_s:
            Watchdog._watches += 1
            self._main = threading.get_ident()
            self._renew(self._allowed_s)
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        if self._thread:
            self._thread.join()

    def phase(self, name: str, reads: int = 0) -> None:
        """Wait for all ranks, then begin a phase with a new timeout.

        Args:
            name: phase name for reports, such as "opening the output folder".
            reads: bytes of the files that the phase reads, which extend the timeout.
        """
        if self._thread:
            self.at(f"waiting for all ranks before {name}")
            dist.barrier()
            self.at(name)
            self._renew(self._allowed_s + reads / SLOWEST)

    def renew(self, name: str, after_step: bool = False) -> None:
        """Restart the timeout after the ranks have synchronized.

        Args:
            name: current position for reports.
            after_step: whether a training step is done. Until the first step the timeout is longer.
        """
        self.at(name)
        if self._thread:
            if after_step and self._allowed_s > self.timeout_s:
                self._allowed_s = self.timeout_s
                self._dump_later(self.timeout_s)
            self._renew(self._allowed_s)

    def at(self, name: str) -> None:
        """Set the current position of this rank for reports."""
        self._phase, self._progress = name, self._progress + 1

    def _renew(self, limit_s: float) -> None:
        self.limit_s, self._deadline = limit_s, time.monotonic() + limit_s

    def _dump_later(self, left_s: float) -> None:
        """Schedule faulthandler's dump. It starts a thread, so call it once per second and not in each step."""
        faulthandler.dump_traceback_later(left_s + WITHOUT_PYTHON_S, file=sys.__stderr__ or sys.stderr)

    def _watch(self) -> None:
        interval, last = min(1.0, self.timeout_s / 4), time.monotonic()
        while not self._closed.wait(interval):
            now = time.monotonic()
            if now - last > interval + SUSPENDED_S:
                # this process itself was suspended (scontrol suspend), which is not a hang
                self._deadline += now - last
            last = now
            if now > self._deadline:
                faulthandler.cancel_dump_traceback_later()
                try:
                    self._report()
                finally:
                    os._exit(HUNG)
            self._dump_later(self._deadline - now)
        faulthandler.cancel_dump_traceback_later()

    def _report(self) -> None:
        stack, is_waiting = self._read_stacks()
        rank, world = dist.get_rank(), dist.get_world_size()
        at = traceback.format_stack(sys._current_frames()[self._main])[-1].splitlines()[0].strip()
        found: dict[int, dict[str, Any]] = {
            rank: {
                "progress": self._progress,
                "doing": self._phase,
                "waits": is_waiting,
                "host": socket.gethostname(),
                "at": at,
            }
        }
        # in a thread, because calls to the store block if its process is stopped
        gather = threading.Thread(target=self._gather, args=(found, world), daemon=True)
        gather.start()
        gather.join(GATHER_S)
        found = dict(found)
        blamed = blame(found, world)
        if blamed == [0] and set(found) == {rank} and rank > 1:
            time.sleep(LATER_S)
        if rank in blamed or not blamed:
            print(f"rank {rank}: where its threads are:\n{stack}", file=sys.__stderr__, flush=True)
        if rank == min(set(found) - set(blamed), default=rank):
            text = verdict(found, blamed, world, self.limit_s)
            print(text, file=sys.__stderr__, flush=True)
        if rank not in blamed or rank == 0:
            # The launcher ends all ranks when the first one ends, so leave the rank at fault time to print its stack.
            # Rank 0 hosts the store, from which other ranks may still read.
            time.sleep(1.0)

    def _gather(self, found: dict[int, dict[str, Any]], world: int) -> None:
        """Send the position of this rank, and add the positions of other ranks to `found` until all have arrived."""
        store = dist.distributed_c10d._get_default_store().clone()
        prefix, rank = f"hang/{Watchdog._watches}/", dist.get_rank()
        store.set(f"{prefix}{rank}", json.dumps(found[rank]))
        while len(found) < world:
            for other in set(range(world)) - set(found):
                if store.check([f"{prefix}{other}"]):
                    found[other] = json.loads(store.get(f"{prefix}{other}"))
            time.sleep(0.1)

    def _read_stacks(self) -> tuple[str, bool]:
        """Return the stacks of all threads, main thread first, and whether this rank is in a collective.

        A Python thread, such as the save thread, counts as being in a collective only while the main thread joins it.
        """
        threads = {thread.ident: thread for thread in threading.enumerate()}
        frames = sys._current_frames()
        awaited = _joined(frames[self._main])
        texts, is_waiting = [], False
        for ident in sorted(frames, key=lambda ident: ident != self._main):
            if ident == threading.get_ident():
                continue
            stack, thread = traceback.extract_stack(frames[ident]), threads.get(ident)
            # threads that torch starts in C++, such as the backward thread, have another class or are unknown
            if type(thread) is not threading.Thread or thread is awaited:
                is_waiting |= any(frame.filename.endswith(COLLECTIVES) for frame in stack)
            phase = f", {self._phase}" if ident == self._main else ""
            name = thread.name if thread else ident
            texts.append(f"  thread {name}{phase}:\n" + "".join(traceback.format_list(stack)))
        return "".join(texts), is_waiting


def _joined(frame: FrameType | None) -> threading.Thread | None:
    """Return the thread that the thread with this innermost frame joins, or None."""
    while frame is not None and frame.f_code is not threading.Thread.join.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def blame(found: dict[int, dict[str, Any]], world: int) -> list[int]:
    """Return the ranks at fault, for which the others wait, or [] if this is unknown.

    Args:
        found: position sent by each rank that answered.
        world: number of ranks.
    """
    silent = [rank for rank in range(world) if rank not in found]
    if silent:
        # if this rank hears from no other rank, the store on rank 0 does not answer
        return [0] if 0 in silent and len(silent) == world - 1 else silent
    least = min(sent["progress"] for sent in found.values())
    for candidates in (
        [rank for rank, sent in found.items() if not sent["waits"]],
        [rank for rank, sent in found.items() if sent["progress"] == least],
    ):
        if 0 < len(candidates) < world:
            return sorted(candidates)
    return []


def verdict(found: dict[int, dict[str, Any]], blamed: list[int], world: int, limit_s: float) -> str:
    """Return the message that ends the job."""
    places = {
        rank: f"rank {rank} on {sent['host']}: {sent['doing']}; {sent['at']}" for rank, sent in found.items()
    }
    lines = [f"error: no progress for {limit_s:g} s (hang_timeout_s)"]
    if blamed:
        lines[0] += f"; the other ranks wait for rank {', '.join(map(str, blamed))} of {world}:"
        gone = "does not answer: its process is stopped, or its machine or connection is down"
        lines += [f"  {places.get(rank, f'rank {rank} {gone}')}" for rank in blamed]
        lines += [f"  waiting: {places[rank]}" for rank in sorted(set(found) - set(blamed))[:1]]
    else:
        lines[0] += f". All {world} ranks answer, so the rank at fault is unknown:"
        lines += [f"  {places[rank]}" for rank in sorted(places)]
    return "\n".join([*lines, "The job ends. The same command resumes from the last checkpoint"])
