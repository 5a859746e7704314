"""Ranks that hang, stop, die or are slow: the job ends in time or continues, and names the rank.

Also before the first step and behind the last, where a phase that takes its time for what it reads is no hang.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.reliability.launching import launch
from tests.train.runs import ROOT, run
from train import train
from train.data.stream import SampleStream
from train.files import bytes_of
from train.monitor import signals, watchdog
from train.monitor.slow_ranks import SlowRankDetector, SlowRanks
from train.monitor.watchdog import FIRST_STEP_S, SLOWEST, Watchdog, blame

RANKS = "tests/reliability/meeting_ranks.py"
SLOW = pytest.mark.slow


# ---------------------------------------------------------------- jobs with a faulty rank

# (fault, the rank that has it) -> ranks, hang_timeout_s. Of those that hang or are stopped none would end by itself.
JOBS = {("hang", 1): (3, 2.0), ("stopped", 0): (3, 2.0), ("killed", 1): (3, 600.0), ("none", 0): (2, 2.0)}
SLOW_JOBS = {("hang_in_c", 1): (3, 2.0), ("stopped", 1): (3, 2.0), ("slow", 1): (3, 60.0)}  # of slow tests


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest) -> dict[tuple[str, int], tuple[int, str]]:
    """Exit status and output of each; most of their time they wait, and all do at the same time."""

    def run(job: tuple[tuple[str, int], tuple[int, float]]) -> tuple[int, str]:
        (fault, rank), (ranks, timeout_s) = job
        done = launch(ranks, RANKS, fault, str(timeout_s), FAULTY_RANK=str(rank))
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
        pytest.param("hang_in_c", 1, 1, r'File ".*meeting_ranks.py", line \d+ in keeps_the_lock', marks=SLOW),
        pytest.param("stopped", 1, 1, "", marks=SLOW),
    ],
)
def test_a_faulty_rank_ends_the_job_and_is_named_once(
    jobs: dict, fault: str, rank: int, status: int, shown: str
) -> None:
    found, output = jobs[fault, rank]
    assert found == status and re.search(shown, output), output
    lines = [line for line in output.splitlines() if "hang_timeout_s" in line]
    if status == 1:
        assert len(lines) == 1 and f"rank {rank} of 3" in lines[0], output
    else:
        assert not lines and re.search(rf"rank {rank} .*SIGKILL", output), output


@pytest.mark.process
def test_no_false_alarm_in_a_clean_run(jobs: dict) -> None:
    status, output = jobs["none", 0]
    assert status == 0 and "all 400 steps" in output
    assert "hang_timeout_s" not in output and "slow" not in output


@pytest.mark.slow
@pytest.mark.process
def test_a_slow_rank_is_named(jobs: dict) -> None:
    status, output = jobs["slow", 1]
    assert status == 0, output
    ((rank, factor, step),) = re.findall(r"rank (\d) is slow: .* ([\d.]+) times .* to step (\d+)", output)
    assert rank == "1" and 1.3 < float(factor) < 1.7 and int(step) <= 50


# ---------------------------------------------------------------- who is slow, who is to blame


def test_one_slow_window_is_noise() -> None:
    detector = SlowRankDetector(4)
    slow, even = [1.0, 1.0, 1.5, 1.1], [1.0, 1.1, 1.2, 1.0]
    assert [detector.window(w) for w in (slow, slow, even, slow, slow)] == [{}] * 5
    assert detector.window(slow) == {2: 1.5}
    assert detector.window(slow) == {}, "named already"
    assert [detector.window(w) for w in (even, slow, slow, slow)] == [{}, {}, {}, {2: 1.5}], "named again"


@pytest.mark.parametrize(("own_s", "found"), [(1.24, {}), (1.26, {1: 1.26})])
def test_a_slow_rank_is_a_quarter_behind_the_others(own_s: float, found: dict[int, float]) -> None:
    """Not behind a median that it is itself in, which of two would hide half of it."""
    detector = SlowRankDetector(2)
    assert [detector.window([1.0, own_s]) for _ in range(3)][-1] == found


@pytest.mark.parametrize(
    ("stage", "cuda_graphs", "group", "is_on"),
    [
        (2, False, "group", True),
        (3, False, "group", False),
        (0, True, "group", False),
        (0, False, None, False),
    ],
)
def test_where_times_say_nothing_of_a_rank_none_are_taken(
    monkeypatch: pytest.MonkeyPatch, stage: int, cuda_graphs: bool, group: Any, is_on: bool
) -> None:
    """At ZeRO 3 each layer waits for the slowest; a replayed graph passes no Python; alone there is no other."""
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    module = SimpleNamespace(model=SimpleNamespace(norm=nn.Identity()))
    engine = SimpleNamespace(device=torch.device("cpu"), module=module, zero_optimization_stage=lambda: stage)
    assert SlowRanks(engine, group, cuda_graphs).on == is_on


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
def test_who_is_to_blame(found: dict, world: int, blamed: list[int]) -> None:
    assert blame(found, world) == blamed


def test_a_job_that_was_suspended_gets_its_time_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by scontrol suspend: the clock goes on while the process stands still."""
    clock, looks, reports = [0.0], [0], list[float]()

    def monotonic() -> float:
        looks[0] += 1
        return clock[0]

    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(Watchdog, "_report", lambda _: reports.append(clock[0]))
    monkeypatch.setattr(Watchdog, "_dump_later", lambda *_: None)
    with Watchdog(0.4) as watches:
        monkeypatch.setattr(watchdog.os, "_exit", lambda status: watches._closed.set())
        watches.renew("step 1 is done", after_step=True)
        for passes_s in (6.0, 0.3):
            clock[0] += passes_s
            before = looks[0]
            while looks[0] < before + 2 and not reports:
                time.sleep(0.01)
            assert reports == []
        clock[0] += 0.2
        assert watches._thread is not None
        watches._thread.join(30)
    assert reports == [pytest.approx(6.5)]


