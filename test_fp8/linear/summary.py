"""What the microtest's results say: the table, where FP8 overtakes bf16, and the plot."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from test_fp8.common.report import Result, measured
from train.files import drawing

COLORS = {"fp32": "gray", "bf16": "C0", "fp8-delayed": "C3", "fp8-current": "C1", "fp8-block": "C2"}
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
    share = "-" if step["share_of_ceiling"] is None else f"{step['share_of_ceiling']:.1%}"
    speed = "-" if step["speed_to_bf16"] is None else f"{step['speed_to_bf16']:.2f}"
    gemms = " ".join(f"{row[part]['tflops']:>8.3f}" for part in ("forward", "dgrad", "wgrad"))
    errors = " ".join(f"{row['errors'][name]:>7.1e}" for name in ("output", "dgrad", "wgrad"))
    return (
        f"{start} {step['ms_median']:>9.4f} {step['tflops']:>8.3f} {share:>7} {speed:>6} | {gemms} | {errors} | "
        f"{'yes' if row['ran_fp8'] else 'no'}"
    )


def fp8_against_bf16(results: list[Result]) -> list[Result]:
    """For each FP8 precision and launch: at how many shapes forward + backward is faster than bf16 launched the same
    way ("faster" of "shapes"), the "median_speed_to_bf16" over them, and for the square Linears "from_width_by_rows",
    the smallest width from which on FP8 was faster at every measured one; None: not even at the widest."""
    kinds: dict[tuple[str, str], list[Result]] = {}
    for r in measured(results):
        if r["ran_fp8"] and r["step"]["speed_to_bf16"] is not None:
            kinds.setdefault((r["precision"], r["launch"]), []).append(r)
    summary = []
    for (precision, launch), rows in kinds.items():
        speeds = [r["step"]["speed_to_bf16"] for r in rows]
        squares: dict[int, dict[int, float]] = {}
        for r, speed in zip(rows, speeds, strict=True):
            if "square" in r["what"]:
                squares.setdefault(r["batch"] * r["rows"], {})[r["inputs"]] = speed
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
    slower = max((width for width, speed in speeds.items() if speed <= 1), default=0)
    return min((width for width in speeds if width > slower), default=None)


def summary_lines(summary: list[Result]) -> list[str]:
    lines = ["FP8 against bf16 launched the same way, forward + backward:"]
    for s in summary:
        lines.append(
            f"  {s['precision']:<12} {s['launch']:<6} faster at {s['faster']} of {s['shapes']} shapes, "
            f"median {s['median_speed_to_bf16']:.2f}x"
        )
        widths = [
            f"{rows} rows: {'never' if width is None else f'from width {width} on'}"
            for rows, width in s["from_width_by_rows"].items()
        ]
        if widths:
            lines.append(f"{'':<22}faster with square Linears, {'; '.join(widths)}")
    return lines


def plot(results: list[Result], ceilings: dict[str, Any], title: str, output: Path) -> None:
    """TFLOP/s of forward + backward by shape as a PNG beside `output`, a panel for each launch; square Linears of as
    many rows are joined by lines. None where there is nothing to draw."""
    rows = measured(results)
    launches = list(dict.fromkeys(r["launch"] for r in rows))
    shapes = list(dict.fromkeys(r["shape"] for r in rows))
    if not rows:
        return
    size = (max(7.0, 0.45 * len(shapes) + 2), 3.2 * len(launches) + 1)
    with drawing(output.with_suffix(".png"), len(launches), sharex=True, figsize=size) as (figure, axes):
        marks: dict[str, Any] = {}
        for axis, launch in zip(axes[:, 0], launches, strict=True):
            curves: dict[tuple[str, int], list[tuple[int, float]]] = {}
            for r in rows:
                if r["launch"] == launch:
                    group = r["batch"] * r["rows"] if r["what"] == ["square"] else 0
                    point = shapes.index(r["shape"]), r["step"]["tflops"]
                    curves.setdefault((r["precision"], group), []).append(point)
            for (precision, group), points in curves.items():
                style: dict[str, Any] = {"marker": "o", "linestyle": "-" if group else "none"}
                (marks[precision],) = axis.plot(
                    *zip(*points, strict=True), color=COLORS[precision], markersize=4, **style
                )
            for key, precision in (("bf16", "bf16"), ("fp8", "fp8-delayed")):
                if key in ceilings:
                    axis.axhline(ceilings[key]["tflops"], color=COLORS[precision], linestyle=":", linewidth=1)
            axis.set(title=launch, ylabel="TFLOP/s, forward + backward")
            axis.grid(alpha=0.3)
        axis.set_xticks(range(len(shapes)), shapes, fontsize=7, rotation=60, ha="right")
        axis.set_xlabel("batch x rows x in : out")
        figure.legend(marks.values(), marks, loc="outside lower center", ncols=len(marks), fontsize=8)
        figure.suptitle(
            title + ("; dotted: measured ceilings of bf16 and FP8" if ceilings else ""), fontsize=10
        )
