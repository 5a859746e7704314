"""test_fp8/convergence: how a row's process is started, stopped and judged; what is kept of it and taken over."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from test_fp8.common.rows import Row
from test_fp8.convergence import durations, earlier, trainings
from test_fp8.convergence.rows import ComparisonError, Plan, begun, read_metrics, trained_under
from tests.test_fp8.test_convergence_evidence import plans_of, row_in
from train.guard.signals import INTERRUPTED, STOPPED

NOTHING: Any = None


def test_a_training_has_nothing_of_the_launcher_that_this_program_may_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a Slurm job or under torchrun: two rows at a time would meet at one port."""
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(trainings.subprocess, "Popen", lambda *_, env, **__: seen.append(env))
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    for name in names:
        monkeypatch.setenv(name, "1")
    trainings.start(Plan(Row("x", {}), {}, [], tmp_path), 0, trainings.Limits(), 9).log.close()
    assert seen[0].keys().isdisjoint(names) and "PATH" in seen[0]


def test_a_training_is_asked_to_stop_once() -> None:
    """It may take a step and a save until it ends, and a second signal would end it without a checkpoint."""
    asked: list[int] = []
    process: Any = SimpleNamespace(poll=lambda: None, terminate=lambda: asked.append(1))
    running = [trainings.Training(NOTHING, process, 0, NOTHING)]
    for _ in range(3):
        trainings.stop(running)
    assert asked == [1]


@pytest.mark.parametrize("status", [0, STOPPED, INTERRUPTED, -signal.SIGTERM, 1, -signal.SIGKILL])
def test_what_a_training_ended_by(tmp_path: Path, status: int) -> None:
    """Of a stop that came before its first step as well. What a finished one was trained under is what it began with,
    also where it was gone on with under others."""
    plan = row_in(tmp_path / "x")
    began, now = trained_under(plan), trained_under(plan) | {"sources": "b"}
    trainings.note(plan, began, finished=False)
    process: Any = SimpleNamespace(returncode=status)
    log = (plan.folder / "log.txt").open("w")
    log.write("\n".join(f"line {number};" for number in range(50)))
    training = trainings.Training(plan, process, 0, log)
    if status in (1, -signal.SIGKILL):
        with pytest.raises(ComparisonError, match=f"row x: the training ended with status {status}") as error:
            trainings.ended(training, now, ["sources"])
        assert "line 49;" in str(error.value) and "line 9;" not in str(error.value)
    else:
        assert trainings.ended(training, now, ["sources"]) == (status == 0)
    was = begun(plan.folder)
    assert was is not None and was["finished"] == (status == 0) and was["conditions"] == began


def test_what_is_taken_over_has_what_curves_do_not_show(tmp_path: Path) -> None:
    """Steps that were skipped and alarms of FP8: by them a row is judged, and told of."""
    curves = {
        "step": [1, 2],
        "loss": [2.0, 1.0],
        "grad_norm": [1.0, 1.0],
        "eval_step": [2],
        "eval_loss": [1.5],
    }
    told = {"skipped_steps": 3, "memory_gib": 7.5, "tokens_per_second": 10.0, "fp8": "6 of 7"}
    row = {**told, "curves": curves, "trained_under": {"sources": "a"}, "health": {"alarms": 2}}
    plan = Plan(Row("x", {}), {"train_batch_size_tokens": 4}, [], tmp_path / "x")
    earlier._write(plan, row, "result.json")
    last, was = read_metrics(plan.folder)[-1], begun(plan.folder)
    assert (last["eval_loss"], last["skipped_steps"], last["memory_gib"]) == (1.5, 3, 7.5)
    assert was is not None and was["finished"] and was["health"] == {"alarms": 2}


def test_a_row_keeps_one_checkpoint() -> None:
    """Of 1.1 B parameters 15 GB, in time that a row with a change of its precision would take for more of them."""
    config = plans_of("--rows", "bf16")[0].config
    kept = {key: config[key] for key in ("save_strategy", "save_steps", "save_minutes", "save_total_limit")}
    assert kept == {"save_strategy": "steps", "save_steps": 0, "save_minutes": 0, "save_total_limit": 1}


def test_the_first_result_that_has_a_row_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Several may; and a row that is being trained has its own."""
    taken: list[tuple[str, str]] = []
    results = {"a": ["x"], "b": ["x", "y"], "c": ["y", "z"]}
    monkeypatch.setattr(earlier, "_read", lambda path: {"results": [{"row": n} for n in results[path.name]]})
    monkeypatch.setattr(earlier, "_changed", lambda *_: [])
    monkeypatch.setattr(earlier, "_write", lambda plan, row, name: taken.append((row["row"], name)))
    (tmp_path / "z").mkdir()
    plans = [Plan(Row(name, {}), {}, [], tmp_path / name) for name in "wxyz"]
    earlier.take_over(plans, [tmp_path / name for name in results])
    assert taken == [("x", "a"), ("y", "b")]


def test_a_plan_counts_starts_and_all_gpus_of_a_row() -> None:
    rates = []
    for nproc in (1, 2):
        (line, _) = durations.lines(plans_of("--rows", "bf16", "--nproc", str(nproc)), "h200", 1, nproc)
        found = re.findall(r"([\d,.]+) (?:M tokens|tokens/s|minutes)", line)
        tokens, rate, minutes = (float(number.replace(",", "")) for number in found)
        assert abs(60 * minutes - 1e6 * tokens / rate - durations.START_S) < 30
        rates.append(rate)
    assert 1.8 < rates[1] / rates[0] < 2
