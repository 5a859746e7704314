"""FP8 alarms and fallbacks: what a health check leads to; each trouble injected into a run is found and named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model.build import build_model
from model.checks.health import check_due
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from tests.conftest import small_config
from tests.train.runs import curve, metrics, run
from train import trainer
from train.checkpoint.files import read_state
from train.monitor import fp8_alarms
from train.monitor.fp8_alarms import FP8Alarms, find_fallbacks

WELL = {"underflow": 0.001, "saturated": 0.0, "range": 1.0, "error": 0.027}
MLP = "model.layers.1.layernorm_mlp"
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


def health(**operands: dict[str, float | None]) -> dict[str, Any]:
    """Of the second of two layers' fc1 and fc2; each operand is well but for what is given as <gemm>_<operand>."""
    found: dict[str, Any] = {}
    for gemm in ("fc1", "fc2"):
        columns = found[f"model.layers.*.layernorm_mlp.{gemm}"] = {}
        for operand in ("input", "weight", "gradient"):
            values = WELL | operands.get(f"{gemm}_{operand}", {})
            columns[operand] = {what: [None, value] for what, value in values.items()}
    return found


def judged(*checks: dict[str, Any]) -> FP8Alarms:
    """The alarms after these checks; before each of them the run is stopped and resumed."""
    alarms = FP8Alarms()
    for step, found in enumerate(checks):
        resumed = FP8Alarms()
        resumed.load_state_dict(json.loads(json.dumps(alarms.state_dict())))
        alarms = resumed
        alarms.judge(step, found)
    return alarms


def te_layer(**changes: Any) -> tuple[Precision, Any]:
    precision = Precision(
        PrecisionConfig(backend="reference", health_steps=1, on_trouble="escalate", **changes)
    )
    return precision, build_model(small_config(), "te_layer", precision)


def began(folder: Path) -> dict[int, dict[tuple[str, str], set[str]]]:
    """Step -> (GEMM, operand) -> statistics of the alarms that began."""
    lines = {m["step"]: m["fp8_alarms"]["began"] for m in metrics(folder) if "fp8_alarms" in m}
    return {
        step: {(a["gemm"].rpartition("layers.")[2], a["operand"]): set(a["found"]) for a in alarms}
        for step, alarms in lines.items()
        if alarms
    }


# ---------------------------------------------------------------- alarms


@pytest.mark.parametrize(("what", "operand", "most", "value"), LIMITS)
def test_alarm_limits(what: str, operand: str, most: float, value: float) -> None:
    alarms = FP8Alarms()
    assert alarms.judge(1, health(**{f"fc2_{operand}": {what: most}})) == {}
    found = alarms.judge(2, health(**{f"fc2_{operand}": {what: value}}))["fp8_alarms"]
    assert found["began"] == [{"gemm": f"{MLP}.fc2", "operand": operand, "found": {what: value}}]


@pytest.mark.parametrize("well", [health(fc2_input={"underflow": 0.0249}), {}])
def test_alarm_start_and_end(well: dict[str, Any]) -> None:
    """What was saved is known after a resume. A GEMM without statistics does not run FP8 any more."""
    alarms = judged(health(), health(fc2_input={"underflow": 0.06}))
    for value, error in ((0.06, 0.03), (0.0251, 0.03), (0.01, 0.06), (0.01, 0.2), (0.051, 0.03)):
        found = alarms.judge(2, health(fc2_input={"underflow": value, "error": error}))["fp8_alarms"]
        assert found == {"began": [], "over": [], "active": 1, "count": 1}
    found = alarms.judge(9, well)["fp8_alarms"]
    over = {"gemm": f"{MLP}.fc2", "operand": "input", "since": 1}
    assert found == {"began": [], "over": [over], "active": 0, "count": 1}
    assert alarms.judge(10, health()) == {}


@pytest.mark.parametrize(
    ("found", "helps"),
    [
        ({"underflow": 0.2}, "precision.recipe block precision.bf16_modules"),
        ({"range": 4.1}, "precision.recipe current"),
        ({"saturated": 0.06}, "precision.recipe current"),
    ],
)
def test_alarm_suggests_a_key(found: dict[str, float], helps: str, logged: list[str]) -> None:
    FP8Alarms().judge(1, health(fc2_input=found))
    assert all(word in logged[0] for word in [f"{MLP}.fc2", *helps.split()])


# ---------------------------------------------------------------- fallbacks

ONE, OTHER = health(fc1_input={"range": 5.0}), health(fc1_weight={"range": 5.0})
BOTH = health(fc1_input={"range": 5.0}, fc1_weight={"range": 5.0})


