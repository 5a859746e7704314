"""Whether a run may go on from a checkpoint, with which sample, and with what of its configuration changed."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from model.fp8.recipes import EIGHT_BITS, STATE_BLOCK, end_step, stage_of
from train.checkpoint.files import CheckpointError, RunState, committed, is_of, step_of
from train.config.arguments import ConfigurationError, TrainingArguments
from train.config.differences import (
    Difference,
    differences,
    key_of,
    resume_differences,
    same_precision,
    why_never,
)
from train.config.schedule import at_stage, stage_at, text_of
from train.files import shown
from train.record.run_folder import RunFolder

ALLOW = "allow_changes_on_resume"
ACCUMULATES_IN = "data_types.grad_accum_dtype"
# What DeepSpeed's files may be cut by, and what is in them.
CUT_BY = ("deepspeed.zero_optimization.", "deepspeed.data_types.", "precision.optimizer_")
# Of the model: what its weights have their shapes by.
SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "tie_word_embeddings".split()
)


@dataclass(frozen=True)
class Change:
    """Something that a run has otherwise than the checkpoint that it goes on from. `key`: what allow_changes_on_resume
    has to name. `never`: why that would be of no use; "" where it is."""

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
        """What allow_changes_on_resume has to name, or the keys that cannot change."""
        return list(dict.fromkeys(change.key for change in self.changes))


def resume_state(state: RunState, saved: RunState, path: Path, allow: bool | Iterable[str]) -> list[str]:
    """Continue `state` where `saved`, of the checkpoint `path`, stopped. Returns what the log should say.

    The number of ranks and the ZeRO stage may be others. All else that changes numbers has to be in `allow`
    (allow_changes_on_resume), and is added to `state.changes`. With another length or order of samples the run goes on
    at the same number of tokens, rounded up to a whole sample.

    Raises CheckpointError: a change that is not allowed, or that cannot be.
    """
    found = allowed_changes(state, saved, path, allow)
    state.step = saved.step
    state.consumed_tokens = saved.consumed_tokens
    old_length, new_length = (int(s.train_config["max_seq_length"]) for s in (saved, state))
    state.consumed_samples = -(-saved.consumed_samples * old_length // new_length)
    state.changes = [*saved.changes, *({"step": saved.step, **vars(c.what)} for c in found)]
    said = _weights_begun_with(saved, state, path) + _redistribution(saved, state)
    if not found:
        return said
    said += [f"{ALLOW}: from step {saved.step + 1} on, of {path}:", *(f"  {change}" for change in found)]
    said += _another_stage(saved, state, found)
    rates = [_rate(saved.step, s.train_config) for s in (saved, state)]
    if rates[0] != rates[1]:
        said.append(
            f"the learning rate of step {saved.step + 1} is {rates[1]:.3e}; it would have been {rates[0]:.3e}"
        )
    said += _another_order(saved, state)
    return said


def allowed_changes(
    state: RunState, saved: RunState, path: Path, allow: bool | Iterable[str]
) -> list[Change]:
    """Return the differences of `state` from `saved`, of the checkpoint `path`, that `allow` names.

    Raises:
        CheckpointError: as `resume_state`.
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
            options += f" {allowing(keys)}" if keys else ""
            remedy = f"To train from an earlier step in a new folder, pass {options}"
        raise ConfigurationError(
            f"max_steps is {max_steps}, but {path} is already at step {saved.step}. {remedy}",
            code="past_max_steps",
            key="max_steps",
        )
    refused = [c for c in found if c.never]
    unnamed = [c for c in found if not (c.never or allow is True or c.key in (allow or ()))]
    if refused or unnamed:
        stages = [] if refused else [*_another_stage(saved, state, found), *_from_here_alone(saved, state)]
        lines = ["\n  ".join(map(str, refused + unnamed)), *stages, _remedy(saved, state, refused, found)]
        refusal = ChangesError(
            f"{path} is of a run that was configured differently:\n  " + "\n".join(lines),
            code="cannot_change" if refused else None,
        )
        refusal.changes = refused or found
        refusal.key = refusal.keys[0]
        raise refusal
    return found


