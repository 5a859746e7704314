"""Alarms of FP8: each trouble injected into a run is found at the next look and named; a healthy run has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import numbers
from tests.train.runs import PRECISIONS, curve, metrics, run
from train import loop
from train.checkpoint.files import read_state
from train.guard import fp8_alarms
from train.guard.fp8_alarms import FP8Alarms
from train.loop import Loop

WELL = {"underflow": 0.001, "saturated": 0.0, "range": 1.0, "error": 0.027}
# Statistic, operand, a value that is none, one that is an alarm
LIMITS = [
    ("underflow", "input", 0.05, 0.051),
    ("underflow", "weight", 0.05, 0.051),
    ("underflow", "gradient", 0.6, 0.61),
    ("saturated", "gradient", 0.05, 0.06),
    ("range", "input", 4.0, 4.1),
    ("error", "weight", 0.106, 0.107),
    ("error", "gradient", 0.4, 0.41),
]


def health(operand: str, layer: int = 1, **found: float) -> dict[str, Any]:
    """Of three layers, well but for one operand; a layer without FP8 has none."""
    columns = {
        each: {what: [None, value, value] for what, value in WELL.items()}
        for each in ("input", "weight", "gradient")
    }
    for what, value in found.items():
        columns[operand][what][layer] = value
    return {"model.layers.*.mlp.fc2": columns}


def began(folder: Path) -> dict[int, dict[tuple[str, str], set[str]]]:
    """Step -> (GEMM, operand) -> statistics of the alarms that began."""
    lines = {m["step"]: m["fp8_alarms"]["began"] for m in metrics(folder) if "fp8_alarms" in m}
    return {
        step: {(a["gemm"].rpartition("layers.")[2], a["operand"]): set(a["found"]) for a in alarms}
        for step, alarms in lines.items()
        if alarms
    }


@pytest.mark.parametrize(("what", "operand", "most", "value"), LIMITS)
def test_limits(what: str, operand: str, most: float, value: float, logged: list[str]) -> None:
    alarms = FP8Alarms()
    assert alarms.judge(1, health(operand, **{what: most})) == {} and not logged
    found = alarms.judge(2, health(operand, **{what: value}))["fp8_alarms"]
    gemm = "model.layers.1.mlp.fc2"
    assert found["began"] == [{"gemm": gemm, "operand": operand, "found": {what: value}}]
    assert len(logged) == 1 and gemm in logged[0]


def test_an_alarm_is_told_once_and_when_it_is_over(logged: list[str]) -> None:
    """Not while it is near its limit; what was saved is known after a resume."""
    alarms = FP8Alarms()
    assert alarms.judge(1, health("input", underflow=0.06))["fp8_alarms"]["active"] == 1
    resumed = FP8Alarms()
    resumed.load_state_dict(json.loads(json.dumps(alarms.state_dict())))
    for value, error in ((0.06, 0.03), (0.0251, 0.03), (0.01, 0.06), (0.01, 0.2), (0.051, 0.03)):
        found = resumed.judge(2, health("input", underflow=value, error=error))["fp8_alarms"]
        assert found == {"began": [], "over": [], "active": 1, "count": 1} and len(logged) == 1
    found = resumed.judge(9, health("input", underflow=0.0249))["fp8_alarms"]
    over = {"gemm": "model.layers.1.mlp.fc2", "operand": "input", "since": 1}
    assert found == {"began": [], "over": [over], "active": 0, "count": 1}
    assert resumed.judge(10, health("input")) == {} and len(logged) == 2


def test_an_alarm_is_over_where_its_gemm_runs_fp8_no_more(logged: list[str]) -> None:
    """As after a resume with another bf16_modules, or a stage; not where what is in trouble is not a number."""
    alarms = FP8Alarms()
    alarms.judge(1, health("input", underflow=0.06))
    not_finite = health("input")
    for column in not_finite["model.layers.*.mlp.fc2"]["input"].values():
        column[1] = None
    assert alarms.judge(2, not_finite)["fp8_alarms"]["active"] == 1
    for operand in ("weight", "gradient"):
        for column in not_finite["model.layers.*.mlp.fc2"][operand].values():
            column[1] = None
    found = alarms.judge(3, not_finite)["fp8_alarms"]
    assert [entry["since"] for entry in found["over"]] == [1] and found["active"] == 0
    assert len(logged) == 2
    assert alarms.judge(4, not_finite) == {}


def test_of_many_the_worst_are_named(logged: list[str]) -> None:
    values = health("input")
    values["model.layers.*.mlp.fc2"]["input"] = {what: [v] * 7 for what, v in WELL.items()}
    values["model.layers.*.mlp.fc2"]["input"]["underflow"] = [0.1 * n for n in range(7)]
    alarms, well = FP8Alarms(), health("input")
    well["model.layers.*.mlp.fc2"]["input"] = {what: [v] * 7 for what, v in WELL.items()}
    found = alarms.judge(1, values)["fp8_alarms"]
    assert len(found["began"]) == found["count"] == 6 and len(logged) == 5
    assert "layers.6." in logged[0] and "60.0%" in logged[0] and "layers.3." in logged[3]
    assert numbers(logged[4]) == [1, 2]
    alarms.judge(2, well)
    assert len(logged) == 6 and numbers(logged[5])[-1] == 6


@pytest.mark.parametrize(
    ("fraction", "cause"),
    [
        (0.24, fp8_alarms.LARGER),
        (0.26, "precision.recipe block"),
        (1.1, "precision.recipe block"),
        (1.11, fp8_alarms.STALE),
    ],
)
def test_the_cause_is_told_by_how_much_of_its_range_a_scale_uses(
    fraction: float, cause: str, logged: list[str]
) -> None:
    FP8Alarms().judge(1, health("weight", underflow=0.2, range=fraction))
    assert cause in logged[0]


@pytest.mark.parametrize(("gemm", "module"), [("mlp.fc2", "mlp"), ("mlp.up_proj", "mlp.up_proj")])
def test_what_is_advised_can_be_done(gemm: str, module: str, logged: list[str]) -> None:
    """Modules, not their GEMMs, are what bf16_modules names; and block scaling is no advice where it is used."""
    found = {f"model.layers.*.{gemm}": health("input", underflow=0.2)["model.layers.*.mlp.fc2"]}
    for blocks in ([], [f"model.layers.1.{gemm}"]):
        logged.clear()
        FP8Alarms().judge(1, found, blocks=blocks)
        assert f"model.layers.1.{module} in " in logged[0] and "bf16_modules" in logged[0]
        assert ("precision.recipe block" in logged[0]) == (not blocks)


@pytest.mark.slow
def test_a_stale_scale_after_a_jump_of_the_rate_is_found_and_a_resume_knows_it(
    settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and activations grow in one step beyond what the scales of the last ones hold."""
    settings |= {"max_steps": 9, "learning_rate": 1e-3, "precision": {"health_steps": 3}, "save_steps": 6}
    rate = loop.learning_rate_at
    monkeypatch.setattr(loop, "learning_rate_at", lambda n, args: rate(n, args) * (500 if n == 4 else 1))
    folder = run(settings)
    found = began(folder)
    assert min(found) == 6 and {"range", "error"} <= found[6]["0.layernorm_mlp.fc1", "weight"]
    assert {operand for _, operand in found[6]} == {"input", "weight", "gradient"}
    alarms = read_state(folder / "checkpoints/step-00000006").health["fp8_alarms"]
    assert alarms["count"] == len(found[6]) and {entry[2] for entry in alarms["active"]} == {6}

    start = str(folder / "checkpoints/step-00000006")
    again = run(settings, output_dir=str(tmp_path / "again"), resume_from_checkpoint=start)
    lines = [[m.get("fp8_alarms") for m in metrics(each) if m["step"] > 6] for each in (folder, again)]
    assert lines[0] == lines[1] and curve(again) == curve(folder)[6:]


