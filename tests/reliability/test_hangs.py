"""Ranks that hang, are stopped, are killed or are slow: the job ends in time, or goes on, and says which one it is."""

from __future__ import annotations

import io
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.reliability.launching import launch
from train.guard import watchdog
from train.guard.slow_ranks import FIRST_STEPS, SlowRankDetector, SlowRanks
from train.guard.watchdog import Watchdog, blame, verdict

RANKS = "tests/reliability/meeting_ranks.py"


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


@pytest.fixture
def hung(jobs: dict[tuple[str, int], tuple[int, str]]) -> dict[tuple[str, int], str]:
    found = {name: job for name, job in jobs.items() if name[0] in ("hang", "hang_in_c", "stopped")}
    assert {status for status, _ in found.values()} == {1}, jobs
    return {name: output for name, (_, output) in found.items()}


@pytest.mark.process
def test_a_rank_that_hangs_is_named_with_its_stack(hung: dict[tuple[str, int], str]) -> None:
    output = hung["hang", 1]
    assert "no step was finished for 2 s (hang_timeout_s); rank 1 of 3 is not where the others wait" in output
    assert re.search(
        r"rank 1 on \S+: step 20, micro-batch 1 of 1; File .*meeting_ranks.py.* never_returns", output
    )
    assert "rank 1: where its threads are:" in output
    assert output.count("no step was finished") == 1, "told once"


@pytest.mark.slow
@pytest.mark.process
def test_a_rank_that_hangs_in_c_code_dumps_its_stack_all_the_same(hung: dict[tuple[str, int], str]) -> None:
    output = hung["hang_in_c", 1]
    assert "rank 1 does not answer" in output
    assert re.search(r'File ".*meeting_ranks.py", line \d+ in keeps_the_lock', output), "faulthandler's form"


@pytest.mark.process
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stopped_process_is_named(hung: dict[tuple[str, int], str], rank: int) -> None:
    """Rank 0 keeps the store through which the ranks tell each other where they are."""
    output = hung["stopped", rank]
    assert f"rank {rank} does not answer: its process is stopped" in output
    assert output.count("no step was finished") == 1, "told once"
    assert "rank" in output


@pytest.mark.process
def test_a_killed_rank_ends_the_job(jobs: dict[tuple[str, int], tuple[int, str]]) -> None:
    status, output = jobs["killed", 1]
    assert status == 128 + 9
    assert "rank 1 was killed by SIGKILL" in output


@pytest.mark.process
def test_no_false_alarm_in_a_clean_run(jobs: dict[tuple[str, int], tuple[int, str]]) -> None:
    status, output = jobs["none", 0]
    assert status == 0 and "all 400 steps" in output
    assert "hang_timeout_s" not in output and "is slow" not in output


@pytest.mark.slow
@pytest.mark.process
def test_a_slow_rank_is_named(jobs: dict[tuple[str, int], tuple[int, str]]) -> None:
    status, output = jobs["slow", 1]
    assert status == 0, output
    found = re.findall(r"warning: rank (\d) is slow: .* ([\d.]+) times .* to step (\d+)", output)
    assert len(found) == 1, "told once"
    rank, factor, step = found[0]
    assert rank == "1" and 1.3 < float(factor) < 1.7 and int(step) <= 50


