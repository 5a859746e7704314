"""train/loop.py: when a save under way is waited for and told; what the first step of every start is checked for;
what of a step is timed and told."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model.fp8 import te_backend
from model.startup_check import StartupCheckError
from tests.conftest import refused
from tests.train.runs import run
from train import loop
from train.checkpoint import save
from train.checkpoint.files import committed, problems
from train.checkpoint.save import write_tensors
from train.guard.replicas import ReplicaError
from train.loop import Loop, Step


def a_step(**known: Any) -> Step:
    return Step(learning_rate=0.1, loss=torch.tensor(1.0), share=None, skipped=False, gemms=None, **known)


def loop_that_saves(told: list[str], **known: Any) -> Any:
    """A loop in step 30 with a save under way; `told` hears of what it does about it, and says."""
    saved = SimpleNamespace(path="step-00000020", seconds=2.0, waited_s=1.0)
    saver = SimpleNamespace(pending=True, busy=False)

    def finish() -> Any:
        saver.pending = False
        told.append("finish")
        return saved

    saver.finish = finish
    found: Any = object.__new__(Loop)
    found.run = SimpleNamespace(
        arguments=SimpleNamespace(on_save_failure="stop"),
        metrics=SimpleNamespace(message=lambda text: told.append(text.partition(" in ")[0])),
        precision=SimpleNamespace(config=SimpleNamespace(on_trouble="warn")),
        saver=saver,
        watchdog=SimpleNamespace(met=lambda what, after_step=False: None, doing=lambda what: None),
        **known,
    )
    found.state = SimpleNamespace(step=30)
    return found


@pytest.mark.parametrize("saving", [False, True])
def test_a_save_that_is_over_on_all_ranks_is_told_after_the_step(
    monkeypatch: pytest.MonkeyPatch, saving: bool
) -> None:
    """And one that failed ends the run then, not hours later at the next one."""
    told: list[str] = []
    of_step = loop_that_saves(told, stop_vote=SimpleNamespace(ask=lambda busy, due: (False, saving, False)))
    of_step.args = SimpleNamespace(
        max_steps=99, logging_steps=7, save_steps=7, eval_steps=7, replica_check_steps=0
    )
    of_step.slow_ranks = SimpleNamespace(step=lambda number, tell: None)
    monkeypatch.setattr(Loop, "_save_is_due", lambda self: False)
    monkeypatch.setattr(Loop, "_changes_precision", lambda self: False)
    of_step._meet(a_step())
    assert told == ([] if saving else ["finish", "saved step-00000020"])


def test_each_part_of_a_save_has_the_time_in_which_a_hang_is_one() -> None:
    """What came before it, waiting for the save under way, and copying all that is saved."""
    told: list[str] = []
    saves = loop_that_saves(told)
    saves.args, saves.health = SimpleNamespace(save_async=True), SimpleNamespace(state_dict=lambda: {})
    saves.run.watchdog.met = told.append
    saves.run.saver.begin = lambda state, background: told.append("begin")
    saves._save(a_step())
    before = ["saves step 30", "finish", "the save is over", "saved step-00000020"]
    assert told == [*before, "begin", "step 30 is saved, or under way"]


@pytest.mark.parametrize("error", [ReplicaError("ranks [1] differ"), OSError(5, "no data"), ValueError("no")])
def test_an_error_leaves_the_save_under_way_whole(
    settings: dict, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Also one that is still being written: a rank of several exits without waiting for its threads."""
    failed = threading.Event()

    def fail(engine: Any, precision: Any, step: int) -> None:
        if step == 3:
            failed.set()
            raise error

    def write_late(path: Path, value: Any) -> dict[str, Any]:
        failed.wait()
        time.sleep(0.5)
        return write_tensors(path, value)

    monkeypatch.setattr(loop, "check_replicas", fail)
    monkeypatch.setattr(save, "write_tensors", write_late)
    with pytest.raises(type(error)):
        run(settings, save_steps=2, replica_check_steps=1)
    (path,) = committed(Path(settings["output_dir"]) / "checkpoints")
    assert path.name == "step-00000002" and problems(path) == []


def test_the_first_step_of_a_start_runs_the_attention_that_it_proved(
    settings: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of one that goes on from a checkpoint."""
    settings |= {"lr_scheduler_type": "constant", "max_steps": 2}
    run(settings)
    used, take = ["fused (cuDNN)"], Loop._take_step
    monkeypatch.setattr(te_backend, "attention_backend_in_use", lambda te: used[0])

    def taken(self: Loop) -> Step:
        used[0] = "flash (2.8)"
        return take(self)

    monkeypatch.setattr(Loop, "_take_step", taken)
    with refused(StartupCheckError, code="attention_changed"):
        run(settings, max_steps=3)


def test_the_forward_of_each_micro_batch_is_timed(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all ranks, by which a slow one is named; with CUDA graphs, which run no hooks, there is nothing to time."""
    told: list[Any] = []
    init = Loop.__init__

    def with_graphs(self: Loop, of_run: loop.Run) -> None:
        of_run.arguments.speed.cuda_graphs = True
        init(self, of_run)

    class Times:
        def __init__(self, engine: Any, group: Any, cuda_graphs: bool):
            told.append(cuda_graphs)
            self.begin, self.step = lambda: told.append("begins"), lambda number, say: told.append(number)

    monkeypatch.setattr(loop, "SlowRanks", Times)
    monkeypatch.setattr(Loop, "__init__", with_graphs)
    run(settings, max_steps=2, gradient_accumulation_steps=2, save_strategy="no")
    assert told == [True, "begins", "begins", 1, "begins", "begins", 2]


def test_memory_is_told_in_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    logs = loop_that_saves(told, speeds=[])
    logs.tokens, logs.world, logs.flops, logs.peak, logs.clock_step, logs.clock = 40, 1, 1e9, None, 20, 0.0
    logs.engine = SimpleNamespace(get_global_grad_norm=lambda: 1.0)
    logs.health = SimpleNamespace(skipped=0, spikes=0, mended=lambda: 0, interval_loss=lambda: 1.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
    step = a_step()
    logs._log(step, 1.0)
    assert step.record["memory_gib"] == 3.0
