"""Run ranks that synchronize once per step like training ranks. One rank has a fault in step 20.

    python train/launch.py --nproc 3 tests/reliability/meeting_ranks.py FAULT HANG_TIMEOUT_S

FAULT is a key of FAULTS, "slow" or "none". The forward times, by which slow ranks are detected, come from a simulated
clock. The timeout applies only from the fault on. The results therefore do not depend on the load of the host.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

import torch
import torch.distributed as dist
from torch import nn

from train.monitor import signals
from train.monitor import slow_ranks as slow_ranks_module
from train.monitor import watchdog as watchdog_module
from train.monitor.slow_ranks import SlowRanks
from train.monitor.watchdog import Watchdog
from train.record.log import configure_logging

STEPS = 400
FORWARD_S = 0.01
JITTER = 0.2  # of one forward to the next


def never_returns() -> None:
    time.sleep(1e6)


class Engine:
    """Minimal engine for SlowRanks: a model with a norm after its last layer."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.module = nn.Module()
        self.module.model = nn.Module()
        self.module.model.norm = nn.Identity()

    def zero_optimization_stage(self) -> int:
        return 1


class Clock:
    """Simulated clock that replaces the module `time` in slow_ranks.py."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


FAULTS = {
    "hang": never_returns,
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "asked": lambda: os.kill(os.getpid(), signal.SIGUSR1),
}


def main() -> int:
    fault, timeout_s = sys.argv[1], float(sys.argv[2])
    dist.init_process_group("gloo")
    configure_logging(rank=dist.get_rank())
    rank, vote = dist.get_rank(), signals.StopVote()
    engine = Engine()
    chance, clock = random.Random(rank), Clock()
    slow_ranks_module.time = clock  # type: ignore[assignment]
    if fault == "hang":  # all answer
        watchdog_module.GATHER_S = 60.0
    slow_ranks = SlowRanks(engine, vote.group, cuda_graphs=False)
    forward_s = FORWARD_S * (1.5 if fault == "slow" and rank == 1 else 1)
    with Watchdog(600.0) as watchdog:
        for step in range(1, STEPS + 1):
            watchdog.set_position(f"step {step}, micro-batch 1 of 1")
            slow_ranks.begin()
            time.sleep(FORWARD_S)
            clock.now_s += forward_s * chance.uniform(1 - JITTER, 1 + JITTER)
            engine.module.model.norm(torch.zeros(1))
            if step == 20 and fault not in ("none", "slow"):
                watchdog.limit_s = timeout_s
                if rank == int(os.environ.get("FAULTY_RANK", "1")):
                    FAULTS[fault]()
            stops, _, due = vote.ask(due=rank == 0 and step == 7)
            if due:
                print(f"rank {rank} saves step {step}", flush=True)
            if stops:
                print(f"rank {rank} left after step {step}", flush=True)
                dist.barrier()
                return signals.STOPPED
            watchdog.renew(f"step {step} is done", after_step=True)
            slow_ranks.step(step)
            if fault == "slow" and step == 120:
                break
    if rank == 0:
        print(f"all {STEPS} steps")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    signals.install()
    with signals.defer_stop():
        sys.exit(main())
