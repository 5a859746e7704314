"""README.md of an exported model: the facts of its run. The licence and what the model is for are the user's to say."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from train.record.history import EVALUATION, History, HistoryError, read_history

# By which a later export knows its own card from one that a user wrote or changed.
MARK = "<!-- written by train/export.py from the run's files; without this line an export leaves the card as it is -->"


def write_card(
    out: Path, former: Path, checkpoint: Path, trained: dict[str, Any], step: int, tokens: int
) -> None:
    """README.md in `out`, for the export that `former` is replaced by: a card there that is the user's own stays.

    checkpoint: RUN/checkpoints/step-NNNNNNNN, of `step` steps and `tokens`; trained: the configuration it has. Files of
    the run that are not there are not spoken of."""
    old = former / "README.md"
    if old.is_file() and MARK not in old.read_text(encoding="utf-8", errors="replace"):
        shutil.copy2(old, out / "README.md")
        return
    try:
        history: History | None = read_history(checkpoint.parent.parent)
    except HistoryError:
        history = None
    facts = _facts(trained, step, tokens, history)
    rows = "\n".join(f"| {name} | {_cell(value)} |" for name, value in facts.items() if value)
    name = checkpoint.resolve().parent.parent.name
    text = f"{MARK}\n\n# {name}\n\nA Mistral model, pretrained from {_begin(trained)}.\n\n| | |\n|---|---|\n{rows}\n"
    (out / "README.md").write_text(
        text + "\nLicence, intended use and limits: to be filled in.\n", encoding="utf-8"
    )


def _facts(trained: dict[str, Any], step: int, tokens: int, history: History | None) -> dict[str, str]:
    stages = [trained["precision"] | stage for stage in trained["precision"].get("schedule") or [{}]]
    hows = (s["compute"] + (f", {s['recipe']} scaling" if s["compute"] == "fp8" else "") for s in stages)
    facts = {
        "model": f"{Path(trained['model']['config']).name}, trained as {trained['model']['variant']}",
        "data": ", ".join(trained["data"]["sources"]),
        "steps, tokens": f"{step:,}, {tokens:,}",
        "sequence length": f"{trained['max_seq_length']:,}",
        "precision": "; then ".join(hows),
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
        facts["proved at the start"] = "; ".join(line.strip() for line in last.get("proof", []))
        facts["GPU"] = str(last.get("machine", {}).get("gpu", "none: the CPU reference of FP8"))
        facts["GPUs"] = str(last.get("gpus") or "")
        facts["versions"] = ", ".join(
            f"{name} {version}" for name, version in last.get("versions", {}).items()
        )
        facts["commit"] = ", ".join(dict.fromkeys(str(start.get("commit", "unknown")) for start in starts))
        facts["starts"] = f"{len(starts)}" if len(starts) > 1 else ""
    return facts


def _begin(trained: dict[str, Any]) -> str:
    """Without the folders of somebody's machine."""
    begun_with = trained["model"].get("init_from")
    return f"the weights of {Path(begun_with).name}" if begun_with else "random weights"


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")
