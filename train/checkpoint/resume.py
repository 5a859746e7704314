"""Whether a run may go on from a checkpoint, and with which sample."""

from __future__ import annotations

import json
from pathlib import Path

from model.autotune.record import differences
from train.checkpoint.load import CheckpointError, RunState
from train.config.arguments import resume_differences

ALLOW = "data.allow_changes_on_resume"
ACCUMULATES_IN = "data_types.grad_accum_dtype"
BATCH = "train_batch_size_tokens: "


def resume_state(state: RunState, saved: RunState, path: Path, allow_data_changes: bool) -> list[str]:
    """Continue `state` where `saved`, of the checkpoint `path`, stopped. Returns what the log should say.

    The number of ranks and the ZeRO stage may be others: they change how the state is spread, not which samples a step
    has, as long as it has as many tokens. With `allow_data_changes` the tokenizer, the data, the mixture and the
    sequence length may be others, too. The run then goes on at the same number of tokens of the new order of samples,
    rounded up to a whole sample.

    Raises CheckpointError: the run that wrote the checkpoint was configured differently, or trained on other data.
    """
    found = [
        line
        for line in resume_differences(saved.train_config, state.train_config)
        if not _is_of_ranks(line, saved, state)
    ]
    for what, old, new in (
        ("model configuration", saved.model_config, state.model_config),
        ("data", saved.data_fingerprint, state.data_fingerprint),
    ):
        found += differences(json.loads(json.dumps(old)), json.loads(json.dumps(new)), what)
    old_length, new_length = (int(s.train_config["max_seq_length"]) for s in (saved, state))
    of_data = [line for line in found if _is_of_data(line, old_length != new_length)]
    refused = [line for line in found if line not in of_data or not allow_data_changes]
    if refused:
        remedy = "restore these values, choose another output_dir, or start anew with --resume_from_checkpoint never"
        if len(of_data) == len(found):
            remedy += f"; --{ALLOW} true goes on with the changed data, at the same number of tokens"
        if saved.world_size != state.world_size and any(line.startswith(BATCH) for line in refused):
            remedy = f"{_batch_remedy(saved, state)}; {remedy}"
        raise CheckpointError(
            f"{path} is of a run that was configured differently:\n  " + "\n  ".join(refused) + "\n" + remedy
        )
    state.step = saved.step
    state.consumed_tokens = saved.consumed_tokens
    state.consumed_samples = -(-saved.consumed_samples * old_length // new_length)
    said = _redistribution(saved, state)
    if not found:
        return said
    return [
        *said,
        f"{ALLOW}: {path} is of a run with other data; these changes are allowed:",
        *(f"  {line}" for line in found),
        f"the run had consumed {saved.consumed_samples:,} samples of {old_length} tokens and goes on with sample "
        f"{state.consumed_samples:,} of {new_length} tokens (rounded up). What it has seen was in the old order: in "
        "the new one texts may come again, or not at all, until the epochs that are under way end",
    ]


def _is_of_data(difference: str, other_length: bool) -> bool:
    """Whether a line "key: old -> new" is of what ALLOW allows: with another sequence length the number of samples of
    a micro-batch may be another one, too, so that a step can have as many tokens as before. A document mask is what is
    computed, not which data."""
    key = difference.partition(": ")[0]
    follows = ("max_seq_length", "per_device_train_batch_size") if other_length else ()
    return key in follows or (key.startswith("data.") and key != "data.document_mask")


def _is_of_ranks(difference: str, saved: RunState, state: RunState) -> bool:
    """Whether a line "key: old -> new" follows from another number of ranks or another ZeRO stage: what DeepSpeed's
    configuration says of either, and in which type gradients are added up, of which not every stage has the choice.
    Tokens a step are compared by themselves."""
    key = difference.partition(": ")[0]
    ranks, stage = saved.world_size != state.world_size, saved.zero_stage != state.zero_stage
    return (ranks and key == "deepspeed.gradient_accumulation_steps") or (
        stage and (key.startswith("deepspeed.zero_optimization.") or key == f"deepspeed.{ACCUMULATES_IN}")
    )


def _redistribution(saved: RunState, state: RunState) -> list[str]:
    """For the log: what another number of ranks or another ZeRO stage comes to."""
    old, new = saved.world_size, state.world_size
    said = []
    if old != new:
        before, after = (s.train_config["gradient_accumulation_steps"] for s in (saved, state))
        generators = "each rank goes on with its random generators"
        if new > old:
            generators = f"random generators of ranks {old} to {new - 1} begin with their seeds"
        said.append(
            f"{old} ranks -> {new}: weights, optimizer and FP8 state are redistributed; each step has the samples it "
            f"would have had, in {after} micro-batches a rank instead of {before}; {generators}"
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
