"""Read the metrics, starts and configuration of a run for plots and tables. The run may still be in progress."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from model.errors import UserError
from train.record.provenance import read_starts
from train.record.run_folder import RunFolder

EVALUATION = "eval_loss"
SET_LOSS = "eval_loss/"  # prefix of the loss of one of data.eval_sources
SMOOTHED_SHARE = 50  # a loss is smoothed over 1/50 of its values


class HistoryError(UserError, ValueError):
    """The folder is not a run, or has no metrics yet."""

    code = "history"


@dataclass
class History:
    """The metrics, starts and configuration of a run.

    Attributes:
        folder: The folder of the run.
        records: The lines of metrics.jsonl, oldest first.
        starts: The starts in run.json whose steps are part of the run.
        config: train_config.json, or {} if the file is missing.
    """

    folder: RunFolder
    records: list[dict[str, Any]]
    starts: list[dict[str, Any]]
    config: dict[str, Any]

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Return (tokens, values) of all lines with a number for `key`."""
        found = [(r["tokens"], r[key]) for r in self.records if is_number(r.get(key))]
        return [tokens for tokens, _ in found], [value for _, value in found]

    def evaluations(self) -> list[str]:
        """Return the keys of the evaluation losses, the main one first."""
        keys = dict.fromkeys(key for record in self.records for key in record)
        return [key for key in keys if key == EVALUATION or key.startswith(SET_LOSS)]

    def last(self, key: str) -> Any:
        """Return the newest value of `key`, or None."""
        return next((r[key] for r in reversed(self.records) if r.get(key) is not None), None)

    def marks(self) -> list[tuple[int, str]]:
        """Return (tokens, "stopped" | "resumed" | "rolled back"), sorted by tokens."""
        marks = [(r["tokens"], "rolled back") for r in self.records if "rollback" in r]
        marks += [(start["tokens"], "resumed") for start in self.starts[1:]]
        ends = (start.get("ended") or {} for start in self.starts)
        marks += [(ended["tokens"], "stopped") for ended in ends if ended.get("how") == "stopped"]
        return sorted(marks)

    def gpu_hours(self) -> float | None:
        """Return the GPU-hours of all starts, or None if unknown or on CPUs.

        A start that was killed is counted up to its last line.
        """
        if not self.starts or not all(start.get("gpus") for start in self.starts):
            return None
        hours = 0.0
        for start, following in zip_longest(self.starts, self.starts[1:]):
            limit = following["time"] if following else math.inf
            times = [r["time"] for r in self.records if start["time"] <= r.get("time", 0) < limit]
            end = (start.get("ended") or {}).get("time") or max(times, default=start["time"])
            hours += start["gpus"] * (end - start["time"]) / 3600
        return hours

    def tokens_per_second(self) -> float | None:
        return typical_speed(self.series("tokens_per_second")[1])

    def fp8(self) -> str:
        """Describe what ran in FP8 in each start and phase of precision.schedule, without repetitions.

        For a phase with fallbacks (precision.on_trouble), this is the state after the last fallback.
        """
        found: list[str] = []
        for start in self.starts:
            for each in (start, *start.get("stages", [])):
                if not each.get("new_stage", True):
                    found.pop()
                if found[-1:] != [each.get("fp8", "")]:
                    found.append(each.get("fp8", ""))
        return "; then ".join(found)

    def state(self) -> str:
        """Return how the last start ended according to run.json, or "" if there are no starts."""
        return str(self._ended().get("how", "running or killed")) if self.starts else ""

    def failure(self) -> str:
        """Return the first line of the error that ended the last start, or ""."""
        return str(self._ended().get("why", "")).partition("\n")[0]

    def _ended(self) -> dict[str, Any]:
        return (self.starts[-1].get("ended") or {}) if self.starts else {}


def typical_speed(speeds: list[float]) -> float | None:
    """Return the median speed. Ignores the first of several values, which includes compilation and allocations."""
    return statistics.median(speeds[1:] or speeds) if speeds else None


def read_history(path: Path) -> History:
    """Read the run in the folder `path`.

    Raises:
        HistoryError: The folder has no metrics.
    """
    folder = RunFolder(path)
    try:
        lines = folder.metrics.read_text(encoding="utf-8", errors="replace").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        nearby = sorted(p.parent.name for p in path.glob("*/metrics.jsonl"))
        hint = f"; it contains the runs {', '.join(nearby[:8])}" if nearby else ""
        raise HistoryError(
            f"{path} has no metrics.jsonl; pass the output_dir of a run that has started{hint}", key=str(path)
        ) from None
    records = [record for record in map(_parse_record, lines) if record is not None]
    if not records:
        raise HistoryError(
            f"{folder.metrics} has no valid lines yet; wait for the first log line of the run", key=str(path)
        )
    try:
        config = json.loads(folder.train_config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    return History(folder, records, remove_abandoned(read_starts(folder)), config)


def remove_abandoned(starts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Remove the starts of an earlier run in the same folder, and starts whose steps a later start repeated."""
    kept: list[dict[str, Any]] = []
    for start in starts:
        while kept and (start["step"] < kept[-1]["step"] or start["step"] == 0):
            kept.pop()
        kept.append(start)
    return kept


def _parse_record(line: str) -> dict[str, Any] | None:
    """Parse a line of metrics.jsonl. Return None if it is incomplete or invalid."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    is_valid = isinstance(record, dict) and all(type(record.get(key)) is int for key in ("step", "tokens"))
    return record if is_valid else None


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def smoothed(values: list[float]) -> list[float]:
    """Return the bias-corrected exponential moving average over about 1/50 of the values."""
    decay = 1 - 1 / max(1.0, len(values) / SMOOTHED_SHARE)
    out, mean, weight = [], 0.0, 0.0
    for value in values:
        mean, weight = decay * mean + (1 - decay) * value, decay * weight + (1 - decay)
        out.append(mean / weight)
    return out


def labels(paths: list[Path]) -> list[str]:
    """Return a label for each folder: its name, with as many parents as needed to make the labels unique."""
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        found = ["/".join(part[-length:]) for part in parts]
        if len(set(found)) == len(set(parts)):
            break
    return found


def table(histories: list[History]) -> str:
    """Return a text table with a row of newest values for each run; "-" for unknown values."""
    rows = [("run", "steps", "loss", "eval_loss", "tokens", "tokens/s", "FP8", "GPU-hours", "state")]
    for name, history in zip(labels([h.folder.path for h in histories]), histories, strict=True):
        last, max_steps = history.records[-1], history.config.get("max_steps")
        rows.append(
            (
                name,
                f"{last['step']:,}/{max_steps:,}" if max_steps else f"{last['step']:,}",
                _cell(history.last("loss"), ".4f"),
                _cell(history.last(EVALUATION), ".4f"),
                f"{last['tokens']:,}",
                _cell(history.tokens_per_second(), ",.0f"),
                history.fp8() or "-",
                _cell(history.gpu_hours(), ".2f"),
                history.state() or "-",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligns = "<>>>>><><"
    return "\n".join(
        "  ".join(
            f"{cell:{align}{width}}" for cell, align, width in zip(row, aligns, widths, strict=True)
        ).rstrip()
        for row in rows
    )


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
