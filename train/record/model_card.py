"""README.md of an exported model: the facts of its run. The licence and what the model is for are the user's to say."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model.config import model_name
from model.fp8.recipes import stage_of
from train.files import shown
from train.record.history import EVALUATION, History, HistoryError, read_history

# By which a later export knows its own card from one that a user wrote or changed.
MARK = "<!-- written by train/export.py from the run's files; without this line an export leaves the card as it is -->"


# What the Hugging Face Hub reads; the license is the user's to add.
FRONT_MATTER = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- mistral
---
"""
COMPRESSED = "compressed-tensors"
NEEDS_COMPRESSED = "transformers needs the package compressed-tensors: pip install compressed-tensors"
# Keys that resumes may change, and that have rows of their own.
TOLD = ("precision.compute", "precision.recipe", "precision.schedule", "max_seq_length", "data.sources")
# What the stages of precision.schedule end by.
COUNTED = ("max_steps", "train_batch_size_tokens")
NEXT = "; then "
HASH = 64  # characters of a sha256


def write_card(
    out: Path,
    former: Path,
    checkpoint: Path,
    trained: dict[str, Any],
    step: int,
    tokens: int,
    changes: Sequence[dict[str, Any]],
    began_at: str | None,
) -> None:
    """README.md in `out`, for the export that `former` is replaced by: a card there that is the user's own stays.

    checkpoint: RUN/checkpoints/step-NNNNNNNN, of `step` steps and `tokens`; trained: the configuration it has; changes:
    what resumes had otherwise before, {"step", "key", "old", "new"}, oldest first; began_at: the checkpoint of another
    run that this one went on from. Files of the run that are not there are not spoken of."""
    model_config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    old = former / "README.md"
    if old.is_file() and MARK not in old.read_text(encoding="utf-8", errors="replace"):
        shutil.copy2(old, out / "README.md")
        return
    try:
        history: History | None = read_history(checkpoint.parent.parent)
    except HistoryError:
        history = None
    facts = _facts(trained, step, tokens, history, changes, began_at)
    facts["max_position_embeddings"] = f"{model_config['max_position_embeddings']:,}"
    facts["quantization"] = _quantization(model_config.get("quantization_config"))
    rows = "\n".join(f"| {name} | {_cell(value)} |" for name, value in facts.items() if value)
    name = checkpoint.resolve().parent.parent.name
    text = f"{MARK}\n\n# {name}\n\nA Mistral model, pretrained from {_begin(trained)}.\n\n| | |\n|---|---|\n{rows}\n"
    (out / "README.md").write_text(
        f"{FRONT_MATTER}{text}\nLicense, intended use and limits: to be filled in.\n", encoding="utf-8"
    )


def _facts(
    trained: dict[str, Any],
    step: int,
    tokens: int,
    history: History | None,
    changes: Sequence[dict[str, Any]],
    began_at: str | None,
) -> dict[str, str]:
    now, before = _configured(trained, step, tokens), _before(trained, step, tokens, changes)
    told = {name: _since(now[name], [(until, values[name]) for until, values in before]) for name in now}
    facts = {
        "model": f"{model_name(trained['model']['config'])}, trained as {trained['model']['variant']}",
        "data": told["data"],
        "steps, tokens": f"{step:,}, {tokens:,}",
        "of another run": _branched(began_at),
        "sequence length": told["sequence length"],
        "precision": told["precision"],
        "also changed": _other_changes(changes),
    }
    if history is None:
        return facts
    upto = [record for record in history.records if record["step"] <= step]
    for key, name in (
        ("loss", "training loss"),
        (EVALUATION, "evaluation loss"),
        ("unigram_loss", "of a unigram model"),
    ):
        values = [record[key] for record in upto if record.get(key) is not None]
        facts[name] = f"{values[-1]:.4f} nats a token" if values else ""
    starts = [start for start in history.starts if start["step"] < step]
    if starts:
        last = starts[-1]
        taken = {change["module"] for change in last.get("escalations", []) if change["step"] < step}
        facts["precision"] += (
            f"; {len(taken)} modules went to other levels (precision.on_trouble)" if taken else ""
        )
        facts["proved at the start"] = _proved(trained, starts, step)
        facts["GPU"] = str(last.get("machine", {}).get("gpu", "none: the CPU reference of FP8"))
        facts["GPUs"] = str(last.get("gpus") or "")
        facts["versions"] = ", ".join(
            f"{name} {version}" for name, version in last.get("versions", {}).items()
        )
        facts["commit"] = ", ".join(dict.fromkeys(str(start.get("commit", "unknown")) for start in starts))
        facts["starts"] = f"{len(starts)}" if len(starts) > 1 else ""
    return facts


