"""precision.schedule: a change of the precision within a run is a stop and a resume with others, bit for bit."""

import json
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from model.checks.startup import StartupCheckError
from model.fp8.precision import PrecisionError
from tests.conftest import refused
from tests.train.runs import PRECISIONS, curve, gradients_without_fp8, metrics, run, tensors
from train import phase
from train import run as training
from train.checkpoint.files import read_state
from train.engine.zero import masters
from train.evaluation.models import plan_model
from train.record.history import read_history
from train.record.provenance import read_starts
from train.record.run_folder import RunFolder

START = "checkpoints/step-00000003"


def test_phase_change_equals_stop_and_resume(settings: dict, tmp_path: Path) -> None:
    """With a startup check and a speed of its own, and a checkpoint to resume from."""
    first, second = PRECISIONS["bf16"], PRECISIONS["delayed"]
    settings |= {"max_steps": 5, "logging_steps": 2}
    scheduled = {"precision": {"schedule": [{"until_step": 3, **first}, second]}}
    whole = run(settings, **scheduled)
    phases = {m["step"]: m["precision_stage"] for m in metrics(whole) if "precision_stage" in m}
    assert {s: (v["number"], v["compute"]) for s, v in phases.items()} == {3: (1, "bf16"), 5: (2, "fp8")}
    (start,) = read_starts(RunFolder(whole))
    assert phases[3]["tokens_per_second"] > 0
    (noted,) = start["phases"]
    assert start["fp8"] == "bf16" and noted["step"] == 3 and noted["fp8"].startswith("6/7 delayed")
    assert noted["new_phase"] and noted["took_s"] > 0 and noted["startup_checks"]
    assert read_history(whole).fp8() == f"bf16; then {noted['fp8']}"
    assert plan_model(whole / START, None).precision.compute == "bf16"
    assert read_state(whole / "checkpoints/step-00000005").precision["amax_history_len"] == 4

    two = tmp_path / "two"
    changed = {"precision": second, "allow_changes_on_resume": True}
    run(settings, **changed, output_dir=str(two), resume_from_checkpoint=str(whole / START))
    again = tmp_path / "again"
    run(settings, **scheduled, output_dir=str(again), resume_from_checkpoint=str(whole / START))
    for folder in (two, again):
        assert curve(folder) == curve(whole)[2:] and tensors(folder, 5) == tensors(whole, 5)


def test_edited_files_do_not_change_a_running_job(settings: dict, tmp_path: Path) -> None:
    model, zero = tmp_path / "model.json", tmp_path / "zero.json"
    text = Path(settings["model"]["config"]).read_text()
    auto = {"zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"}}
    schedule = [{"until_step": 1, **PRECISIONS["bf16"]}, PRECISIONS["current"]]
    settings |= {"model": {"config": str(model)}, "deepspeed": str(zero), "max_steps": 2}
    settings |= {"precision": {"schedule": schedule}}
    found, build = [], training.build_next_phase

    def edit_files(*of_run: Any) -> Any:
        model.write_text(json.dumps(json.loads(text) | {"rope_parameters": {"rope_theta": 100.0}}))
        zero.unlink()
        return build(*of_run)

    for name, next_phase in (("whole", build), ("edited", edit_files)):
        model.write_text(text), zero.write_text(json.dumps(auto))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(training, "build_next_phase", next_phase)
            folder = run(settings, output_dir=str(tmp_path / name))
        found.append((curve(folder), tensors(folder, 2)))
    assert found[0] == found[1]


def test_watchdog_during_phase_change(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a start and steps are: ranks that hang would be waited for, for the day that they wait for each other."""
    watched, build_engine = list[int](), phase.build_engine_and_resume

    def watched_build_engine(*of_run: Any) -> Any:
        watched.append(sum(thread.name == "watchdog" for thread in threading.enumerate()))
        return build_engine(*of_run)

    monkeypatch.setattr(phase, "build_engine_and_resume", watched_build_engine)
    schedule = [{"until_step": 1, **PRECISIONS["bf16"]}, PRECISIONS["current"]]
    run(settings, max_steps=2, precision={"schedule": schedule})
    assert watched == [1, 1] and "watchdog" not in [thread.name for thread in threading.enumerate()]


THREE = [{"until_tokens": 512, "compute": "bf16"}, {"until_step": 4}, {"recipe": "current"}]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "steps"), [(0, [4]), (1, [1, 2]), (2, [5]), (3, [3])])
def test_resume_at_any_step_of_a_schedule(
    settings: dict, tmp_path: Path, stage: int, steps: list[int]
) -> None:
    """The changes are those after steps 2 and 4."""
    settings |= {"precision": {"schedule": THREE}, "deepspeed": f"ds_config_zero{stage}.json"}
    whole = run(settings, save_steps=1, save_total_limit=10)
    for step in steps:
        branch = {"output_dir": str(tmp_path / f"from-{step}"), "save_steps": 2}
        start = str(whole / f"checkpoints/step-{step:08d}")
        folder = run(settings, **branch, resume_from_checkpoint=start)
        assert curve(folder) == curve(whole)[step:] and tensors(folder, 6) == tensors(whole, 6)


@pytest.mark.parametrize("zero", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_phase_change_releases_memory(settings: dict, monkeypatch: pytest.MonkeyPatch, zero: int) -> None:
    """Model, masters and moments would not fit twice; and FP8 that would not run ends a run that was in bf16."""
    held: list[weakref.ref] = []
    check_startup, build_engine = phase.check_startup, phase.build_engine_and_resume

    def proves(*of_run: Any) -> list[str]:
        assert not [each for each in held if each() is not None]
        return check_startup(*of_run)

    def built(*of_run: Any) -> tuple:
        engine, micro_step = build_engine(*of_run)
        held[:] = map(
            weakref.ref, (engine, *engine.module.parameters(), *(m.tensor for m in masters(engine)))
        )
        if len(of_run[2].precision.config.bf16_modules) == 2:
            gradients_without_fp8(monkeypatch)
        return engine, micro_step

    monkeypatch.setattr(phase, "check_startup", proves)
    monkeypatch.setattr(phase, "build_engine_and_resume", built)
    one, two = {"until_step": 1}, {"until_step": 2, "compute": "bf16", "bf16_modules": ["lm_head", "*.0"]}
    with refused(StartupCheckError, code="fp8_gemms"):
        run(
            settings,
            max_steps=3,
            precision={"schedule": [one, two, {}]},
            deepspeed=f"ds_config_zero{zero}.json",
        )
    assert [m["step"] for m in metrics(Path(settings["output_dir"]))] == [1, 2]


def test_unsupported_later_phase_raises_before_training(settings: dict) -> None:
    schedule = [{"until_step": 3, "compute": "bf16"}, {"bf16_modules": ["no.such"]}]
    with refused(PrecisionError):
        run(settings, precision={"schedule": schedule})
    assert not (Path(settings["output_dir"]) / "metrics.jsonl").exists()
