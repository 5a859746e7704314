"""train/loop.py: what was proven at the start holds in the steps."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from model.fp8 import te_backend
from model.startup_check import StartupCheckError
from tests.conftest import numbers, refused
from tests.train.runs import curve, gradients_without_fp8, metrics, run
from train.checkpoint.files import committed, name_of
from train.checkpoint.save import SaveError
from train.data.stream import NO_LABEL, Batch
from train.engine.step import MicroStep
from train.guard.health import Health
from train.loop import Loop, Step, TrainingError, _advice, evaluate, settle
from train.record.run_folder import RunFolder

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


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_that_leave_fp8_end_the_run(
    settings: dict, monkeypatch: pytest.MonkeyPatch, accumulation: int
) -> None:
    """One GEMM of a step in bf16 is enough; the forward is as before."""
    after_step(monkeypatch, 2, lambda: gradients_without_fp8(monkeypatch))
    with pytest.raises(TrainingError) as error:
        run(
            settings,
            max_steps=6,
            logging_steps=2,
            save_strategy="no",
            gradient_accumulation_steps=accumulation,
        )
    assert numbers(error.value)[:2] == [4, 6]


def test_another_attention_than_the_proven_one_ends_the_run(
    settings: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = ["fused (cuDNN)"]
    monkeypatch.setattr(te_backend, "attention_backend_in_use", lambda te: used[0])
    after_step(monkeypatch, 0, lambda: used.insert(0, "flash (2.8)"))
    with refused(StartupCheckError, code="attention_changed", key="model.attention_backend"):
        run(settings, max_steps=3, save_strategy="no")


def test_a_run_saves_by_time_without_other_numbers(
    settings: dict, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minutes count from the last save; with 0 of them only the steps do."""
    settings |= {"save_steps": 0, "save_total_limit": 9, "save_async": False}
    minutes = itertools.count(0, 60)  # one at each look at the clock: a step, a save
    clock = SimpleNamespace(monotonic=lambda: next(minutes), perf_counter=time.perf_counter)
    monkeypatch.setattr("train.loop.time", clock)
    by_time = run(settings, save_minutes=2)
    assert [path.name for path in committed(by_time / "checkpoints")] == [name_of(n) for n in (2, 4, 6)]
    assert curve(by_time) == curve(trained)