def changes(state: RunState, saved: RunState) -> list[Change]:
    """What `state` has otherwise than `saved` and not every resume may have."""
    old, new = saved.train_config, state.train_config
    found = [
        Change(d, key_of(d.key), why_never(d))
        for d in resume_differences(old, new)
        if not _is_of_stage(d.key, saved, state)
    ]
    for d in differences(saved.data_fingerprint, _through_json(state.data_fingerprint), "data"):
        if d.key in ("data.seq_length", "data.seed"):  # named as keys of the configuration
            continue
        key = "data.sources"
        if ".weight" in d.key:
            lengths = old["max_seq_length"] != new["max_seq_length"]
            key = "data.weights" if old["data"]["weights"] != new["data"]["weights"] else key
            key = "max_seq_length" if lengths and key == "data.sources" else key
        found.append(Change(d, key))
    for d in differences(saved.model_config, _through_json(state.model_config), "model configuration"):
        size = d.key.split(".")[1] in SIZES
        found.append(Change(d, "model.config", "the checkpoint has weights of these sizes" if size else ""))
    return found


def begins_as(args: TrainingArguments, state: RunState) -> tuple[int, dict[str, str]]:
    """(stage of precision.schedule, levels of modules) that the run begins with: its next step's. Where the evaluation
    of the step before was left, that one's, if the configuration still has its precision: they change after it."""
    stage = stage_at(args, state.step, state.consumed_tokens)
    if not state.evaluation_due:
        return stage, state.levels
    numbers = (n for n in (stage, stage - 1) if n >= 0)
    precisions = ((n, at_stage(args, n).to_dict()["precision"]) for n in numbers)
    stage = next((n for n, precision in precisions if same_precision(precision, state.precision)), stage)
    return stage, {c["module"]: c["to"] for c in state.escalations if c["step"] != state.step}


def is_cut_otherwise(saved: RunState, state: RunState) -> bool:
    """Whether DeepSpeed's files of `saved` may be cut otherwise than those of `state` although ranks and stage are the
    same."""
    found = resume_differences(saved.train_config, state.train_config) if saved.train_config else []
    return any(d.key.startswith(CUT_BY) for d in found)


def at_half_the_rate(path: Path, learning_rate: float) -> str:
    """How a run goes on from its checkpoint `path` at half the rate: what to add to its command."""
    checkpoint, rate = shlex.quote(str(path)), f"{learning_rate / 2:g}"
    return f"--resume_from_checkpoint {checkpoint} --learning_rate {rate} " + allowing(["learning_rate"])


def to_go_on(args: TrainingArguments) -> str:
    """What the command of a run needs to go on from the run's newest checkpoint, "" for nothing: where it asked to
    begin anew, or at a checkpoint of its own, it would do that again."""
    setting, own = args.resume_from_checkpoint, RunFolder(args.output_dir).checkpoints
    again = setting == "never" or (setting != "auto" and is_of(Path(setting), own))
    return " with --resume_from_checkpoint auto" if again else ""


def allowing(keys: Iterable[str]) -> str:
    """The option that allows changes of `keys`."""
    return f"--{ALLOW} {','.join(dict.fromkeys(keys))}"


def _through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _rate(step: int, config: dict[str, Any]) -> float:
    from train.engine.optimizer import learning_rate_at  # torch, which a look before the start does without

    return learning_rate_at(step, cast(TrainingArguments, SimpleNamespace(**config)))


