"""An evaluation that a run is stopped in: left, and made up for by the next start, in the precision of its step."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.reliability.stopping import stop_when
from tests.train.runs import metrics, run
from train.checkpoint.files import committed, read_state
from train.guard import fp8_alarms, signals
from train.guard.watchdog import FIRST_STEP_S, Watchdog
from train.record.metrics import MetricsLogger
from train.record.provenance import read_starts
from train.record.run_folder import RunFolder
from train.trainer import Trainer


@pytest.mark.parametrize(("evaluation", "step"), [(1, 2), pytest.param(3, 6, marks=pytest.mark.slow)])
def test_an_evaluation_is_left_and_made_up_for(
    settings: dict,
    tmp_path: Path,
    handlers: None,
    monkeypatch: pytest.MonkeyPatch,
    evaluation: int,
    step: int,
) -> None:
    """Also the last one, after which there is nothing left to train, and if a crash comes before the next save. Each
    has three batches here."""
    settings["eval_steps"] = 2
    whole = run({**settings, "output_dir": str(tmp_path / "whole")})
    with monkeypatch.context() as patch:
        stop_when(patch, Trainer, "held_out_losses", evaluation, signal.SIGUSR1)
        with pytest.raises(signals.Stopped, match=f"after step {step};"):
            run(settings)
    folder = Path(settings["output_dir"])
    assert [m.get("eval_loss") for m in metrics(folder) if m["step"] == step] == [None]
    signals.received.clear()
    right = Trainer._evaluate_first

    def crashes(*arguments: Any) -> None:
        right(*arguments)
        raise RuntimeError("a crash")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a crash"):
        patch.setattr(Trainer, "_evaluate_first", crashes)
        run(settings)
    assert [m.get("eval_loss") is None for m in metrics(folder) if m["step"] == step] == [True, False]
    run(settings)  # which makes up for it once more
    evaluated = [m for m in metrics(folder) if m.get("eval_loss") is not None]
    made_up = [(m["step"], m["eval_loss"]) for m in evaluated]
    assert all(m["unigram_loss"] > 0 for m in evaluated)
    expected = [(m["step"], m["eval_loss"]) for m in metrics(whole) if m.get("eval_loss") is not None]
    assert [s for s, _ in expected] == [2, 4, 6] and made_up == expected
    # what was saved since then has none to make up for
    assert read_state(committed(folder / "checkpoints")[-1]).evaluation_due == (step == 6)
    assert (folder / "hf/config.json").exists()


def test_an_evaluation_is_made_up_for_in_the_precision_of_its_step(
    settings: dict, tmp_path: Path, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a stage of precision.schedule ends with it, and where modules went up with it."""
    schedule = [{"until_step": 2, "compute": "bf16"}, {"on_trouble": "escalate", "recipe": "current"}]
    settings |= {"eval_steps": 2, "max_steps": 5, "precision": {"health_steps": 3, "schedule": schedule}}
    # of each gradient more is asked than FP8 can do, at the looks in steps 3 and 4
    monkeypatch.setitem(fp8_alarms.LIMITS, ("error", "gradient"), 0.001)
    whole = run({**settings, "output_dir": str(tmp_path / "whole")})
    folder = Path(settings["output_dir"])
    for step, evaluation in ((2, 1), (4, 2)):  # the second start makes up for the first one's
        with monkeypatch.context() as patch:
            stop_when(patch, Trainer, "held_out_losses", evaluation, signal.SIGUSR1)
            with pytest.raises(signals.Stopped, match=f"after step {step};"):
                run(settings)
        signals.received.clear()
    run(settings)
    took_up = [m["step"] for m in metrics(folder) if "fp8_escalations" in m]
    assert took_up[0] == 4
    evaluated = [
        [(m["step"], m["eval_loss"]) for m in metrics(f) if "eval_loss" in m] for f in (whole, folder)
    ]
    assert [step for step, _ in evaluated[0]] == [2, 4, 5] and evaluated[1] == evaluated[0]


