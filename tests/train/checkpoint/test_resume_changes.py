"""A resume with each key of the configuration changed, one at a time: it is free, allowed by its name, or refused with
a reason; and what is allowed shows in the next steps (slow)."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.runs import curve, metrics, run
from train.checkpoint.files import CheckpointError, RunState, read_signed, read_state
from train.checkpoint.resume import resume_state
from train.config.arguments import ConfigurationError, TrainingArguments
from train.config.schema import Node, keys_of, options
from train.engine.optimizer import learning_rate_at
from train.loop import Loop

CHECKPOINT = Path("run/checkpoints/step-00000003")
KEYS = keys_of(TrainingArguments)

# ---------------------------------------------------------------- the decision, key by key

FREE = set(
    "model.init_from data.verify data.eval_sources precision.calibration_passes precision.auto speed.cuda_graphs "
    "max_skipped_steps per_device_eval_batch_size spike_threshold on_spike spike_window replica_check_steps "
    "hang_timeout_s output_dir logging_steps eval_steps max_eval_samples save_steps save_minutes save_strategy "
    "save_total_limit save_async on_save_failure resume_from_checkpoint allow_changes_on_resume report_to "
    "run_name wandb_project gradient_checkpointing".split()
)
NEVER = {"model.variant": "weights and optimizer state are stored under the names of its modules"}
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
    "max_seq_length": ({}, 128),
    "per_device_eval_batch_size": ({}, 4),
    "gradient_accumulation_steps": ({}, 2),
    "train_batch_size_tokens": ({}, 1024),
    "decay_steps": (WSD, 20),
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
        assert resumed(new, saved, False) == [] and new.changes == []
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
    assert f"--allow_changes_on_resume '{json.dumps(names)}' (or true" in message
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


def test_max_steps_is_free_while_the_rate_is_constant() -> None:
    constant = {"lr_scheduler_type": "constant"}
    assert resumed(state_of({**constant, "max_steps": 200}), state_of(constant), False) == []


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


# ---------------------------------------------------------------- what is allowed shows in the next steps

ALL_AT_ONCE = {
    "learning_rate": 1e-3,
    "max_steps": 8,
    "weight_decay": 0.3,
    "adam_beta1": 0.8,
    "adam_beta2": 0.9,
    "adam_epsilon": 1e-6,
    "max_grad_norm": 0.25,
}


def test_a_run_goes_on_otherwise_and_says_so_wherever_it_is_looked_for(
    own_trained: Path, settings: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """All of it at once, from the last checkpoint: a longer cosine, other settings of AdamW and of clipping, which
    DeepSpeed's checkpoint would bring back; noted in the metrics and the next checkpoint, and gone on from."""
    before = curve(own_trained)
    with pytest.raises(CheckpointError, match=r"adam_beta1: 0\.9 -> 0\.8(?s:.)*weight_decay"):
        run(settings, **ALL_AT_ONCE, allow_changes_on_resume=["learning_rate"])
    engines = []
    step = Loop._take_step
    monkeypatch.setattr(Loop, "_take_step", lambda self: engines.append(self.engine) or step(self))
    run(settings, **ALL_AT_ONCE, allow_changes_on_resume=list(ALL_AT_ONCE))
    expected = {"betas": (0.8, 0.9), "eps": 1e-6}
    decays = [group["weight_decay"] for group in engines[0].optimizer.param_groups]
    assert decays == [0.3, 0.0] and engines[0].optimizer.clip_grad == 0.25
    assert all(
        group[key] == value for group in engines[0].optimizer.param_groups for key, value in expected.items()
    )

    assert "the learning rate of step 7 is " in capsys.readouterr().out
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
    args = TrainingArguments.from_dict({**settings, **ALL_AT_ONCE})
    assert after[:6] == before and [entry[3] for entry in after[6:]] == [
        learning_rate_at(n, args) for n in (6, 7)
    ]

    # the same command again has nothing to change any more
    (last / "manifest.json").unlink()
    run(settings, **ALL_AT_ONCE, allow_changes_on_resume=list(ALL_AT_ONCE))
    assert curve(own_trained) == after
    assert len([line for line in metrics(own_trained) if "changes" in line]) == 1


