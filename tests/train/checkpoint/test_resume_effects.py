"""What an allowed change on a resume does to the next steps (slow), and that it is noted; branches in a new folder.

The decision for each key: test_resume.py."""

import json
from pathlib import Path

import pytest

from tests.conftest import refused
from tests.train.runs import curve, metrics, run
from train import train
from train.checkpoint.files import CheckpointError, read_signed, read_state
from train.config.arguments import ConfigurationError
from train.config.load import build_arguments
from train.engine.optimizer import learning_rate_at

ALL_AT_ONCE = {
    "learning_rate": 1e-3,
    "max_steps": 8,
    "weight_decay": 0.3,
    "adam_beta1": 0.8,
    "adam_beta2": 0.9,
    "adam_epsilon": 1e-6,
    "max_grad_norm": 0.25,
}


def test_allowed_changes_are_recorded(own_trained: Path, settings: dict) -> None:
    """A longer cosine and other settings of AdamW, at once. They are noted in the metrics and the next checkpoint."""
    before = curve(own_trained)
    with refused(CheckpointError, code="change_not_allowed") as error:
        run(settings, **ALL_AT_ONCE, allow_changes_on_resume=["learning_rate"])
    assert {change.key for change in error.value.changes} == ALL_AT_ONCE.keys()
    run(settings, **ALL_AT_ONCE, allow_changes_on_resume=list(ALL_AT_ONCE))
    entries = [
        {"step": 6, "key": key, "old": settings.get(key), "new": new} for key, new in ALL_AT_ONCE.items()
    ]
    by_default = {
        "weight_decay": 0.1,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-8,
        "max_grad_norm": 1,
    }
    entries = [entry | {"old": by_default.get(entry["key"], entry["old"])} for entry in entries]
    (line,) = [line for line in metrics(own_trained) if "changes" in line]
    last = own_trained / "checkpoints/step-00000008"
    for noted in (
        line["changes"],
        read_state(last).changes,
        read_signed(last / "manifest.json", "changes")[0],
    ):
        assert sorted(noted, key=lambda e: e["key"]) == sorted(entries, key=lambda e: e["key"])
    after = curve(own_trained)
    args = build_arguments({**settings, **ALL_AT_ONCE})
    assert after[:6] == before and [entry[3] for entry in after[6:]] == [
        learning_rate_at(n, args) for n in (6, 7)
    ]

    # started again from the same checkpoint it is the same, and noted once
    (last / "manifest.json").unlink()
    run(settings, **ALL_AT_ONCE, allow_changes_on_resume=list(ALL_AT_ONCE))
    assert curve(own_trained) == after
    assert len([line for line in metrics(own_trained) if "changes" in line]) == 1


DECAY = {"lr_scheduler_type": "warmup_stable_decay", "decay_steps": 2, "learning_rate": 5e-3}


@pytest.mark.slow
def test_branch_in_a_new_folder(settings: dict, tmp_path: Path) -> None:
    """From the middle of a warmup_stable_decay run, by one command; a second start goes on from its own checkpoint."""
    stable = run(settings, **DECAY, max_steps=12, save_steps=4, eval_steps=0)
    start, branch = stable / "checkpoints/step-00000004", tmp_path / "branch"
    before, lines = curve(stable), (stable / "metrics.jsonl").read_bytes()
    command = {
        **DECAY,
        "max_steps": 8,
        "save_steps": 2,
        "output_dir": str(branch),
        "resume_from_checkpoint": str(start),
        "allow_changes_on_resume": ["max_steps"],
    }
    with refused(CheckpointError, key="max_steps"):
        run(settings, **{**command, "allow_changes_on_resume": False})
    assert not branch.exists()
    run(settings, **command)
    whole = curve(branch)
    assert [entry[0] for entry in whole] == [5, 6, 7, 8]
    assert whole[:2] == before[4:6], "as long as the rate is the same"
    assert whole[2][3] == before[6][3] and whole[3][3] < before[7][3]
    (line,) = [line for line in metrics(branch) if "began_at" in line]
    assert line["step"] == 4 and line["began_at"]["path"] == str(start.resolve())
    assert [change["key"] for change in line["changes"]] == ["max_steps"]
    assert (stable / "metrics.jsonl").read_bytes() == lines and not (branch / "stopped.json").exists()

    (branch / "checkpoints/step-00000008/manifest.json").unlink()
    run(settings, **command)
    assert curve(branch) == whole and not list(branch.glob("checkpoints.discarded-*"))


