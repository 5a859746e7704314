"""Run a benchmark, print its table, and write its report.

A report is a JSON file {"command", "date", "commit", "machine", "versions", ..., "results"}, with a plot beside it, a
PNG of the same stem. It names hardware and software, never a host, a user or a path.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from model.errors import UserError
from model.fp8.machine import describe, headline
from test_fp8.common.options import Options
from train.engine import launchers
from train.files import drawing, reason, write_durably
from train.record.provenance import commit

Result = dict[str, Any]
"""One entry of "results". It has a "reason" instead of figures if the case could not be measured."""

Columns = Mapping[str, tuple[str | Callable[[Result], Any], str]]
"""Title -> (key of a result, or a function of it; format specification, which ends in < for text)."""

NAMES = ("measure", "row", "case", "shape", "precision", "launch")


@dataclass
class Outcome:
    """`more`: further keys of the report. `lines`: printed below the table. `failures`: why the exit status is 1.
    `panels` and `xlabel`: see `plot`."""

    results: list[Result]
    more: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    panels: dict[str, dict[str, Any]] = field(default_factory=dict)
    xlabel: str = ""


def run(
    parser: Options,
    argv: list[str],
    measure: Callable[[argparse.Namespace], Outcome] | str,
    columns: Columns,
) -> int:
    """Parse `argv`, measure, print the table and write the report. Of several ranks, rank 0 prints and writes.

    measure: a function, or the module that has it, which is imported when the options are right. Returns the exit
    status: 1 for failures, 2 for bad input.
    """
    options = parser.parse(argv)
    try:
        launchers.adopt()
        if launchers.rank():
            options.output, sys.stdout = None, open(os.devnull, "w", encoding="utf-8")
        parser.settle(options)
        machine, versions = describe()
        print(headline(machine, versions), flush=True)
        if isinstance(measure, str):
            measure = importlib.import_module(measure).measure
        outcome = measure(options)  # type: ignore[operator]
        if not outcome.results:
            raise ValueError("there is nothing to measure; name a case")
    except (ValueError, OSError, UserError) as error:
        print(f"error: {reason(error)}", file=sys.stderr)
        return 2
    print("\n".join([table(measured(outcome.results), columns), *outcome.lines]))
    for why in dict.fromkeys(r["reason"] for r in outcome.results if "reason" in r):
        names = (
            " ".join(str(r[k]) for k in NAMES if k in r) for r in outcome.results if r.get("reason") == why
        )
        print(f"not measured: {', '.join(names)}: {why}")
    if options.output:
        write_json(options.output, parser.command(options), outcome.results, **outcome.more)
        panels = {title: series for title, series in outcome.panels.items() if series}
        if panels:
            plot(
                options.output,
                f"{parser.program} on {machine.get('gpu', machine['cpu'])}",
                panels,
                outcome.xlabel,
            )
    for failure in outcome.failures:
        print(f"failed: {failure}", file=sys.stderr)
    return int(bool(outcome.failures))


def write_json(path: Path, command: str, results: Sequence[Result], /, **more: Any) -> None:
    """Write a report to `path`; `more` are keys beside "results". A number that is not finite becomes null. Raises
    TypeError: `more` has one of the report's own keys."""
    machine, versions = describe()
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    made = dict(command=command, date=date, commit=commit(), machine=machine, versions=versions)
    report = dict(**made, **more, results=results)
    finite = json.loads(json.dumps(report), parse_constant=lambda number: None)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, json.dumps(finite, indent=2) + "\n")


def measured(results: Sequence[Result]) -> list[Result]:
    """The results that have figures."""
    return [r for r in results if "reason" not in r]


def table(results: Sequence[Result], columns: Columns) -> str:
    """The results as lines of text, "-" for what is None or missing."""
    lines, forms = [list(columns)], [form for _, form in columns.values()]
    for r in results:
        values = [r.get(get) if isinstance(get, str) else get(r) for get, _ in columns.values()]
        lines.append(["-" if v is None else format(v, form) for v, form in zip(values, forms, strict=True)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = [f"{'<' if f.endswith('<') else '>'}{w}" for f, w in zip(forms, widths, strict=True)]
    return "\n".join("  ".join(map(format, line, sides)).rstrip() for line in lines)


def curves(results: Sequence[Result], label: str, x: str, y: str) -> dict[str, tuple[list[Any], list[Any]]]:
    """Lines for `plot`: the value of the key `label` -> (x, y)."""
    lines: dict[str, tuple[list[Any], list[Any]]] = {}
    for r in results:
        values = lines.setdefault(r[label], ([], []))
        values[0].append(r[x])
        values[1].append(r[y])
    return lines


def plot(output: Path, title: str, panels: Mapping[str, Mapping[str, Any]], xlabel: str) -> None:
    """Draw `panels`, title -> label -> value, as the PNG beside `output`: horizontal bars if the values are numbers,
    lines if they are pairs (x, y) of lists."""
    labels = list(dict.fromkeys(label for series in panels.values() for label in series))
    height = 1 + len(panels) * max(3.0, 0.3 * len(labels))
    with drawing(output.with_suffix(".png"), len(panels), figsize=(10, height)) as (figure, axes):
        for axis, (name, series) in zip(axes[:, 0], panels.items(), strict=True):
            for label, value in series.items():
                color = f"C{labels.index(label) % 10}"
                if isinstance(value, tuple):
                    axis.plot(*value, "o-", markersize=3, linewidth=1, color=color, label=label)
                else:
                    axis.bar_label(axis.barh(label, value, color=color), fmt=" {:,.4g}", fontsize=8)
            if isinstance(value, tuple):
                axis.legend(fontsize=8)
            axis.set_title(name, fontsize=10)
            axis.grid(alpha=0.3)
        axes[-1, 0].set_xlabel(xlabel)
        figure.suptitle(title, fontsize=11)
