"""precision.on_trouble escalate: what is decided at a look, what that does to alarms and saves, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model.build import build_model
from model.fp8 import te_backend
from model.fp8.health import check_due
from model.fp8.modules import gemm_modules
from model.fp8.precision import Precision, PrecisionError
from model.fp8.recipes import PrecisionConfig
from tests.conftest import numbers, small_config
from tests.train.checkpoint.test_checkpoint import make
from tests.train.runs import run
from train import loop
from train.checkpoint.files import RunState, committed, discard_old, step_of
from train.config.arguments import ConfigurationError
from train.config.load import build_arguments, resolve_arguments
from train.guard.escalation import escalations, take_all_out
from train.guard.fp8_alarms import FP8Alarms
from train.loop import Loop, Step

ESCALATE = {"health_steps": 1, "on_trouble": "escalate"}
WELL = {"underflow": 0.001, "saturated": 0.0, "range": 1.0, "error": 0.027}


def look(**operands: dict[str, float]) -> dict[str, Any]:
    """Of the second of two layers' fc1 and fc2; each operand well but for what is given as <gemm>_<operand>."""
    found: dict[str, Any] = {}
    for gemm in ("fc1", "fc2"):
        columns = found[f"model.layers.*.layernorm_mlp.{gemm}"] = {}
        for operand in ("input", "weight", "gradient"):
            values = WELL | operands.get(f"{gemm}_{operand}", {})
            columns[operand] = {what: [WELL[what], value] for what, value in values.items()}
    return found


def judged(*looks: dict[str, Any]) -> FP8Alarms:
    alarms = FP8Alarms()
    for step, found in enumerate(looks):
        alarms.load_state_dict(json.loads(json.dumps(alarms.state_dict())))  # stopped and resumed
        alarms.judge(step, found)
    return alarms


def of_fallbacks(logged: list[str]) -> list[str]:
    """Return the lines of a log without those of alarms."""
    return [line for line in logged if "on_trouble" in line]


def test_what_one_look_finds_is_looked_at_in_the_next_step_and_goes_up_when_two_of_four_find_it(
    logged: list[str],
) -> None:
    precision = Precision(PrecisionConfig(backend="reference", **ESCALATE))
    model = build_model(small_config(), "te_layer", precision)
    one, other, both = (
        look(**dict.fromkeys(names, {"range": 5.0}))
        for names in (["fc1_input"], ["fc1_weight"], ["fc1_input", "fc1_weight"])
    )
    for looks, again, up in (
        ([one], True, 0),
        ([one, one], False, 1),
        ([one, look()], False, 0),
        ([one, other], True, 0),
        ([one, both], True, 1),
        ([one, look(), look(), one], False, 1),
        ([one, look(), look(), look(), one], True, 0),
        ([one, look(fc1_input={"range": 3.9})], False, 0),  # an alarm, but not above the limit
    ):
        alarms = judged(*looks)
        logged.clear()
        changes = escalations(9, looks[-1], alarms, model, precision)
        assert (alarms.look_again, len(changes), len(logged)) == (again, up, again + up)
        for steps, due in ((100, again), (9, True), (0, False)):
            precision.config.health_steps = steps
            assert bool(check_due(model, precision, 9, alarms.look_again)) == due
        precision.config.on_trouble = "warn"
        assert check_due(model, precision, 10, True) is None
        precision.config.on_trouble = "escalate"


def test_a_module_goes_up_once_a_look_by_what_is_worst(logged: list[str]) -> None:
    precision = Precision(PrecisionConfig(backend="reference", **ESCALATE))
    model = build_model(small_config(), "te_layer", precision)
    trouble = look(
        fc1_input={"underflow": 0.06, "error": 0.11}, fc2_gradient={"underflow": 0.9, "saturated": 0.05}
    )
    alarms = judged(trouble, trouble)
    (change,) = escalations(7, trouble, alarms, model, precision)
    mlp = "model.layers.1.layernorm_mlp"
    assert change == {
        "step": 7,
        "module": mlp,
        "from": "delayed",
        "to": "current",
        "gemm": f"{mlp}.fc2",
        "operand": "gradient",
        "statistic": "underflow",
        "value": 0.9,
        "threshold": 0.6,
    }
    (line,) = of_fallbacks(logged)
    assert mlp in line and numbers(line)[-2:] == [0.9, 0.6]
    at_the_limit = look(fc1_input={"underflow": 0.05, "range": 4.0}, fc2_gradient={"error": 0.4})
    assert escalations(8, at_the_limit, judged(trouble, at_the_limit), model, precision) == []
    precision.levels[mlp] = "block"
    wrong = look(fc1_weight={"error": 0.11})
    (change,) = escalations(8, wrong, judged(wrong, wrong), model, precision)
    assert (change["from"], change["to"], change["statistic"]) == ("block", "bf16", "error")
    precision.config.on_trouble = "warn"
    assert escalations(9, trouble, alarms, model, precision) == [] and len(of_fallbacks(logged)) == 2


def test_of_many_modules_some_are_named_the_worst_first(logged: list[str]) -> None:
    precision = Precision(PrecisionConfig(backend="reference", **ESCALATE))
    model = build_model(small_config(num_hidden_layers=10), "te_layer", precision)
    columns = {what: [value] * 10 for what, value in WELL.items()} | {"range": [5.0 + n for n in range(10)]}
    trouble = {"model.layers.*.self_attention.proj": {"input": columns}}
    found = escalations(1, trouble, judged(trouble, trouble), model, precision)
    assert [c["value"] for c in found] == [14.0 - n for n in range(10)]
    lines = of_fallbacks(logged)
    assert len(lines) == 9 and "layers.9." in lines[0] and numbers(lines[8]) == [1, 2]


