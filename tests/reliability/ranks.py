"""Run the ranks of test cases as forks of one process.

    python tests/reliability/ranks.py FOLDER CASES
    python train/launch.py --nproc RANKS tests/reliability/ranks.py FOLDER CASES GROUP

The process imports everything once, so a case takes only one or two seconds.

CASES is a JSON file with a list of [ranks, function, arguments], where the function is a key of FUNCTIONS. For each
case and rank, the result of the function is written to FOLDER/<index>-<rank>.json. The cases run in order. Consecutive
cases with the same number of ranks form a group that shares its ranks.

A forked process cannot use a GPU. On a host with GPUs, the second command runs one rank of the group with the index
GROUP.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

import torch
import torch.distributed as dist

from tests.reliability.gather_ranks import gathered_steps
from tests.reliability.number_ranks import reduced_state, run_with_given_losses, skip, whole_run
from tests.reliability.optimizer_ranks import muon_against_plain
from tests.reliability.world_size_ranks import watched_run
from tests.train.preflight.preflight_ranks import alike, gradients, missing_data
from train.engine.process_group import init_distributed
from train.monitor import signals
from train.record import plots

FUNCTIONS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        skip,
        whole_run,
        run_with_given_losses,
        watched_run,
        reduced_state,
        gradients,
        alike,
        missing_data,
        muon_against_plain,
        gathered_steps,
    )
}


def fork_ranks(count: int, body: Callable[[int], object]) -> list[int]:
    """Fork `count` processes that call body(rank) as the ranks of a process group. Return their process ids.

    A process exits with status 0, or 1 if `body` raises an error.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    pids = []
    for rank in range(count):
        if (pid := os.fork()) == 0:
            status = 1
            try:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                torch.set_num_threads(1)
                init_distributed()
                body(rank)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(status)
        pids.append(pid)
    return pids


def end_well(pids: list[int]) -> bool:
    """Wait for the processes, and return whether all of them succeeded.

    If a process fails, the remaining processes are killed, because they would wait for it.
    """
    left, good = set(pids), True
    while left:
        pid, status = os.wait()
        left.remove(pid)
        if status:
            good = False
            for other in left:
                os.kill(other, signal.SIGKILL)
    return good


def run_group(folder: Path, group: list[tuple[int, list]]) -> None:
    """Run a group of cases on one rank, whose process group already exists.

    Plots are disabled, because drawing them takes longer than a short run.
    """
    signals.install()
    plots.draw = lambda histories, path: None
    plots.draw_health = lambda history, path: False
    for index, (_, function, values) in group:
        found = FUNCTIONS[function](**values)
        (folder / f"{index}-{dist.get_rank()}.json").write_text(json.dumps(found))


def groups_of(cases: list[list]) -> list[tuple[int, list[tuple[int, list]]]]:
    """Return (number of ranks, cases with their indices) for each group of consecutive cases."""
    return [(ranks, list(group)) for ranks, group in itertools.groupby(enumerate(cases), lambda c: c[1][0])]


def main() -> int:
    folder, groups = Path(sys.argv[1]), groups_of(json.loads(Path(sys.argv[2]).read_text()))
    if sys.argv[3:]:
        torch.set_num_threads(1)
        init_distributed()
        run_group(folder, groups[int(sys.argv[3])][1])
        return 0
    return int(
        not all(
            end_well(fork_ranks(ranks, lambda _, g=group: run_group(folder, g))) for ranks, group in groups
        )
    )


if __name__ == "__main__":
    sys.exit(main())
