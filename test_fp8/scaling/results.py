"""What the launches of `bench_scaling.py` come to: the speed on each number of GPUs as a share of what these make each
for itself, beside what was planned; table and plot."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from test_fp8.common import report
from test_fp8.common.report import Result, measured
from test_fp8.scaling.launches import Launch
from train.files import drawing
from train.planning.memory import WORKSPACES_GIB

COLUMNS: report.Columns = {
    "row": ("row", "<"),
    "GPUs": ("ranks", "d"),
    "tokens a step": ("step_tokens", ",d"),
    "tokens/s": ("tokens_per_second", ",.0f"),
    "a GPU": (lambda r: _each(r, "tokens_per_second"), ",.0f"),
    "of each alone": ("share_of_alone", ".3f"),
    "of the slowest": ("share_of_slowest", ".3f"),
    "planned": ("planned_tokens_per_second", ",.0f"),
    "apart": (lambda r: apart(r, "tokens_per_second"), "+.1%"),
    "GiB": ("peak_gib", ".1f"),
    "planned GiB": ("planned_peak_gib", ".1f"),
    "GiB apart": (lambda r: apart(r, "peak_gib"), "+.1%"),
    "reason": (lambda r: r.get("reason", ""), "<"),
}


def _each(r: Result, key: str) -> float | None:
    return r[key] / r["ranks"] if key in r else None


def apart(r: Result, key: str) -> float | None:
    """By what share a plan was above what was measured; None: one of them is not known."""
    planned, found = r.get(f"planned_{key}"), r.get(key)
    return planned / found - 1 if planned and found else None


def results_of(cells: Sequence[Result], launches: Sequence[Launch]) -> list[Result]:
    """A result for each of `cells`, which say of a row on a number of ranks what is planned: with its speed, that of
    the median round, and its peak of memory, or a "reason". Of one rank it is the mean of the GPUs, each of which is
    told in "alone"."""
    alone: dict[str, list[float]] = {}
    results = []
    for cell in sorted(cells, key=lambda cell: cell["ranks"]):
        ran = [launch for launch in launches if launch.ranks == cell["ranks"] and cell["row"] in launch.found]
        found = [(launch, launch.found[cell["row"]]) for launch in ran]
        if reason := next(
            (f["reason"] for _, f in found if "reason" in f), None if found else "not measured"
        ):
            results.append(cell | {"reason": reason})
            continue
        by_place: dict[Any, list[float]] = {}
        for launch, one in found:
            by_place.setdefault(launch.places and tuple(launch.places), []).append(one["tokens_per_second"])
        speeds = [statistics.median(rounds) for rounds in by_place.values()]
        peaks = [peak for _, one in found if (peak := _peak_gib(one)) is not None]
        result = cell | {
            "tokens_per_second": statistics.fmean(speeds),
            "rounds": list(by_place.values()),
            "peak_gib": max(peaks, default=None),
            "attention": found[0][1]["attention"],
            "notes": found[0][1]["proof"],
        }
        if cell["ranks"] == 1:
            result["alone"] = alone[cell["row"]] = speeds
        elif known := alone.get(cell["row"]):
            its = (known * cell["ranks"])[: cell["ranks"]] if len(known) == 1 else known[: cell["ranks"]]
            result["share_of_alone"] = result["tokens_per_second"] / sum(its)
            result["share_of_slowest"] = result["tokens_per_second"] / (len(its) * min(its))
        results.append(result)
    return results


def _peak_gib(one: Result) -> float | None:
    """Of what bench_model.py measured, without what its earlier visits had left; None without a GPU."""
    if one["allocated_gib"] is None:
        return None
    return one["allocated_gib"] - max(0.0, one["before_gib"] - WORKSPACES_GIB)


def farthest(results: Sequence[Result]) -> str:
    """How far plans were off, in words; "" where none can be told."""
    texts = []
    for key, what in (("peak_gib", "memory"), ("tokens_per_second", "speed")):
        if errors := [error for r in results if (error := apart(r, key)) is not None]:
            texts.append(f"{what} within {max(map(abs, errors)):.1%}")
    return f"what was planned: {', '.join(texts)}" if texts else ""


def plot(results: Sequence[Result], title: str, output: Path) -> None:
    """Tokens/s of a GPU and shares of the GPUs alone against their number, a line a row, as a PNG beside `output`; none
    where there is nothing to draw."""
    rows: Mapping[str, list[Result]] = {
        name: list(group)
        for name, group in itertools.groupby(
            sorted(measured(results), key=lambda r: (r["row"], r["ranks"])), key=lambda r: r["row"]
        )
    }
    if not rows:
        return
    with drawing(output.with_suffix(".png"), 1, 2, figsize=(11, 4.5)) as (figure, axes):
        speed, share = axes[0]
        for number, (name, its) in enumerate(rows.items()):
            color = f"C{number % 10}"
            speed.plot(
                [r["ranks"] for r in its], [_each(r, "tokens_per_second") for r in its], "o-", color=color
            )
            planned = [(r["ranks"], each) for r in its if (each := _each(r, "planned_tokens_per_second"))]
            if planned:
                speed.plot(*zip(*planned, strict=True), ":", color=color)
            shares = [(r["ranks"], r["share_of_alone"]) for r in its if "share_of_alone" in r]
            share.plot(
                [1, *(n for n, _ in shares)], [1.0, *(s for _, s in shares)], "o-", color=color, label=name
            )
        counts = sorted({r["ranks"] for r in measured(results)})
        for axis, what in (
            (speed, "tokens/s of a GPU (dotted: planned)"),
            (share, "share of what each makes alone"),
        ):
            axis.set_xscale("log", base=2)
            axis.set_xticks(counts, counts)
            axis.set(xlabel="GPUs", title=what)
            axis.grid(alpha=0.3)
        speed.set_ylim(bottom=0)
        share.legend(fontsize=8)
        figure.suptitle(title, fontsize=11)