def test_alarms_end_with_the_last_fp8_module(monkeypatch: pytest.MonkeyPatch, logged: list[str]) -> None:
    """No look follows that could say so."""
    mlp = "model.layers.1.layernorm_mlp"
    section, taken = PrecisionConfig(backend="reference", **ESCALATE), {"module": mlp, "to": "bf16"}
    precision = Precision(section)
    model = build_model(small_config(), "te_layer", precision)
    precision.levels = dict.fromkeys(gemm_modules(model, precision), "bf16") | {mlp: "block"}
    assert not take_all_out([taken], model, precision)  # lm_head's gradients are FP8 products still
    precision = Precision(section, levels={"lm_head": "bf16"})
    model = build_model(small_config(), "te_layer", precision)
    precision.levels = dict.fromkeys(gemm_modules(model, precision), "bf16") | {mlp: "current"}
    trouble = look(fc1_input={"error": 0.2})
    monkeypatch.setattr(loop, "health_record", lambda *_: trouble)
    for layers in trouble.values():
        for columns in layers.values():
            columns |= {what: [None, column[1]] for what, column in columns.items()}
    its: Any = Loop.__new__(Loop)
    its.state, its.health = (
        SimpleNamespace(step=7, escalations=[]),
        SimpleNamespace(fp8_alarms=judged(trouble)),
    )
    its.engine = SimpleNamespace(module=model)
    its.run = SimpleNamespace(
        state=its.state, precision=precision, metrics=SimpleNamespace(message=logged.append)
    )
    for level in ("block", "bf16"):
        its.state.step += 1
        step = Step(0.0, torch.zeros(()), None, False, None)
        its._look_at_fp8(step, SimpleNamespace(not_fp8=(), blocks=()))
        assert its.state.escalations[-1]["to"] == level
        precision.levels[mlp] = level
    assert step.record["fp8_alarms"] == {
        "began": [],
        "over": [{"gemm": f"{mlp}.fc1", "operand": "input", "since": 0}],
        "active": 0,
        "count": 1,
    }


@pytest.mark.parametrize(
    ("on_trouble", "looks", "due"),
    [("escalate", True, True), ("escalate", False, False), ("warn", True, False)],
)
def test_where_modules_may_go_up_the_numbers_are_looked_at_before(
    on_trouble: str, looks: bool, due: bool
) -> None:
    """Between two lines of metrics, too: the save has the losses of the steps up to it."""
    its: Any = Loop.__new__(Loop)
    its.args = SimpleNamespace(
        max_steps=9, save_steps=0, eval_steps=0, logging_steps=5, replica_check_steps=0, save_strategy="no"
    )
    its.state, its.slow_ranks = SimpleNamespace(step=2), SimpleNamespace(step=lambda *_: None)
    its._save_is_due = its._changes_precision = lambda: False
    its.run = SimpleNamespace(
        stop_vote=SimpleNamespace(ask=lambda *_: (False, False, False)),
        saver=SimpleNamespace(busy=False, pending=False),
        watchdog=SimpleNamespace(met=lambda what, after_step: None),
        metrics=SimpleNamespace(message=None),
        precision=SimpleNamespace(config=SimpleNamespace(on_trouble=on_trouble)),
    )
    check: Any = SimpleNamespace() if looks else None
    step = Step(0.0, torch.zeros(()), None, False, None, check)
    its._meet(step)
    assert step.due == due


def test_saves_of_modules_in_trouble_make_room_first(tmp_path: Path) -> None:
    """Of three that are kept one is lost to them, however many there are; a step of save_steps is none of them."""
    state = RunState(0, 0, 0, 1, 1, {"save_steps": 10}, {})
    state.escalations = [{"step": step, "module": "a", "to": "current"} for step in (20, 31, 32, 33)]
    assert state.unscheduled == {31, 32, 33}
    left = {20: [10, 20], 30: [10, 20, 30], 31: [20, 30, 31], 32: [20, 30, 32], 33: [20, 30, 33]}
    left |= {40: [20, 30, 40], 50: [30, 40, 50]}
    for step in (10, *left):
        discard_old(make(tmp_path, step), 3, state.unscheduled)
        assert [step_of(p) for p in committed(tmp_path)] == left.get(step, [10])
    state.train_config["save_steps"] = 0
    assert state.unscheduled == {20, 31, 32, 33}


@pytest.mark.parametrize(
    ("keys", "others", "key"),
    [
        ({"health_steps": 0}, {}, "precision.on_trouble"),
        ({"recipe": "tensorwise", "health_steps": 0}, {}, "precision.on_trouble"),
        ({}, {"save_strategy": "no"}, "save_strategy"),
        ({"schedule": [{"until_step": 2, "health_steps": 0}, {}]}, {}, "1 of 2"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict, keys: dict, others: dict, key: str) -> None:
    if "recipe" in keys:
        settings["model"]["variant"] = "torchao"
    with pytest.raises(ConfigurationError) as error:
        resolve_arguments(build_arguments({**settings, "precision": {**ESCALATE, **keys}, **others}), 1)
    assert key in str(error.value)


def test_a_machine_without_block_scaling_is_found_before_the_first_step(
    settings: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    def require(te: Any, recipe: str, instead: str = "use delayed or current") -> None:
        if recipe == "block":
            raise te_backend.BackendError(f"recipe block is not available here; {instead}")

    monkeypatch.setattr(te_backend, "require_fp8", require)
    with pytest.raises(PrecisionError) as error:
        run(settings, precision=ESCALATE)
    assert "precision.on_trouble" in str(error.value)
    assert not (Path(settings["output_dir"]) / "metrics.jsonl").exists()
