"""Tests of runs that are stopped during an evaluation.

The next start repeats the evaluation in the precision of its step.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.conftest import stop_when
from tests.train.runs import metrics, run
from train.checkpoint.files import committed, read_state
from train.monitor import fp8_alarms, signals
from train.trainer import Trainer


@pytest.mark.parametrize(("evaluation", "step"), [(1, 2), pytest.param(3, 6, marks=pytest.mark.slow)])
def test_stopped_evaluation_runs_on_resume(
    settings: dict,
    tmp_path: Path,
    handlers: None,
    monkeypatch: pytest.MonkeyPatch,
    evaluation: int,
    step: int,
) -> None:
    """A stopped evaluation is repeated even if the run crashes before the next save, or if no steps are left to train.

    Each evaluation has three batches here.
    """
    settings["eval_steps"] = 2
    whole = run({**settings, "output_dir": str(tmp_path / "whole")})
    with monkeypatch.context() as patch:
        stop_when(patch, Trainer, "_evaluate", evaluation, signal.SIGUSR1)
        with pytest.raises(signals.Stopped) as stopped:
            run(settings)
    assert stopped.value.step == step
    folder = Path(settings["output_dir"])
    assert [m.get("eval_loss") for m in metrics(folder) if m["step"] == step] == [None]
    signals.received.clear()
    right = Trainer._evaluate_first

    def crashes(*arguments: Any) -> None:
        right(*arguments)
        raise RuntimeError("a crash")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
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


def test_stopped_evaluation_keeps_its_precision(
    settings: dict, tmp_path: Path, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated evaluation uses the precision of its step, even if the precision changes after this step.

    The precision changes once because a phase of precision.schedule ends, and once because modules fall back.
    """
    schedule = [{"until_step": 2, "compute": "bf16"}, {"on_trouble": "escalate", "recipe": "current"}]
    settings |= {"eval_steps": 2, "max_steps": 5, "precision": {"health_steps": 3, "schedule": schedule}}
    # of each gradient more is asked than FP8 can do, at the looks in steps 3 and 4
    monkeypatch.setitem(fp8_alarms.LIMITS, ("error", "gradient"), 0.001)
    whole = run({**settings, "output_dir": str(tmp_path / "whole")})
    folder = Path(settings["output_dir"])
    for step, evaluation in ((2, 1), (4, 2)):  # the second start makes up for the first one's
        with monkeypatch.context() as patch:
            stop_when(patch, Trainer, "_evaluate", evaluation, signal.SIGUSR1)
            with pytest.raises(signals.Stopped) as stopped:
                run(settings)
        assert stopped.value.step == step
        signals.received.clear()
    run(settings)
    took_up = [m["step"] for m in metrics(folder) if "fp8_escalations" in m]
    assert took_up[0] == 4
    evaluated = [
        [(m["step"], m["eval_loss"]) for m in metrics(f) if "eval_loss" in m] for f in (whole, folder)
    ]
    assert [step for step, _ in evaluated[0]] == [2, 4, 5] and evaluated[1] == evaluated[0]
