"""precision.schedule: a change of the precision within a run is a stop and a resume with others, bit for bit.

With speed.cuda_graphs, each phase captures its own graphs.
"""

import json
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from model.checks.startup import StartupCheckError
from model.fp8.precision import PrecisionError
from model.graphs import _Captured
from tests.conftest import refused
from tests.train.engine.test_speed import graphs_on_tapes
from tests.train.runs import PRECISIONS, curve, gradients_without_fp8, metrics, run, tensors
from train import phase
from train import run as training
from train.checkpoint.files import read_state
from train.engine.zero import masters
from train.evaluation.models import plan_model
from train.monitor import signals
from train.record.history import read_history
from train.record.provenance import read_starts
from train.record.run_folder import RunFolder
from train.trainer import Trainer

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


def test_phases_share_process_groups(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group holds threads and file descriptors until the process ends: one for votes, and one for saves."""
    made, new_group = list[str](), dist.new_group
    monkeypatch.setattr(
        dist,
        "new_group",
        lambda *its, **options: made.append(options["backend"]) or new_group(*its, **options),
    )
    schedule = [{"until_step": 1, **PRECISIONS["bf16"]}, PRECISIONS["current"]]
    run(settings, max_steps=2, precision={"schedule": schedule})
    assert made == ["gloo", "gloo"]


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


# ---------------------------------------------------------------- CUDA graphs


GPU = torch.cuda.is_available()
CHANGES, STEPS = (2, 5), 7  # after steps 2 and 5: two steps in bf16, three in FP8, two in bf16


def with_schedule(settings: dict, variant: str, recipe: str, cuda_graphs: bool) -> dict:
    bf16 = PRECISIONS["bf16"]
    stages = [{"until_step": CHANGES[0], **bf16}, {"until_step": CHANGES[1], **PRECISIONS[recipe]}, bf16]
    return settings | {
        "model": {**settings["model"], "variant": variant},
        "precision": {"schedule": stages},
        "speed": {"cuda_graphs": cuda_graphs},
        "full_determinism": True,
        "max_steps": STEPS,
    }


@pytest.mark.skipif(GPU, reason="test_speed.py compares graphs with none there")
@pytest.mark.slow
@pytest.mark.parametrize(("variant", "recipe"), [("te_layer", "delayed"), ("te_linear", "current")])
def test_graphs_in_each_phase_are_bit_equal(
    settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, recipe: str
) -> None:
    """So are resumes from a checkpoint in each phase. On a CPU, tapes stand in for graphs."""
    graphs_on_tapes(monkeypatch)
    plain, whole = tmp_path / "plain", tmp_path / "whole"
    without = with_schedule(settings, variant, recipe, False) | {"output_dir": str(plain)}
    run(without)
    with_graphs = with_schedule(settings, variant, recipe, True) | {"save_steps": 1, "save_total_limit": 10}
    run(with_graphs, output_dir=str(whole))
    assert curve(whole) == curve(plain) and tensors(whole, STEPS) == tensors(plain, STEPS)
    for saved in (1, 4):
        folder = tmp_path / f"from-{saved}"
        start = str(whole / f"checkpoints/step-{saved:08d}")
        run(with_graphs, output_dir=str(folder), save_steps=STEPS, resume_from_checkpoint=start)
        assert curve(folder) == curve(whole)[saved:] and tensors(folder, STEPS) == tensors(whole, STEPS)


# The CPU reference, with tapes for graphs, and Transformer Engine on a GPU.
CPU = pytest.param("cpu", marks=pytest.mark.skipif(GPU, reason="the GPU form of this test runs there"))
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("variant", ["te_layer", "te_linear"])
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_resume_in_fp8_phase_is_bit_exact(
    settings: dict,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
    variant: str,
    cuda_graphs: bool,
) -> None:
    """Losses, gradient norms and what is saved at the end."""
    settings, stop, take = with_schedule(settings, variant, recipe, cuda_graphs), 4, Trainer.take_step
    whole, folder = tmp_path / "whole", Path(settings["output_dir"])
    run(settings, output_dir=str(whole))

    def should_stop(self: Trainer) -> Any:
        if self.state.step + 1 == stop:
            signals.received.append("SIGTERM")
        return take(self)

    with monkeypatch.context() as patch:
        patch.setattr(signals, "received", [])
        patch.setattr(Trainer, "take_step", should_stop)
        with pytest.raises(signals.Stopped) as stopped:
            run(settings)
    assert stopped.value.step == stop
    assert curve(folder) == curve(whole)[:stop]
    run(settings)
    assert all(norm > 0 for _, _, norm, *_ in curve(whole))
    assert curve(folder) == curve(whole) and tensors(folder, STEPS) == tensors(whole, STEPS)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_phase_change_releases_graphs(settings: dict, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """The memory of both stages' graphs, and with them both models, would not fit."""
    if device == "cpu":
        graphs_on_tapes(monkeypatch)
    held, alive = list[weakref.ref](), list[tuple[int, int]]()
    capture, build = _Captured.__init__, phase.build_model_and_precision

    def captured(self: _Captured, *of_passes: Any) -> None:
        held.append(weakref.ref(self))
        capture(self, *of_passes)

    def made(*of_run: Any) -> Any:
        alive.append((len(held), sum(each() is not None for each in held)))
        return build(*of_run)

    monkeypatch.setattr(_Captured, "__init__", captured)
    monkeypatch.setattr(phase, "build_model_and_precision", made)
    run(with_schedule(settings, "te_layer", "delayed", True))
    # by a stage: one for all micro-batches, in FP8 one for the first of a step, one for the others, one for health
    assert alive == [(0, 0), (1, 0), (4, 0)]