# ---------------------------------------------------------------- before the first step and behind the last

# Phases of a start: one in which rank 0 is slow, as it may be for what it reads, and one in which rank 1 hangs.
START = f"""import sys, time
sys.path.insert(0, {str(ROOT)!r})
import torch.distributed as dist
from train.monitor import watchdog
watchdog.FIRST_STEP_S, watchdog.GATHER_S = 1.0, 60.0

def hangs():
    time.sleep(1e6)

dist.init_process_group("gloo")
with watchdog.Watchdog(0.5) as watches:
    watches.phase("verifying the checkpoint", reads=int(600 * watchdog.SLOWEST))
    if dist.get_rank() == 0:
        time.sleep(4)
    watches.phase("building the model")
    if dist.get_rank() == 0:
        print("the model is built", flush=True)
    if dist.get_rank() == 1:
        hangs()
    watches.phase("running the startup check")
"""


@pytest.mark.process
def test_a_rank_that_hangs_in_a_start_is_named_and_one_that_reads_is_not(tmp_path: Path) -> None:
    (script := tmp_path / "start.py").write_text(START)
    done = launch(3, str(script))
    assert done.returncode == 1 and "the model is built" in done.stdout, done.stdout
    assert len(re.findall(r"1 s \(hang_timeout_s\).* rank 1 of 3", done.stdout)) == 1, done.stdout
    assert re.search(r"rank 1 on \S+: building the model; File .*start.py.* in hangs", done.stdout)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ranks do together, in its order, and whether a watchdog watched then: "barrier", "barrier, unwatched"."""
    found, watching = list[str](), list[Watchdog]()
    enter, leave = Watchdog.__enter__, Watchdog.__exit__

    def entered(self: Watchdog) -> Watchdog:
        assert not watching, "two at a time would take each other's timer"
        watching.append(self)
        return enter(self)

    def left(self: Watchdog, *exception: object) -> None:
        leave(self, *exception)
        watching.remove(self)

    monkeypatch.setattr(Watchdog, "__enter__", entered)
    monkeypatch.setattr(Watchdog, "__exit__", left)

    def noted(name: str, right: Callable[..., Any]) -> Callable[..., Any]:
        def call(*its: Any, **named: Any) -> Any:
            found.append(name if watching else f"{name}, unwatched")
            return right(*its, **named)

        return call

    collectives = "barrier broadcast broadcast_object_list all_gather all_gather_object all_reduce new_group"
    for name in collectives.split():
        monkeypatch.setattr(dist, name, noted(name, getattr(dist, name)))
    monkeypatch.setattr(train, "export_last", noted("export", train.export_last))
    return found


@pytest.mark.parametrize("is_stopped", [False, True])
def test_ranks_wait_for_each_other_under_a_watchdog_from_the_first_time_to_the_last(
    settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: list[str], is_stopped: bool
) -> None:
    """Else for a day (train/engine/distributed.py). A stop that cannot be noted is a stop: by another status a Slurm
    job would not be requeued."""
    schedule = {"schedule": [{"until_step": 1, "compute": "bf16"}, {"compute": "fp8"}]}
    (config := tmp_path / "config.json").write_text(
        json.dumps({**settings, "max_steps": 2, "preflight": True, "precision": schedule})
    )
    if is_stopped:
        monkeypatch.setattr(signals.StopVote, "ask", lambda *_: (True, False, False))
        (tmp_path / "run/stopped.json.tmp").mkdir(parents=True)
    monkeypatch.setattr("train.engine.distributed.init_distributed", lambda: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr("train.record.plots.draw", lambda *_: None)
    assert train.main([str(config)]) == (signals.STOPPED if is_stopped else 0)
    assert [call for call in watched if "unwatched" in call] == [] and len(watched) > 20
    assert watched[0] == "all_gather_object" and watched[-1] == "barrier"
    assert ("export" in watched) != is_stopped


def test_a_phase_has_the_time_for_what_it_reads(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it by one slow rank, of a file system that others use, too; without files, half an hour."""
    read: list[int] = []
    begin = Watchdog.phase

    def phase(self: Watchdog, name: str, reads: int = 0) -> None:
        begin(self, name, reads)
        assert self.limit_s == FIRST_STEP_S + reads / SLOWEST
        read.extend([reads] * bool(reads))

    monkeypatch.setattr(Watchdog, "phase", phase)
    monkeypatch.setattr(SampleStream, "verify", lambda *_: 0)
    monkeypatch.setattr(SampleStream, "num_bytes", 5 * 10**12)
    settings["data"]["verify"] = True
    output_dir = run(settings, save_steps=3, hang_timeout_s=60)
    last = output_dir / "checkpoints/step-00000006"
    assert read == [10**13, bytes_of(last)], "of the data, held out data, too, and of what is exported"

    read.clear()
    run(settings, max_steps=6, hang_timeout_s=60)
    everything = bytes_of(output_dir / "checkpoints")
    assert read[:4] == [10**13, everything, bytes_of(last), bytes_of(last)], "it is verified, then loaded"


def test_a_step_takes_back_the_time_of_a_phase(process_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with Watchdog(60) as watches:
        watches.phase("reads", reads=int(1000 * SLOWEST))
        limits = [watches.limit_s]
        for after_step in (False, True):
            watches.renew("is over", after_step)
            limits.append(watches.limit_s)
    assert limits == [FIRST_STEP_S + 1000, FIRST_STEP_S, 60]
    monkeypatch.setattr(dist, "barrier", pytest.fail)
    with Watchdog(0) as off:
        off.phase("nothing")
