"""What the microtest's results say: the table, where FP8 overtakes bf16, and the plot."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from test_fp8.common.report import Result, measured
from test_fp8.linear.shapes import PARTS
from train.files import drawing

COLORS = {
    "fp32": "tab:gray",
    "bf16": "tab:blue",
    "fp8-delayed": "tab:red",
    "fp8-current": "tab:orange",
    "fp8-block": "tab:green",
}
HEADER = (
    f"{'shape':<20} {'precision':<12} {'launch':<6} {'ms':>9} {'TFLOP/s':>8} {'ceiling':>7} {'x bf16':>6} | "
    f"{'forward':>8} {'dgrad':>8} {'wgrad':>8} | {'output':>7} {'dgrad':>7} {'wgrad':>7} | FP8"
)
LEGEND = """ms, TFLOP/s, share of the measured ceiling of the row's own precision, speed relative to bf16 launched the
same way: forward + backward. Then TFLOP/s of each GEMM with its quantization, and errors relative to float32."""


def table_row(row: Result) -> str:
    start = f"{row['shape']:<20} {row['precision']:<12} {row['launch']:<6}"
    if "reason" in row:
        return f"{start} not run: {row['reason']}"
    step = row["step"]
    share, speed = step["share_of_ceiling"], step["speed_to_bf16"]
    columns = [
        f"{step['ms_median']:>9.4f} {step['tflops']:>8.3f}",
        f"{'-':>7}" if share is None else f"{share:>7.1%}",
        f"{'-':>6}" if speed is None else f"{speed:>6.2f}",
        "|",
        *(f"{row[part]['tflops']:>8.3f}" for part in PARTS[1:]),
        "|",
        *(f"{row['errors'][name]:>7.1e}" for name in ("output", "dgrad", "wgrad")),
        "|",
        "yes" if row["ran_fp8"] else "no",
    ]
    return f"{start} {' '.join(columns)}"


def fp8_against_bf16(results: list[Result]) -> list[Result]:
    """For each FP8 precision and launch: at how many shapes forward + backward is faster than bf16 launched the same
    way ("faster" of "shapes"), the "median_speed_to_bf16" over them, and for the square Linears "from_width_by_rows",
    the smallest width from which on FP8 was faster at every measured one; None: not even at the widest."""
    summary = []
    rows = [r for r in measured(results) if r["ran_fp8"] and r["step"]["speed_to_bf16"] is not None]
    for precision, launch in dict.fromkeys((r["precision"], r["launch"]) for r in rows):
        of_kind = [r for r in rows if (r["precision"], r["launch"]) == (precision, launch)]
        speeds = [r["step"]["speed_to_bf16"] for r in of_kind]
        squares: dict[int, dict[int, float]] = {}
        for r in of_kind:
            if "square" in r["what"]:
                widths = squares.setdefault(r["batch"] * r["rows"], {})
                widths[r["inputs"]] = r["step"]["speed_to_bf16"]
        summary.append(
            {
                "precision": precision,
                "launch": launch,
                "faster": sum(speed > 1 for speed in speeds),
                "shapes": len(speeds),
                "median_speed_to_bf16": statistics.median(speeds),
                "from_width_by_rows": {n: from_width(squares[n]) for n in sorted(squares)},
            }
        )
    return summary


def from_width(speeds: dict[int, float]) -> int | None:
    """The smallest key of `speeds` whose value and all values of larger keys are above 1."""
    found = None
    for width in sorted(speeds, reverse=True):
        if speeds[width] <= 1:
            break
        found = width
    return found


def summary_lines(summary: list[Result]) -> list[str]:
    lines = ["FP8 against bf16 launched the same way, forward + backward:"]
    for s in summary:
        lines.append(
            f"  {s['precision']:<12} {s['launch']:<6} faster at {s['faster']} of {s['shapes']} shapes, "
            f"median {s['median_speed_to_bf16']:.2f}x"
        )
        if s["from_width_by_rows"]:
            widths = (
                f"{rows} rows: {'never' if width is None else f'from width {width} on'}"
                for rows, width in s["from_width_by_rows"].items()
            )
            lines.append(f"{'':<22}faster with square Linears, {'; '.join(widths)}")
    return lines


def plot(results: list[Result], ceilings: dict[str, Any], title: str, output: Path) -> None:
    """TFLOP/s of forward + backward as a PNG beside `output`: a row of panels for each launch; square Linears by width,
    a panel for each number of rows, and bars for the other shapes. None where there is nothing to draw."""
    rows = measured(results)
    launches = list(dict.fromkeys(r["launch"] for r in rows))
    row_counts = sorted({r["batch"] * r["rows"] for r in rows if "square" in r["what"]})
    others = list(dict.fromkeys(r["shape"] for r in rows if r["what"] != ["square"]))
    if not rows:
        return
    ratios = [1.0] * len(row_counts) + ([max(2.0, len(others) / 3.5)] if others else [])
    size: dict[str, Any] = {"figsize": (2.7 * sum(ratios) + 2, 3.2 * len(launches) + 0.8)}
    size |= {"width_ratios": ratios, "sharey": True}
    with drawing(output.with_suffix(".png"), len(launches), len(ratios), **size) as (figure, axes):
        for line, launch in zip(axes, launches, strict=True):
            of_launch = [r for r in rows if r["launch"] == launch]
            for axis, count in zip(line, row_counts, strict=False):
                squares = [r for r in of_launch if "square" in r["what"] and r["batch"] * r["rows"] == count]
                _lines_by_width(axis, squares)
                axis.set_title(f"square, {count} rows, {launch}", fontsize=9)
            if others:
                _bars_by_shape(line[-1], [r for r in of_launch if r["shape"] in others], others)
                line[-1].set_title(f"batch x rows x in : out, {launch}", fontsize=9)
            for axis in line:
                axis.grid(alpha=0.3)
                for precision in ("bf16", "fp8"):
                    if precision in ceilings:
                        color = COLORS.get(precision, COLORS["fp8-delayed"])
                        axis.axhline(ceilings[precision]["tflops"], color=color, linestyle=":", linewidth=1)
            line[0].set_ylabel("TFLOP/s, forward + backward")
        # one legend for all panels, as any of them may lack a precision
        handles: dict[str, Any] = {}
        for axis in axes.flat:
            handles |= {label: h for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        where = {"loc": "outside lower center", "ncols": len(handles), "fontsize": 8}
        figure.legend(handles.values(), handles.keys(), **where)
        figure.suptitle(
            title + ("; dotted: measured ceilings of bf16 and FP8" if ceilings else ""), fontsize=10
        )


def _lines_by_width(axis: Any, rows: list[Result]) -> None:
    for precision in dict.fromkeys(r["precision"] for r in rows):
        points = sorted((r["inputs"], r["step"]["tflops"]) for r in rows if r["precision"] == precision)
        axis.plot(*zip(*points, strict=True), "o-", color=COLORS[precision], label=precision, markersize=3)
    widths = sorted({r["inputs"] for r in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(widths, [str(width) for width in widths], fontsize=7, rotation=45)
    axis.set_xlabel("width", fontsize=8)


def _bars_by_shape(axis: Any, rows: list[Result], shapes: list[str]) -> None:
    precisions = list(dict.fromkeys(r["precision"] for r in rows))
    thickness = 0.8 / max(1, len(precisions))
    for i, precision in enumerate(precisions):
        speeds = {r["shape"]: r["step"]["tflops"] for r in rows if r["precision"] == precision}
        positions = [n + (i - (len(precisions) - 1) / 2) * thickness for n in range(len(shapes))]
        heights = [speeds.get(shape, math.nan) for shape in shapes]
        axis.bar(positions, heights, thickness, color=COLORS[precision], label=precision)
    axis.set_xticks(range(len(shapes)), shapes, fontsize=7, rotation=20, ha="right")