def _another_stage(saved: RunState, state: RunState, found: list[Change]) -> list[str]:
    """For people: that by the changes `found` the next step is in another stage of precision.schedule, whose ends by
    until_share are elsewhere in a run of another length, and how it would stay in its own."""
    (old, before), (new, after) = (
        ((s.train_config.get("precision") or {}).get("schedule"), s.train_config["max_steps"])
        for s in (saved, state)
    )
    if not (old and new):
        return []
    was, now = (stage_of(o, n, saved.step, saved.consumed_tokens) for o, n in ((old, before), (new, after)))
    if was == now:
        return []
    said = f"step {saved.step + 1} is in {text_of(new, now)}, not in {text_of(old, was)} as before"
    if old != new:  # which says why
        return [said]
    moved = [stage for stage in new[min(was, now) : max(was, now)] if "until_share" in stage]
    ends = (
        f"until_share {stage['until_share']} is step {end_step(stage, after)} of {after}, and was step "
        f"{end_step(stage, before)} of {before}"
        for stage in moved
    )
    said += f": {'; '.join(ends)}"
    if now < was:
        own = (f"until_step {end_step(s, before)} in place of until_share {s['until_share']}" for s in moved)
        keys = [*(change.key for change in found), "precision.schedule"]
        said += f". To stay in stage {was + 1}: {', '.join(own)}, and {allowing(keys)}"
    return [said]


def _another_order(saved: RunState, state: RunState) -> list[str]:
    """For people: what another order of samples means for what the run has seen."""
    before, now = saved.data_fingerprint, _through_json(state.data_fingerprint)
    if before == now:
        return []
    old_length, new_length = (s.train_config["max_seq_length"] for s in (saved, state))
    said = (
        f"the run had consumed {saved.consumed_samples:,} samples of {old_length} tokens and goes on with sample "
        f"{state.consumed_samples:,} of {new_length} tokens (rounded up). "
    )
    if _until(before, saved.consumed_samples) == _until(now, saved.consumed_samples):
        return [f"{said}Up to there the order is as it was, but for one sample of each source at the most"]
    said += (
        "What it has seen was in the old order: in the new one texts may come again, or not at all, until the epochs "
        "that are under way end"
    )
    return [said, *_from_here_alone(saved, state)]


def _until(fingerprint: dict[str, Any], position: int) -> Any:
    """What the order of samples depends on up to sample `position`."""
    sources = {}
    for name, its in fingerprint.get("sources", {}).items():
        weights: dict[str, float] = its.get("weight_from_sample", {"0": its.get("weight", 1.0)})
        begun = [(int(start), weight) for start, weight in weights.items() if int(start) < position]
        changes = [b for a, b in pairwise([(0, 0.0), *begun]) if a[1] != b[1]]
        if changes:
            sources[name] = its.get("tokenizer_sha256"), its.get("shards_sha256"), changes
    return {key: value for key, value in fingerprint.items() if key != "sources"}, sources


