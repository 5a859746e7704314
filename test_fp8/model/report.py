"""How `bench_model.py` shows its results: the table, the summary, the plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from test_fp8.common import report
from test_fp8.common.report import Result, measured
from test_fp8.model.rows import BASELINE
from train.files import drawing

COLORS = {"bf16": "tab:blue", "fp8": "tab:red", "torchao": "tab:orange"}
LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # over the dashed line


COLUMNS: report.Columns = {
    "measure": ("measure", "<"),
    "row": (lambda r: r["row"] + " *" * r["best_bf16"], "<"),
    "tokens/s": ("tokens_per_second", ",.0f"),
    "x eager": (f"ratio_to_{BASELINE}", ".2f"),
    "x bf16": ("ratio_to_best_bf16", ".2f"),
    "TFLOP/s": ("tflops", ".3g"),
    "batch": ("micro_batch", "d"),
    "pass ms": ("pass_ms", ".2f"),
    "launch ms": ("launch_ms", ".2f"),
    "GiB": ("allocated_gib", ".1f"),
    "reserved": ("reserved_gib", ".1f"),
    "prepare s": ("prepare_s", ".1f"),
    "capture s": ("capture_s", ".1f"),
    "DeepSpeed": ("deepspeed_share", ".1%"),
    "drift": ("drift", ".1%"),
    "FP8": ("fp8_modules", "d"),
    "loss": ("loss", ".4f"),
    "attention": ("attention", "<"),
}


def lines(results: Sequence[Result]) -> list[str]:
    """The results as a text table; below it what precision.auto chose, and the rows without a speed with the reason."""
    shown = [report.table(measured(results), COLUMNS)]
    shown.append("* the fastest bf16 of its measure; x eager: to hf_bf16; x bf16: to that fastest one")
    for r in results:
        if choice := r.get("choice"):
            named = ", ".join(f"{key} {value}" for key, value in choice.items() if key != "why")
            shown.append(f"{r['measure']} {r['row']} chose: {named}")
    return shown + [
        f"{r['measure']} {r['row']} not measured: {r['reason']}" for r in results if "reason" in r
    ]


def summary_lines(results: Sequence[Result]) -> list[str]:
    """For each measure: the fastest row, the fastest bf16 row, and how they compare."""
    lines = []
    for measure in dict.fromkeys(r["measure"] for r in results):
        rows = [r for r in measured(results) if r["measure"] == measure]
        if not rows:
            lines.append(f"{measure}: nothing was measured")
            continue
        fastest = max(rows, key=lambda r: r["tokens_per_second"])
        line = f"{measure}: fastest {fastest['row']}, {fastest['tokens_per_second']:,.0f} tokens/s"
        for r in rows:
            if r["best_bf16"] and r is not fastest:
                line += f", {fastest['ratio_to_best_bf16']:.2f} x the fastest bf16 ({r['row']})"
        if (ratio := fastest[f"ratio_to_{BASELINE}"]) is not None:
            line += f", {ratio:.2f} x {BASELINE}"
        lines.append(line)
    return lines


def plot(results: Sequence[Result], title: str, output: Path) -> None:
    """Bars of tokens/s, a panel a measure, the fastest bf16 row marked by a line, as a PNG beside `output`; none where
    there is nothing to draw."""
    rows = measured(results)
    measures = [[r for r in rows if r["measure"] == m] for m in dict.fromkeys(r["measure"] for r in rows)]
    if not rows:
        return
    heights = [len(rows) + 1 for rows in measures]
    size: dict[str, Any] = {"figsize": (10, 0.32 * sum(heights) + 1.6), "height_ratios": heights}
    with drawing(output.with_suffix(".png"), len(measures), sharex=True, **size) as (figure, axes):
        for axis, rows in zip(axes[:, 0], measures, strict=True):
            kinds = ["torchao" if r["variant"] == "torchao" else r["compute"] for r in rows]
            speeds = [r["tokens_per_second"] for r in rows]
            report.bars(axis, [r["row"] for r in rows], speeds, color=[COLORS[kind] for kind in kinds])
            for place, r in enumerate(rows):
                ratio = r["ratio_to_best_bf16"]
                text = f" {r['tokens_per_second']:,.0f}" + ("" if ratio is None else f" ({ratio:.2f})")
                axis.text(r["tokens_per_second"], place, text, va="center", fontsize=8, bbox=LABEL_BOX)
                if r["best_bf16"]:
                    axis.axvline(r["tokens_per_second"], color=COLORS["bf16"], linestyle="--", linewidth=1)
            name = {"bare": "forward + backward", "step": "whole DeepSpeed step"}[rows[0]["measure"]]
            axis.set_title(name, fontsize=10)
        axes[0, 0].set_xlim(0, 1.18 * max(r["tokens_per_second"] for r in measured(results)))
        axes[-1, 0].set_xlabel("tokens/s (ratio to the fastest bf16 row, dashed)")
        figure.suptitle(title, fontsize=11)
