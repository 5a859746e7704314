"""Stop a run on request: SIGTERM, SIGUSR1, SIGHUP or Ctrl-C on any rank stops the run after the current step.

During training, the signal handler only records the signal. After each step, and between the batches of an evaluation,
the ranks vote on whether any rank has received a signal (`StopVote`). The training loop then saves a checkpoint and
raises `Stopped`, and train.py exits with status STOPPED on every rank. Some launchers do not return this status:
torchrun exits with 1 whatever its processes return. For such launchers, `stopped.json` in the run folder records the
stop.

Outside of training, such as during the calibration of FP8 scales, there is no step to finish. Each signal then ends the
rank immediately: Ctrl-C with status INTERRUPTED, other signals with status STOPPED. After a first signal during
training, further signals except Ctrl-C have no effect: the other ranks still need this rank until all have stopped.

On Ctrl-C, the terminal sends SIGINT to the ranks and to the launcher. Each process counts its own signals. The launcher
does not forward SIGINT, because the ranks would count it as a second Ctrl-C. A second Ctrl-C terminates a rank
immediately with status INTERRUPTED.
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

from train import rank_env
from train.files import write_durably
from train.record.run_folder import RunFolder

# EX_TEMPFAIL of sysexits.h, "try again later": no error occurred, and the same command resumes from the checkpoint.
STOPPED = 75
# The command cannot work as given, or training has diverged: a restart would fail again.
DO_NOT_RESTART = 2
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
INTERRUPTED = 128 + signal.SIGINT
PR_SET_PDEATHSIG = 1

received: list[str] = []  # names of the received signals, in order
_is_training = False  # whether a stop waits for the current step


class Stopped(Exception):
    """An exception raised when a run stops on request.

    Args:
        step: Number of completed steps.
        checkpoint: The last checkpoint, or None if save_strategy is "no".
        option: Command-line option that resumes the run, from `resume_option` (train/checkpoint/resume.py).
    """

    def __init__(self, step: int, checkpoint: Path | None, option: str = ""):
        what = (
            f"the checkpoint {checkpoint} is complete. To resume from this checkpoint, run the same command{option}"
            if checkpoint
            else "no checkpoint was saved, because save_strategy is no. The same command starts at the step where this "
            "run started"
        )
        super().__init__(f"stopped on request after step {step}; {what}")
        self.step, self.checkpoint = step, checkpoint


class Interrupted(SystemExit):
    """An exception raised when a stop signal arrives outside of training.

    The class derives from SystemExit, so `except Exception` does not catch it and no traceback is printed.
    """

    def __init__(self, status: int = INTERRUPTED) -> None:
        super().__init__(status)
        self.status = status


@contextlib.contextmanager
def defer_stop() -> Iterator[None]:
    """Treat signals in a `with` block as requests to stop after the current step, except for a second Ctrl-C."""
    global _is_training
    _is_training = True
    try:
        yield
    finally:
        _is_training = False


def _record(number: int, frame: FrameType | None) -> None:
    """Handle a stop signal by recording it. A second Ctrl-C terminates the rank immediately.

    Outside of training, a signal is ignored if a stop was requested before, unless it is a Ctrl-C.

    Raises:
        Interrupted: The signal arrived outside of training.
    """
    name = signal.Signals(number).name
    if received and not _is_training and name != "SIGINT":
        return
    # torchrun sends each SIGINT to its ranks a second time
    is_passed_on = "TORCHELASTIC_RUN_ID" in os.environ
    if not received and (name != "SIGINT" or rank_env.rank() == 0):  # every rank receives a Ctrl-C
        when = " after the current step (press Ctrl-C again to stop immediately)" if _is_training else ""
        # print raises if the signal arrives during another print; os.write raises on a full disk
        with contextlib.suppress(OSError):
            os.write(2, f"rank {rank_env.rank()} received {name}: the run stops{when}\n".encode())
    if not _is_training:
        # the launcher may also send a stop signal; with SIG_IGN Python would report an error here
        for other in SIGNALS:
            signal.signal(other, lambda *_: None)
        signal.signal(signal.SIGINT, (lambda *_: None) if is_passed_on else signal.SIG_DFL)
        raise Interrupted(INTERRUPTED if number == signal.SIGINT else STOPPED)
    if name == "SIGINT" and name in received:
        if not is_passed_on:
            os._exit(INTERRUPTED)
        return
    received.append(name)


def install(handler: Callable[[int, FrameType | None], None] = _record) -> None:
    """Install `handler` as the signal handler for all stop signals and Ctrl-C."""
    for number in (*SIGNALS, signal.SIGINT):
        if number in (signal.SIGHUP, signal.SIGINT) and signal.getsignal(number) == signal.SIG_IGN:
            continue  # nohup or a background job: the run must continue when its terminal closes
        signal.signal(number, handler)
        # a signal must not interrupt system calls, such as the write of a checkpoint
        signal.siginterrupt(number, False)
    # train/launch.py starts the ranks with SIGINT blocked, because an earlier Ctrl-C would only print a traceback
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def signal_on_parent_exit(number: int) -> Callable[[], object] | None:
    """Return a preexec_fn for subprocess that sends the signal `number` to the child when its parent exits.

    This also works if the parent is killed by SIGKILL. Returns None on systems other than Linux.
    """
    if sys.platform != "linux":
        return None
    return functools.partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, number)


class StopVote:
    """Vote of all ranks on whether to stop the run. The vote uses gloo on the CPU, so that no rank waits for a GPU."""

    def __init__(self) -> None:
        import torch.distributed as dist

        from train.engine.process_group import GROUP_TIMEOUT

        self.group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)

    def ask(self, busy: bool = False, due: bool = False) -> tuple[bool, bool, bool]:
        """Exchange the votes of all ranks on stopping and saving.

        Collective: all ranks must call this method.

        Args:
            busy: Whether a background save is in progress on this rank.
            due: Whether a save is due according to this rank.

        Returns:
            A tuple of three booleans: whether any rank has received a stop signal, whether any rank is busy, and
            whether a save is due according to any rank.
        """
        import torch
        import torch.distributed as dist

        vote = torch.tensor([bool(received), busy, due], dtype=torch.int32)
        dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self.group)
        stops, any_busy, any_due = map(bool, vote.tolist())
        return stops, any_busy, any_due


def write_stopped(output_dir: Path, stopped: Stopped) -> None:
    """Write `stopped.json`, which records that the run stopped on request, to the run folder.

    Call on rank 0 only.
    """
    folder, checkpoint = RunFolder(output_dir), stopped.checkpoint
    # before the first save, this may be a checkpoint of another run from which this run started
    own = checkpoint is None or checkpoint.parent.resolve() == folder.checkpoints.resolve()
    what = {"step": stopped.step, "checkpoint": checkpoint and (checkpoint.name if own else str(checkpoint))}
    write_durably(folder.stopped, json.dumps(what) + "\n")
