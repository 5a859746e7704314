"""Stopping on request: SIGTERM, SIGUSR1, SIGHUP or Ctrl-C on any rank ends the run after the running step, with a
checkpoint.

A signal handler only records the signal. After each step, and between the batches of an evaluation, the ranks vote
whether any of them has one (`StopVote`); the loop then saves as at any other step and raises `Stopped`, and train.py
exits with status STOPPED on every rank. `stopped.json` in the run's folder says the same as the status, for launchers
that do not pass it on: torchrun exits with 1 whatever its processes return.

A terminal sends the SIGINT of a Ctrl-C to ranks and launcher at once. Each counts its own, and none passes it on as
SIGINT, which would be a second Ctrl-C. Where no training is under way, and for the second one, it ends a rank at once,
with status INTERRUPTED.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from train import launchers
from train.files import write_durably
from train.record.run_folder import RunFolder

# EX_TEMPFAIL of sysexits.h, "try again later": nothing is wrong, the same command goes on from the checkpoint.
STOPPED = 75
# What was asked for cannot be done, or the numbers went wrong: another start would end so again.
NOT_AS_IT_IS = 2
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
INTERRUPTED = 128 + signal.SIGINT
WITHOUT_STEPS = "Ctrl-C: ended; no training was under way, and what is saved is as it was"
PR_SET_PDEATHSIG = 1

received: list[str] = []  # the names of the signals, in their order
_is_training = False  # a Ctrl-C waits for the running step


class Stopped(Exception):
    """The run was stopped on request after `step` steps; `checkpoint` is what it left, None with save_strategy no.
    option: of `resume_option` (train/checkpoint/resume.py)."""

    def __init__(self, step: int, checkpoint: Path | None, option: str = ""):
        kept = f"{checkpoint} is committed. The same command{option} goes on from there"
        lost = "nothing was saved (save_strategy is no). The same command begins where this one did"
        super().__init__(f"stopped on request after step {step}; {kept if checkpoint else lost}")
        self.step, self.checkpoint = step, checkpoint


class Interrupted(SystemExit):
    """Ctrl-C while no training is under way. As a SystemExit it passes what catches any Exception, without a
    traceback."""

    def __init__(self) -> None:
        super().__init__(INTERRUPTED)


@contextlib.contextmanager
def taking_steps() -> Iterator[None]:
    """In the block the first Ctrl-C is a request to stop after the running step, as SIGTERM is."""
    global _is_training
    _is_training = True
    try:
        yield
    finally:
        _is_training = False


def _print(text: str) -> None:
    # print would raise if the signal had arrived within another print, and this does on a full disk
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def _record(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT:
        return _interrupt()
    name = signal.Signals(number).name
    received.append(name)
    if len(received) == 1:
        _print(f"rank {launchers.rank()}: {name}: stop requested; a running step is finished and saved")


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


def _interrupt() -> None:
    """Handle a Ctrl-C, which each rank gets; rank 0 prints.

    Raises Interrupted: no training is under way."""
    prints = _print if launchers.rank() == 0 else lambda text: None
    is_passed_on = "TORCHELASTIC_RUN_ID" in os.environ  # torchrun sends each one to its ranks once more
    if not _is_training:
        # a launcher may ask for a stop as well; Python reports one that meets SIG_IGN here
        for number in SIGNALS:
            signal.signal(number, _ignore)
        signal.signal(signal.SIGINT, _ignore if is_passed_on else signal.SIG_DFL)
        prints(WITHOUT_STEPS)
        raise Interrupted
    if "SIGINT" not in received:
        received.append("SIGINT")
        prints(
            "Ctrl-C: the run stops after this step and saves; Ctrl-C again ends it at once, without a save"
        )
    elif not is_passed_on:
        prints("Ctrl-C again: ended at once, without a save")
        os._exit(INTERRUPTED)


def install(handler: Callable[[int, FrameType | None], None] = _record) -> None:
    """Let stop signals and Ctrl-C call `handler` instead of ending the process."""
    for number in (*SIGNALS, signal.SIGINT):
        if number in (signal.SIGHUP, signal.SIGINT) and signal.getsignal(number) == signal.SIG_IGN:
            continue  # nohup, or a script's background: it goes on whatever its terminal does
        signal.signal(number, handler)
        # a write of a checkpoint that is under way in C is not to see the signal either
        signal.siginterrupt(number, False)
    # train/launch.py blocks it in the ranks until here, where nothing but a traceback would come of it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def at_parents_end(number: int) -> Callable[[], object] | None:
    """Return a preexec_fn of subprocess with which a process is sent the signal `number` when the one that starts it
    ends, however it ends (Linux)."""
    if sys.platform != "linux":
        return None
    return functools.partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, number)


class StopVote:
    """Whether any rank was asked to stop; every rank votes at the same points. Over gloo, on the CPU: no rank waits for
    a GPU."""

    def __init__(self) -> None:
        import torch.distributed as dist

        from train.engine.distributed import GROUP_TIMEOUT

        self.group = None
        if dist.get_world_size() > 1:
            self.group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)

    def ask(self, busy: bool = False, due: bool = False) -> tuple[bool, bool, bool]:
        """Whether any rank has received a stop signal, is `busy`, and finds a save `due`."""
        if self.group is None:
            return bool(received), busy, due
        import torch
        import torch.distributed as dist

        vote = torch.tensor([bool(received), busy, due], dtype=torch.int32)
        dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self.group)
        stops, any_busy, any_due = map(bool, vote.tolist())
        return stops, any_busy, any_due


def write_stopped(output_dir: Path, stopped: Stopped) -> None:
    """Leave `stopped.json` in the run's folder; rank 0 calls it."""
    folder, checkpoint = RunFolder(output_dir), stopped.checkpoint
    # one that it began at is another run's
    own = checkpoint is None or checkpoint.parent.resolve() == folder.checkpoints.resolve()
    what = {"step": stopped.step, "checkpoint": checkpoint and (checkpoint.name if own else str(checkpoint))}
    write_durably(folder.stopped, json.dumps(what) + "\n")