def _quantization(config: dict[str, Any] | None) -> str:
    """Describe the quantization_config of an export; "" without one."""
    if config is None:
        return ""
    if config["quant_method"] == COMPRESSED:
        return f"FP8 weights with a scale a row ({COMPRESSED}); {NEEDS_COMPRESSED}"
    rows, columns = config["weight_block_size"]
    return f"FP8 weights with a scale for each block of {rows} x {columns} (quant_method {config['quant_method']})"


def _proved(config: dict[str, Any], starts: Sequence[dict[str, Any]], step: int) -> str:
    """What the `starts` before `step` have proved: of each stage of precision.schedule the newest, and where there are
    several, before which step it was."""
    schedule, tokens_of_step = config["precision"].get("schedule") or [{}], config.get(COUNTED[1], 0)
    proofs: dict[int, tuple[int, str]] = {}
    for start in starts:
        # what an earlier start came to after the checkpoint that this one went on from does not count
        proofs = {stage: proof for stage, proof in proofs.items() if proof[0] <= start["step"]}
        for proven in (start, *(stage for stage in start.get("stages", []) if stage.get("new_stage"))):
            if (at := proven["step"]) < step:
                tokens = start.get("tokens", 0) + (at - start["step"]) * tokens_of_step
                stage = stage_of(schedule, config.get(COUNTED[0], 0), at, tokens)
                proofs[stage] = at, "; ".join(line.strip() for line in proven.get("proof", []))
    if len(proofs) == 1:
        return next(iter(proofs.values()))[1]
    return NEXT.join(f"before step {at + 1:,}: {proof}" for at, proof in sorted(proofs.values()))


def _configured(config: dict[str, Any], step: int, tokens: int) -> dict[str, str]:
    """What of a configuration has a row of its own, and a resume may change; of precision.schedule the stages that
    `step` steps, of so many tokens, have come to."""
    schedule = config["precision"].get("schedule") or [{}]
    max_steps, tokens_of_step = (config.get(key, 0) for key in COUNTED)
    reached = stage_of(schedule, max_steps, step - 1, tokens - tokens_of_step)  # that of the last step
    stages = [config["precision"] | stage for stage in schedule[: reached + 1]]
    hows = (s["compute"] + (f", {s['recipe']} scaling" if s["compute"] == "fp8" else "") for s in stages)
    return {
        "data": ", ".join(config["data"]["sources"]),
        "sequence length": f"{config['max_seq_length']:,}",
        "precision": NEXT.join(hows),
    }


def _before(
    trained: dict[str, Any], step: int, tokens: int, changes: Sequence[dict[str, Any]]
) -> list[tuple[int, dict[str, str]]]:
    """(step, `_configured` until then) of each step from which on a resume had something otherwise, oldest first."""
    found: list[tuple[int, dict[str, str]]] = []
    config = copy.deepcopy(trained)
    for until in sorted({change["step"] for change in changes}, reverse=True):
        tokens -= (step - until) * config.get("train_batch_size_tokens", 0)
        step = until
        for change in reversed(changes):
            if change["step"] == step and change["key"] in (*TOLD, *COUNTED):
                section, _, name = change["key"].rpartition(".")
                (config[section] if section else config)[name] = change["old"]
        found.insert(0, (step, _configured(config, step, tokens)))
    return found


def _other_changes(changes: Sequence[dict[str, Any]]) -> str:
    """Those of keys that have no row of their own."""
    last: dict[str, str] = {}
    formers: dict[str, list[tuple[int, str]]] = {}
    for change in changes:
        key, old, new = change["key"], change["old"], change["new"]
        of_a_source = key.startswith("data.sources.") and (old is None or new is None)
        if key not in TOLD and not of_a_source:  # that one came or went is in the row of the data
            formers.setdefault(key, []).append((change["step"], _short(old)))
            last[key] = _short(new)
    return "; ".join(_since(f"{key} {last[key]}", formers[key]) for key in last)


def _since(now: str, formers: list[tuple[int, str]]) -> str:
    """`now`, and what was before: (step until which, what), oldest first; what stayed so, or had a further stage later,
    is told once."""
    following = [*(what for _, what in formers), now][1:]
    told = [
        f"until step {step:,}: {what}"
        for (step, what), then in zip(formers, following, strict=True)
        if then != what and not then.startswith(f"{what}{NEXT}")
    ]
    return f"{now} ({'; '.join(told)})" if told else now


def _short(value: Any) -> str:
    if isinstance(value, str) and len(value) == HASH:
        return f"{value[:12]}..."
    return f"{value:g}" if isinstance(value, float) else shown(value)


def _branched(began_at: str | None) -> str:
    """Without the folders of somebody's machine."""
    if not began_at:
        return ""
    path = Path(began_at)
    own = "what is said of starts, GPUs, versions and commits is of the steps after it"
    return f"up to {path.name} of {path.parent.parent.name}; {own}"


def _begin(trained: dict[str, Any]) -> str:
    begun_with = trained["model"].get("init_from")
    return f"the weights of {model_name(begun_with)}" if begun_with else "random weights"


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")
