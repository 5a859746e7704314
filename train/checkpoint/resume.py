"""Whether a run may go on from a checkpoint, and with which sample."""

from __future__ import annotations

import json
from pathlib import Path

from train.checkpoint.files import CheckpointError, RunState
from train.config.differences import Difference, differences, resume_differences, rule_of

ALLOW = "data.allow_changes_on_resume"
ACCUMULATES_IN = "data_types.grad_accum_dtype"


def resume_state(state: RunState, saved: RunState, path: Path, allow_data_changes: bool) -> list[str]:
    """Continue `state` where `saved`, of the checkpoint `path`, stopped. Returns what the log should say.

    The number of ranks and the ZeRO stage may be others, as long as a step has as many tokens. With changed data, which
    `allow_data_changes` allows, the run goes on at the same number of tokens, rounded up to a whole sample.

    Raises CheckpointError: the run that wrote the checkpoint was configured differently, or trained on other data.
    """
    old_length, new_length = (int(s.train_config["max_seq_length"]) for s in (saved, state))
    # with another sequence length a micro-batch may have another number of samples, so that a step has as many tokens
    allowed = {"data", "length"} if old_length != new_length else {"data"}
    of_data: list[Difference] = []
    others: list[Difference] = []
    for d in resume_differences(saved.train_config, state.train_config):
        if not _is_of_ranks(d.key, saved, state):
            (of_data if rule_of(d.key) in allowed else others).append(d)
    model, data = json.loads(json.dumps([state.model_config, state.data_fingerprint]))
    of_data += differences(saved.data_fingerprint, data, "data")
    others += differences(saved.model_config, model, "model configuration")
    if others or (of_data and not allow_data_changes):
        refused = others if allow_data_changes else others + of_data
        remedy = "restore these values, choose another output_dir, or start anew with --resume_from_checkpoint never"
        if not others:
            remedy += f"; --{ALLOW} true goes on with the changed data, at the same number of tokens"
        if saved.world_size != state.world_size and any(d.key == "train_batch_size_tokens" for d in others):
            remedy = f"{_batch_remedy(saved, state)}; {remedy}"
        raise CheckpointError(
            f"{path} is of a run that was configured differently:\n  "
            + "\n  ".join(map(str, refused))
            + f"\n{remedy}"
        )
    state.step = saved.step
    state.consumed_tokens = saved.consumed_tokens
    state.consumed_samples = -(-saved.consumed_samples * old_length // new_length)
    said = _redistribution(saved, state)
    if not of_data:
        return said
    return [
        *said,
        f"{ALLOW}: {path} is of a run with other data; these changes are allowed:",
        *(f"  {difference}" for difference in of_data),
        f"the run had consumed {saved.consumed_samples:,} samples of {old_length} tokens and goes on with sample "
        f"{state.consumed_samples:,} of {new_length} tokens (rounded up). What it has seen was in the old order: in "
        "the new one texts may come again, or not at all, until the epochs that are under way end",
    ]


def _is_of_ranks(key: str, saved: RunState, state: RunState) -> bool:
    """Whether a difference follows from another number of ranks or another ZeRO stage: what DeepSpeed's configuration
    says of either, and in which type gradients are added up, of which not every stage has the choice. Tokens a step are
    compared by themselves."""
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
        said.append(
            f"{old} ranks -> {new}: weights, optimizer and FP8 state are redistributed; each step has the samples it "
            f"would have had, in {after} micro-batches a rank instead of {before}"
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
