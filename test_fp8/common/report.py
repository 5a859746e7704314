"""What the programs of test_fp8/ make of their results: a table, and a report that says where and with what they were
measured.

A report is a JSON file {"command", "date", "commit", "machine", "versions", ..., "results"}, with a plot beside it, a
PNG of the same stem. It names hardware and software, and nothing that names a host, a user or a path.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from model.fp8.machine import describe
from train.files import write_durably
from train.record.provenance import commit

Result = dict[str, Any]
"""What a report says of a row. It has a "reason" in place of figures where the row could not be measured."""

Columns = Mapping[str, tuple[str | Callable[[Result], Any], str]]
"""Title -> (key of a result, or a function of it; format specification, which ends in < for a column of text)."""


def write_json(
    path: Path,
    command: str,
    results: Sequence[Result],
    measured_on: tuple[Result, Result] | None = None,
    /,
    **more: Any,
) -> None:
    """Write the report of a run with `command` (from `Options.command`) to `path`, making its folder; `more` are keys
    beside "results". A number that is not finite becomes null. measured_on: (machine, versions) as of `describe`, where
    it is not here; then no "commit" is told, which would be that of this program alone.

    Raises TypeError: `more` has a key that is the report's own.
    """
    machine, versions = measured_on or describe()
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    sources = {} if measured_on else {"commit": commit()}
    made = dict(command=command, date=date, **sources, machine=machine, versions=versions)
    report = dict(**made, **more, results=results)
    finite = json.loads(json.dumps(report), parse_constant=lambda number: None)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, json.dumps(finite, indent=2) + "\n")


def measured(results: Sequence[Result]) -> list[Result]:
    return [r for r in results if "reason" not in r]


def table(results: Sequence[Result], columns: Columns) -> str:
    """The results as lines of text, "-" for what is None or missing."""
    lines, forms = [list(columns)], [form for _, form in columns.values()]
    for r in results:
        values = [r.get(get) if isinstance(get, str) else get(r) for get, _ in columns.values()]
        lines.append(["-" if v is None else format(v, form) for v, form in zip(values, forms, strict=True)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = [
        f"{'<' if form.endswith('<') else '>'}{width}" for form, width in zip(forms, widths, strict=True)
    ]
    return "\n".join("  ".join(map(format, line, sides)).rstrip() for line in lines)


def bars(
    axis: Any, labels: Sequence[str], values: Sequence[float], offset: float = 0.0, **options: Any
) -> None:
    """Horizontal bars from the top down, `offset` below their labels; `options` as axis.barh takes them."""
    axis.barh([place + offset for place in range(len(labels))], values, **options)
    axis.set_yticks(range(len(labels)), labels, fontsize=8)
    axis.set_ylim(len(labels) - 0.4, -0.6)
    axis.grid(axis="x", alpha=0.3)