@pytest.mark.parametrize(
    ("checks", "again", "fallbacks"),
    [
        ([ONE], True, 0),
        ([ONE, ONE], False, 1),
        ([ONE, health()], False, 0),
        ([ONE, OTHER], True, 0),
        ([ONE, BOTH], True, 1),
        ([ONE, health(), health(), ONE], False, 1),
        ([ONE, health(), health(), health(), ONE], True, 0),
        ([ONE, health(fc1_input={"range": 3.9})], False, 0),  # an alarm, but not above the limit
    ],
)
def test_fallback_after_two_of_four_checks(checks: list[dict], again: bool, fallbacks: int) -> None:
    """What one check finds is checked in the next step, too."""
    precision, model = te_layer()
    alarms = judged(*checks)
    changes = find_fallbacks(9, checks[-1], alarms, model, precision)
    assert (alarms.check_again, len(changes)) == (again, fallbacks)
    for steps, due in ((100, again), (9, True), (0, False)):
        precision.config.health_steps = steps
        assert bool(check_due(model, precision, 9, alarms.check_again)) == due
    precision.config.on_trouble = "warn"
    assert check_due(model, precision, 10, True) is None


def test_one_fallback_per_module_and_check() -> None:
    precision, model = te_layer()
    trouble = health(
        fc1_input={"underflow": 0.06, "error": 0.11}, fc2_gradient={"underflow": 0.9, "saturated": 0.05}
    )
    alarms = judged(trouble, trouble)
    (change,) = find_fallbacks(7, trouble, alarms, model, precision)
    assert change == {
        "step": 7,
        "module": MLP,
        "from": "delayed",
        "to": "current",
        "gemm": f"{MLP}.fc2",
        "operand": "gradient",
        "statistic": "underflow",
        "value": 0.9,
        "threshold": 0.6,
    }
    at_the_limit = health(fc1_input={"underflow": 0.05, "range": 4.0}, fc2_gradient={"error": 0.4})
    assert find_fallbacks(8, at_the_limit, judged(trouble, at_the_limit), model, precision) == []
    precision.fallbacks[MLP] = "block"
    wrong = health(fc1_weight={"error": 0.11})
    (change,) = find_fallbacks(8, wrong, judged(wrong, wrong), model, precision)
    assert (change["from"], change["to"], change["statistic"]) == ("block", "bf16", "error")
    precision.config.on_trouble = "warn"
    assert find_fallbacks(9, trouble, alarms, model, precision) == []


# ---------------------------------------------------------------- whole runs


@pytest.mark.slow
def test_stale_scale_alarm_survives_resume(
    settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and activations grow in one step beyond what the scales of the last ones hold."""
    settings |= {"max_steps": 9, "learning_rate": 1e-3, "precision": {"health_steps": 3}, "save_steps": 6}
    settings["model"] |= {"initialization": "normal"}  # small weights, which the step changes most
    rate = trainer.learning_rate_at
    monkeypatch.setattr(trainer, "learning_rate_at", lambda n, args: rate(n, args) * (500 if n == 4 else 1))
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


@pytest.mark.parametrize(
    "without", [{"compute": "bf16"}, pytest.param({"health_steps": 0}, marks=pytest.mark.slow)]
)
def test_phase_without_checks_ends_alarms(
    settings: dict,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    without: dict[str, Any],
) -> None:
    """Told once; and begun anew when somebody looks again."""
    monkeypatch.setitem(fp8_alarms.LIMITS, ("error", "gradient"), 0.001)
    schedule = [{"until_step": 2}, {"until_step": 4, **without}, {}]
    settings |= {"max_steps": 5, "precision": {"health_steps": 1, "schedule": schedule}, "logging_steps": 5}
    folder = run(settings)
    found = {m["step"]: m["fp8_alarms"] for m in metrics(folder) if "fp8_alarms" in m}
    assert list(found) == [1, 2, 3, 5] and found[2]["active"] == len(found[1]["began"]) > 0
    assert found[3] == {"began": [], "over": found[3]["over"], "active": 0, "count": found[2]["count"]}
    assert len(found[3]["over"]) == found[2]["active"] == len(found[5]["began"])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_healthy_run_has_no_alarm(settings: dict, recipe: str) -> None:
    settings |= {"max_steps": 24, "warmup_steps": 8, "learning_rate": 1e-3, "logging_steps": 24}
    folder = run(settings, precision={"recipe": recipe, "health_steps": 2})
    assert len([m for m in metrics(folder) if "fp8_health" in m]) == 12
    assert not [m for m in metrics(folder) if "fp8_alarms" in m]
