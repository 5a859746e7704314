"""A resume with a changed configuration or data: free, allowed by name, or refused; and what an allowed change does to
the next steps (slow)."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import numbers, refused
from tests.folders import make_folder
from tests.train.config.test_load import arguments
from tests.train.runs import curve, metrics, run
from train import train
from train.checkpoint.files import CheckpointError, RunState, read_signed, read_state
from train.checkpoint.resume import (
    SIZES,
    Difference,
    changes,
    is_partitioned_differently,
    resume_differences,
    resume_state,
)
from train.config.arguments import ConfigurationError
from train.config.load import build_arguments, load_arguments, load_deepspeed, resolve_arguments
from train.config.schema import Node, all_keys, options
from train.data.stream import open_stream
from train.engine.optimizer import learning_rate_at

CHECKPOINT = Path("run/checkpoints/step-00000003")
KEYS = all_keys()

FREE = set(
    "model.init_from model.initialization data.verify data.eval_sources precision.auto speed.cuda_graphs "
    "precision.health_steps precision.on_trouble max_skipped_steps per_device_eval_batch_size spike_threshold "
    "on_spike spike_window replica_check_steps "
    "hang_timeout_s output_dir logging_steps eval_steps max_eval_samples save_steps save_minutes save_strategy "
    "save_total_limit keep_every_steps save_async on_save_failure resume_from_checkpoint allow_changes_on_resume "
    "report_to run_name wandb_project profile_steps push_to_hub hub_model_id dry_run preflight log_level".split()
)
NEVER = {"model.variant", "optim"} | {key for key in KEYS if key.startswith("lr_scales.")}
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
    "lr_scales": {},
    "max_steps": 100,
    "max_seq_length": 64,
    "output_dir": "run",
}
WSD = {"lr_scheduler_type": "warmup_stable_decay", "decay_steps": 10}
BF16 = {"model.variant": "hf", "precision.compute": "bf16"}
# key -> (what its change needs on both sides, its value after it), where its type does not say enough
VALUES: dict[str, tuple[dict[str, Any], Any]] = {
    "keep_every_steps": ({"save_steps": 5}, 10),
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
    "profile_steps": ({}, [2, 3]),
    "push_to_hub": ({"hub_model_id": "org/name"}, True),
    "output_dir": ({}, "./run"),
    "deepspeed": ({}, {"zero_optimization": {"stage": 1, "overlap_comm": True}}),
}


def changed(node: Node, value: Any) -> Any:
    """Return another value that the schema of a key takes."""
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


def state_of(values: dict[str, Any]) -> RunState:
    """Return the state of a run after three steps of 8 samples, without data."""
    raw = json.loads(json.dumps(BASE))
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (raw[section] if section else raw)[name] = value
    args = resolve_arguments(build_arguments(raw), 1)
    sources = {name: {"shards_sha256": folder} for name, folder in args.data.sources.items()}
    fingerprint = {"seed": args.seed, "seq_length": args.max_seq_length, "sources": sources}
    model = {"hidden_size": 64, "rope_parameters": {"rope_theta": args.model.config}}
    drawn = {name: {"samples": 12, "deficit": 0.0} for name in sources}
    return RunState(3, 24, 24 * 64, 1, 1, args.to_dict(), model, fingerprint, drawn)


def through_json(saved: RunState) -> RunState:
    return RunState(**json.loads(json.dumps(vars(saved))))


def resumed(new: RunState, saved: RunState, allow: bool | list[str] = True) -> list[str]:
    """As from a checkpoint, whose state has been through JSON."""
    return resume_state(new, through_json(saved), CHECKPOINT, allow)


def keys_of(error: Any) -> list[str]:
    """Return the keys that the user may allow after a refused resume."""
    return re.findall(r"--allow_changes_on_resume (\S+)", str(error.value))[0].split(",")


# ---------------------------------------------------------------- the configuration


@pytest.mark.parametrize("key", KEYS)
def test_resume_rule_of_each_key(key: str) -> None:
    base, value = VALUES.get(key, ({}, None))
    if key not in VALUES:
        value = changed(KEYS[key], KEYS[key].get("default", BASE.get(key)))
    saved, new = state_of(base), state_of({**base, key: value})
    names = BY.get(key, [key])
    if key in FREE:
        assert new.train_config != saved.train_config
        resumed(new, saved, False)
        assert new.changes == []
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
    assert keys_of(error) == names
    for missing in names:
        with pytest.raises(CheckpointError):
            resumed(new, saved, [name for name in KEYS if name != missing])
    expected = [{"step": 3, **vars(change.what)} for change in changes(new, through_json(saved))]
    for allow in (True, names):
        resumed(new, saved, allow)
        assert (new.step, new.consumed_tokens, new.changes) == (3, 24 * 64, expected)


@pytest.mark.parametrize(
    ("size", "values"), [*((size, (1, 2)) for size in SIZES), ("model_type", ("llama", "qwen3"))]
)
def test_other_model_sizes_raise(size: str, values: tuple[Any, Any]) -> None:
    old, new = state_of({}), state_of({"learning_rate": 1e-5})
    old.model_config[size], new.model_config[size] = values
    with refused(CheckpointError, code="cannot_change", key="model.config") as error:
        resumed(new, old)
    before, after = map(json.dumps, values)
    assert f"model configuration.{size}: {before} -> {after}" in str(error.value)


def test_refusal_lists_all_changes() -> None:
    values = {"max_steps": 99, "learning_rate": 1e-5}
    with refused(CheckpointError, code="cannot_change", key="model.config") as error:
        old, new = state_of({}), state_of(values)
        old.model_config["hidden_size"] = 32
        resumed(new, old, ["max_steps"])
    assert keys_of(error) == ["max_steps", "learning_rate"]
    assert "learning_rate: " in str(error.value) and "max_steps: " not in str(error.value)
    with refused(CheckpointError, code="change_not_allowed", key="learning_rate"):
        resumed(state_of(values), state_of({}), ["max_steps"])


def test_other_weight_type_raises() -> None:
    with refused(CheckpointError, code="cannot_change", key="precision.compute"):
        resumed(state_of({"precision.compute": "fp32"}), state_of({}))


@pytest.mark.parametrize(
    ("began", "given", "ignored"),
    [("base", "other", 1), (None, "other", 1), ("base", None, 0), ("base", "base", 0)],
)
def test_init_from_is_kept_on_resume(began: str | None, given: str | None, ignored: int) -> None:
    new = state_of({"model.init_from": given})
    assert len(resumed(new, state_of({"model.init_from": began}), False)) == ignored
    assert new.train_config["model"]["init_from"] == began


def test_repartitioned_files_are_resharded() -> None:
    """DeepSpeed would load the flat tensors of another order without an error."""
    zero2 = state_of({"deepspeed": {"zero_optimization": {"stage": 2}}})
    in_turns = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}
    for old, values, expected in (
        (zero2, {"deepspeed": in_turns}, True),
        (state_of({}), {"deepspeed": {"zero_optimization": {"stage": 1}}}, True),
        (state_of({}), {"precision.optimizer_states": "bf16_remainder"}, True),
        (zero2, {"deepspeed": {"zero_optimization": {"stage": 2}}}, False),
        (state_of({}), {"learning_rate": 1e-4, "max_grad_norm": 0.5}, False),
    ):
        assert is_partitioned_differently(old, state_of(values)) == expected, values


def test_missing_key_in_checkpoint_has_its_default() -> None:
    """As one of a version before the key existed, or with a key that is gone."""
    saved = state_of({})
    del saved.train_config["weight_decay"]
    saved.train_config["data"]["gone"] = 1
    saved.changes = [{"step": 2, "key": "seed", "old": 1, "new": 42}]
    new = state_of({})
    resumed(new, saved, False)
    assert new.changes == saved.changes
    with refused(CheckpointError, key="weight_decay") as error:
        resumed(state_of({"weight_decay": 0.2}), saved, False)
    assert "weight_decay: 0.1 -> 0.2" in str(error.value) and keys_of(error) == ["weight_decay"]


# ---------------------------------------------------------------- the data


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    def tokens(seed: int) -> np.ndarray:
        return np.random.default_rng(seed).integers(3, 400, 5000)

    return {
        name: str(make_folder(tmp_path / name, {"train": [tokens(seed)], "eval": [tokens(seed + 9)]}))
        for seed, name in enumerate(["a", "b", "c"])
    }


def state(sources: dict[str, str], consumed: int = 0, ranks: int = 1, **changes: object) -> RunState:
    """Return the state of a run on `ranks` ranks with these sources after `consumed` samples."""
    raw = {**BASE, "data": {"sources": sources}, "precision": {}}
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        (raw[section] if section else raw)[name] = value
    args = resolve_arguments(build_arguments(raw), ranks)
    stream = open_stream(args.data.sources, args.data.weights, args.max_seq_length, args.seed)
    return RunState(
        step=consumed // 8,
        consumed_samples=consumed,
        consumed_tokens=consumed * args.max_seq_length,
        world_size=ranks,
        zero_stage=args.deepspeed["zero_optimization"]["stage"],
        train_config=args.to_dict(),
        model_config={"vocab_size": 400},
        data_fingerprint=stream.fingerprint(),
        sources=stream.drawn_at(consumed),
    )


def two(folders: dict[str, str]) -> dict[str, str]:
    return {name: folders[name] for name in "ab"}


def replaced(folders: dict[str, str]) -> dict[str, str]:
    """Source b with the content of c."""
    return {"a": folders["a"], "b": folders["c"]}


PHASES = [{"until_tokens": 640, "weights": {"a": 1, "b": 1}}, {"weights": {"a": 1, "b": 3}}]
LONGER = {"max_seq_length": 128, "per_device_train_batch_size": 4, "train_batch_size_tokens": 512}
BOTH = ["max_seq_length", "per_device_train_batch_size"]


@pytest.mark.parametrize(
    ("sources", "before", "changes", "expected", "keys"),
    [
        (replaced, {}, {}, {"data.sources.b.shards_sha256"}, ["data.sources"]),
        (dict, {}, {}, {"data.sources", "data.sources.c"}, ["data.sources"]),
        (
            two,
            {},
            {"data__weights": {"a": 3, "b": 1}},
            {"data.weights", "data.sources.a.weight"},
            ["data.weights"],
        ),
        (
            two,
            {},
            {"data__weights": PHASES},
            {"data.weights", "data.sources.b.weight_from_sample"},
            ["data.weights"],
        ),
        (two, {}, LONGER, {*BOTH}, BOTH),
        (  # phases are in tokens: with another length they begin at other samples
            two,
            {"data__weights": PHASES, "train_batch_size_tokens": 512},
            LONGER,
            {*BOTH, "data.sources.b.weight_from_sample.5"},
            BOTH,
        ),
    ],
)
def test_changed_data_raise_or_are_allowed(folders, sources, before, changes, expected, keys) -> None:
    saved = state(two(folders), consumed=24, **before)
    new = state(sources(folders), **{**before, **changes})
    unchanged = copy.deepcopy(new)
    with refused(CheckpointError, code="change_not_allowed") as error:
        resumed(new, saved, allow=False)
    assert new == unchanged and keys_of(error) == keys
    for missing in keys:
        with pytest.raises(CheckpointError):
            resumed(new, saved, [key for key in keys if key != missing])
    resumed(new, saved, keys)
    assert expected <= {change["key"] for change in new.changes}
    assert (new.step, new.consumed_tokens) == (3, 24 * 64)
    assert new.consumed_samples * new.train_config["max_seq_length"] == 24 * 64


@pytest.mark.parametrize(
    ("old", "new", "consumed", "expected"), [(64, 128, 25, 13), (64, 96, 24, 16), (128, 64, 25, 50)]
)
def test_resume_with_another_sequence_length(folders, old, new, consumed, expected) -> None:
    saved = state(two(folders), consumed=consumed, max_seq_length=old, train_batch_size_tokens=128 * 96)
    later = state(two(folders), max_seq_length=new, train_batch_size_tokens=128 * 96)
    resumed(later, saved)
    assert later.consumed_samples == expected and later.consumed_tokens == saved.consumed_tokens
    assert expected <= sum(drawn["samples"] for drawn in later.sources.values()) <= expected + 1


def test_each_source_continues_where_it_stands(folders) -> None:
    """Of a run with one source from an earlier version, too. One with several had another order."""
    weights = {"data__weights": {"a": 3, "b": 1}}
    for before, expected in (
        (state({"a": folders["a"]}, consumed=24), {"a": 24}),
        (state(two(folders), consumed=24, **weights), {"a": 18, "b": 6}),
    ):
        after = state(folders)
        resumed(after, before)
        stream = open_stream(folders, None, 64, after.train_config["seed"])
        stream.seek(after.consumed_samples, after.sources)
        ids = stream.sample_ids(24, 3000)
        for index, name in enumerate(folders):
            alone = open_stream({name: folders[name]}, None, 64, after.train_config["seed"])
            windows = [window for source, window in ids if source == index]
            start = expected.get(name, 0)
            assert windows == [window for _, window in alone.sample_ids(start, len(windows))]
        saved = json.loads(json.dumps(vars(before)))
        del saved["sources"]
        if len(expected) == 1:
            assert RunState(**saved).sources["a"]["samples"] == 24
            continue
        with refused(CheckpointError, code="older_mixture"):
            resumed(state(folders), RunState(**saved))


def test_resume_with_another_number_of_ranks(folders) -> None:
    saved = state(two(folders), consumed=24, ranks=4, train_batch_size_tokens=8 * 64 * 8)
    for ranks, steps in ((2, 4), (8, 1)):
        new = state(two(folders), ranks=ranks, train_batch_size_tokens=8 * 64 * 8)
        (line,) = resumed(new, saved, allow=False)
        assert numbers(line) == [4, ranks, 1, 1, 2, steps]
        assert (new.step, new.consumed_samples, new.world_size) == (3, 24, ranks)
    smaller = state(two(folders), ranks=2, gradient_accumulation_steps=2)
    with refused(CheckpointError, code="change_not_allowed", key="train_batch_size_tokens") as error:
        resumed(smaller, saved, False)
    assert "train_batch_size_tokens: 4096 -> 2048" in str(error.value)
    resumed(smaller, saved)


def test_resume_with_another_zero_stage(folders) -> None:
    """Other settings at the same stage, and another data type of the accumulated gradients, are refused."""
    saved = state(two(folders), consumed=24, deepspeed="ds_config_zero2.json")
    later = state(two(folders), deepspeed="ds_config_zero3.json")
    (line,) = resumed(later, saved, allow=False)
    assert numbers(line)[:4] == [1, 1, 2, 3] and later.consumed_samples == 24
    with refused(CheckpointError, key="deepspeed") as error:
        resumed(state(two(folders), deepspeed="ds_config_zero0.json"), saved, False)
    assert "deepspeed.data_types.grad_accum_dtype" in str(error.value)
    settings = load_deepspeed("ds_config_zero2.json")
    settings |= {"zero_optimization": {"stage": 2, "overlap_comm": True}}
    with refused(CheckpointError, key="deepspeed") as error:
        resumed(state(two(folders), deepspeed=settings), saved, False)
    assert "deepspeed.zero_optimization.overlap_comm" in str(error.value)


# ---------------------------------------------------------------- differences of two configurations


ZERO_1 = {"zero_optimization": {"stage": 1}}
TWO = {"data__sources": {"a": "data/a", "b": "data/b"}}
MIXTURE = {"a": 0.7, "b": 0.3}
MIXTURES = [{"weights": {"a": 1.0}, "until_tokens": 4096}, {"weights": {"b": 1.0}, "until_tokens": None}]
BLOCK_THEN_CURRENT = [{"until_step": 5, "recipe": "block"}, {"recipe": "current"}]
BF16_THEN_FP8 = {"precision__compute": "bf16", "precision__schedule": [{"until_step": 5}, {"compute": "fp8"}]}


def resolved(**changes: Any) -> dict[str, Any]:
    return resolve_arguments(arguments(**changes), 1).to_dict()


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ({}, {}, {}),
        ({}, {"learning_rate": 1e-3}, {"learning_rate": (3e-4, 1e-3)}),
        ({}, {"max_steps": 200}, {"max_steps": (100, 200)}),
        ({}, {"data__sources": {"b": "data/a"}}, {"data.sources": (["a"], ["b"])}),
        ({}, {"data__sources": {"a": "moved"}}, {}),
        ({}, {"precision__backend": "reference"}, {"precision.backend": ("auto", "reference")}),
        (TWO | {"data__weights": MIXTURE}, TWO | {"data__weights": MIXTURES}, {"data.weights": (MIXTURE, MIXTURES)}),
        (TWO | {"data__weights": MIXTURES}, TWO, {"data.weights": (MIXTURES, None)}),
        # DeepSpeed's keys
        (
            {"deepspeed": ZERO_1},
            {"deepspeed": {"zero_optimization": {"stage": 2}}},
            {"deepspeed.zero_optimization.stage": (1, 2)},
        ),
        ({"deepspeed": ZERO_1}, {"deepspeed": ZERO_1 | {"bf16": {"enabled": True}, "train_batch_size": "auto"}}, {}),
        ({"deepspeed": ZERO_1}, {"deepspeed": ZERO_1 | {"optimizer": {"type": "AdamW"}, "dump_state": True}}, {}),
        ({"deepspeed": ZERO_1}, {"deepspeed": ZERO_1 | {"timers": {"throughput": {"enabled": True}}}}, {}),
        ({}, {"deepspeed": ZERO_1}, {"deepspeed.data_types.grad_accum_dtype": ("fp32", None)}),
        (
            {"deepspeed": {"zero_optimization": {"stage": 3}}},
            {"deepspeed": {"zero_optimization": {"stage": 3, "leaf_module": {"classes": ["A"]}}}},
            {},
        ),
        (
            {"deepspeed": {"zero_optimization": {"stage": 3}}},
            {"deepspeed": {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1000}}},
            {"deepspeed.zero_optimization.reduce_bucket_size": (None, 1000)},
        ),
    ],
)  # fmt: skip
def test_differences_that_change_a_step(old: dict, new: dict, found: dict) -> None:
    expected = [Difference(key, *values) for key, values in found.items()]
    assert resume_differences(resolved(**old), resolved(**new)) == expected


def test_shipped_baseline_differs_only_in_precision() -> None:
    fp8, bf16 = (load_arguments([f"train_config_{kind}"]).to_dict() for kind in ("fp8", "bf16"))
    assert {key for key in fp8 if fp8[key] != bf16[key]} == {"precision", "output_dir"}
    assert resume_differences(fp8, bf16) == [Difference("precision.compute", "fp8", "bf16")]


@pytest.mark.parametrize(
    ("key", "before", "own", "counts"),
    [
        # only FP8 recipes with a history read it
        ("amax_history_len", 1024, {}, True),
        ("amax_history_len", 1024, {"precision__recipe": "current"}, False),
        ("amax_history_len", 1024, {"precision__compute": "bf16"}, False),
        ("amax_history_len", 1024, BF16_THEN_FP8, True),
        ("amax_history_len", 1024, {"precision__schedule": BLOCK_THEN_CURRENT}, False),
        # a module of delayed scaling may have fallen back to block scaling
        ("amax_epsilon", 1e-3, {"precision__on_trouble": "escalate"}, True),
        # None: a version without the key wrote it, and did not compute these gradients in FP8
        ("fp8_head_gradients", None, {}, True),
        ("fp8_head_gradients", None, BF16_THEN_FP8, True),
        ("fp8_head_gradients", None, {"precision__compute": "bf16"}, False),
        ("fp8_head_gradients", None, {"model__variant": "torchao", "precision__recipe": "tensorwise"}, False),
        ("margin", None, {}, False),
    ],
)  # fmt: skip
def test_precision_keys_are_compared_if_read(key: str, before: Any, own: dict, counts: bool) -> None:
    new = resolved(**own)
    old = {**new, "precision": {**new["precision"], key: before}}
    if before is None:
        del old["precision"][key]
        before = False
    expected = [Difference(f"precision.{key}", before, new["precision"][key])] if counts else []
    assert resume_differences(old, new) == expected


# ---------------------------------------------------------------- what an allowed change does to the next steps


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
    assert set(keys_of(error)) == ALL_AT_ONCE.keys()
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
    """One command branches off a warmup_stable_decay run. A restart resumes from the checkpoint of the branch."""
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
    },  # ranks may differ afterwards, because scales are reset
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
    assert [step[1:3] for step in steps] != [step[1:3] for step in unchanged]
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
