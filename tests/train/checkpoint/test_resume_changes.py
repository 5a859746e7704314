"""A resume with each key of the configuration changed, one at a time: it is free, allowed by its name, or refused with
a reason. What is allowed shows in the next steps: test_resume_effects.py."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from train.checkpoint.files import CheckpointError, RunState
from train.checkpoint.resume import at_half_the_rate, is_cut_otherwise, resume_state
from train.config.arguments import ConfigurationError, TrainingArguments
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
NEVER = {
    "model.variant": "weights and optimizer state are stored under the names of its modules",
    "optim": "what the optimizer keeps of its steps is of another kind",
}
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
    with pytest.raises(CheckpointError) as refused:
        resumed(new, saved, False)
    message = str(refused.value)
    assert str(CHECKPOINT) in message
    if key in NEVER:
        for allow in (True, [key]):
            with pytest.raises(CheckpointError, match=NEVER[key]):
                resumed(new, saved, allow)
        assert "restore this value" in message and "--allow_changes_on_resume" not in message
        with pytest.raises(ConfigurationError, match=f'"{key}": this key cannot change on a resume: '):
            state_of({"allow_changes_on_resume": [key]})
        return
    assert f"--allow_changes_on_resume {','.join(names)} (or true" in message
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
        assert (
            said
            == [f"model.init_from {given} has no effect: the run goes on with the weights of {CHECKPOINT}"]
            * told
        )


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
        with pytest.raises(CheckpointError, match="weights and optimizer state are kept in another type"):
            resumed(state_of({"precision.compute": compute}), saved, True)
    wider = state_of({"learning_rate": 1e-5})
    wider.model_config["hidden_size"] = 128
    with pytest.raises(CheckpointError, match="hidden_size: 64 -> 128 .*weights of these sizes") as refused:
        resumed(wider, saved, ["learning_rate"])
    assert "learning_rate" not in str(refused.value)


def test_a_name_that_is_no_key_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r'"learning_ratte".*did you mean learning_rate\?'):
        state_of({"allow_changes_on_resume": ["learning_ratte"]})


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
    with pytest.raises(CheckpointError, match="max_steps: .* -> 200"):  # it may be in another stage then
        resumed(state_of({**constant, "max_steps": 200}), state_of(constant), False)


def test_a_stage_that_another_length_leads_to_is_said_with_what_keeps_it() -> None:
    """Where the change is refused, and where it is allowed; what is given to stay in the stage does so."""
    schedule = [{"until_share": 0.01}, {"compute": "bf16", "until_share": 0.02}, {"recipe": "current"}]
    saved, longer = state_of({"precision.schedule": schedule}), {"max_steps": 400}
    told = (
        "step 4 is in stage 1 of 3 of precision.schedule (as the section says), not in stage 3 of 3 of "
        'precision.schedule ({"recipe": "current"}) as before: until_share 0.01 is step 4 of 400, and was step 1 of '
        "100; until_share 0.02 is step 8 of 400, and was step 2 of 100. To stay in stage 3: until_step 1 in place of "
        "until_share 0.01, until_step 2 in place of until_share 0.02, and "
        """--allow_changes_on_resume max_steps,precision.schedule"""
    )
    with pytest.raises(CheckpointError, match="max_steps: 100 -> 400") as refused:
        resumed(state_of({"precision.schedule": schedule, **longer}), saved, False)
    assert told in str(refused.value).splitlines()
    assert told in resumed(state_of({"precision.schedule": schedule, **longer}), saved, ["max_steps"])
    stays = [{"until_step": 1}, {"compute": "bf16", "until_step": 2}, {"recipe": "current"}]
    new = state_of({"precision.schedule": stays, **longer})
    assert not [line for line in resumed(new, saved, ["max_steps", "precision.schedule"]) if "stage" in line]


@pytest.mark.parametrize(
    ("schedule", "why"),
    [
        (
            [{"until_share": 0.5}, {"compute": "bf16"}],
            ": until_share 0.5 is step 2 of 5, and was step 50 of 100",
        ),
        ([{"until_step": 2}, {"compute": "bf16"}], ""),  # the schedule is another, which is listed
    ],
)
def test_a_stage_that_begins_earlier_is_said(schedule: list[dict], why: str) -> None:
    """There it cannot stay: the run would be over before the stage is."""
    saved = state_of({"precision.schedule": [{"until_share": 0.5}, {"compute": "bf16"}]})
    said = resumed(state_of({"precision.schedule": schedule, "max_steps": 5}), saved, True)
    (line,) = (line for line in said if line.startswith("step 4 is in stage 2 of 2"))
    assert line.endswith(f"not in stage 1 of 2 of precision.schedule (as the section says) as before{why}")


def test_a_checkpoint_without_a_key_had_its_default() -> None:
    """That of a version before the key was there, or with one that is gone."""
    saved = state_of({})
    del saved.train_config["weight_decay"]
    saved.train_config["data"]["gone"] = 1
    assert resumed(state_of({}), saved, False) == []
    with pytest.raises(CheckpointError, match="weight_decay: 0.1 -> 0.2"):
        resumed(state_of({"weight_decay": 0.2}), saved, False)


def test_changes_add_up_and_the_rate_of_the_next_step_is_said() -> None:
    saved, new = state_of({}), state_of({"learning_rate": 1e-4})
    saved.changes = [{"step": 2, "key": "seed", "old": 1, "new": 42}]
    said = resumed(new, saved, ["learning_rate"])
    assert [change["key"] for change in new.changes] == ["seed", "learning_rate"]
    assert said[-1].startswith("the learning rate of step 4 is 9.98") and "would have been 2.99" in said[-1]
