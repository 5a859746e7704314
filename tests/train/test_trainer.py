"""train/trainer.py: what the startup check found holds in the steps, and what of a run is timed, logged and saved."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model.checks.startup import StartupCheckError
from model.fp8 import te_backend
from tests.conftest import numbers, refused
from tests.train.runs import curve, gradients_without_fp8, metrics, run
from train import trainer
from train.checkpoint import save
from train.checkpoint.files import checkpoint_name, committed, problems
from train.checkpoint.save import SaveError, Saver, write_tensors
from train.engine.step import MicroStep
from train.monitor.replicas import ReplicaError
from train.monitor.spikes import Health, Spike
from train.trainer import TrainingError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="takes the reference's GEMMs out of FP8")


def after_step(monkeypatch: pytest.MonkeyPatch, number: int, change: Callable[[], None]) -> None:
    """Have `change` made after that many optimizer steps."""
    take, steps = MicroStep.__call__, []

    def counted(self, batch, index):  # type: ignore[no-untyped-def]
        if index == 0:
            steps.append(index)
            if len(steps) == number + 1:
                change()
        return take(self, batch, index)

    monkeypatch.setattr(MicroStep, "__call__", counted)


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_lost_fp8_gradients_end_the_run(
    settings: dict, monkeypatch: pytest.MonkeyPatch, accumulation: int
) -> None:
    """One GEMM of a step in bf16 is enough; the forward is as before."""
    after_step(monkeypatch, 2, lambda: gradients_without_fp8(monkeypatch))
    settings |= {"save_strategy": "no", "gradient_accumulation_steps": accumulation}
    with pytest.raises(TrainingError) as error:
        run(settings, max_steps=6, logging_steps=2)
    assert numbers(error.value)[:2] == [4, 6]


@pytest.mark.parametrize(
    ("used", "is_same"), [("fused (cuDNN), sub-backend 2", True), ("flash (2.8)", False)]
)
@pytest.mark.parametrize("resumed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_first_step_runs_the_checked_attention(
    settings: dict, monkeypatch: pytest.MonkeyPatch, resumed: bool, used: str, is_same: bool
) -> None:
    """By how q, k and v lie in memory, cuDNN's sub-backends differ."""
    settings |= {"lr_scheduler_type": "constant"}
    if resumed:
        run(settings, max_steps=2)
    backends = ["fused (cuDNN), sub-backend 1"]
    monkeypatch.setattr(te_backend, "attention_backend_in_use", lambda te: backends[0])
    after_step(monkeypatch, 0, lambda: backends.insert(0, used))
    error = refused(StartupCheckError, code="attention_changed", key="model.attention_backend")
    with nullcontext() if is_same else error:
        run(settings, max_steps=3, allow_changes_on_resume=["max_steps"])


def test_save_minutes_changes_no_result(
    settings: dict, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minutes count from the last save; with 0 of them only the steps do."""
    settings |= {"save_steps": 0, "save_total_limit": 9, "save_async": False}
    minutes = itertools.count(0, 60)  # one at each look at the clock: a step, a save
    clock = SimpleNamespace(monotonic=lambda: next(minutes), perf_counter=time.perf_counter, time=time.time)
    monkeypatch.setattr(trainer, "time", clock)
    by_time = run(settings, save_minutes=2)
    assert [path.name for path in committed(by_time / "checkpoints")] == [
        checkpoint_name(n) for n in (2, 4, 6)
    ]
    assert curve(by_time) == curve(trained)


def test_speed_counts_only_steps(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations, saves and refused rollbacks do not count. In this test, a step takes one second."""
    now = [0.0]

    def takes(seconds: float, owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def timed(*values: Any, **named: Any) -> Any:
            now[0] += seconds
            return call(*values, **named)

        monkeypatch.setattr(owner, name, timed)

    takes(0.5, MicroStep, "__call__")
    takes(100, trainer, "held_out_losses")
    takes(100, Saver, "begin")
    spike = Spike(1, 0, 0, "loss", 9.0, 1.0, 2.0)
    monkeypatch.setattr(Health, "find_spikes", lambda *_: [spike])
    monkeypatch.setattr(trainer, "roll_back", lambda *_, **__: False)
    takes(100, trainer, "roll_back")
    monkeypatch.setattr(
        trainer,
        "time",
        SimpleNamespace(perf_counter=lambda: now[0], monotonic=time.monotonic, time=time.time),
    )
    lines = metrics(run(settings, save_steps=2, eval_steps=3, on_spike="rollback"))
    assert [line["tokens_per_second"] for line in lines] == [256.0] * 6


def test_logged_loss_is_the_mean_since_the_last_line(settings: dict, trained: Path, tmp_path: Path) -> None:
    """A run that is stopped in the middle of an interval goes on with what it had of it."""
    by_step = [m["loss"] for m in metrics(trained)]
    assert by_step == pytest.approx([m["step_loss"] for m in metrics(trained)], rel=1e-12)
    folder = tmp_path / "by_3"
    settings |= {"logging_steps": 3, "save_steps": 2, "save_total_limit": 9, "output_dir": str(folder)}
    whole = curve(run(settings))
    means = [sum(by_step[:3]) / 3, sum(by_step[3:]) / 3]
    assert [entry[1] for entry in whole] == pytest.approx(means, rel=1e-12)
    assert [m["step_loss"] for m in metrics(folder)] == [by_step[2], by_step[5]]
    for path in committed(folder / "checkpoints")[1:]:
        (path / "manifest.json").unlink()
    assert curve(run(settings)) == whole


def test_failed_last_save_is_an_error(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever on_save_failure is: no other save follows."""

    def full(path: Path, value: Any) -> Any:
        if path.parent.name in (checkpoint_name(2), checkpoint_name(6)):
            raise OSError(f"{path} could not be written")
        return write_tensors(path, value)

    monkeypatch.setattr(save, "write_tensors", full)
    with pytest.raises(SaveError):
        run(settings, save_steps=2, on_save_failure="continue")
    names = [path.name for path in committed(Path(settings["output_dir"]) / "checkpoints")]
    assert names == [checkpoint_name(4)]


@pytest.mark.parametrize(
    "error",
    [
        ReplicaError("ranks [1] differ"),
        *(pytest.param(e, marks=pytest.mark.slow) for e in (OSError(5, "no data"), ValueError("no"))),
    ],
)
def test_error_waits_for_background_save(
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

    monkeypatch.setattr(trainer, "check_replicas", fail)
    monkeypatch.setattr(save, "write_tensors", write_late)
    with pytest.raises(type(error)):
        run(settings, save_steps=2, replica_check_steps=1)
    (path,) = committed(Path(settings["output_dir"]) / "checkpoints")
    assert path.name == checkpoint_name(2) and problems(path) == []
