"""Whether a run may go on from a checkpoint, and with which sample."""

from __future__ import annotations

import json
from pathlib import Path

from model.autotune import differences
from train.arguments import resume_differences
from train.checkpoint import CheckpointError, RunState

ALLOW = "data.allow_changes_on_resume"


def resume_state(state: RunState, saved: RunState, path: Path, allow_data_changes: bool) -> list[str]:
    """Continue `state` where `saved`, of the checkpoint `path`, stopped. Returns what the log should say.

    With `allow_data_changes` the tokenizer, the data, the mixture and the sequence length may be others. The run then
    goes on at the same number of tokens of the new order of samples, rounded up to a whole sample.

    Raises CheckpointError: the run that wrote the checkpoint was configured differently, or trained on other data.
    """
    found = resume_differences(saved.train_config, state.train_config)
    for what, old, new in (
        ("number of ranks", saved.world_size, state.world_size),
        ("ZeRO stage", saved.zero_stage, state.zero_stage),
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
        raise CheckpointError(
            f"{path} is of a run that was configured differently:\n  " + "\n  ".join(refused) + "\n" + remedy
        )
    state.step = saved.step
    state.consumed_tokens = saved.consumed_tokens
    state.consumed_samples = -(-saved.consumed_samples * old_length // new_length)
    if not found:
        return []
    return [
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
