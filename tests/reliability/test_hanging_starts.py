"""Ranks that hang before the first step or behind the last: the job ends by the watchdog there, too, and a part that
takes its time for what it reads is no hang."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.reliability.launching import launch
from tests.train.runs import ROOT, run
from train import setup, train
from train.data.stream import SampleStream
from train.files import bytes_of
from train.guard import signals, watchdog
from train.guard.watchdog import FIRST_STEP_S, NO_END, NO_START, SLOWEST, Watchdog, verdict

# Parts of a start: one in which rank 0 is slow, as it may be for what it reads, and one in which rank 1 hangs.
START = f"""import sys, time
sys.path.insert(0, {str(ROOT)!r})
import torch.distributed as dist
from train.guard import watchdog
watchdog.FIRST_STEP_S, watchdog.GATHER_S = 1.0, 60.0

def hangs():
    time.sleep(1e6)

dist.init_process_group("gloo")
with watchdog.Watchdog(0.5, watchdog.NO_START) as its:
    its.meet("verifies the checkpoint", reads=int(600 * watchdog.SLOWEST))
    if dist.get_rank() == 0:
        time.sleep(4)
    its.meet("builds the model")
    if dist.get_rank() == 0:
        print("the model is built", flush=True)
    if dist.get_rank() == 1:
        hangs()
    its.meet("proves what runs")
"""


@pytest.mark.process
def test_a_rank_that_hangs_in_a_start_is_named_and_one_that_reads_is_not(tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    script.write_text(START)
    done = launch(3, str(script))
    said = done.stdout
    assert done.returncode == 1 and "the model is built" in said, said
    head = "error: no part of the start was finished for 1 s (hang_timeout_s); rank 1 of 3 is not where the others wait"
    assert said.count(head) == 1, said
    assert re.search(r"rank 1 on \S+: builds the model; File .*start.py.* in hangs", said)
    assert "rank 0 waits: waits for all, before it proves what runs; " in said


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ranks do together, in its order, each with whether a watchdog watched then: "meet", or "meet, unwatched"."""
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

    def told(name: str, right: Callable[..., Any]) -> Callable[..., Any]:
        def call(*its: Any, **named: Any) -> Any:
            found.append(name if watching else f"{name}, unwatched")
            return right(*its, **named)

        return call

    for (
        name
    ) in "barrier broadcast broadcast_object_list all_gather all_gather_object all_reduce new_group".split():
        monkeypatch.setattr(dist, name, told(name, getattr(dist, name)))
    export = train.export_last
    monkeypatch.setattr(train, "export_last", told("export", export))
    return found


def start(settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> int:
    """As a command."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**settings, **changes}))
    monkeypatch.setattr("train.engine.distributed.init_distributed", lambda: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr("train.record.plots.draw", lambda *_: None)
    return train.main([str(config)])


def test_ranks_wait_for_each_other_under_a_watchdog_from_the_first_time_to_the_last(
    settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: list[str]
) -> None:
    """Else for a day (train/engine/distributed.py)."""
    schedule = {"schedule": [{"until_step": 1, "compute": "bf16"}, {"compute": "fp8"}]}
    settings |= {"max_steps": 2, "preflight": True, "precision": schedule}
    assert start(settings, tmp_path, monkeypatch) == 0
    assert [call for call in watched if "unwatched" in call] == [] and watched.index("export") > 20
    assert watched[0] == "all_gather_object" and watched[-1] == "barrier"


def test_the_end_of_a_run_that_is_stopped_is_watched(
    settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: list[str]
) -> None:
    monkeypatch.setattr(signals.StopVote, "ask", lambda *_: (True, False, False))
    assert start(settings, tmp_path, monkeypatch) == signals.STOPPED
    assert [call for call in watched if "unwatched" in call] == [] and watched[-1] == "barrier"


def test_a_stop_that_cannot_be_noted_is_a_stop(
    settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is saved; by another status a Slurm job would not be requeued."""
    (tmp_path / "run/stopped.json.tmp").mkdir(parents=True)
    monkeypatch.setattr(signals.StopVote, "ask", lambda *_: (True, False, False))
    assert start(settings, tmp_path, monkeypatch) == signals.STOPPED
    said = capsys.readouterr().out
    assert f"warning: {tmp_path}/run/stopped.json cannot be written: [Errno 21]" in said
    assert "stopped on request after step 1; " in said


def test_each_part_has_the_time_for_what_it_reads(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it by one slow rank, of a file system that others use, too; a part without, half an hour."""
    parts: dict[str, float] = {}
    meet = Watchdog.meet

    def met(self: Watchdog, doing: str, reads: int = 0) -> None:
        meet(self, doing, reads)
        assert self._deadline - time.monotonic() == pytest.approx(FIRST_STEP_S + reads / SLOWEST, abs=60)
        assert self._limit_s == FIRST_STEP_S + reads / SLOWEST
        parts[doing] = reads

    monkeypatch.setattr(Watchdog, "meet", met)
    monkeypatch.setattr(setup, "verify_data", lambda *_: None)
    monkeypatch.setattr(SampleStream, "num_bytes", 5 * 10**12)
    settings["data"]["verify"] = True
    output_dir = run(settings, save_steps=3, hang_timeout_s=60)
    last = output_dir / "checkpoints/step-00000006"
    assert parts["verifies its share of the data"] == 10**13, "held out data, too"
    assert parts[f"exports {last}, which rank 0 does"] == bytes_of(last) > 10**5
    assert sum(parts.values()) == 10**13 + bytes_of(last)

    parts.clear()
    run(settings, max_steps=6, hang_timeout_s=60)
    resumed = {part: read for part, read in parts.items() if read and part.startswith(("waits", "builds"))}
    assert resumed == {
        "waits for rank 0, which verifies the checkpoint to go on from": bytes_of(output_dir / "checkpoints"),
        "builds the model": bytes_of(last),
        "builds the engine": bytes_of(last),
    }


def test_a_met_step_takes_back_the_time_of_a_part(
    monkeypatch: pytest.MonkeyPatch, process_group: None
) -> None:
    monkeypatch.setattr(Watchdog, "_watch", lambda self: None)
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    with Watchdog(60) as its:
        its.meet("reads", reads=int(1000 * SLOWEST))
        assert its._limit_s == FIRST_STEP_S + 1000
        its.met("is over")
        assert its._limit_s == FIRST_STEP_S
        its.met("step 1 is done", after_step=True)
        assert its._limit_s == 60 and its._deadline - time.monotonic() < 61
    monkeypatch.setattr(dist, "barrier", pytest.fail)
    with Watchdog(0) as off:
        off.meet("nothing")


def test_what_was_missed_is_said() -> None:
    found = {0: {"host": "h", "doing": "proves", "at": "File 0"}}
    assert verdict(found, [], 1, 1800, NO_START).startswith(
        "error: no part of the start was finished for 1800 s"
    )
    assert verdict(found, [], 1, 1827.896, NO_END).startswith(
        "error: the end of the run did not come for 1828 s"
    )