DECAY = {"lr_scheduler_type": "warmup_stable_decay", "decay_steps": 2, "learning_rate": 5e-3}


@pytest.mark.slow
def test_a_branch_decays_in_a_folder_of_its_own_and_goes_on_there(
    settings: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
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
    with pytest.raises(CheckpointError, match="max_steps: 12 -> 8"):
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
    capsys.readouterr()
    run(settings, **command)
    out = capsys.readouterr().out
    assert f"this run began at {start} and goes on from its own step-00000006" in out
    assert f"resumed from {branch / 'checkpoints/step-00000006'}" in out
    assert curve(branch) == whole and not list(branch.glob("checkpoints.discarded-*"))

    # the checkpoint that it began at may be gone; another run's is not mixed in
    start.rename(tmp_path / start.name)
    run(settings, **command)
    assert "nothing to train" in capsys.readouterr().out
    other = {**command, "resume_from_checkpoint": str(stable / "checkpoints/step-00000008")}
    with pytest.raises(CheckpointError, match="of a run that did not begin there: choose another output_dir"):
        run(settings, **other)


RATES = {
    "learning_rate": {"learning_rate": 1e-3},
    "lr_scheduler_type": {"lr_scheduler_type": "linear"},
    "warmup_steps": {"warmup_steps": 5},
    "decay_steps": {"lr_scheduler_type": "warmup_stable_decay", "decay_steps": 2},
    "min_lr_ratio": {"min_lr_ratio": 0.5},
    "max_steps": {"max_steps": 7},
}
NUMBERS = {
    "weight_decay": {"weight_decay": 10.0},
    "adam_beta1": {"adam_beta1": 0.5},
    "adam_beta2": {"adam_beta2": 0.5},
    "adam_epsilon": {"adam_epsilon": 1e-3},
    "max_grad_norm": {"max_grad_norm": 0.05},
    "seed": {"seed": 7},
    "per_device_train_batch_size": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1},
    "train_batch_size_tokens": {"gradient_accumulation_steps": 4},
    "max_seq_length": {"max_seq_length": 128, "gradient_accumulation_steps": 1},
    "precision.compute": {"precision": {"compute": "bf16"}},
    "precision.recipe": {"precision": {"recipe": "current"}},
    "precision.fp8_format": {"precision": {"fp8_format": "hybrid"}},
    "precision.margin": {"precision": {"margin": 3}},
    "precision.amax_history_len": {"precision": {"amax_history_len": 2}},
    "precision.amax_compute_algo": {"precision": {"amax_compute_algo": "most_recent"}},
    "precision.reduce_amax": {
        "precision": {"reduce_amax": False}
    },  # ranks may differ from then on: scales begin anew
    "precision.bf16_modules": {"precision": {"bf16_modules": []}},
    "precision.power_2_scales": {"precision": {"recipe": "current", "power_2_scales": True}},
    "precision.amax_epsilon": {"precision": {"recipe": "current", "amax_epsilon": 64.0}},
    "deepspeed": {"deepspeed": {"zero_optimization": {"stage": 1}}},
}
# without effect on a CPU, or with one rank, or in this model
ELSEWHERE = {
    "precision.backend": {"precision": {"backend": "reference"}},
    "precision.fast_accumulation_wgrad": {"precision": {"fast_accumulation_wgrad": True}},
    "speed.fused_rope": {"speed": {"fused_rope": False}},
    "speed.fused_swiglu": {"speed": {"fused_swiglu": False}},
    "speed.fused_cross_entropy": {"speed": {"fused_cross_entropy": False}},
    "speed.main_grad": {"speed": {"main_grad": False}},
    "full_determinism": {"full_determinism": False},
}
# in test_resume.py and data/test_document_mask.py; below; on a GPU alone
SHOWN_ELSEWHERE = {"data.sources", "data.weights", "data.document_mask", "model.config"} | {
    "model.compile",
    "model.attention_backend",
}


