"""Decide whether a run can resume from a checkpoint, at which sample, and with which configuration changes.

A configuration key may change freely, may change only if it is listed in allow_changes_on_resume, or cannot change. The
rule for each key is the argument `resume` of its field (model.keys.option). This module does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.fp8.recipes import unused_recipe_keys
from train.checkpoint.files import (
    CheckpointError,
    RunState,
    committed,
    find_start,
    identity,
    is_in_folder,
    rolled_back,
)
from train.config.arguments import ConfigurationError, TrainingArguments
from train.config.ds_config import FREE, KEYS
from train.config.schema import all_keys, flatten, key_at
from train.files import to_json_text
from train.record.run_folder import RunFolder

ALLOW_KEY = "allow_changes_on_resume"
# Prefixes of the keys that determine the content and partitioning of DeepSpeed's files.
PARTITION_KEYS = ("deepspeed.zero_optimization.", "deepspeed.data_types.", "precision.optimizer_")
# Keys of the model configuration that determine the shapes of the weights.
SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "tie_word_embeddings".split()
)


# ---------------------------------------------------------------- differences of two configurations


@dataclass(frozen=True)
class Difference:
    """A configuration key whose value differs between two configurations. A missing value is represented as None."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {to_json_text(self.old)} -> {to_json_text(self.new)}"


