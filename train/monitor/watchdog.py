"""Ends a run in which a rank hangs, and names the rank and its phase.

The ranks wait for each other at least once a step (signals.StopVote), and between the phases of a start and before the
export (Watchdog.phase). A thread of each rank counts the time since. After the timeout each sends where its main thread
is to the others, through the process group's store, names the ranks that the others wait for, and ends its process; the
launcher ends what is left.

A rank that sends nothing is to blame: it is stopped, or its machine is gone. Else one that is not inside a collective,
where the others wait for it. Else those that are furthest behind.
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

HUNG = 1  # as any other crash: worth another start from the last checkpoint
# In the first step, and in phases of a start, there are compilation, captured graphs and NCCL's connections.
FIRST_STEP_S = 1800.0
# In addition, a phase of a start or the export may take as long as reading its files takes at this rate, in bytes/s.
SLOWEST = 20e6
GATHER_S = 3.0  # how long the others may take to say where they are
# Without rank 0, which keeps the store, no rank hears another. Rank 1 prints the verdict, the others so much later,
# when the launcher of its node has ended them.
LATER_S = 8.0
# Python cannot run while C code holds its lock: then faulthandler's own thread writes the stacks, this much later,
# and the other ranks end the job.
WITHOUT_PYTHON_S = 2.0
SUSPENDED_S = 5.0
# Files (end of the name) whose frames mean: this thread waits for other ranks.
COLLECTIVES = ("torch/distributed/distributed_c10d.py", "deepspeed/comm/comm.py", "deepspeed/comm/torch.py")


class Watchdog:
    """with Watchdog(timeout_s) as watchdog: ...; a timeout of 0 turns all of it off.

    Every rank calls `phase`, `renew` and `at` at the same points: their number shows which rank is behind.
    """

    _watches = 0  # of this process, so that keys in the store are new

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
        """Wait for all ranks, so that the time of the phase begins for all at once.

        Args:
            reads: bytes of the files that the phase reads, for which it has more time.
        """
        if self._thread:
            self.at(f"waiting for all ranks before {name}")
            dist.barrier()
            self.at(name)
            self._renew(self._allowed_s + reads / SLOWEST)

    def renew(self, name: str, after_step: bool = False) -> None:
        """Begin the time anew: the ranks have just waited for each other.

        Args:
            after_step: a step of training is done; until the first of them there is more time.
        """
        self.at(name)
        if self._thread:
            if after_step and self._allowed_s > self.timeout_s:
                self._allowed_s = self.timeout_s
                self._dump_later(self.timeout_s)
            self._renew(self._allowed_s)

    def at(self, name: str) -> None:
        """Name what this rank does, for the report."""
        self._phase, self._progress = name, self._progress + 1

    def _renew(self, limit_s: float) -> None:
        self.limit_s, self._deadline = limit_s, time.monotonic() + limit_s

    def _dump_later(self, left_s: float) -> None:
        """Called once a second and not in each step, since it starts a thread."""
        faulthandler.dump_traceback_later(left_s + WITHOUT_PYTHON_S, file=sys.__stderr__ or sys.stderr)

    def _watch(self) -> None:
        interval, last = min(1.0, self.timeout_s / 4), time.monotonic()
        while not self._closed.wait(interval):
            now = time.monotonic()
            if now - last > interval + SUSPENDED_S:
                # this process was stopped itself (scontrol suspend): it may go on
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
        # in a thread: a store whose process is stopped answers nothing, not even that
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
            # A launcher ends all when the first rank ends: the one to blame is to print its stack. And with rank 0 goes
            # the store, from which the others may still read.
            time.sleep(1.0)

    def _gather(self, found: dict[int, dict[str, Any]], world: int) -> None:
        """Send where this rank is, and add to `found` what others send, as long as somebody waits for it."""
        store = dist.distributed_c10d._get_default_store().clone()
        prefix, rank = f"hang/{Watchdog._watches}/", dist.get_rank()
        store.set(f"{prefix}{rank}", json.dumps(found[rank]))
        while len(found) < world:
            for other in set(range(world)) - set(found):
                if store.check([f"{prefix}{other}"]):
                    found[other] = json.loads(store.get(f"{prefix}{other}"))
            time.sleep(0.1)

    def _read_stacks(self) -> tuple[str, bool]:
        """The stacks of this process's threads, main thread first, and whether this rank is in a collective. A thread
        of Python, as that of a save, counts only while the main thread waits for its end."""
        threads = {thread.ident: thread for thread in threading.enumerate()}
        frames = sys._current_frames()
        awaited = _joined(frames[self._main])
        texts, is_waiting = [], False
        for ident in sorted(frames, key=lambda ident: ident != self._main):
            if ident == threading.get_ident():
                continue
            stack, thread = traceback.extract_stack(frames[ident]), threads.get(ident)
            # those that torch's C++ starts, as the one of the backward pass, are of another class or unknown
            if type(thread) is not threading.Thread or thread is awaited:
                is_waiting |= any(frame.filename.endswith(COLLECTIVES) for frame in stack)
            phase = f", {self._phase}" if ident == self._main else ""
            name = thread.name if thread else ident
            texts.append(f"  thread {name}{phase}:\n" + "".join(traceback.format_list(stack)))
        return "".join(texts), is_waiting


def _joined(frame: FrameType | None) -> threading.Thread | None:
    """The thread whose end the one with this innermost frame waits for."""
    while frame is not None and frame.f_code is not threading.Thread.join.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def blame(found: dict[int, dict[str, Any]], world: int) -> list[int]:
    """Return the ranks that the others wait for, [] if that cannot be told.

    Args:
        found: by rank, what each rank that answers sent.
    """
    silent = [rank for rank in range(world) if rank not in found]
    if silent:
        # nobody answers one that is not rank 0: then it is the store, which rank 0 keeps, that does not
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
    """The message that ends the job."""
    places = {
        rank: f"rank {rank} on {sent['host']}: {sent['doing']}; {sent['at']}" for rank, sent in found.items()
    }
    lines = [f"error: no progress for {limit_s:g} s (hang_timeout_s)"]
    if blamed:
        lines[0] += f"; rank {', '.join(map(str, blamed))} of {world} is not where the others wait for it:"
        gone = "does not answer: its process is stopped, or its machine or connection is gone"
        lines += [f"  {places.get(rank, f'rank {rank} {gone}')}" for rank in blamed]
        lines += [f"  waiting: {places[rank]}" for rank in sorted(set(found) - set(blamed))[:1]]
    else:
        lines[0] += f", and all {world} ranks answer:"
        lines += [f"  {places[rank]}" for rank in sorted(places)]
    return "\n".join([*lines, "The job ends. The same command resumes from the last checkpoint"])
