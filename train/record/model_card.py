"""Write the model card (README.md) of an exported model. The user adds license, language and intended use."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from model.config import model_name
from train.files import to_json_text
from train.record.history import EVALUATION, HistoryError, read_history

# A later export replaces a README.md only if it contains this line.
MARK = "<!-- written by train/export.py from the run's files; without this line an export leaves the card as it is -->"
COMPRESSED = "compressed-tensors"
COMPRESSED_HINT = "transformers needs the package compressed-tensors: pip install compressed-tensors"
LOSSES = {"training loss": "loss", "evaluation loss": EVALUATION, "loss of a unigram model": "unigram_loss"}


def write_card(
    out: Path,
    former: Path,
    checkpoint: Path,
    config: dict[str, Any],
    step: int,
    tokens: int,
) -> None:
    """Write the model card README.md of an exported model, or keep the existing one if it belongs to the user.

    Args:
        out: The folder of the new export, which contains config.json.
        former: The folder of the export that `out` replaces.
        checkpoint: The path of the exported checkpoint, RUN/checkpoints/step-NNNNNNNN.
        config: The training configuration of the checkpoint.
        step: The number of training steps at the checkpoint.
        tokens: The number of training tokens at the checkpoint.
    """
    old = former / "README.md"
    if old.is_file() and MARK not in old.read_text(encoding="utf-8", errors="replace"):
        shutil.copyfile(old, out / "README.md")
        return
    model_config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    precision, start_weights = config["precision"], config["model"].get("init_from") or ""
    base_model = hub_id(start_weights)
    method = (model_config.get("quantization_config") or {}).get("quant_method", "")
    note = f"; {COMPRESSED_HINT}" if method == COMPRESSED else ""
    facts = {
        "model": f"{model_name(config['model']['config'])}, trained as {config['model']['variant']}",
        "started from": f"the weights of {base_model or model_name(start_weights)}"
        if start_weights
        else "random weights",
        "data": ", ".join(config["data"]["sources"]),
        "steps, tokens": f"{step:,}, {tokens:,}",
        "sequence length": f"{config['max_seq_length']:,}",
        "precision": precision["compute"]
        + (f", {precision['recipe']} scaling" if precision["compute"] == "fp8" else ""),
        "precision.schedule": to_json_text(precision["schedule"]) if precision.get("schedule") else "",
        **_run_facts(checkpoint.parent.parent, step),
        "max_position_embeddings": f"{model_config['max_position_embeddings']:,}",
        "quantization": f"FP8 weights (quant_method {method}){note}" if method else "",
    }
    rows = "".join(
        f"| {name} | {value.replace('|', chr(92) + '|')} |\n" for name, value in facts.items() if value
    )
    # metadata for the Hugging Face Hub
    metadata = {
        "license": "other  # fill in",
        "language": "und  # fill in, for example en",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": base_model,
        "tags": f"\n- {model_config['model_type']}\n- {precision['compute']}",
        "training_tokens": tokens,
        "sequence_length": config["max_seq_length"],
        "precision": precision["compute"],
        "quantization": method,
    }
    front = "".join(f"{key}: {value}\n" for key, value in metadata.items() if value != "")
    (out / "README.md").write_text(
        f"---\n{front}---\n{MARK}\n\n# {checkpoint.resolve().parent.parent.name}\n\n| | |\n|---|---|\n{rows}\n"
        "License, intended use and limitations: please fill in.\n",
        encoding="utf-8",
    )


def hub_id(folder: str) -> str:
    """Return the Hugging Face Hub id org/name of a folder in the Hub's cache, or "" for any other folder."""
    cached = [part for part in Path(folder).parts if part.startswith("models--")]
    return cached[-1].removeprefix("models--").replace("--", "/") if cached else ""


def _run_facts(run: Path, step: int) -> dict[str, str]:
    """Return model card entries about the training, or {} if the run has no metrics.

    The entries are the losses at `step`, the startup check, the GPUs, the package versions and the commit.
    """
    try:
        history = read_history(run)
    except (HistoryError, OSError):
        return {}
    facts = {}
    for name, key in LOSSES.items():
        values = [r[key] for r in history.records if r["step"] <= step and r.get(key) is not None]
        facts[name] = f"{values[-1]:.4f} nats per token" if values else ""
    if starts := [start for start in history.starts if start["step"] < step]:
        last = starts[-1]
        fallbacks = {change["module"] for change in last["escalations"] if change["step"] < step}
        facts |= {
            "startup check": "; ".join(line.strip() for line in last["startup_checks"]),
            "modules after a fallback": str(len(fallbacks) or ""),
            "GPU": f"{last['gpus']} x {gpu}" if (gpu := last["machine"].get("gpu")) else "",
            "versions": ", ".join(f"{name} {version}" for name, version in last["versions"].items()),
            "commit": last["commit"],
        }
    return facts
