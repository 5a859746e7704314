"""How `bench_model.py` shows its results: the table, the summary, the plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from test_fp8.common.report import save_plot, subplots
from test_fp8.model.results import Result
from test_fp8.model.rows import BASELINE

COLORS = {"bf16": "tab:blue", "fp8": "tab:red", "torchao": "tab:orange"}
LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # over the dashed line


def table(results: Sequence[Result]) -> str:
    """The results as a text table; rows without a speed below it, with the reason."""
    titles = (
        "measure", "row", "tokens/s", "x eager", "x bf16", "TFLOP/s", "batch", "pass ms", "launch ms", "GiB",
        "reserved", "prepare s", "capture s", "DeepSpeed", "drift", "FP8", "loss", "attention",
    )  # fmt: skip
    lines = [titles]
    for r in (r for r in results if "reason" not in r):
        lines.append(
            (
                r["measure"],
                r["row"] + (" *" if r["best_bf16"] else ""),
                f"{r['tokens_per_second']:,.0f}",
                _shown(r[f"ratio_to_{BASELINE}"], ".2f"),
                _shown(r["ratio_to_best_bf16"], ".2f"),
                f"{r['tflops']:.3g}",
                str(r["micro_batch"]),
                f"{r['pass_ms']:.2f}",
                f"{r['launch_ms']:.2f}",
                _shown(r["allocated_gib"], ".1f"),
                _shown(r["reserved_gib"], ".1f"),
                f"{r['prepare_s']:.1f}",
                _shown(r["capture_s"], ".1f"),
                _shown(r.get("deepspeed_share"), ".1%"),
                f"{r['drift']:.1%}",
                str(r["fp8_modules"]),
                f"{r['loss']:.4f}",
                r["attention"],
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = [
        "  ".join(
            cell.ljust(width) if title in ("measure", "row", "attention") else cell.rjust(width)
            for title, cell, width in zip(titles, line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]
    shown.append("* the fastest bf16 of its measure; x eager: to hf_bf16; x bf16: to that fastest one")
    for r in results:
        if choice := r.get("choice"):
            named = ", ".join(f"{key} {value}" for key, value in choice.items() if key != "why")
            shown.append(f"{r['measure']} {r['row']} chose: {named}")
    shown += [f"{r['measure']} {r['row']} not measured: {r['reason']}" for r in results if "reason" in r]
    return "\n".join(shown)


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def summary_lines(results: Sequence[Result]) -> list[str]:
    """For each measure: the fastest row, the fastest bf16 row, and how they compare."""
    lines = []
    for measure in dict.fromkeys(r["measure"] for r in results):
        measured = [r for r in results if r["measure"] == measure and "reason" not in r]
        if not measured:
            lines.append(f"{measure}: nothing was measured")
            continue
        fastest = max(measured, key=lambda r: r["tokens_per_second"])
        line = f"{measure}: fastest {fastest['row']}, {fastest['tokens_per_second']:,.0f} tokens/s"
        for r in measured:
            if r["best_bf16"] and r is not fastest:
                line += f", {fastest['ratio_to_best_bf16']:.2f} x the fastest bf16 ({r['row']})"
        if (ratio := fastest[f"ratio_to_{BASELINE}"]) is not None:
            line += f", {ratio:.2f} x {BASELINE}"
        lines.append(line)
    return lines


def plot(results: Sequence[Result], title: str, output: Path) -> Path | None:
    """Bars of tokens/s, a panel a measure, the fastest bf16 row marked by a line, as a PNG beside `output`; None where
    there is nothing to draw."""
    measures = [
        [r for r in results if r["measure"] == measure and "reason" not in r]
        for measure in dict.fromkeys(r["measure"] for r in results)
    ]
    measures = [rows for rows in measures if rows]
    if not measures:
        return None
    heights = [len(rows) + 1 for rows in measures]
    figure, axes = subplots(
        len(measures), 1, figsize=(10, 0.32 * sum(heights) + 1.6), height_ratios=heights, sharex=True
    )
    for axis, rows in zip(axes[:, 0], measures, strict=True):
        kinds = ["torchao" if r["variant"] == "torchao" else r["compute"] for r in rows]
        speeds = [r["tokens_per_second"] for r in rows]
        axis.barh(range(len(rows)), speeds, color=[COLORS[kind] for kind in kinds])
        for place, r in enumerate(rows):
            ratio = r["ratio_to_best_bf16"]
            text = f" {r['tokens_per_second']:,.0f}" + ("" if ratio is None else f" ({ratio:.2f})")
            axis.text(r["tokens_per_second"], place, text, va="center", fontsize=8, bbox=LABEL_BOX)
            if r["best_bf16"]:
                axis.axvline(r["tokens_per_second"], color=COLORS["bf16"], linestyle="--", linewidth=1)
        axis.set_yticks(range(len(rows)), [r["row"] for r in rows], fontsize=8)
        axis.invert_yaxis()
        axis.set_xlim(0, 1.18 * max(max(r["tokens_per_second"] for r in rows) for rows in measures))
        axis.set_title(
            {"bare": "forward + backward", "step": "whole DeepSpeed step"}[rows[0]["measure"]], fontsize=10
        )
        axis.grid(axis="x", alpha=0.3)
    axes[-1, 0].set_xlabel("tokens/s (ratio to the fastest bf16 row, dashed)")
    figure.suptitle(title, fontsize=11)
    return save_plot(figure, output)
