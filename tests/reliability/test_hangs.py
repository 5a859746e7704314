"""Tests of ranks that hang, are stopped or are killed.

The job must exit in time or continue, and the message must name the faulty rank. The tests include hangs before the
first step and after the last step. A phase that is slow only because it reads much data must not be reported as a hang.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.reliability.launching import launch
from tests.train.runs import ROOT
from train.monitor.watchdog import FIRST_STEP_S, Watchdog, find_ranks_at_fault

RANKS = "tests/reliability/meeting_ranks.py"
SLOW = pytest.mark.slow


# ---------------------------------------------------------------- jobs with a faulty rank

# (fault, the rank that has it) -> ranks, hang_timeout_s. Of those that hang or are stopped none would end by itself.
JOBS = {("hang", 1): (3, 2.0), ("stopped", 0): (3, 2.0), ("killed", 1): (3, 600.0), ("none", 0): (2, 2.0)}
SLOW_JOBS = {("stopped", 1): (3, 2.0)}  # of slow tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder to which the ranks of a hanging job write."""
    return tmp_path_factory.mktemp("hang") / "hang"


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest, folder: Path) -> dict[tuple[str, int], tuple[int, str]]:
    """Run all jobs at the same time, and return the exit status and the output of each job.

    The jobs spend most of their time waiting.
    """

    def run(job: tuple[tuple[str, int], tuple[int, float]]) -> tuple[int, str]:
        (fault, rank), (ranks, timeout_s) = job
        files = [str(folder)] if fault == "hang" else []
        done = launch(ranks, RANKS, fault, str(timeout_s), *files, FAULTY_RANK=str(rank))
        return done.returncode, done.stdout

    here = [item for item in request.session.items if item.path == request.path]
    every = JOBS | (SLOW_JOBS if any(item.get_closest_marker("slow") for item in here) else {})
    with ThreadPoolExecutor(len(every)) as pool:
        return dict(zip(every, pool.map(run, every.items()), strict=True))


@pytest.mark.process
@pytest.mark.parametrize(
    ("fault", "rank", "status", "shown"),
    [
        (
            "hang",
            1,
            1,
            r"rank 1 on \S+: step 20, micro-batch 1 of 1; File .*meeting_ranks.py.* never_returns",
        ),
        ("stopped", 0, 1, ""),  # it keeps the store through which the ranks tell each other where they are
        ("killed", 1, 128 + 9, ""),
        pytest.param("stopped", 1, 1, "", marks=SLOW),
    ],
)
def test_faulty_rank_is_named(jobs: dict, fault: str, rank: int, status: int, shown: str) -> None:
    found, output = jobs[fault, rank]
    assert found == status and re.search(shown, output), output
    lines = [line for line in output.splitlines() if "hang_timeout_s" in line]
    if status == 1:
        assert lines and all(f"rank {rank} of 3" in line for line in lines), output
    else:
        assert not lines and re.search(rf"rank {rank} .*SIGKILL", output), output


@pytest.mark.process
def test_hang_writes_stack_traces(jobs: dict, folder: Path) -> None:
    """Each rank writes its own, and the message names the files. The flight recorder needs NCCL."""
    _, output = jobs["hang", 1]
    assert f"{folder}/stacks_rank_*.txt" in output
    stacks = {path.name: path.read_text() for path in folder.iterdir()}
    assert stacks.keys() == {f"stacks_rank_{rank}.txt" for rank in range(3)}
    assert [name for name, text in stacks.items() if "never_returns" in text] == ["stacks_rank_1.txt"]


@pytest.mark.process
def test_watchdog_has_no_false_alarm(jobs: dict) -> None:
    status, output = jobs["none", 0]
    assert status == 0 and "all 400 steps" in output
    assert "hang_timeout_s" not in output


# ---------------------------------------------------------------- who is to blame


WAITS, RUNS = (lambda progress: {"progress": progress, "waits": True}), {"progress": 8, "waits": False}


@pytest.mark.parametrize(
    ("found", "world", "blamed"),
    [
        ({0: WAITS(8), 1: WAITS(7), 2: WAITS(8)}, 3, [1]),  # all wait, one an operation behind the others
        ({0: WAITS(8), 1: RUNS, 2: WAITS(8)}, 3, [1]),
        ({0: WAITS(8), 2: WAITS(8)}, 3, [1]),
        ({2: WAITS(8)}, 3, [0]),  # nobody answers: rank 0 keeps the store
        ({0: WAITS(8)}, 3, [1, 2]),
        ({1: WAITS(8)}, 2, [0]),
        ({0: WAITS(8), 1: WAITS(8)}, 2, []),  # cannot be told
    ],
)
def test_find_ranks_at_fault(found: dict, world: int, blamed: list[int]) -> None:
    assert find_ranks_at_fault(found, world) == blamed


def test_timeout_restarts_after_each_step(process_group: None) -> None:
    """The timeout is longer before the first step is complete."""
    watchdog = Watchdog(60)
    limits = [watchdog.limit_s]
    for after_step in (False, True):
        watchdog.renew("is over", after_step)
        limits.append(watchdog.limit_s)
    assert limits == [FIRST_STEP_S, FIRST_STEP_S, 60]
    assert not watchdog.is_late(59)
    watchdog.renew("step 2 is done", after_step=True)
    assert [watchdog.is_late(30) for _ in range(3)] == [False, False, True]


# ---------------------------------------------------------------- before the first step and behind the last

# Phases of a start: one that ends, and one in which rank 1 hangs.
START = f"""import sys, time
sys.path.insert(0, {str(ROOT)!r})
import torch.distributed as dist
from train.monitor import watchdog
watchdog.FIRST_STEP_S, watchdog.GATHER_S = 2.0, 60.0

def hangs():
    time.sleep(1e6)

dist.init_process_group("gloo")
with watchdog.Watchdog(0.5) as watches:
    watches.phase("building the model")
    if dist.get_rank() == 0:
        print("the model is built", flush=True)
    if dist.get_rank() == 1:
        hangs()
    watches.phase("running the startup check")
"""


@pytest.mark.process
def test_hang_during_startup(tmp_path: Path) -> None:
    (script := tmp_path / "start.py").write_text(START)
    done = launch(3, str(script))
    assert done.returncode == 1 and "the model is built" in done.stdout, done.stdout
    assert len(re.findall(r"2 s \(hang_timeout_s\).* rank 1 of 3", done.stdout)) == 1, done.stdout
    assert re.search(r"rank 1 on \S+: building the model; File .*start.py.* in hangs", done.stdout)
