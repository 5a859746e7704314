#!/usr/bin/env python3
"""Generate the tables of docs/ from the code and test_fp8/results/.

python scripts/tables.py    updates docs/configuration.md (all keys) and docs/hardware.md (memory, disk and time)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from model.config import CONFIGS, flops_per_token, load_sizes, num_parameters, state_memory_gib
from train.config.arguments import TrainingArguments
from train.config.schema import Node, all_keys, describe
from train.planning.memory import checkpoint_bytes, weight_bytes

BEGIN, END = "<!-- written by scripts/tables.py -->\n", "<!-- end of what it writes -->\n"
SEQ_LENGTH = 2048
GB = 1e9

# First key of each part of docs/configuration.md, in the order of the configuration's fields.
PARTS = {
    "max_steps": "Length and batch",
    "optim": "Learning rate and optimizer",
    "seed": "Reproducibility",
    "max_skipped_steps": "Failures",
    "output_dir": "Logs, checkpoints and evaluation",
    "resume_from_checkpoint": "Resuming",
    "report_to": "Trackers",
    "gradient_checkpointing": "Memory and DeepSpeed",
    "model": "`model`: the model to train",
    "data": "`data`: the training data",
    "precision": "`precision`: bf16 or FP8, and its recipe",
    "speed": "`speed`: fused kernels and CUDA graphs",
}
# Short forms of a key's `resume` rule (model/keys.py) for the table.
ON_A_RESUME = {
    "free": "free",
    "allowed": "if allowed",
    "structural": "no",
}
# Benchmarks of whole steps (test_fp8/results/) whose speeds docs/hardware.md shows, at the micro-batch of the training.
MEASURED = ("hare_0.4b_shipped_step", "hare_1.1b_shipped_step", "hare_2.0b_shipped_step")
ROWS = {
    "te_layer_bf16": "bf16",
    "te_layer_fp8_delayed": "FP8",
    "te_layer_bf16_graph": "bf16, CUDA graphs",
    "te_layer_fp8_delayed_graph": "FP8, CUDA graphs",
}


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "".join(f"| {' | '.join(row)} |\n" for row in (titles, ["---"] * len(titles), *rows))


def configuration() -> str:
    """Return one table of keys for each part of the configuration."""
    parts: dict[str, list[list[str]]] = {}
    title = ""
    for key, node in all_keys().items():
        title = PARTS.get(key.partition(".")[0], title)
        parts.setdefault(title, []).append(_described(key, node))
    sections = [title for title in parts if title.startswith("`")]
    titles = ("key", "values", "default", "on a resume", "description")
    return "\n".join(
        f"### {title}\n\n{table(titles, parts[title])}"
        for title in (*sections, *(t for t in parts if t not in sections))
    )


def _described(key: str, node: Node) -> list[str]:
    def plain(text: str) -> str:
        for sign in "\\*<|":
            text = text.replace(sign, f"\\{sign}")
        return text

    default = f"`{json.dumps(node['default'])}`" if "default" in node else "required"
    why = f": {node['why']}" if "why" in node else ""
    resume = ON_A_RESUME[node["resume"]] + plain(why)
    return [f"`{key}`", plain(describe(node)), default, resume, plain(node["description"])]


def hardware() -> str:
    """Return the GPU memory, disk and work of each model in model/configs, and the time of the measured ones."""
    models = {path.stem: load_sizes(path.stem) for path in CONFIGS.glob("*.json")}
    models = dict(sorted(models.items(), key=lambda item: num_parameters(item[1])))

    def rows(*cells: Callable[[Any], str]) -> list[list[str]]:
        return [[f"`{name}`", *(cell(sizes) for cell in cells)] for name, sizes in models.items()]

    def state(stage: int, ranks: int) -> Callable[[Any], str]:
        return lambda sizes: f"{state_memory_gib(sizes, stage, ranks):,.1f}"

    def gigabytes(count: Callable[[Any], int]) -> Callable[[Any], str]:
        return lambda sizes: f"{count(sizes) / GB:,.1f}"

    def saved(sizes: Any) -> int:
        return checkpoint_bytes(sizes, 1, "fp8")

    def exported(sizes: Any) -> int:
        return num_parameters(sizes) * weight_bytes("fp8")

    memory = [(1, 1), (1, 2), (1, 8), (2, 8), (3, 8)]
    titles = [f"ZeRO {stage}, {ranks} GPU{'s' if ranks > 1 else ''}" for stage, ranks in memory]
    millions, gflop = (
        lambda sizes: f"{num_parameters(sizes) / 1e6:,.0f}",
        lambda sizes: f"{flops_per_token(sizes, SEQ_LENGTH) / 1e9:,.2f}",
    )
    keep = TrainingArguments.save_total_limit
    return "\n".join(
        [
            "### GPU memory of weights, gradients and optimizer (GiB per GPU)\n",
            table(("model", "M parameters", *titles), rows(millions, *(state(*where) for where in memory))),
            "### Disk space (GB)\n",
            table(
                (
                    "model",
                    "one checkpoint",
                    f"{keep + 1} checkpoints (save_total_limit {keep}) and hf/",
                    "hf/ alone",
                ),
                rows(
                    gigabytes(saved),
                    gigabytes(lambda sizes: saved(sizes) * (keep + 1) + exported(sizes)),
                    gigabytes(exported),
                ),
            ),
            f"### Work per token, forward and backward (GFLOP, sequence length {SEQ_LENGTH})\n",
            table(("model", "GFLOP per token"), rows(gflop)),
            "### Measured whole steps on one H200\n",
            table(
                (
                    "model",
                    "precision of te_layer",
                    "micro-batch",
                    "peak GiB",
                    "tokens/s",
                    "TFLOP/s",
                    "hours for 1 B tokens",
                ),
                _measured(),
            ),
        ]
    )


def _measured() -> list[list[str]]:
    rows = []
    for name in MEASURED:
        report = json.loads((ROOT / "test_fp8" / "results" / f"{name}.json").read_text(encoding="utf-8"))
        for r in report["results"]:
            if r["row"] in ROWS:
                speed = r["tokens_per_second"]
                figures = (
                    r["allocated_gib"],
                    speed,
                    speed * report["gflop_per_token"] / 1e3,
                    1e9 / speed / 3600,
                )
                shown = [
                    form.format(figure)
                    for form, figure in zip(("{:.0f}", "{:,.0f}", "{:,.0f}", "{:.2f}"), figures, strict=True)
                ]
                rows.append([f"`{report['model']}`", ROWS[r["row"]], str(r["micro_batch"]), *shown])
    return rows


PAGES = {ROOT / "docs/configuration.md": configuration, ROOT / "docs/hardware.md": hardware}


def page_with(page: Path, written: str) -> str:
    """Return the page with `written` between its markers. Raises ValueError if the markers are missing."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: expected a line {BEGIN.strip()} followed by a line {END.strip()}")
    return before + BEGIN + written + END + after


if __name__ == "__main__":
    for page, write in PAGES.items():
        page.write_text(page_with(page, write()), encoding="utf-8")