def test_every_key_that_may_be_allowed_is_tried_below() -> None:
    tried = {*RATES, *NUMBERS, *ELSEWHERE, *SHOWN_ELSEWHERE, "gradient_accumulation_steps"}
    assert tried == KEYS.keys() - FREE - NEVER.keys()


def gone_on(
    trained: Path, settings: dict, tmp_path: Path, changes: dict
) -> tuple[list[tuple], TrainingArguments]:
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
    return curve(run(merged)), TrainingArguments.from_dict(merged)


@pytest.mark.slow
@pytest.mark.parametrize("key", RATES)
def test_a_change_of_the_schedule_shows_in_the_next_steps(
    trained: Path, settings: dict, tmp_path: Path, key: str
) -> None:
    steps, args = gone_on(trained, settings, tmp_path, RATES[key])
    assert [entry[3] for entry in steps] == [learning_rate_at(entry[0] - 1, args) for entry in steps]
    unchanged = curve(trained)[3:]
    assert steps[0][1] == unchanged[0][1], "the loss before the first update is the same"
    assert [entry[3] for entry in steps] != [entry[3] for entry in unchanged]
    assert steps[2][1] != unchanged[2][1]


@pytest.mark.slow
@pytest.mark.parametrize("key", NUMBERS)
def test_a_change_of_the_numbers_shows_in_the_next_steps(
    trained: Path, settings: dict, tmp_path: Path, key: str
) -> None:
    steps, _ = gone_on(trained, settings, tmp_path, NUMBERS[key])
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
@pytest.mark.parametrize("key", ELSEWHERE)
def test_a_change_without_effect_here_goes_on_with_the_same_numbers(
    trained: Path, settings: dict, tmp_path: Path, key: str
) -> None:
    steps, _ = gone_on(trained, settings, tmp_path, ELSEWHERE[key])
    assert steps == curve(trained)[3:]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_bf16_run_goes_on_in_fp8_with_scales_of_its_weights(
    settings: dict, tmp_path: Path, stage: int
) -> None:
    settings |= {"deepspeed": f"ds_config_zero{stage}.json"}
    whole = run(settings, precision={"compute": "bf16"}, save_steps=3)
    steps, _ = gone_on(whole, settings, tmp_path, {})
    for fp8, bf16 in zip(steps, curve(whole)[3:], strict=True):
        assert fp8[1] != bf16[1] and fp8[1] == pytest.approx(bf16[1], rel=0.02)
        assert fp8[2] == pytest.approx(bf16[2], rel=0.15)


@pytest.mark.slow
def test_what_a_model_says_of_other_than_sizes_may_change(
    trained: Path, settings: dict, tmp_path: Path, small_model: Path
) -> None:
    config = json.loads(small_model.read_text())
    for name, key, value in (("theta", "rope_theta", 500.0), ("narrow", "hidden_size", 64)):
        changed_config = json.loads(json.dumps(config))
        (changed_config["rope_parameters"] if key == "rope_theta" else changed_config)[key] = value
        (tmp_path / f"{name}.json").write_text(json.dumps(changed_config))
    steps, _ = gone_on(trained, settings, tmp_path, {"model": {"config": str(tmp_path / "theta.json")}})
    assert steps[0][1] != curve(trained)[3][1] and steps[0][1] == pytest.approx(
        curve(trained)[3][1], rel=0.15
    )
    with pytest.raises(CheckpointError, match="hidden_size: .* -> 64 .*weights of these sizes"):
        gone_on(trained, settings, tmp_path, {"model": {"config": str(tmp_path / "narrow.json")}})