def test_times_are_those_of_micro_batches_behind_the_first_steps(
    process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of evaluations, nor of steps that compile and allocate."""
    norm = nn.Identity()
    module = SimpleNamespace(model=SimpleNamespace(norm=norm))
    engine = SimpleNamespace(device=torch.device("cpu"), module=module, zero_optimization_stage=lambda: 1)
    slow_ranks, now = SlowRanks(engine, dist.group.WORLD, False), iter([0.0, 9.0, 20.0, 22.0, 30.0, 33.0])
    monkeypatch.setattr(slow_ranks, "_now", lambda: next(now))
    slow_ranks.begin()
    norm(torch.ones(1))
    for step in range(1, FIRST_STEPS + 1):
        slow_ranks.step(step)
    for _ in range(2):
        slow_ranks.begin()
        norm(torch.ones(1))
        norm(torch.ones(1))  # an evaluation's
    assert slow_ranks._median_s() == 2.5
    assert slow_ranks._median_s() is None, "of this window"


def test_one_slow_window_is_noise() -> None:
    detector = SlowRankDetector(4)
    slow, even = [1.0, 1.0, 1.5, 1.1], [1.0, 1.1, 1.2, 1.0]
    assert [detector.window(w) for w in (slow, slow, even, slow, slow)] == [{}] * 5
    assert detector.window(slow) == {2: 1.5}
    assert detector.window(slow) == {}, "told already"
    assert [detector.window(w) for w in (even, slow, slow, slow)] == [{}, {}, {}, {2: 1.5}], "told again"


@pytest.mark.parametrize(("own_s", "found"), [(1.24, {}), (1.26, {1: 1.26})])
def test_a_slow_rank_is_a_quarter_behind_the_others(own_s: float, found: dict[int, float]) -> None:
    """Not behind a median that it is itself in, which of two would hide half of it."""
    detector = SlowRankDetector(2)
    assert [detector.window([1.0, own_s]) for _ in range(3)][-1] == found


def test_what_is_said_of_a_slow_rank(monkeypatch: pytest.MonkeyPatch, logged: list[str]) -> None:
    """After three windows of ten steps behind the first five of a start."""
    said, ranks = dict[int, str](), SlowRanks.__new__(SlowRanks)
    ranks.on, ranks.on_gpu, ranks.group, ranks._steps = True, False, None, 0
    ranks._detector, ranks._pairs = SlowRankDetector(2), []
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)

    def gather(times: list, own: float, group: None) -> None:
        times[:] = 0.002, own

    monkeypatch.setattr(dist, "all_gather_object", gather)
    for step in range(101, 141):
        ranks._pairs.append((0.0, 0.003))
        ranks.step(step)
        said |= {step: logged.pop()} if logged else {}
    assert list(said) == [135] and said[135].startswith(
        "warning: rank 1 is slow: the forward of a micro-batch takes it 3.0 ms, 1.50 times the 2.0 ms of the others, "
        "for 30 steps to step 135;"
    )


@pytest.mark.parametrize(
    ("stage", "cuda_graphs", "ranks", "on"),
    [(2, False, 2, True), (3, False, 2, False), (0, True, 2, False), (0, False, 1, False)],
)
def test_where_times_say_nothing_of_a_rank_nobody_is_named(
    monkeypatch: pytest.MonkeyPatch, logged: list[str], stage: int, cuda_graphs: bool, ranks: int, on: bool
) -> None:
    """At ZeRO 3 each layer waits for the slowest; a replayed graph passes no Python; alone there is no other."""
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group=None: ranks)
    norm = nn.Identity()
    engine: Any = SimpleNamespace(
        device=torch.device("cpu"),
        zero_optimization_stage=lambda: stage,
        module=SimpleNamespace(model=SimpleNamespace(norm=norm)),
    )
    times = SlowRanks(engine, object() if ranks > 1 else None, cuda_graphs)
    assert times.on == on == bool(norm._forward_pre_hooks)
    times.begin()
    for step in range(1, 3):
        times.step(step)
    assert not logged


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
        watches.met("step 1 is done", after_step=True)
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


def answer(progress: int, waits: bool) -> dict:
    return {"progress": progress, "waits": waits}


def test_who_is_to_blame() -> None:
    behind = {0: answer(8, True), 1: answer(7, True), 2: answer(8, True)}
    assert blame(behind, 3) == [1], "all wait, one an operation behind the others"
    assert blame({0: answer(8, True), 1: answer(8, False), 2: answer(8, True)}, 3) == [1]
    assert blame({0: answer(8, True), 2: answer(8, True)}, 3) == [1]
    assert blame({2: answer(8, True)}, 3) == [0], "nobody answers: rank 0 keeps the store"
    assert blame({0: answer(8, True)}, 3) == [1, 2], "nobody answers the one that keeps it"
    assert blame({0: answer(8, True)}, 2) == [1] and blame({1: answer(8, True)}, 2) == [0]
    assert blame({0: answer(8, True), 1: answer(8, True)}, 2) == [], "cannot be told"


def test_the_verdict_has_the_time_the_place_and_one_of_those_who_wait() -> None:
    found = {rank: {"host": f"h{rank}", "doing": f"step {rank}", "at": f"File {rank}"} for rank in (0, 1, 3)}
    assert verdict(found, [1, 2], 4, 90.0).splitlines() == [
        "error: no step was finished for 90 s (hang_timeout_s); rank 1, 2 of 4 is not where the others wait for it:",
        "  rank 1 on h1: step 1; File 1",
        "  rank 2 does not answer: its process is stopped, or its machine or connection is gone",
        "  rank 0 waits: step 0; File 0",
        "The job ends; with --resume_from_checkpoint auto, the default, the same command goes on from the last "
        "checkpoint",
    ]
    said = verdict({rank: found[rank] for rank in (1, 0)}, [], 2, 0.5)
    assert said == (
        "error: no step was finished for 0.5 s (hang_timeout_s) and all 2 ranks answer; where they are: rank 0: step "
        "0, File 0; rank 1: step 1, File 1"
    )


@pytest.mark.parametrize(
    ("rank", "local", "answer_too", "says", "waits_s"),
    [
        (1, 1, [], True, []),
        (8, 0, [], True, [8.0]),  # rank 1 may be gone with its node, too
        (2, 2, [], True, [16.0]),
        (2, 2, [0, 3], False, []),  # rank 0 does
        (2, 2, [3], True, []),
    ],
)
def test_one_gives_the_verdict_though_rank_0_keeps_the_store_and_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    local: int,
    answer_too: list[int],
    says: bool,
    waits_s: list[float],
) -> None:
    """Then no rank hears another, and the launcher ends the others before they speak, too."""
    slept, said = list[float](), io.StringIO()
    watches = Watchdog(0)
    watches._main = threading.get_ident()
    monkeypatch.setattr(watchdog, "console", lambda: said)

    def gather(self: Watchdog, found: dict, world: int) -> None:
        found.update({other: found[rank] for other in answer_too})

    monkeypatch.setattr(Watchdog, "_gather", gather)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(sleep=slept.append))
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: 16)
    monkeypatch.setenv("LOCAL_RANK", str(local))
    watches._report()
    assert ("no step was finished" in said.getvalue()) == says and slept == [*waits_s, 1.0]
    assert says or said.getvalue() == "", "not even an empty line"


def test_a_thread_beside_counts_only_while_the_main_thread_waits_for_it() -> None:
    """As that of a save, which is in a collective of its own while training hangs elsewhere."""
    there: dict[str, Any] = {}
    exec(
        compile("def collective(event): event.wait()", "torch/distributed/distributed_c10d.py", "exec"), there
    )
    ends = threading.Event()
    beside = threading.Thread(target=there["collective"], args=(ends,), name="save")
    beside.start()
    watchdog, found = Watchdog(0), list[tuple[str, bool]]()
    watchdog._main = threading.get_ident()

    def look() -> None:
        found.append(watchdog._where())

    def look_until_it_counts() -> None:
        look()
        deadline = time.monotonic() + 100
        while not found[-1][1] and time.monotonic() < deadline:
            look()
        ends.set()

    first = threading.Thread(target=look)
    first.start()
    while first.is_alive():
        pass
    threading.Thread(target=look_until_it_counts).start()
    beside.join()
    (texts, waits), *_, (_, waits_for_it) = found
    assert "thread save:" in texts and (waits, waits_for_it) == (False, True)