def differences(old: Any, new: Any, what: str = "") -> list[Difference]:
    """Return the differences between two JSON values. Objects are compared recursively, key by key.

    Args:
        old: The first JSON value.
        new: The second JSON value.
        what: The dotted key of both values in the configuration.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        prefix = what + "." if what else ""
        return [
            d for key in {**old, **new} for d in differences(old.get(key), new.get(key), f"{prefix}{key}")
        ]
    return [] if old == new else [Difference(what, old, new)]


def resume_differences(old: dict[str, Any], new: dict[str, Any]) -> list[Difference]:
    """Return the configuration differences that prevent resuming a run unless the user allows them.

    Args:
        old, new: Resolved arguments as returned by `TrainingArguments.to_dict`. Arguments written by another version of
            the code may lack keys. A missing key is treated as if it had the value `before` from its declaration, or
            the default if there is no such value.
    """
    sections = (values.get("precision") or {} for values in (old, new))
    unread_keys = {f"precision.{name}" for section in sections for name in unused_recipe_keys(section)}

    defaults = {
        key: node.get("before", node["default"]) for key, node in all_keys().items() if "default" in node
    }

    def relevant(values: dict[str, Any]) -> dict[str, Any]:
        data = values["data"]
        # a resume compares the content of the data folders, not their paths
        whole = {"data.sources": sorted(data["sources"]), "data.weights": data.get("weights")}
        given = {k: v for k, v in flatten(values).items() if config_key(k) not in ("", *whole)} | whole
        named = {config_key(key) for key in given}
        given |= {key: value for key, value in defaults.items() if key not in named}
        return {k: v for k, v in given.items() if not (config_key(k) in unread_keys or is_free(k))}

    return differences(relevant(old), relevant(new))


def same_precision(one: dict[str, Any], other: dict[str, Any], keys: Iterable[str] | None = None) -> bool:
    """Return whether two "precision" sections have equal values for `keys`.

    Keys that one of the two recipes does not use are not compared.

    Args:
        one, other: The two sections.
        keys: The keys to compare, or None for all keys.
    """
    compared = {*one, *other} if keys is None else {*keys}
    return all(
        one.get(key) == other.get(key)
        for key in compared - unused_recipe_keys(one) - unused_recipe_keys(other)
    )


def config_key(key: str) -> str:
    """Return the configuration key that contains the dotted path, or "" if none does.

    For example, "deepspeed.zero_optimization" belongs to the key "deepspeed".
    """
    return key_at(key.split("."))


def is_free(key: str) -> bool:
    """Return whether the value of a dotted configuration key may change when a run is resumed.

    For keys inside the DeepSpeed configuration, ds_config.KEYS contains the rules.
    """
    if config_key(key) == "deepspeed":
        return KEYS.get(key.removeprefix("deepspeed."), (None, ""))[1] in FREE
    return all_keys()[config_key(key)]["resume"] == "free"


def permanent_refusal(difference: Difference) -> str:
    """Return why this configuration difference can never be allowed when resuming, or "" if the user may allow it."""
    if difference.key == "precision.compute" and not {difference.old, difference.new} <= {"fp8", "bf16"}:
        return "the checkpoint stores weights and optimizer state in the data type of the old value"
    return all_keys()[config_key(difference.key)].get("why", "")


@dataclass(frozen=True)
class Change:
    """A difference between the configuration of a run and the configuration stored in its checkpoint.

    Attributes:
        what: the key, old value and new value of the difference.
        key: the key to list in allow_changes_on_resume.
        never: the reason why this value cannot change on resume, or "" if it can change.
    """

    what: Difference
    key: str
    never: str = ""

    def __str__(self) -> str:
        return f"{self.what}" + (f" (cannot change when a run resumes: {self.never})" if self.never else "")


# ---------------------------------------------------------------- resume


def is_new_run(args: TrainingArguments) -> bool:
    """Return whether the run starts without a checkpoint."""
    setting = args.resume_from_checkpoint
    return setting == "never" or (setting == "auto" and not committed(RunFolder(args.output_dir).checkpoints))


def checkpoint_to_resume(args: TrainingArguments) -> Path | None:
    """Return the checkpoint that a run will resume from, or None for a new run. Hashes are not checked.

    Raises:
        CheckpointError: See `find_start`.
    """
    return find_start(RunFolder(args.output_dir).checkpoints, args.resume_from_checkpoint, hashes=False)


def resume_state(state: RunState, saved: RunState, path: Path, allow: bool | Iterable[str]) -> list[str]:
    """Update the run state `state` to resume from a checkpoint.

    The number of ranks and the ZeRO stage may change. Every other change that affects results must be listed in
    `allow`, and is added to `state.changes`. Each data source continues after the samples drawn from it. If the
    sequence length changes, the run resumes at the same number of tokens, rounded up to a whole sample.

    Args:
        state: run state with the current configuration. Updated in place.
        saved: run state read from the checkpoint.
        path: the checkpoint.
        allow: value of allow_changes_on_resume: the keys that may change, or True for all keys.

    Returns:
        Lines for the log.

    Raises:
        CheckpointError: if rollback.json is damaged, or `allowed_changes` refuses a change or the checkpoint.
        ConfigurationError: if max_steps is smaller than the step of the checkpoint.
    """
    found = allowed_changes(state, saved, path, allow)
    old, new = saved.train_config, state.train_config
    state.step, state.consumed_tokens = saved.step, saved.consumed_tokens
    lengths = int(old["max_seq_length"]), int(new["max_seq_length"])
    state.consumed_samples = _rescale(saved.consumed_samples, *lengths)
    state.sources = {
        name: drawn | {"samples": _rescale(drawn["samples"], *lengths)}
        for name, drawn in saved.sources.items()
    }
    state.changes = [*saved.changes, *({"step": saved.step, **vars(change.what)} for change in found)]
    for name in ("health", "evaluation_due", "precision", "escalations", "precision_changes"):
        setattr(state, name, getattr(saved, name))
    is_own = is_in_folder(path, RunFolder(new["output_dir"]).checkpoints)
    state.began_at = (
        saved.began_at if is_own else {"path": str(path.resolve()), "manifest_sha256": identity(path)}
    )
    lines = []
    given, began = (config["model"].get("init_from") for config in (new, old))
    new["model"]["init_from"] = began  # the model card lists the initial weights
    if given not in (None, began):
        lines.append(f"model.init_from {given} is ignored, because the weights are loaded from {path}")
    if (saved.world_size, saved.zero_stage) != (state.world_size, state.zero_stage):
        lines.append(
            "resharding weights, optimizer state and FP8 state: "
            f"{saved.world_size} -> {state.world_size} ranks, ZeRO stage {saved.zero_stage} -> {state.zero_stage}, "
            "gradient_accumulation_steps "
            f"{old['gradient_accumulation_steps']} -> {new['gradient_accumulation_steps']}"
        )
    lines += [f"{ALLOW_KEY}: starting at step {saved.step + 1}, {change}" for change in found]
    if saved.data_fingerprint == _through_json(state.data_fingerprint):
        state.skipped_samples = rolled_back(path) or saved.skipped_samples
    else:
        drawn = ", ".join(f"{name} {each['samples']:,}" for name, each in state.sources.items())
        lines.append(
            f"the data changed. Each source continues after the samples already drawn (number of samples: {drawn}). If "
            "the content of a source, the seed or max_seq_length changed, some texts of the current epoch may be "
            "repeated or skipped"
        )
    return lines


def allowed_changes(
    state: RunState, saved: RunState, path: Path, allow: bool | Iterable[str]
) -> list[Change]:
    """Return the configuration changes since a checkpoint was saved, after checking that all of them are allowed.

    Args:
        state: run state with the current configuration.
        saved: run state read from the checkpoint.
        path: the checkpoint, for error messages.
        allow: value of allow_changes_on_resume: the keys that may change, or True for all keys.

    Raises:
        CheckpointError: if a change is not allowed, or the checkpoint does not record the number of samples drawn from
            each data source.
        ConfigurationError: if max_steps is smaller than the step of the checkpoint.
    """
    if len(saved.data_fingerprint.get("sources", {})) > len(saved.sources):
        raise CheckpointError(
            f"{path} was written by an earlier version, which mixed several data sources in another order. Finish the "
            "run with that version, or export the checkpoint with train/export.py and start a new run with "
            "model.init_from",
            code="older_mixture",
            key=str(path),
        )
    found = changes(state, saved)
    if saved.step > (max_steps := state.train_config["max_steps"]):
        raise ConfigurationError(
            f"max_steps is {max_steps}, but {path} is already at step {saved.step}. Increase max_steps, or "
            "pass an earlier checkpoint as --resume_from_checkpoint with a new --output_dir",
            code="past_max_steps",
            key="max_steps",
        )
    never = [c for c in found if c.never]
    wrong = [c for c in found if c.never or not (allow is True or c.key in (allow or ()))]
    if not wrong:
        return found
    lines = "\n  ".join(map(str, wrong))
    keys = ",".join(dict.fromkeys(c.key for c in found if not c.never))
    which = "the other" if never else "these"
    hint = f"To resume with {which} changes, pass --{ALLOW_KEY} {keys} (true allows all). " if keys else ""
    raise CheckpointError(
        f"{path} was written with a different configuration:\n  {lines}\n{hint}Restore the old values, choose another "
        "output_dir, or pass --resume_from_checkpoint never",
        code="cannot_change" if never else "change_not_allowed",
        key=(never or wrong)[0].key,
    )


def changes(state: RunState, saved: RunState) -> list[Change]:
    """Return the configuration changes since a checkpoint was saved, except changes that are always allowed."""
    old, new = saved.train_config, state.train_config
    found = []
    for each in resume_differences(old, new):
        # the data type in which gradients accumulate does not follow from the stage
        follows_from_stage = each.key.startswith("deepspeed.zero_optimization.")
        if not (follows_from_stage and saved.zero_stage != state.zero_stage):
            found.append(Change(each, config_key(each.key), permanent_refusal(each)))
    for each in differences(saved.data_fingerprint, _through_json(state.data_fingerprint), "data"):
        if each.key not in ("data.seq_length", "data.seed"):  # already reported as configuration keys
            found.append(Change(each, _data_key(each, old, new)))
    for each in differences(saved.model_config, _through_json(state.model_config), "model configuration"):
        key = each.key.split(".")[1]
        # Qwen3 has weights that the other model types lack
        is_size = key in SIZES or (key == "model_type" and "qwen3" in (each.old, each.new))
        found.append(
            Change(
                each,
                "model.config",
                "this value determines the shapes of the saved weights" if is_size else "",
            )
        )
    return found


def is_partitioned_differently(saved: RunState, state: RunState) -> bool:
    """Return whether configuration changes may have changed the partitioning of DeepSpeed's checkpoint files.

    Changes to the number of ranks or the ZeRO stage are not considered here.
    """
    found = resume_differences(saved.train_config, state.train_config) if saved.train_config else []
    return any(each.key.startswith(PARTITION_KEYS) for each in found)


def resume_option(args: TrainingArguments) -> str:
    """Return the option that must be added to the training command to resume from the newest checkpoint.

    The option is returned as text for a message: " with --resume_from_checkpoint auto", or "" if no option is needed.
    """
    setting, own = args.resume_from_checkpoint, RunFolder(args.output_dir).checkpoints
    starts_again = setting == "never" or (setting != "auto" and is_in_folder(Path(setting), own))
    return " with --resume_from_checkpoint auto" if starts_again else ""


def _rescale(samples: int, old_length: int, new_length: int) -> int:
    """Convert a number of samples to another sequence length, rounded up."""
    return -(-samples * old_length // new_length)


def _data_key(difference: Difference, old: dict[str, Any], new: dict[str, Any]) -> str:
    """Return the configuration key that explains a difference in the data between a run and its checkpoint."""
    if ".weight" not in difference.key:
        return "data.sources"
    if old["data"]["weights"] != new["data"]["weights"]:
        return "data.weights"
    return "max_seq_length" if old["max_seq_length"] != new["max_seq_length"] else "data.sources"


def _through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))
