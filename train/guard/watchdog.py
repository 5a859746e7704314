"""A run in which a rank does not answer any more ends, and says which rank and where it stands.

The ranks meet at least once a step (signals.StopVote), and between the parts of a start and before the export
(Watchdog.meet); a watchdog in each counts the time since. When it is more than the timeout, each sends where its main
thread is to the others, through the process group's store, names the ranks which the others wait for, and ends its
process; the launcher ends what is left.

Who is to blame: a rank that sends nothing is stopped, or its machine is gone. Else one that is not inside a
collective, where the others are, waiting for it. Else those that are furthest behind.
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
from typing import Any, TextIO

import torch.distributed as dist

HUNG = 1  # as any other crash: worth another start from the last checkpoint
# In the first step, and in parts of a start, there are compilation, captured graphs and NCCL's connections.
FIRST_STEP_S = 1800.0
# Beside that, a part of a start or the export may take as long as what it reads does at this rate, in bytes a second:
# no file system that works is slower for a whole job, and of one that hangs the job waits for no day.
SLOWEST = 20e6
# What has not come in time, as the message begins.
NO_STEP = "error: no step was finished for"
NO_START = "error: no part of the start was finished for"
NO_END = "error: the end of the run did not come for"
GATHER_S = 3.0  # how long the others may take to say where they are
# Without rank 0, which keeps the store, no rank hears another, and each would give the verdict. Rank 1 does; should it
# be gone, too, the first of each node, so much later, and the rest later again: after the first that does and ends, the
# launcher ends its other ranks within six seconds.
LATER_S = 8.0
# Python cannot run while C code holds its lock: then faulthandler's own thread writes the stacks, this much later,
# and the other ranks end the job.
WITHOUT_PYTHON_S = 2.0
SUSPENDED_S = 5.0
# Files (end of the name) whose frames mean: this thread waits for other ranks.
COLLECTIVES = ("torch/distributed/distributed_c10d.py", "deepspeed/comm/comm.py", "deepspeed/comm/torch.py")


def console() -> TextIO:
    return sys.__stderr__ or sys.stderr


class Watchdog:
    """with Watchdog(timeout_s): watches; 0 turns all of it off. Every rank calls `met`, `doing` and `meet` at the same
    points. The first two cost next to nothing: they count, and the counts are compared. `missed`: what has not come in
    time, for the report; one of NO_STEP, NO_START, NO_END."""

    _watches = 0  # of this process, so that keys in the store are new

    def __init__(self, timeout_s: float, missed: str = NO_STEP):
        self.timeout_s, self.missed = timeout_s, missed
        self._doing = "begins"
        self._progress = 0  # calls of met and doing, the same sequence on each rank
        self._deadline = float("inf")
        self._allowed_s = self._limit_s = max(timeout_s, FIRST_STEP_S)  # until the first step is done
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def _stderr(self) -> TextIO:
        return console()

    def __enter__(self) -> Watchdog:
        if self.timeout_s:
            Watchdog._watches += 1
            self._deadline = time.monotonic() + self._allowed_s
            self._main = threading.get_ident()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def meet(self, doing: str, reads: int = 0) -> None:
        """The ranks wait for each other here, so that the time of what comes next, `doing`, begins for all at once.
        reads: the bytes of files that it goes through, which it has time for, too."""
        if self._thread:
            self.doing(f"waits for all, before it {doing}")
            dist.barrier()
            self.met(doing)
            self._limit_s = self._allowed_s + reads / SLOWEST
            self._deadline = time.monotonic() + self._limit_s

    def met(self, doing: str, after_step: bool = False) -> None:
        """All ranks have just met: the time begins anew. `doing`: what comes next. after_step: a step of training is
        done; until the first of them there is more time, also for what may come before it."""
        self.doing(doing)
        if self._thread:
            if after_step and self._allowed_s > self.timeout_s:
                self._allowed_s = self.timeout_s
                self._dump_later(self.timeout_s)
            self._limit_s = self._allowed_s
            self._deadline = time.monotonic() + self._limit_s

    def doing(self, doing: str) -> None:
        """Where this rank is, for the report."""
        self._doing, self._progress = doing, self._progress + 1

    def __exit__(self, *exception: object) -> None:
        self._closed.set()
        if self._thread:
            self._thread.join()

    def _dump_later(self, left_s: float) -> None:
        """Called once a second and not in each step, since it starts a thread."""
        faulthandler.dump_traceback_later(left_s + WITHOUT_PYTHON_S, file=self._stderr)

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
        stack, waits = self._where()
        mine = {
            "progress": self._progress,
            "doing": self._doing,
            "waits": waits,
            "host": socket.gethostname(),
            "at": traceback.format_stack(sys._current_frames()[self._main])[-1].splitlines()[0].strip(),
        }
        rank, world = dist.get_rank(), dist.get_world_size()
        found: dict[int, dict[str, Any]] = {rank: mine}
        # in a thread: a store whose process is stopped answers nothing, not even that
        gather = threading.Thread(target=self._gather, args=(found, world), daemon=True)
        gather.start()
        gather.join(GATHER_S)
        found = dict(found)
        blamed = blame(found, world)
        if blamed == [0] and set(found) == {rank} and rank > 1:
            time.sleep(LATER_S if os.environ.get("LOCAL_RANK") == "0" else 2 * LATER_S)
        lines = []
        if rank in blamed or not blamed:
            lines += [f"rank {rank}: where its threads are:", stack]
        if rank == min(set(found) - set(blamed), default=rank):
            lines += [verdict(found, blamed, world, self._limit_s, self.missed)]
        if lines:
            print("\n".join(lines), file=self._stderr, flush=True)
        if rank not in blamed or rank == 0:
            # A launcher ends all when the first rank ends: the one to blame is to have its say. And with rank 0 goes
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

    def _where(self) -> tuple[str, bool]:
        """The stacks of this process's threads, main thread first, and whether this rank is in a collective. A thread
        beside the training, as that of a save is, counts only while the main thread waits for it."""
        threads = {thread.ident: thread for thread in threading.enumerate()}
        frames = sys._current_frames()
        awaited = _joined(frames[self._main])
        texts, waits = [], False
        for ident in sorted(frames, key=lambda ident: ident != self._main):
            if ident == threading.get_ident():
                continue
            stack, thread = traceback.extract_stack(frames[ident]), threads.get(ident)
            # those that torch's C++ starts, as the one of the backward pass, are of another class or unknown
            beside = ident != self._main and type(thread) is threading.Thread
            if not beside or thread is awaited:
                waits |= any(frame.filename.endswith(COLLECTIVES) for frame in stack)
            if ident == self._main:
                name = f"main thread ({self._doing})"
            else:
                name = f"thread {thread.name if thread else ident}"
            texts.append(f"  {name}:\n" + "".join(traceback.format_list(stack)))
        return "".join(texts), waits


def _joined(frame: FrameType | None) -> threading.Thread | None:
    """The thread that the one with this innermost frame waits for the end of."""
    while frame is not None and frame.f_code is not threading.Thread.join.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def blame(found: dict[int, dict[str, Any]], world: int) -> list[int]:
    """The ranks that the others wait for; empty if that cannot be told. `found`: what each rank that answers sent."""
    silent = [rank for rank in range(world) if rank not in found]
    if silent:
        # nobody answers one that is not rank 0: then it is the store, which rank 0 keeps, that does not
        return [0] if 0 in silent and len(silent) == world - 1 else silent
    for candidates in (
        [rank for rank, its in found.items() if not its["waits"]],
        [r for r, its in found.items() if its["progress"] == min(i["progress"] for i in found.values())],
    ):
        if 0 < len(candidates) < world:
            return sorted(candidates)
    return []


def verdict(
    found: dict[int, dict[str, Any]], blamed: list[int], world: int, limit_s: float, missed: str = NO_STEP
) -> str:
    """The message that ends the job."""
    seconds = f"{limit_s:g}" if limit_s < 10 else f"{limit_s:.0f}"
    head = f"{missed} {seconds} s (hang_timeout_s)"
    if not blamed:
        places = "; ".join(f"rank {r}: {its['doing']}, {its['at']}" for r, its in sorted(found.items()))
        return f"{head} and all {world} ranks answer; where they are: {places}"
    lines = [f"{head}; rank {', '.join(map(str, blamed))} of {world} is not where the others wait for it:"]
    for rank in blamed:
        its = found.get(rank)
        lines.append(
            f"  rank {rank} on {its['host']}: {its['doing']}; {its['at']}"
            if its
            else f"  rank {rank} does not answer: its process is stopped, or its machine or connection is gone"
        )
    others = sorted(set(found) - set(blamed))
    lines += [f"  rank {r} waits: {found[r]['doing']}; {found[r]['at']}" for r in others[:1]]
    goes_on = (
        "with --resume_from_checkpoint auto, the default, the same command goes on from the last checkpoint"
    )
    return "\n".join([*lines, f"The job ends; {goes_on}"])
