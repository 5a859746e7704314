"""A run read again for plots and tables: its metrics, its starts, its configuration. It may still be going on."""

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
SET_LOSS = "eval_loss/"  # and the name of one of data.eval_sources
SMOOTHED_SHARE = 50  # a loss is smoothed over this part of the lines


class HistoryError(UserError, ValueError):
    """A folder is not that of a run, or has no metrics yet."""

    code = "history"


@dataclass
class History:
    """A run.

    Attributes:
        records: the lines of metrics.jsonl, oldest first.
        starts: of run.json, those that the run consists of.
        config: train_config.json, {} without one.
    """

    folder: RunFolder
    records: list[dict[str, Any]]
    starts: list[dict[str, Any]]
    config: dict[str, Any]

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Return (tokens, values) of the lines that have a number for `key`."""
        found = [(r["tokens"], r[key]) for r in self.records if is_number(r.get(key))]
        return [tokens for tokens, _ in found], [value for _, value in found]

    def evaluations(self) -> list[str]:
        """Return the keys of the losses of evaluation sets, the main one first."""
        keys = dict.fromkeys(key for record in self.records for key in record)
        return [key for key in keys if key == EVALUATION or key.startswith(SET_LOSS)]

    def last(self, key: str) -> Any:
        """Return the newest value of `key`, None without any."""
        return next((r[key] for r in reversed(self.records) if r.get(key) is not None), None)

    def marks(self) -> list[tuple[int, str]]:
        """Return (tokens, "stopped" | "resumed" | "rolled back"), sorted by tokens."""
        marks = [(r["tokens"], "rolled back") for r in self.records if "rollback" in r]
        marks += [(start["tokens"], "resumed") for start in self.starts[1:]]
        ends = (start.get("ended") or {} for start in self.starts)
        marks += [(ended["tokens"], "stopped") for ended in ends if ended.get("how") == "stopped"]
        return sorted(marks)

    def gpu_hours(self) -> float | None:
        """Return GPUs times hours, of each start from its begin to its end or, if it was killed, to its last line. None
        if that is not known, or on CPUs."""
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
        """Return what ran in FP8 in each start and phase of precision.schedule, without repetitions; of a phase with
        fallbacks (precision.on_trouble) what ran after the last one."""
        found: list[str] = []
        for start in self.starts:
            for each in (start, *start.get("stages", [])):
                if not each.get("new_stage", True):
                    found.pop()
                if found[-1:] != [each.get("fp8", "")]:
                    found.append(each.get("fp8", ""))
        return "; then ".join(found)

    def state(self) -> str:
        """Return how the last start ended, as run.json has it; "" without starts."""
        return str(self._ended().get("how", "runs, or was killed")) if self.starts else ""

    def failure(self) -> str:
        """Return the first line of why the last start failed, or ""."""
        return str(self._ended().get("why", "")).partition("\n")[0]

    def _ended(self) -> dict[str, Any]:
        return (self.starts[-1].get("ended") or {}) if self.starts else {}


def typical_speed(speeds: list[float]) -> float | None:
    """Return the median without the first of several, which has compilation and first allocations in it."""
    return statistics.median(speeds[1:] or speeds) if speeds else None


def read_history(path: Path) -> History:
    """Read the run in the folder `path`. Raises HistoryError: it has no metrics."""
    folder = RunFolder(path)
    try:
        lines = folder.metrics.read_text(encoding="utf-8", errors="replace").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        nearby = sorted(p.parent.name for p in path.glob("*/metrics.jsonl"))
        hint = f"; it contains the runs {', '.join(nearby[:8])}" if nearby else ""
        raise HistoryError(
            f"{path} has no metrics.jsonl: give the output_dir of a run that has begun{hint}", key=str(path)
        ) from None
    records = [record for record in map(_parse_record, lines) if record is not None]
    if not records:
        raise HistoryError(f"{folder.metrics} has no lines of a run yet", key=str(path))
    try:
        config = json.loads(folder.train_config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    return History(folder, records, remove_abandoned(read_starts(folder)), config)


def remove_abandoned(starts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the starts without those of an earlier run in the same folder, and without those that a later one left by
    resuming from an earlier step."""
    kept: list[dict[str, Any]] = []
    for start in starts:
        while kept and (start["step"] < kept[-1]["step"] or start["step"] == 0):
            kept.pop()
        kept.append(start)
    return kept


def _parse_record(line: str) -> dict[str, Any] | None:
    """Return a line of metrics.jsonl; None if it is cut off or not one."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    is_valid = isinstance(record, dict) and all(type(record.get(key)) is int for key in ("step", "tokens"))
    return record if is_valid else None


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def smoothed(values: list[float]) -> list[float]:
    """Return the exponential moving average over about a fiftieth of the values, without the bias of its begin."""
    decay = 1 - 1 / max(1.0, len(values) / SMOOTHED_SHARE)
    out, mean, weight = [], 0.0, 0.0
    for value in values:
        mean, weight = decay * mean + (1 - decay) * value, decay * weight + (1 - decay)
        out.append(mean / weight)
    return out


def labels(paths: list[Path]) -> list[str]:
    """Return the name of each folder, with as many of its parents as distinguish it from the others."""
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        found = ["/".join(part[-length:]) for part in parts]
        if len(set(found)) == len(set(parts)):
            break
    return found


def table(histories: list[History]) -> str:
    """Return a row for each run with its newest values, "-" for those that are not known."""
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
