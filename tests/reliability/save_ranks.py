"""Train runs on two forked ranks, with faults during their saves.

    python tests/reliability/save_ranks.py CASES

CASES is a JSON file with a list of [settings, fault, arguments]. The fault is a key of FAULTS, or "" for a run without
a fault. One process imports everything and forks the ranks of each run, so that a run takes only a few seconds.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

import torch.distributed as dist
from deepspeed.comm.torch import build_shm_op

from tests.reliability.ranks import fork_ranks
from train import run as training
from train.checkpoint import save
from train.checkpoint.files import RunState
from train.config.load import build_arguments, open_inputs, resolve_arguments
from train.record import plots

RANKS = 2


def kill_this_rank() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_all(step: int, delay_s: float) -> None:
    """Kill both ranks when `delay_s` seconds have passed since the save of `step` began."""
    begin = save.Saver.begin

    def begins(saver: save.Saver, state: RunState, background: bool) -> None:
        if state.step == step:
            threading.Timer(delay_s, kill_this_rank).start()
        begin(saver, state, background)

    save.Saver.begin = begins  # type: ignore[method-assign]


def fail_on_rank_1(step: int, fail: Callable[[Path], object]) -> None:
    """Call `fail` on rank 1 in the save of `step`, after half of the first file is written."""
    write = save.write_tensors

    def write_half(path: Path, value: Any) -> dict[str, Any]:
        if dist.get_rank() == 1 and path.parent.name == f"step-{step:08d}":
            path.write_bytes(b"half a file")
            fail(path)
        return write(path, value)

    save.write_tensors = write_half


def kill_one(step: int, has_written: bool) -> None:
    """Kill rank 1 in the save of `step`, when it has written half of its first file or all of its files."""
    if not has_written:
        fail_on_rank_1(step, lambda path: kill_this_rank())
        return
    write = save.Job._write

    def write_all(job: save.Job) -> list[dict[str, Any]]:
        entries = write(job)
        if dist.get_rank() == 1 and job.run_state["step"] == step:
            kill_this_rank()
        return entries

    save.Job._write = write_all  # type: ignore[method-assign]


def fill_disk(step: int) -> None:
    """Let the disk of rank 1 be full in the save of `step`."""

    def fail(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    fail_on_rank_1(step, fail)


FAULTS: dict[str, Callable[..., None]] = {f.__name__: f for f in (kill_all, kill_one, fill_disk)}


def train(settings: dict[str, Any], fault: str, arguments: dict[str, Any]) -> None:
    """Train a run on this rank."""
    plots.draw = lambda histories, path: None  # takes longer than the run
    if fault:
        FAULTS[fault](**arguments)
    args = resolve_arguments(build_arguments(settings), dist.get_world_size())
    Path(settings["output_dir"]).mkdir(parents=True, exist_ok=True)  # which the lock of train.py has done
    training.run_training(args, open_inputs(args))


def main() -> None:
    build_shm_op()  # once, instead of in each rank
    for case in json.loads(Path(sys.argv[1]).read_text()):
        for pid in fork_ranks(RANKS, lambda rank, case=case: train(*case)):
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
