"""Decide whether a run may resume from a checkpoint, at which sample, and with which changes of its configuration.

A changed key is free, allowed by allow_changes_on_resume, or structural: then the checkpoint cannot be used. The rule
of a key stands at its field (`resume=` of model.keys.option). Nothing here imports torch.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.checkpoint.files import (
    CheckpointError,
    RunState,
    belongs_to,
    branch_at,
    check_given,
    committed,
    origin,
    rolled_back,
    step_of,
)
from train.config.arguments import ConfigurationError, TrainingArguments
from train.config.differences import (
    Difference,
    differences,
    key_of,
    resume_differences,
    same_precision,
    why_never,
)
from train.config.schedule import arguments_of_phase, phase_at
from train.record.run_folder import RunFolder

ALLOW = "allow_changes_on_resume"
# Keys that decide how DeepSpeed's files are partitioned, and what is in them.
PARTITION_KEYS = ("deepspeed.zero_optimization.", "deepspeed.data_types.", "precision.optimizer_")
# Keys of the model's configuration that decide the shapes of its weights.
SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "tie_word_embeddings".split()
)


@dataclass(frozen=True)
class Change:
    """A difference between a run and the checkpoint that it resumes from.

    Attributes:
        key: the key that allow_changes_on_resume has to name.
        never: the reason why the change cannot be allowed, or "".
    """

    what: Difference
    key: str
    never: str = ""

    def __str__(self) -> str:
        return f"{self.what}" + (f" (cannot change on a resume: {self.never})" if self.never else "")


class ChangesError(CheckpointError):
    """The configuration differs from that of the checkpoint, and the differences are not or cannot be allowed.

    Attributes:
        changes: the differences.
    """

    code = "change_not_allowed"
    changes: list[Change] = []

    @property
    def keys(self) -> list[str]:
        """Keys that allow_changes_on_resume has to name, or that cannot change."""
        return list(dict.fromkeys(change.key for change in self.changes))


def is_new_run(args: TrainingArguments) -> bool:
    """Whether the run resumes from no checkpoint."""
    setting = args.resume_from_checkpoint
    return setting == "never" or (setting == "auto" and not committed(RunFolder(args.output_dir).checkpoints))


def checkpoint_to_resume(args: TrainingArguments) -> Path | None:
    """Return the checkpoint the run will resume from, without reading it; None for a new run.

    Raises CheckpointError: see `branch_at`, `check_given`.
    """
    own = RunFolder(args.output_dir).checkpoints
    if is_new_run(args):
        return None
    if args.resume_from_checkpoint == "auto":
        return committed(own)[-1]
    path = Path(str(args.resume_from_checkpoint))
    if newest := branch_at(own, path):
        return newest
    check_given(path, own, hashes=False)
    return path


def resume_state(state: RunState, saved: RunState, path: Path, allow: bool | Iterable[str]) -> list[str]:
    """Continue `state` where `saved`, the state of the checkpoint `path`, stopped. Return lines for the log.

    The number of ranks and the ZeRO stage may differ. Every other change of the numbers has to be in `allow`
    (allow_changes_on_resume), and is added to `state.changes`. With another sequence length the run resumes at the same
    number of tokens, rounded up to a whole sample.

    Raises:
        CheckpointError: rollback.json is damaged; as `allowed_changes`.
        ConfigurationError: as `allowed_changes`.
    """
    found = allowed_changes(state, saved, path, allow)
    old, new = saved.train_config, state.train_config
    state.step, state.consumed_tokens = saved.step, saved.consumed_tokens
    state.consumed_samples = -(
        -saved.consumed_samples * int(old["max_seq_length"]) // int(new["max_seq_length"])
    )
    state.changes = [*saved.changes, *({"step": saved.step, **vars(change.what)} for change in found)]
    for name in ("health", "evaluation_due", "precision", "escalations", "precision_changes"):
        setattr(state, name, getattr(saved, name))
    is_own = belongs_to(path, RunFolder(new["output_dir"]).checkpoints)
    state.began_at = saved.began_at if is_own else origin(path)
    lines = []
    given, began = (config["model"].get("init_from") for config in (new, old))
    new["model"]["init_from"] = began  # the model card names what the run began with
    if given not in (None, began):
        lines.append(f"model.init_from {given} is ignored: the weights are those of {path}")
    if saved.world_size != state.world_size:
        lines.append(
            f"{saved.world_size} ranks -> {state.world_size}: weights, optimizer and FP8 state are resharded; "
            f"gradient_accumulation_steps {old['gradient_accumulation_steps']} -> {new['gradient_accumulation_steps']}"
        )
    if saved.zero_stage != state.zero_stage:
        lines.append(f"ZeRO {saved.zero_stage} -> {state.zero_stage}: weights and optimizer are resharded")
    if found:
        lines += [f"{ALLOW}: changes from step {saved.step + 1} on:", *(f"  {change}" for change in found)]
    if saved.data_fingerprint == _through_json(state.data_fingerprint):
        skipped = rolled_back(path)
        state.skipped_samples = saved.skipped_samples if skipped is None else skipped
    else:
        lines.append(
            f"the order of samples changes: the run resumes at sample {state.consumed_samples:,} of the new one. Texts "
            "may come twice, or not at all, until the current epochs end"
        )
    return lines


def allowed_changes(
    state: RunState, saved: RunState, path: Path, allow: bool | Iterable[str]
) -> list[Change]:
    """Return the differences of `state` from `saved`, of the checkpoint `path`, that `allow` names.

    Raises:
        ChangesError: a difference that is not or cannot be allowed.
        ConfigurationError: max_steps is below the step of the checkpoint.
    """
    found = changes(state, saved)
    max_steps = state.train_config["max_steps"]
    if saved.step > max_steps:
        earlier = [each for each in committed(path.parent) if step_of(each) <= max_steps]
        remedy = "To train a new run, choose another output_dir"
        if earlier:
            keys = [change.key for change in found if not change.never]
            options = f"--resume_from_checkpoint {shlex.quote(str(earlier[-1]))} --output_dir NEW"
            options += f" {allow_option(keys)}" if keys else ""
            remedy = f"To train from an earlier step in a new folder, pass {options}"
        raise ConfigurationError(
            f"max_steps is {max_steps}, but {path} is already at step {saved.step}. {remedy}",
            code="past_max_steps",
            key="max_steps",
        )
    refused = [c for c in found if c.never]
    unnamed = [c for c in found if not (c.never or allow is True or c.key in (allow or ()))]
    if not (refused or unnamed):
        return found
    remedy = "Restore the old values, choose another output_dir, or pass --resume_from_checkpoint never"
    if not refused:
        remedy = f"To resume with these changes, pass {allow_option(c.key for c in found)} (true allows all). {remedy}"
    lines = "\n  ".join(map(str, refused + unnamed))
    error = ChangesError(
        f"{path} was written with a different configuration:\n  {lines}\n{remedy}",
        code="cannot_change" if refused else None,
    )
    error.changes = refused or found
    error.key = error.keys[0]
    raise error


def changes(state: RunState, saved: RunState) -> list[Change]:
    """Return the differences of `state` from `saved` that are not free."""
    old, new = saved.train_config, state.train_config
    found = []
    for each in resume_differences(old, new):
        follows_from_stage = each.key.startswith(("deepspeed.zero_optimization.", "deepspeed.data_types."))
        if not (follows_from_stage and saved.zero_stage != state.zero_stage):
            found.append(Change(each, key_of(each.key), why_never(each)))
    for each in differences(saved.data_fingerprint, _through_json(state.data_fingerprint), "data"):
        if each.key not in ("data.seq_length", "data.seed"):  # named as keys of the configuration
            found.append(Change(each, _key_of_data(each, old, new)))
    for each in differences(saved.model_config, _through_json(state.model_config), "model configuration"):
        is_size = each.key.split(".")[1] in SIZES
        found.append(
            Change(each, "model.config", "the checkpoint has weights of these sizes" if is_size else "")
        )
    return found


def starting_precision(args: TrainingArguments, state: RunState) -> tuple[int, dict[str, str]]:
    """Return the phase of precision.schedule and the levels of modules of the next step.

    If the evaluation of the step before was skipped, return that step's, if the configuration still has its precision:
    they change after the evaluation.
    """
    phase = phase_at(args, state.step, state.consumed_tokens)
    if not state.evaluation_due:
        return phase, state.levels
    for number in (phase, phase - 1):
        if number >= 0 and same_precision(
            arguments_of_phase(args, number).to_dict()["precision"], state.precision
        ):
            phase = number
            break
    return phase, {c["module"]: c["to"] for c in state.escalations if c["step"] != state.step}


def is_partitioned_differently(saved: RunState, state: RunState) -> bool:
    """Return whether DeepSpeed's files of `saved` may be partitioned differently from those of `state` although the
    number of ranks and the ZeRO stage are the same."""
    found = resume_differences(saved.train_config, state.train_config) if saved.train_config else []
    return any(each.key.startswith(PARTITION_KEYS) for each in found)


def half_rate_options(path: Path, learning_rate: float) -> str:
    """Return the options that resume from the checkpoint `path` at half the learning rate."""
    checkpoint, rate = shlex.quote(str(path)), f"{learning_rate / 2:g}"
    return f"--resume_from_checkpoint {checkpoint} --learning_rate {rate} {allow_option(['learning_rate'])}"


def resume_option(args: TrainingArguments) -> str:
    """Return the option with which the command of a run resumes from its newest checkpoint, or "" if it does so as it
    is."""
    setting, own = args.resume_from_checkpoint, RunFolder(args.output_dir).checkpoints
    starts_again = setting == "never" or (setting != "auto" and belongs_to(Path(setting), own))
    return " with --resume_from_checkpoint auto" if starts_again else ""


def allow_option(keys: Iterable[str]) -> str:
    """Return the option that allows changes of `keys`."""
    return f"--{ALLOW} {','.join(dict.fromkeys(keys))}"


def _key_of_data(difference: Difference, old: dict[str, Any], new: dict[str, Any]) -> str:
    """Return the key that changed a value of the data's fingerprint."""
    if ".weight" not in difference.key:
        return "data.sources"
    if old["data"]["weights"] != new["data"]["weights"]:
        return "data.weights"
    return "max_seq_length" if old["max_seq_length"] != new["max_seq_length"] else "data.sources"


def _through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))