@pytest.mark.parametrize("without", [{"compute": "bf16"}, {"health_steps": 0}])
def test_alarms_are_over_in_a_stage_that_does_not_look(
    settings: dict,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    without: dict[str, Any],
) -> None:
    """Told once, also where a start goes on from the change; and begun anew when somebody looks again."""
    monkeypatch.setitem(fp8_alarms.LIMITS, ("error", "gradient"), 0.001)
    schedule = [{"until_step": 2}, {"until_step": 4, **without}, {}]
    settings |= {"max_steps": 5, "precision": {"health_steps": 1, "schedule": schedule}, "logging_steps": 5}
    folder = run(settings)
    found = {m["step"]: m["fp8_alarms"] for m in metrics(folder) if "fp8_alarms" in m}
    assert list(found) == [1, 2, 3, 5] and found[2]["active"] == len(found[1]["began"]) > 0
    assert found[3] == {"began": [], "over": found[3]["over"], "active": 0, "count": found[2]["count"]}
    assert len(found[3]["over"]) == found[2]["active"] == len(found[5]["began"])

    start = str(folder / "checkpoints/step-00000002")
    again = run(settings, output_dir=str(tmp_path / "again"), resume_from_checkpoint=start)
    assert {m["step"]: m["fp8_alarms"] for m in metrics(again) if "fp8_alarms" in m} == {
        step: found[step] for step in (3, 5)
    }


@pytest.mark.slow
def test_a_gradient_that_underflows_is_found_in_the_first_step(settings: dict) -> None:
    """Without calibration its scale is 1."""
    found = began(run(settings, max_steps=2, precision={"calibration_passes": 0, "health_steps": 1}))
    assert "underflow" in found[1]["0.layernorm_mlp.fc1", "gradient"] and 2 not in found
    assert not [operand for _, operand in found[1] if operand == "weight"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_a_channel_that_grows_is_found_where_it_is(
    settings: dict, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    """The input of one MLP, sixteen times larger in one channel each step, of which its matrix takes nothing. With one
    scale for 128 values it hides the others of its channels, which here are all there are."""
    take = Loop._take_step

    def grown(self: Loop) -> Any:
        mlp = self.engine.module.model.layers[1].layernorm_mlp
        with torch.no_grad():
            mlp.layer_norm_weight[3] = 16.0**self.state.step
            mlp.fc1_weight[:, 3] = 0
        return take(self)

    monkeypatch.setattr(Loop, "_take_step", grown)
    settings |= {"learning_rate": 1e-4, "max_steps": 6}
    found = began(run(settings, precision={**PRECISIONS[recipe], "health_steps": 1}))
    where = ("1.layernorm_mlp.fc1", "input")
    assert {key for keys in found.values() for key in keys} == {where}
    # with a history it is its growth that is seen first
    assert found[2 if recipe == "delayed" else 5] == {where: found[min(found)][where]}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_a_healthy_run_has_no_alarm(settings: dict, recipe: str) -> None:
    settings |= {"max_steps": 24, "warmup_steps": 8, "learning_rate": 1e-3, "logging_steps": 24}
    folder = run(settings, precision={"recipe": recipe, "health_steps": 2})
    assert len([m for m in metrics(folder) if "fp8_health" in m]) == 12
    assert not [m for m in metrics(folder) if "fp8_alarms" in m]