@pytest.mark.parametrize(
    ("rank", "minutes", "strategy", "pending", "due"),
    [
        (0, 2.0, "steps", False, True),
        (0, 2.1, "steps", False, False),
        (0, 0, "steps", False, False),
        (0, 2.0, "no", False, False),
        (0, 2.0, "steps", True, False),
        (1, 2.0, "steps", False, False),
    ],
)
def test_rank_0_says_when_a_save_is_due(
    monkeypatch: pytest.MonkeyPatch, rank: int, minutes: float, strategy: str, pending: bool, due: bool
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(time, "monotonic", lambda: 1120.0)
    loop: Any = object.__new__(Loop)
    loop.args, loop.last_save = SimpleNamespace(save_minutes=minutes, save_strategy=strategy), 1000.0
    loop.run = SimpleNamespace(saver=SimpleNamespace(pending=pending))
    assert loop._save_is_due() == due


def test_the_loss_of_a_line_is_the_mean_since_the_last_one_also_over_a_stop(
    settings: dict, trained: Path, tmp_path: Path
) -> None:
    """A run that is stopped in the middle of an interval goes on with what it had of it."""
    by_step = [m["loss"] for m in metrics(trained)]
    assert by_step == pytest.approx([m["step_loss"] for m in metrics(trained)], rel=1e-12)
    settings |= {
        "logging_steps": 3,
        "save_steps": 2,
        "save_total_limit": 9,
        "output_dir": str(tmp_path / "by_3"),
    }
    whole = curve(run(settings))
    assert [entry[1] for entry in whole] == pytest.approx(
        [sum(by_step[:3]) / 3, sum(by_step[3:]) / 3], rel=1e-12
    )
    assert [m["step_loss"] for m in metrics(tmp_path / "by_3")] == [by_step[2], by_step[5]]
    for path in committed(tmp_path / "by_3/checkpoints")[1:]:
        (path / "manifest.json").unlink()
    assert curve(run(settings)) == whole


def test_the_mean_loss_counts_tokens_with_a_label_in_steps_that_were_not_skipped(process_group: None) -> None:
    engine: Any = SimpleNamespace(
        module=torch.nn.Linear(1, 1), skipped_steps=0, get_global_grad_norm=lambda: 1.0
    )
    precision: Any = SimpleNamespace(device="cpu", has_state=False)
    health = Health(engine, precision, 16, 10.0)
    assert math.isnan(health.interval_loss())
    for step, (skipped, loss, share) in enumerate([(0, 2.0, 1.0), (0, 2.0, 0.25), (1, 9.0, 1.0)], start=1):
        engine.skipped_steps += skipped
        health.before_step()
        health.after_step(step, 0, {}, torch.tensor(loss * share), torch.tensor(share))
    health.look(tokens=100)
    health.after_step(4, 0, {}, torch.tensor(5.0), None)
    resumed = Health(engine, precision, 16, 10.0)
    health.look(tokens=300)  # of a batch that a resume made larger
    resumed.load_state_dict(json.loads(json.dumps(health.state_dict())))
    assert resumed.interval_loss() == pytest.approx((2.0 * 125 + 5.0 * 300) / 425)
    assert math.isnan(resumed.interval_loss())
    known = {
        "skipped_in_a_row": 2,
        "spikes": 3,
        "interval": [4.0, 5.0],
        "data_weights": {"web": 0.5, "code": 0.5},
        "fp8_alarms": {
            "count": 6,
            "active": [["fc2", "input", 7]],
            "looks": 5,
            "found": [["fc2", "input", 4]],
            "look_again": True,
        },
        "loss": [8.0, 9.0],
        "grad_norm": [1.0],
    }
    for _ in range(2):
        resumed.load_state_dict(known)
        assert resumed.state_dict() == known


def test_numbers_are_looked_at_after_a_thousand_steps_whatever_is_logged() -> None:
    """Those that nobody has looked at lie on the GPU, and a spike among them is told of late."""
    health: Any = object.__new__(Health)
    health._steps = [()] * 999
    assert not health.full()
    health._steps.append(())
    assert health.full()


def test_the_loss_of_a_step_is_the_mean_over_tokens_with_a_label(process_group: None) -> None:
    loop: Any = object.__new__(Loop)
    loop.run, loop.state = None, SimpleNamespace(step=1)
    for share, mean in ((torch.tensor(0.25), 6.0), (None, 1.5)):
        step = Step(learning_rate=0.1, loss=torch.tensor(1.5), share=share, skipped=False, gemms=None)
        assert loop._mean_loss(step) == mean


def test_only_steps_that_are_skipped_in_a_row_end_a_run(process_group: None, tmp_path: Path) -> None:
    """A long run may skip one now and then."""
    engine: Any = SimpleNamespace(
        module=torch.nn.Linear(1, 1), skipped_steps=0, get_global_grad_norm=lambda: 1.0
    )
    loop: Any = object.__new__(Loop)
    loop.health = Health(engine, SimpleNamespace(device="cpu", has_state=False), 16, 10.0)  # type: ignore[arg-type]
    loop.args, loop.samples = SimpleNamespace(max_skipped_steps=3, learning_rate=0.1), 4
    loop.run = SimpleNamespace(
        arguments=loop.args,
        folder=RunFolder(tmp_path),
        metrics=SimpleNamespace(message=lambda text: None),
        saver=SimpleNamespace(pending=False),
        train_stream=SimpleNamespace(sample_ids=lambda first, count: []),
        log=lambda record: None,
    )

    def step(number: int, skipped: bool) -> None:
        loop.state = SimpleNamespace(step=number, consumed_samples=4 * number)
        engine.skipped_steps += skipped
        found = loop.health.after_step(number, 4 * number - 4, {}, torch.tensor(1.0), None)
        loop._judge_skip(
            Step(learning_rate=0.1, loss=torch.tensor(1.0), share=None, skipped=found, gemms=None)
        )

    for number, skipped in enumerate([1, 1, 0, 1, 1, 0, 0, 1, 1], start=1):
        step(number, bool(skipped))
    with pytest.raises(TrainingError) as error:
        step(10, True)
    assert numbers(error.value)[:2] == [3, 10]


@pytest.mark.parametrize(
    ("step", "last"), [({}, False), ({"last": True}, True), ({"stops": True}, True)], ids=str
)
def test_the_last_save_of_a_process_is_waited_for_and_must_succeed(step: dict, last: bool) -> None:
    """That of a stop, too, whatever save_async and on_save_failure are."""
    begun, said = list[bool](), list[str]()
    saver = SimpleNamespace(pending=False)

    def begin(state: Any, background: bool) -> None:
        begun.append(background)
        saver.pending = True

    def finish() -> None:
        saver.pending = False
        raise SaveError("the disk is full")

    saver.begin, saver.finish = begin, finish
    loop: Any = object.__new__(Loop)
    loop.args = SimpleNamespace(save_async=True, on_save_failure="continue")
    loop.state, loop.health = SimpleNamespace(step=4), SimpleNamespace(state_dict=lambda: {})
    watchdog = SimpleNamespace(met=lambda what: None, doing=lambda what: None)
    metrics = SimpleNamespace(message=said.append)
    loop.run = SimpleNamespace(saver=saver, watchdog=watchdog, metrics=metrics, arguments=loop.args)
    of_step = Step(learning_rate=0.1, loss=torch.tensor(1.0), share=None, skipped=False, gemms=None, **step)
    if last:
        with pytest.raises(SaveError):
            loop._save(of_step)
    else:
        loop._save(of_step)
        settle(loop.run)
        assert "on_save_failure is continue: the run goes on" in said[0]
    assert begun == [not last]


@pytest.mark.parametrize(
    ("saved", "pending", "said"),
    [
        ([], False, "this run has saved no checkpoint. Start anew"),
        ([], True, "checkpoints/step-N --learning_rate 0.00015 "),
        ([10, 20], False, "checkpoints/step-00000020 --learning_rate 0.00015 "),
    ],
)
def test_after_a_step_that_went_wrong_the_newest_checkpoint_is_named(
    tmp_path: Path, saved: list[int], pending: bool, said: str
) -> None:
    """With half of the learning rate; one that is being saved is as good as saved."""
    for step in saved:
        (tmp_path / "checkpoints" / name_of(step)).mkdir(parents=True)
        (tmp_path / "checkpoints" / name_of(step) / "manifest.json").write_text("{}")
    of_run: Any = SimpleNamespace(
        folder=RunFolder(tmp_path),
        saver=SimpleNamespace(pending=pending),
        arguments=SimpleNamespace(learning_rate=3e-4),
    )
    assert said in _advice(of_run)


def test_mfu_is_of_one_of_the_gpus() -> None:
    """tokens_per_second is of all of them."""
    loop: Any = object.__new__(Loop)
    loop.state, loop.clock_step, loop.clock = SimpleNamespace(step=30), 20, time.perf_counter() - 2.0
    loop.tokens, loop.world, loop.flops, loop.peak = 4000, 4, 1e9, 10.0
    loop.engine = SimpleNamespace(get_global_grad_norm=lambda: 1.0)
    loop.health = SimpleNamespace(skipped=0, spikes=0, mended=lambda: 0, interval_loss=lambda: 1.0)
    loop.run = SimpleNamespace(speeds=[])
    step = Step(learning_rate=0.1, loss=torch.tensor(1.0), share=None, skipped=False, gemms=None)
    loop._log(step, 1.0)
    assert step.record["tokens_per_second"] == pytest.approx(20_000, rel=0.1)
    assert loop.run.speeds == [step.record["tokens_per_second"]]
    assert (
        loop.clock_step == 30 and loop.clock > time.perf_counter() - 2.0
    )  # the next is of the steps after it
    assert step.record["mfu"] == pytest.approx(step.record["tokens_per_second"] / 4 * 1e9 / 10e12)


def test_a_step_that_stops_leaves_its_evaluation_to_the_resumed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for the process to end has seconds."""
    monkeypatch.setattr("train.loop.evaluate", lambda run: pytest.fail("evaluates"))
    loop: Any = object.__new__(Loop)
    loop.run, loop.state = None, SimpleNamespace(step=30, evaluation_due=False)
    loss = torch.tensor(1.0)
    step = Step(learning_rate=0.1, loss=loss, share=None, skipped=False, gemms=None, stops=True)
    loop._evaluate(step)
    assert loop.state.evaluation_due and step.stops and not step.record


class Evaluated:
    """A run of which only `evaluate` is called; the loss of a token is its id, and sample n has n for all ids."""

    def __init__(self, samples: int, size: int):
        self.arguments = SimpleNamespace(per_device_eval_batch_size=size, per_device_train_batch_size=7)
        self.eval_streams: Any = {"eval_loss": SimpleNamespace(num_samples=samples, batch=self._batch)}
        self.engine, self.forwards, self.device, self.module = self, 0, "cpu", None
        self.precision, self.state = SimpleNamespace(has_state=False), SimpleNamespace(step=1)
        self.stop_vote = SimpleNamespace(ask=lambda: (False, False, False))
        self.watchdog = SimpleNamespace(met=lambda what: None)
        self.modes: list[str] = []
        self.eval, self.train = (partial(self.modes.append, mode) for mode in ("eval", "train"))

    def _batch(self, start: int, count: int) -> Batch:
        ids = torch.arange(start, start + count)[:, None].expand(-1, 4)
        return Batch(ids, ids.clone())

    def __call__(self, ids: torch.Tensor, labels: torch.Tensor, documents: None) -> Any:
        self.forwards += 1
        return SimpleNamespace(loss=torch.nan_to_num(labels[labels != NO_LABEL].float().mean()))


@pytest.mark.parametrize("samples", range(1, 10))
def test_ranks_without_a_sample_evaluate_none_of_another(
    samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks with two rows each: the last of their forwards may have fewer samples than rows, or none."""
    totals: list[torch.Tensor] = []
    forwards = []
    for rank in range(2):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(dist, "all_reduce", totals.append)
        of_rank: Any = Evaluated(samples, size=2)
        evaluate(of_rank)
        forwards.append(of_rank.forwards)
    assert forwards[0] == forwards[1] == -(-samples // 4)
    assert sum(totals).tolist() == [4 * sum(range(samples)), 4 * samples]


def test_each_held_out_set_is_evaluated_by_itself(
    process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the FP8 state that training left, which is there again afterwards."""
    scale = torch.ones(1)
    monkeypatch.setattr("train.engine.held_out.fp8_state", lambda *_: {"scale": scale})
    monkeypatch.setattr("train.engine.held_out.snapshot_fp8_state", lambda *_: {"scale": scale.clone()})

    class Scaled(Evaluated):
        def __call__(self, ids: torch.Tensor, labels: torch.Tensor, documents: None) -> Any:
            scale.add_(1)
            return SimpleNamespace(loss=super().__call__(ids, labels, documents).loss * scale[0])

    of_run: Any = Scaled(samples=3, size=2)
    of_run.eval_streams["eval_loss/short"] = SimpleNamespace(num_samples=1, batch=of_run._batch)
    of_run.eval_streams["eval_loss/same"] = of_run.eval_streams["eval_loss"]
    # samples 0 and 1 with a scale of 2, sample 2 with one of 3; then sample 0, and a row without labels
    assert evaluate(of_run) == {
        "eval_loss": (1 * 2 + 2 * 3) / 3,
        "eval_loss/short": 0,
        "eval_loss/same": 8 / 3,
    }
    assert scale == 1
    # or no step after it would recompute activations, or replay a CUDA graph
    assert of_run.modes == ["eval", "train"]


@pytest.mark.parametrize("batches", [1, 2, 3, 4])
def test_an_evaluation_that_is_left_has_no_loss_of_any_set(process_group: None, batches: int) -> None:
    of_run: Any = Evaluated(samples=3, size=2)
    of_run.eval_streams["eval_loss/other"] = of_run.eval_streams["eval_loss"]
    of_run.stop_vote.ask = lambda: (of_run.forwards == batches, False, False)
    assert evaluate(of_run) is None and of_run.forwards == batches
    assert of_run.modes == ["eval", "train"]
