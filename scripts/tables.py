#!/usr/bin/env python3
"""Generate the tables in docs/configuration.md and docs/hardware.md from the code and test_fp8/results/.

    python scripts/tables.py

docs/configuration.md lists all configuration keys. docs/hardware.md lists memory, disk space and training time.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from model.config import CONFIGS, flops_per_token, load_sizes, num_parameters, state_parts_gib
from train.config.schema import Node, all_keys, describe
from train.planning.memory import checkpoint_bytes

BEGIN, END = "<!-- written by scripts/tables.py -->\n", "<!-- end of the generated text -->\n"
SEQ_LENGTH = 2048
GB = 1e9

# Headings in docs/configuration.md, keyed by the first configuration key below each heading.
PARTS = {
    "max_steps": "Length and batch",
    "optim": "Learning rate, optimizer and seed",
    "max_skipped_steps": "Failures",
    "output_dir": "Logs, evaluation, checkpoints and resuming",
    "gradient_checkpointing": "Memory and DeepSpeed",
    "model": "`model`: the model to train",
    "data": "`data`: the training data",
    "precision": "`precision`: bf16 or FP8, and its recipe",
    "speed": "`speed`: fused kernels and CUDA graphs",
    "lr_scales": "`lr_scales`: factors for the learning rates of parts of the model",
}
# Short names for the `resume` rule of a key (model/keys.py).
RESUME_LABELS = {"free": "", "allowed": "; flag", "structural": "; no"}
# Benchmarks of complete training steps (test_fp8/results/) that docs/hardware.md shows.
MEASURED = ("hare_0.4b_shipped_step", "hare_1.1b_shipped_step", "hare_2.0b_shipped_step")
ROWS = {
    "te_layer_bf16": "bf16",
    "te_layer_fp8_delayed": "FP8",
    "te_layer_bf16_graph": "bf16, CUDA graphs",
    "te_layer_fp8_delayed_graph": "FP8, CUDA graphs",
}


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows of text as a Markdown table with the column headings `titles`."""
    head, *lines = (f"| {' | '.join(row)} |\n" for row in (titles, *rows))
    return "".join([head, "|---" * len(titles) + "|\n", *lines])


def configuration() -> str:
    """Return the Markdown tables of all configuration keys, one per heading in PARTS."""
    parts: dict[str, list[list[str]]] = {}
    title = ""
    for key, node in all_keys().items():
        title = PARTS.get(key.partition(".")[0], title)
        parts.setdefault(title, []).append(_described(key, node))
    sections = [title for title in parts if title.startswith("`")]
    titles = ("key", "description")
    return "\n".join(
        f"### {title}\n\n{table(titles, parts[title])}"
        for title in (*sections, *(t for t in parts if t not in sections))
    )


def _described(key: str, node: Node) -> list[str]:
    def plain(text: str) -> str:
        return re.sub(r"[\\*<|]", r"\\\g<0>", text)

    default = f"`{json.dumps(node['default'])}`" if "default" in node else "required"
    resume = RESUME_LABELS[node["resume"]]
    values = plain(describe(node).removesuffix(" or null"))
    return [f"`{key}`<br>{values}; {default}{resume}", plain(node["description"])]


def hardware() -> str:
    """Return the Markdown tables for docs/hardware.md.

    They list the memory, disk space and FLOPs for each model in model/configs, and the measured training speeds.
    """
    models = {path.stem: load_sizes(path.stem) for path in CONFIGS.glob("*.json")}
    models = dict(sorted(models.items(), key=lambda item: num_parameters(item[1])))

    def gib(stage: int, ranks: int) -> Callable[[Any], str]:
        return lambda sizes: f"{sum(state_parts_gib(sizes, stage, ranks).values()):,.1f}"

    layouts = [(1, 1), (1, 2), (1, 8), (2, 8), (3, 8)]
    columns: dict[str, Callable[[Any], str]] = {
        "M parameters": lambda sizes: f"{num_parameters(sizes) / 1e6:,.0f}",
        "GFLOP per token": lambda sizes: f"{flops_per_token(sizes, SEQ_LENGTH) / 1e9:,.2f}",
        "checkpoint, GB": lambda sizes: f"{checkpoint_bytes(sizes, 1, 'fp8') / GB:,.1f}",
        **{f"ZeRO {stage}, {ranks} GPU{'s' * (ranks > 1)}": gib(stage, ranks) for stage, ranks in layouts},
    }
    rows = [
        [f"`{name}`", *(cell(sizes) for cell in columns.values())]
        for name, sizes in models.items()
        if num_parameters(sizes) > 1e7  # smaller models need next to nothing
    ]
    titles = (
        "model",
        "`te_layer`",
        "micro-batch",
        "allocated GiB",
        "tokens/s",
        "TFLOP/s",
        "hours for 1 B tokens",
    )
    return "\n".join(
        [
            "### Memory, disk and work\n",
            table(("model", *columns), rows),
            "### Measured whole steps on one H200\n",
            table(titles, _measured()),
        ]
    )


def _measured() -> list[list[str]]:
    rows = []
    for name in MEASURED:
        report = json.loads((ROOT / "test_fp8" / "results" / f"{name}.json").read_text(encoding="utf-8"))
        for r in report["results"]:
            if r["row"] not in ROWS:
                continue
            speed = r["tokens_per_second"]
            rows.append(
                [
                    f"[{report['model']}](../test_fp8/results/{name}.json)",
                    ROWS[r["row"]],
                    str(r["micro_batch"]),
                    f"{r['allocated_gib']:.0f}",
                    f"{speed:,.0f}",
                    f"{speed * report['gflop_per_token'] / 1e3:,.0f}",
                    f"{1e9 / speed / 3600:.2f}",
                ]
            )
    return rows


PAGES = {ROOT / "docs/configuration.md": configuration, ROOT / "docs/hardware.md": hardware}


def page_with(page: Path, written: str) -> str:
    """Return the text of a page, with the text between its two marker lines replaced by `written`.

    Raises ValueError if a marker line is missing.
    """
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: expected a line {BEGIN.strip()} followed by a line {END.strip()}")
    return before + BEGIN + written + END + after


if __name__ == "__main__":
    for page, write in PAGES.items():
        page.write_text(page_with(page, write()), encoding="utf-8")
