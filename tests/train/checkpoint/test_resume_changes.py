"""A resume with each key of the configuration changed, one at a time: it is free, allowed by its name, or refused with
a reason. What is allowed shows in the next steps: test_resume_effects.py."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import numbers, refused
from train.checkpoint.files import CheckpointError, RunState
from train.checkpoint.resume import at_half_the_rate, is_cut_otherwise, resume_state
from train.config.arguments import ConfigurationError, TrainingArguments
from train.config.differences import Difference
from train.config.schema import Node, keys_of, options

CHECKPOINT = Path("run/checkpoints/step-00000003")
KEYS = keys_of(TrainingArguments)

FREE = set(
    "model.init_from data.verify data.eval_sources precision.calibration_passes precision.auto speed.cuda_graphs "
    "precision.health_steps precision.on_trouble max_skipped_steps per_device_eval_batch_size spike_threshold "
    "on_spike spike_window replica_check_steps "
    "hang_timeout_s output_dir logging_steps eval_steps max_eval_samples save_steps save_minutes save_strategy "
    "save_total_limit save_async on_save_failure resume_from_checkpoint allow_changes_on_resume report_to "
    "run_name wandb_project gradient_checkpointing dry_run preflight".split()
)
NEVER = {"model.variant", "optim"}
# what a change of the key has to be allowed by, where that is not the key alone
BY = {
    "gradient_accumulation_steps": ["train_batch_size_tokens"],
    "per_device_train_batch_size": ["per_device_train_batch_size", "train_batch_size_tokens"],
    "max_seq_length": ["max_seq_length", "train_batch_size_tokens"],
}
BASE = {
    "model": {"config": "tiny"},
    "data": {"sources": {"a": "A", "b": "B"}},
    "precision": {},
    "speed": {},
    "max_steps": 100,
    "max_seq_length": 64,
}
WSD = {"lr_scheduler_type": "warmup_stable_decay", "decay_steps": 10}
BF16 = {"model.variant": "hf", "precision.compute": "bf16"}
# key -> (what its change needs on both sides, its value after it), where its type does not say enough
VALUES: dict[str, tuple[dict[str, Any], Any]] = {
    "model.config": ({}, "hare_0.4b"),
    "model.variant": ({}, "te_linear"),
    "model.compile": (BF16, True),
    "data.sources": ({}, {"a": "A", "c": "C"}),
    "data.eval_sources": ({}, {"e": "E"}),
    "data.weights": ({}, {"a": 0.3, "b": 0.7}),
    "precision.compute": ({}, "bf16"),
    "precision.power_2_scales": ({"precision.recipe": "current"}, True),
    "precision.amax_epsilon": ({"precision.recipe": "current"}, 0.5),
    "precision.optimizer_moments": ({"precision.optimizer_states": "bf16_remainder"}, "fp32"),
    "precision.on_trouble": ({"precision.health_steps": 10}, "escalate"),
    "precision.schedule": ({}, [{"until_step": 50, "compute": "bf16"}, {}]),
    "max_seq_length": ({}, 128),
    "per_device_eval_batch_size": ({}, 4),
    "gradient_accumulation_steps": ({}, 2),
    "train_batch_size_tokens": ({}, 1024),
    "decay_steps": (WSD, 20),
    "muon_momentum": ({"optim": "muon"}, 0.9),
    "allow_changes_on_resume": ({}, ["seed"]),
    "deepspeed": ({}, {"zero_optimization": {"stage": 1, "overlap_comm": True}}),
}


def changed(node: Node, value: Any) -> Any:
    """Another value that the schema of a key takes."""
    if isinstance(value, bool):
        return not value
    for option in options(node):
        if "enum" in option:
            return next(each for each in option["enum"] if each != value)
        if option["type"] == "integer":
            return (value or 0) + 1
        if option["type"] == "number":
            return (value or 0.0) / 2 + 0.25
        if option["type"] == "boolean":
            return True
        if option["type"] == "string":
            return f"{value or ''}x"
        if option["type"] == "array":
            return ["x"]
    raise AssertionError(f"give VALUES an entry for {node}")


def raw_with(values: dict[str, Any]) -> dict[str, Any]:
    raw = json.loads(json.dumps(BASE))
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (raw[section] if section else raw)[name] = value
    return raw


def state_of(values: dict[str, Any]) -> RunState:
    """A run after three steps of 8 samples; its data and model are what its configuration names."""
    args = TrainingArguments.from_dict(raw_with(values)).resolve(1)
    sources = {name: {"shards_sha256": folder} for name, folder in args.data.sources.items()}
    fingerprint = {"seed": args.seed, "seq_length": args.max_seq_length, "sources": sources}
    model = {"hidden_size": 64, "rope_parameters": {"rope_theta": args.model.config}}
    return RunState(3, 24, 24 * 64, 1, 1, args.to_dict(), model, fingerprint)


def resumed(new: RunState, saved: RunState, allow: bool | list[str]) -> list[str]:
    return resume_state(new, RunState(**json.loads(json.dumps(vars(saved)))), CHECKPOINT, allow)


def before_and_after(key: str) -> tuple[RunState, RunState]:
    base, value = VALUES.get(key, ({}, None))
    if key not in VALUES:
        value = changed(KEYS[key], KEYS[key].get("default", BASE.get(key)))
    return state_of(base), state_of({**base, key: value})


@pytest.mark.parametrize("key", KEYS)
def test_each_key_is_free_or_allowed_by_name_or_refused(key: str) -> None:
    saved, new = before_and_after(key)
    names = BY.get(key, [key])
    if key in FREE:
        assert new.train_config != saved.train_config
        said = resumed(new, saved, False)
        assert bool(said) == (key == "model.init_from") and new.changes == []
        return
    if key in NEVER:
        for allow in (False, True, [key]):
            with refused(CheckpointError, code="cannot_change", key=key):
                resumed(new, saved, allow)
        with refused(ConfigurationError, key="allow_changes_on_resume"):
            state_of({"allow_changes_on_resume": [key]})
        return
    with refused(CheckpointError, code="change_not_allowed") as error:
        resumed(new, saved, False)
    message = str(error.value)
    assert error.value.keys == names
    assert str(CHECKPOINT) in message and f"--allow_changes_on_resume {','.join(names)} " in message
    for missing in names:
        others = [name for name in KEYS if name != missing]
        with pytest.raises(CheckpointError):
            resumed(new, saved, others)
    for allow in (True, names):
        said = resumed(new, saved, allow)
        assert (new.step, new.consumed_tokens) == (3, 24 * 64)
        assert {change["step"] for change in new.changes} == {3}
        for change in new.changes:
            line = f"{change['key']}: {json.dumps(change['old'])} -> {json.dumps(change['new'])}"
            assert line in message and f"  {line}" in said


def test_weights_to_begin_with_are_those_of_the_begin() -> None:
    """What a resume names besides has no effect: it is told, and exports do not speak of it."""
    for began, given, told in (
        ("base", "other", 1),
        (None, "other", 1),
        ("base", None, 0),
        ("base", "base", 0),
    ):
        new = state_of({"model.init_from": given})
        said = resumed(new, state_of({"model.init_from": began}), False)
        assert new.train_config["model"]["init_from"] == began
        assert len(said) == told and all(str(given) in line for line in said)


def test_a_command_that_is_advised_is_one_for_a_shell() -> None:
    path = Path("my runs/it's/step-00000003")
    words = shlex.split(at_half_the_rate(path, 3e-4))
    assert (
        words[:4] == ["--resume_from_checkpoint", str(path), "--learning_rate", "0.00015"] and len(words) == 6
    )


def test_what_a_precision_and_a_model_cannot_become() -> None:
    """Weights of other sizes or in another type; what is refused is named without what could be allowed."""
    saved = state_of({})
    for compute in ("fp16", "fp32"):
        with refused(CheckpointError, code="cannot_change", key="precision.compute"):
            resumed(state_of({"precision.compute": compute}), saved, True)
    wider = state_of({"learning_rate": 1e-5})
    wider.model_config["hidden_size"] = 128
    with refused(CheckpointError, code="cannot_change") as error:
        resumed(wider, saved, ["learning_rate"])
    assert error.value.keys == ["model.config"]
    assert error.value.changes[0].what == Difference("model configuration.hidden_size", 64, 128)


def test_a_name_that_is_no_key_is_refused_with_the_nearest() -> None:
    with refused(ConfigurationError, key="allow_changes_on_resume") as error:
        state_of({"allow_changes_on_resume": ["learning_ratte"]})
    assert "learning_rate" in str(error.value)


def test_files_that_may_be_cut_otherwise_are_not_loaded_as_they_are() -> None:
    """DeepSpeed would load the flat tensors of another order without a word."""
    zero2 = state_of({"deepspeed": {"zero_optimization": {"stage": 2}}})
    in_turns = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}
    assert is_cut_otherwise(zero2, state_of({"deepspeed": in_turns}))
    assert is_cut_otherwise(state_of({}), state_of({"deepspeed": {"zero_optimization": {"stage": 1}}}))
    assert is_cut_otherwise(state_of({}), state_of({"precision.optimizer_states": "bf16_remainder"}))
    assert not is_cut_otherwise(zero2, zero2)
    assert not is_cut_otherwise(state_of({}), state_of({"learning_rate": 1e-4, "max_grad_norm": 0.5}))


def test_max_steps_is_free_while_the_rate_is_constant() -> None:
    constant = {"lr_scheduler_type": "constant"}
    assert resumed(state_of({**constant, "max_steps": 200}), state_of(constant), False) == []
    constant["precision"] = {"schedule": [{"until_share": 0.5, "compute": "bf16"}, {}]}
    with refused(
        CheckpointError, code="change_not_allowed", key="max_steps"
    ):  # it may be in another stage then
        resumed(state_of({**constant, "max_steps": 200}), state_of(constant), False)


def test_a_stage_that_another_length_leads_to_is_said_with_what_keeps_it() -> None:
    """Where the change is refused, and where it is allowed; what is given to stay in the stage does so."""
    schedule = [{"until_share": 0.01}, {"compute": "bf16", "until_share": 0.02}, {"recipe": "current"}]
    saved, longer = state_of({"precision.schedule": schedule}), {"max_steps": 400}
    with refused(CheckpointError, key="max_steps") as error:
        resumed(state_of({"precision.schedule": schedule, **longer}), saved, False)
    allowed = resumed(state_of({"precision.schedule": schedule, **longer}), saved, ["max_steps"])
    (told,) = (line for line in allowed if "until_step" in line)
    assert told in str(error.value).splitlines()
    assert "until_step 1 " in told and "until_step 2 " in told
    assert told.endswith("--allow_changes_on_resume max_steps,precision.schedule")
    stays = [{"until_step": 1}, {"compute": "bf16", "until_step": 2}, {"recipe": "current"}]
    new = state_of({"precision.schedule": stays, **longer})
    assert not [line for line in resumed(new, saved, ["max_steps", "precision.schedule"]) if "stage" in line]


@pytest.mark.parametrize(
    ("schedule", "ends"),
    [
        ([{"until_share": 0.5}, {"compute": "bf16"}], {0.5, 2, 5, 50, 100}),
        ([{"until_step": 2}, {"compute": "bf16"}], set()),  # the schedule is another, which is listed
    ],
)
def test_a_stage_that_begins_earlier_is_said(schedule: list[dict], ends: set[float]) -> None:
    """There it cannot stay: the run would be over before the stage is."""
    saved = state_of({"precision.schedule": [{"until_share": 0.5}, {"compute": "bf16"}]})
    said = resumed(state_of({"precision.schedule": schedule, "max_steps": 5}), saved, True)
    (line,) = (line for line in said if line.startswith("step 4 "))
    assert set(numbers(line)) == {4, 2, 1} | ends


def test_a_checkpoint_without_a_key_had_its_default() -> None:
    """That of a version before the key was there, or with one that is gone."""
    saved = state_of({})
    del saved.train_config["weight_decay"]
    saved.train_config["data"]["gone"] = 1
    assert resumed(state_of({}), saved, False) == []
    with refused(CheckpointError, key="weight_decay") as error:
        resumed(state_of({"weight_decay": 0.2}), saved, False)
    assert [change.what for change in error.value.changes] == [Difference("weight_decay", 0.1, 0.2)]


def test_changes_add_up_and_the_rate_of_the_next_step_is_said() -> None:
    saved, new = state_of({}), state_of({"learning_rate": 1e-4})
    saved.changes = [{"step": 2, "key": "seed", "old": 1, "new": 42}]
    said = resumed(new, saved, ["learning_rate"])
    assert [change["key"] for change in new.changes] == ["seed", "learning_rate"]
    assert numbers(said[-1]) == pytest.approx([4, 9.98e-5, 2.99e-4], rel=2e-3)
