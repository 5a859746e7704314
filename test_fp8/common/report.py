"""Run a benchmark, print its table, and write its report.

A report is a JSON file with the keys "command", "date", "commit", "machine", "versions" and "results", and further keys
of the benchmark. It contains the hardware and the software versions, but no host name, user name or path.
bench_scaling.py and compare_convergence.py also write plots to PNG files next to it.
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
from model.terminal import format_table
from test_fp8.common.options import Option, Options, choose_defaults
from train import rank_env
from train.files import describe_error, open_figure, write_durably
from train.record.provenance import commit

Result = dict[str, Any]
"""Report entry for one benchmark case. A case that could not be measured has a "reason" instead of figures."""

Columns = Mapping[str, tuple[str | Callable[[Result], Any], str]]
"""Table columns: maps each title to a result key (or a function of the result) and a format specification.

The format of text columns ends with "<".
"""

NAMES = ("row", "shape", "precision", "launch", "ranks")


@dataclass
class Panel:
    """One diagram of a plot.

    x, y: axis labels with units. series: the values by label. A number is drawn as a horizontal bar, a pair (x, y) of
    lists as a line, and (x, y, lower, upper) as a line with a band. target: a value of y to mark, with its label.
    """

    x: str
    y: str
    series: Mapping[str, Any]
    target: tuple[float, str] | None = None


@dataclass
class Outcome:
    """The results of a benchmark.

    results: one entry per case. more: additional report keys. lines: text to print below the table. failures: reasons
    to exit with status 1. title: title of the plots. plots: the panels of each plot, keyed by the suffix of its file
    name.
    """

    results: list[Result]
    more: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    title: str = ""
    plots: dict[str, list[Panel]] = field(default_factory=dict)


class Benchmark:
    """A benchmark that can be run from the command line.

    file: path of the script. text: description for --help. options: command-line options. columns: columns of the
    table. measure: the function that runs the measurements, or the name of the module that contains this function. The
    module is imported only after the options have been checked.
    """

    def __init__(
        self,
        file: str,
        text: str | None,
        options: Sequence[Option],
        columns: Columns,
        measure: Callable[[argparse.Namespace], Outcome] | str,
    ):
        self.options = Options(file, text, options)
        self.columns, self.measure = columns, measure

    def main(self, argv: list[str]) -> int:
        """Run the benchmark, print its table and write its report. On several ranks, only rank 0 prints and writes.

        Returns the exit status, which is 0 on success, 1 if a case failed, and 2 for invalid input.
        """
        options = self.options.parse(argv)
        try:
            rank_env.export_torch_variables()
            if rank_env.rank():
                options.output, sys.stdout = None, open(os.devnull, "w", encoding="utf-8")
            choose_defaults(options)
            machine, versions = describe()
            print(headline(machine, versions), flush=True)
            measure = self.measure
            if isinstance(measure, str):
                measure = importlib.import_module(measure).measure
            outcome = measure(options)  # type: ignore[operator]
            if not outcome.results:
                raise ValueError("no benchmark case is selected; select at least one (see --help)")
        except (ValueError, OSError, UserError) as error:
            print(f"error: {describe_error(error)}", file=sys.stderr)
            return 2
        print_outcome(outcome, self.columns)
        if options.output:
            write_json(options.output, self.options.command(argv), outcome.results, **outcome.more)
            title = f"{outcome.title} on {machine.get('gpu', machine['cpu'])}"
            for suffix, panels in outcome.plots.items():
                plot(options.output.with_name(f"{options.output.stem}{suffix}.png"), title, panels)
        return int(bool(outcome.failures))


def print_outcome(outcome: Outcome, columns: Columns) -> None:
    """Print the table of a benchmark, the reasons why cases were not measured, and the failures."""
    print("\n".join([table(measured(outcome.results), columns), *outcome.lines]))
    for reason in dict.fromkeys(r["reason"] for r in outcome.results if "reason" in r):
        names = [
            " ".join(str(r[k]) for k in NAMES if k in r) for r in outcome.results if r.get("reason") == reason
        ]
        print(f"not measured: {', '.join(names)}: {reason}")
    for failure in outcome.failures:
        print(f"failed: {failure}", file=sys.stderr)


def write_json(path: Path, command: str, results: Sequence[Result], /, **more: Any) -> None:
    """Write the JSON report of a benchmark. Non-finite numbers are written as null.

    more: additional report keys. Raises TypeError if an additional key is also a standard key.
    """
    machine, versions = describe()
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    report = dict(
        command=command,
        date=date,
        commit=commit(),
        machine=machine,
        versions=versions,
        **more,
        results=results,
    )
    finite = json.loads(json.dumps(report), parse_constant=lambda number: None)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, json.dumps(finite, indent=2) + "\n")


def measured(results: Sequence[Result]) -> list[Result]:
    """Return the results of the benchmark cases that were measured successfully."""
    return [r for r in results if "reason" not in r]


def table(results: Sequence[Result], columns: Columns) -> str:
    """Format benchmark results as a text table. Values that are None or missing are shown as "-"."""
    lines, forms = [list(columns)], [form for _, form in columns.values()]
    for r in results:
        values = [r.get(get) if isinstance(get, str) else get(r) for get, _ in columns.values()]
        lines.append(["-" if v is None else format(v, form) for v, form in zip(values, forms, strict=True)])
    return format_table(lines, ["<" if form.endswith("<") else ">" for form in forms])


def plain_labels(names: Mapping[str, str]) -> dict[str, str]:
    """Return a label for each benchmark case: the plain name. If cases share a plain name, the case name is appended.

    names: maps the names of the cases to plain names, such as "te_layer, FP8 delayed, AdamW".
    """
    plain = list(names.values())
    return {case: f"{name} ({case})" if plain.count(name) > 1 else name for case, name in names.items()}


def plot(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Plot benchmark results to the PNG file `path`, one panel below the other."""
    labels = list(dict.fromkeys(label for panel in panels for label in panel.series))
    height = 1 + len(panels) * max(4.0, 0.3 * len(labels))
    with open_figure(path, len(panels), figsize=(9, height)) as (figure, axes):
        for axis, panel in zip(axes[:, 0], panels, strict=True):
            for label, value in panel.series.items():
                color = f"C{labels.index(label) % 10}"
                if isinstance(value, tuple):
                    x, y, *bounds = value
                    axis.plot(x, y, "o-", markersize=3, linewidth=1, color=color, label=label)
                    if bounds:
                        axis.fill_between(x, *bounds, color=color, alpha=0.2, linewidth=0)
                else:
                    axis.bar_label(axis.barh(label, value, color=color), fmt=" {:,.0f}", fontsize=8)
                    axis.margins(x=0.1)  # space for the label of the longest bar
            if panel.target:
                axis.axhline(panel.target[0], linestyle="--", color="gray", label=panel.target[1])
            if axis.get_legend_handles_labels()[1]:
                axis.legend(fontsize=9)
            axis.set(xlabel=panel.x, ylabel=panel.y)
            axis.grid(alpha=0.3)
        figure.suptitle(title)