def test_a_branch_that_is_stopped_before_its_first_step_names_where_it_began(
    settings: dict, tmp_path: Path, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command goes on from there; with auto it would begin anew."""
    settings |= {"eval_steps": 2, "precision": {"compute": "bf16"}}
    said = "a/checkpoints/step-00000002 is committed. The same command goes on from there"
    for folder, start in (
        (tmp_path / "a", "auto"),
        (tmp_path / "b", str(tmp_path / "a/checkpoints/step-00000002")),
    ):
        with monkeypatch.context() as patch:
            stop_when(patch, Trainer, "held_out_losses", 1, signal.SIGUSR1)
            with pytest.raises(signals.Stopped, match=said):
                run(settings, output_dir=str(folder), resume_from_checkpoint=start)
        signals.received.clear()
        log = (folder / "train.log").read_text()
        assert said in log and "Traceback" not in log, "it was asked for"
        assert [each["ended"]["how"] for each in read_starts(RunFolder(folder))] == ["stopped"]
    kept = [json.loads((tmp_path / name / "stopped.json").read_text())["checkpoint"] for name in "ab"]
    assert kept == ["step-00000002", start] and not (tmp_path / "b/checkpoints").exists()


def test_a_command_that_would_do_again_what_it_asked_for_is_told_what_goes_on(
    settings: dict, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that began anew, and of one that went back to a checkpoint of its own, the same command loses what was
    saved since."""
    settings |= {"eval_steps": 2, "precision": {"compute": "bf16"}}
    own = f"{settings['output_dir']}/checkpoints/step-00000002"
    for evaluation, begins, needs in ((1, "never", True), (2, own, True), (2, "auto", False)):
        option = " with --resume_from_checkpoint auto" * needs
        with monkeypatch.context() as patch:
            stop_when(patch, Trainer, "held_out_losses", evaluation, signal.SIGUSR1)
            with pytest.raises(signals.Stopped, match=f"The same command{option} goes on from there"):
                run(settings, resume_from_checkpoint=begins)
        signals.received.clear()


def test_ranks_end_together_behind_what_rank_0_has_to_write(
    settings: dict, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """stopped.json, the export, what trackers still send: soon after the first rank a launcher ends the others."""
    settings |= {"eval_steps": 2, "max_steps": 3, "precision": {"compute": "bf16"}}
    events, barrier, close = list[str](), dist.barrier, MetricsLogger.close
    monkeypatch.setattr(dist, "barrier", lambda *a, **k: events.append("meet") or barrier(*a, **k))
    monkeypatch.setattr(MetricsLogger, "close", lambda self: close(self) or events.append("closed"))
    with monkeypatch.context() as patch:
        stop_when(patch, Trainer, "held_out_losses", 1, signal.SIGUSR1)
        with pytest.raises(signals.Stopped):
            run(settings)
    assert events[-2:] == ["closed", "meet"]
    signals.received.clear()
    events.clear()
    run(settings)
    assert events[-2:] == ["closed", "meet"]


def test_an_evaluation_that_is_made_up_for_leaves_the_first_step_its_time(
    settings: dict, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are compiled and graphs captured in the first step, whatever comes before it."""
    settings["eval_steps"] = 2
    with monkeypatch.context() as patch:
        stop_when(patch, Trainer, "held_out_losses", 1, signal.SIGUSR1)
        with pytest.raises(signals.Stopped, match="after step 2;"):
            run(settings)
    signals.received.clear()
    left_s: dict[str, float] = {}
    right = Watchdog.met

    def met(self: Watchdog, doing: str, *values: bool, **named: bool) -> None:
        right(self, doing, *values, **named)
        left_s.setdefault(doing, self._deadline - time.monotonic())

    monkeypatch.setattr(Watchdog, "met", met)
    run(settings, hang_timeout_s=600)
    assert 1200 < left_s["evaluates step 2"] <= FIRST_STEP_S
    assert left_s["step 3 is done"] <= 600 and left_s["evaluates step 4"] <= 600