def test_max_steps_below_the_current_step_raises(own_trained: Path, settings: dict, tmp_path: Path) -> None:
    """Before anything is written. An earlier checkpoint trains on in a new folder."""
    before = {path: path.stat().st_mtime_ns for path in own_trained.rglob("*")}
    settings |= {"max_steps": 4, "allow_changes_on_resume": ["max_steps"]}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(settings))
    with refused(ConfigurationError, code="past_max_steps", key="max_steps"):
        run(settings)
    assert train.main([str(config)]) == 2
    assert {path: path.stat().st_mtime_ns for path in own_trained.rglob("*")} == before
    checkpoint = own_trained / "checkpoints/step-00000003"
    branch = run(settings, resume_from_checkpoint=str(checkpoint), output_dir=str(tmp_path / "branch"))
    assert [step for step, *_ in curve(branch)] == [4]


NUMBERS = {
    "adam_beta1": {"adam_beta1": 0.5},
    "max_grad_norm": {"max_grad_norm": 0.05},
    "seed": {"seed": 7},
    "per_device_train_batch_size": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1},
    "max_seq_length": {"max_seq_length": 128, "gradient_accumulation_steps": 1},
    "precision.compute": {"precision": {"compute": "bf16"}},
    "precision.recipe": {"precision": {"recipe": "current"}},
    "precision.fp8_format": {"precision": {"fp8_format": "hybrid"}},
    "precision.amax_history_len": {"precision": {"amax_history_len": 2}},
    "precision.reduce_amax": {
        "precision": {"reduce_amax": False}
    },  # ranks may differ from then on: scales begin anew
    "precision.bf16_modules": {"precision": {"bf16_modules": []}},
    "precision.schedule": {"precision": {"schedule": [{"recipe": "current"}]}},
    "precision.power_2_scales": {"precision": {"recipe": "current", "power_2_scales": True}},
    "precision.amax_epsilon": {"precision": {"recipe": "current", "amax_epsilon": 0.25}},
    "precision.optimizer_states": {"precision": {"optimizer_states": "bf16_remainder"}},
    "precision.gradient_communication": {"precision": {"gradient_communication": "fp32"}},
    "deepspeed": {"deepspeed": {"zero_optimization": {"stage": 1}}},
}


def gone_on(trained: Path, settings: dict, tmp_path: Path, changes: dict) -> list[tuple]:
    """The steps after the checkpoint of step 3, in a branch that saves nothing."""
    merged = {**settings, **changes}
    for section in ("data", "model"):
        merged[section] = {**settings[section], **changes.get(section, {})}
    merged |= {
        "output_dir": str(tmp_path / "branch"),
        "resume_from_checkpoint": str(trained / "checkpoints/step-00000003"),
        "allow_changes_on_resume": True,
        "save_strategy": "no",
    }
    return curve(run(merged))


@pytest.mark.slow
@pytest.mark.parametrize("key", NUMBERS)
def test_changed_hyperparameters_take_effect(trained: Path, settings: dict, tmp_path: Path, key: str) -> None:
    steps = gone_on(trained, settings, tmp_path, NUMBERS[key])
    unchanged = curve(trained)[3:]
    assert [entry[0] for entry in steps] == [4, 5, 6]
    assert steps[2][1:3] != unchanged[2][1:3]
    assert steps[0][1] == pytest.approx(unchanged[0][1], rel=0.15), "the weights are those of the checkpoint"
    if key.startswith(
        ("precision.", "adam_", "deepspeed")
    ):  # the same samples: neither gradients nor scales are lost
        assert steps[0][1] == pytest.approx(unchanged[0][1], rel=0.02)
        assert steps[0][2] == pytest.approx(unchanged[0][2], rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "stage"), [("bf16", 1), ("bf16", 3), ("hybrid", 1), ("current", 2)])
def test_change_to_delayed_scaling_calibrates(
    settings: dict, tmp_path: Path, before: str, stage: int
) -> None:
    """Gradients are neither lost below the range of e4m3 nor cut at its top."""
    precisions = {
        "bf16": {"compute": "bf16"},
        "hybrid": {"fp8_format": "hybrid"},
        "current": {"recipe": "current"},
    }
    settings |= {"deepspeed": f"ds_config_zero{stage}.json"}
    whole = run(settings, precision=precisions[before], save_steps=3)
    steps = gone_on(whole, settings, tmp_path, {})
    for after, as_before in zip(steps, curve(whole)[3:], strict=True):
        assert after[1] != as_before[1] and after[1] == pytest.approx(as_before[1], rel=0.02)
        assert after[2] == pytest.approx(as_before[2], rel=0.15)
