"""Run ranks that synchronize once per step like training ranks. One rank has a fault in step 20.

    python train/launch.py --nproc 3 tests/reliability/meeting_ranks.py FAULT HANG_TIMEOUT_S [FOLDER]

FAULT is a key of FAULTS or "none". The timeout applies only from the fault on. The results therefore do not depend on
the load of the host.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

import torch.distributed as dist

from train.monitor import signals
from train.monitor import watchdog as watchdog_module
from train.monitor.watchdog import Watchdog
from train.record.log import configure_logging

STEPS = 400
STEP_S = 0.01


def never_returns() -> None:
    time.sleep(1e6)


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
    if fault == "hang":  # all answer
        watchdog_module.GATHER_S = 60.0
    folder = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    with Watchdog(600.0, folder) as watchdog:
        for step in range(1, STEPS + 1):
            watchdog.set_position(f"step {step}, micro-batch 1 of 1")
            time.sleep(STEP_S)
            if step == 20 and fault != "none":
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
    if rank == 0:
        print(f"all {STEPS} steps")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    signals.install()
    with signals.defer_stop():
        sys.exit(main())
