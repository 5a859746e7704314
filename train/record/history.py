"""Read metrics.jsonl and run.json of a run for plots and tables. The run may still be in progress."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.errors import UserError
from model.terminal import format_table
from train.record.provenance import read_starts
from train.record.run_folder import RunFolder

EVALUATION = "eval_loss"
SET_LOSS = (
    "eval_loss/"  # prefix of the keys for the losses on data.eval_sources and on each of several sources
)
SMOOTHED_SHARE = 50  # a loss curve is smoothed over 1/50 of its values


class HistoryError(UserError, ValueError):
    """An error raised if a run has no metrics yet."""

    code = "history"


@dataclass
class History:
    """History of a run: the contents of its metrics.jsonl and run.json.

    Attributes:
        path: The folder of the run.
        records: The lines of metrics.jsonl, oldest first.
        starts: The entries of run.json, one for each launch and resume. Entries whose steps were discarded are omitted.
    """

    path: Path
    records: list[dict[str, Any]]
    starts: list[dict[str, Any]]

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Return the token counts and the values of all records in which `key` is a number."""
        found = [(r["tokens"], r[key]) for r in self.records if is_number(r.get(key))]
        return [tokens for tokens, _ in found], [value for _, value in found]

    def last(self, key: str) -> Any:
        """Return the most recent value of `key` in the records, or None if there is none."""
        return next((r[key] for r in reversed(self.records) if r.get(key) is not None), None)

    def marks(self) -> list[tuple[int, str]]:
        """Return the positions of stops, resumes and rollbacks of the run, for plots.

        Returns:
            A list of (tokens, "stopped" | "resumed" | "rolled back"), sorted by tokens.
        """
        marks = [(r["tokens"], "rolled back") for r in self.records if "rollback" in r]
        marks += [(start["tokens"], "resumed") for start in self.starts[1:]]
        ends = (start["ended"] or {} for start in self.starts)
        marks += [(ended["tokens"], "stopped") for ended in ends if ended.get("how") == "stopped"]
        return sorted(marks)

    def fp8(self) -> str:
        """Describe which modules ran in FP8, for each launch of the run and each phase of precision.schedule.

        Equal descriptions in succession are listed once. If modules fell back to a safer recipe (precision.on_trouble),
        the description of a phase shows the modules after its last fallback.
        """
        found: list[str] = []
        for start in self.starts:
            for each in (start, *start["phases"]):
                if not each.get("new_phase", True):
                    found.pop()
                if found[-1:] != [each["fp8"]]:
                    found.append(each["fp8"])
        return "; then ".join(found)

    def ended(self) -> dict[str, Any]:
        """Return how the last launch of the run ended, with the keys "how" and, after an error, "why"."""
        return (self.starts and self.starts[-1]["ended"]) or {"how": "running or killed"}


def typical_speed(speeds: list[float]) -> float | None:
    """Return the median of the training speeds, or None if `speeds` is empty.

    If there are several speeds, the first is ignored, because it includes compilation and memory allocation.
    """
    return statistics.median(speeds[1:] or speeds) if speeds else None


def read_history(path: Path) -> History:
    """Read the history of the run in the folder `path`.

    Raises:
        HistoryError: metrics.jsonl has no valid lines.
        OSError: The folder has no metrics.jsonl.
    """
    folder = RunFolder(path)
    lines = folder.metrics.read_text(encoding="utf-8", errors="replace").splitlines()
    records = [record for record in map(parse_record, lines) if record is not None]
    if not records:
        raise HistoryError(
            f"{folder.metrics} contains no valid lines yet. Wait until the run has logged its first step",
            key=str(path),
        )
    return History(path, records, remove_abandoned(read_starts(folder)))


def parse_record(line: str) -> dict[str, Any] | None:
    """Parse a line of metrics.jsonl. Return None if the line is incomplete or invalid."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and {"step", "tokens"} <= record.keys() else None


def remove_abandoned(starts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of run.json that belong to the current run.

    Entries of an earlier run in the same folder are omitted. An entry is also omitted if a later resume repeated its
    steps.
    """
    kept: list[dict[str, Any]] = []
    for start in starts:
        while kept and (start["step"] < kept[-1]["step"] or start["step"] == 0):
            kept.pop()
        kept.append(start)
    return kept


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def smoothed(values: list[float]) -> list[float]:
    """Return the bias-corrected exponential moving average of `values`, over a window of about 1/50 of the values."""
    decay = 1 - 1 / max(1.0, len(values) / SMOOTHED_SHARE)
    out, mean, weight = [], 0.0, 0.0
    for value in values:
        mean, weight = decay * mean + (1 - decay) * value, decay * weight + (1 - decay)
        out.append(mean / weight)
    return out


def table(histories: list[History]) -> str:
    """Return a text table with the latest values of each run, one row per run. Unknown values are shown as "-"."""
    rows = [("run", "step", "loss", "eval_loss", "tokens", "tokens/s", "state", "FP8")]
    for history in histories:
        last = max(history.records, key=lambda record: record["step"])
        speed = typical_speed(history.series("tokens_per_second")[1])
        values = (last["step"], history.last("loss"), history.last(EVALUATION), last["tokens"], speed)
        formats = (",", ".4f", ".4f", ",", ",.0f")
        cells = [
            "-" if value is None else format(value, form) for value, form in zip(values, formats, strict=True)
        ]
        rows.append((str(history.path), *cells, history.ended()["how"], history.fp8() or "-"))
    return format_table(rows, "<" * len(rows[0]))