def _from_here_alone(saved: RunState, state: RunState) -> list[str]:
    """For people: how another mixture, of the same sources or more, would leave the order of what the run has seen as
    it was. [] where it does, or nothing could."""
    old, new = saved.train_config, state.train_config
    before, now = (s.data_fingerprint.get("sources", {}) for s in (saved, state))
    length, position = old["max_seq_length"], saved.consumed_samples * old["max_seq_length"]
    added = new["data"]["sources"].keys() - old["data"]["sources"].keys()
    other = any(
        its.get("shards_sha256") != now.get(name, {}).get("shards_sha256") for name, its in before.items()
    )
    other |= len(added) != len(new["data"]["sources"]) - len(old["data"]["sources"])  # one is gone
    if not before or other or any(old[key] != new[key] for key in ("max_seq_length", "seed")):
        return []
    by_size = {name: (its.get("tokens", 0) - 1) // length for name, its in before.items()}
    former, following = (_stages_until(c["data"]["weights"] or by_size, position) for c in (old, new))
    if former == following and (new["data"]["weights"] or not added):
        return []
    weights = new["data"]["weights"]
    last = shown(weights) if isinstance(weights, dict) else "..."
    return [
        "so that what the run has seen neither comes again nor is left out, have the new mixture begin here: "
        f'data.weights {shown(former)[:-1]}, {{"weights": {last}}}]'
    ]


def _stages_until(weights: dict[str, float] | list[dict[str, Any]], position: int) -> list[dict[str, Any]]:
    """The stages of data.weights that begin before `position`, in tokens, at which the last one of them ends."""
    stages: list[dict[str, Any]] = [{"weights": weights}] if isinstance(weights, dict) else weights
    begins: list[int] = [0, *(stage.get("until_tokens") or position for stage in stages)]
    return [
        {"until_tokens": min(end, position), "weights": stage["weights"]}
        for stage, (begin, end) in zip(stages, pairwise(begins), strict=True)
        if begin < position
    ]


def _is_of_stage(key: str, saved: RunState, state: RunState) -> bool:
    """Whether a difference follows from another ZeRO stage: what DeepSpeed's configuration says of it, and in which
    type gradients are added up, of which not every stage has the choice."""
    return saved.zero_stage != state.zero_stage and (
        key.startswith("deepspeed.zero_optimization.") or key == f"deepspeed.{ACCUMULATES_IN}"
    )


def _remedy(saved: RunState, state: RunState, refused: list[Change], found: list[Change]) -> str:
    """What to do about the changes that were `found`, some of which may be `refused`."""
    anew = "choose another output_dir, or start anew with --resume_from_checkpoint never"
    if refused:
        return f"restore {'this value' if len(refused) == 1 else 'these values'}, {anew}"
    remedy = f"to go on with these changes from step {saved.step}: {allowing(c.key for c in found)} (or true: whatever "
    remedy += f"can change); else restore these values, {anew}"
    if saved.world_size != state.world_size and any(c.key == "train_batch_size_tokens" for c in found):
        remedy = f"{_batch_remedy(saved, state)}; {remedy}"
    return remedy


def _weights_begun_with(saved: RunState, state: RunState, path: Path) -> list[str]:
    """model.init_from stays in `state` what the run began with, which exports tell. For the log: that another one has
    no effect."""
    given, began = (s.train_config["model"].get("init_from") for s in (state, saved))
    state.train_config["model"]["init_from"] = began
    if given in (None, began):
        return []
    return [f"model.init_from {given} has no effect: the run goes on with the weights of {path}"]


def _redistribution(saved: RunState, state: RunState) -> list[str]:
    """For the log: what another number of ranks or another ZeRO stage comes to."""
    old, new = saved.world_size, state.world_size
    said = []
    if old != new:
        before, after = (s.train_config["gradient_accumulation_steps"] for s in (saved, state))
        same = saved.train_config["train_batch_size_tokens"] == state.train_config["train_batch_size_tokens"]
        samples = "each step has the samples it would have had, " if same else "a step goes on "
        said.append(
            f"{old} ranks -> {new}: weights, optimizer and FP8 state are redistributed; {samples}in {after} "
            f"micro-batches a rank instead of {before}"
        )
        if (kind := (state.train_config.get("precision") or {}).get("optimizer_states")) in EIGHT_BITS:
            said.append(
                f"moments in {kind} are rounded anew, as blocks of {STATE_BLOCK} begin elsewhere; weights are not"
            )
    if saved.zero_stage != state.zero_stage:
        before, after = (
            s.train_config["deepspeed"].get("data_types", {}).get("grad_accum_dtype")
            or "the parameters' type"
            for s in (saved, state)
        )
        accumulation = "" if before == after else f"; gradients are added up in {after} instead of {before}"
        said.append(
            f"ZeRO {saved.zero_stage} -> {state.zero_stage}: weights and optimizer are redistributed{accumulation}"
        )
    return said


def _batch_remedy(saved: RunState, state: RunState) -> str:
    """How a step of `state`, on another number of ranks, can have as many tokens as one of `saved`."""
    config = state.train_config
    tokens = int(saved.train_config["train_batch_size_tokens"])
    micro = int(config["per_device_train_batch_size"]) * int(config["max_seq_length"]) * state.world_size
    if tokens % micro:
        return (
            f"a step had {tokens} tokens, which {state.world_size} ranks cannot have, with {micro} in a micro-batch of "
            "all: take another number of ranks"
        )
    return (
        f"with {state.world_size} ranks instead of {saved.world_size} a step has as many tokens as before with "
        f"gradient_accumulation_steps {tokens // micro}, or with train_batch_size_tokens {tokens} in its place"
    )
