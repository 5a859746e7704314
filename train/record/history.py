"""What a run has left to read, as plots and tables need it: its lines of metrics, its starts, its configuration.

Of a run that still goes on as well: a line that is being written is left out.
"""

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
    """A folder is not that of a run, or has nothing to show yet; the message says what is there and what to do."""

    code = "history"


@dataclass
class Mark:
    """Something happened to the run when it had seen so many `tokens`."""

    tokens: int
    what: str  # stopped | resumed | rolled back


@dataclass
class History:
    """A run. records: the lines of metrics.jsonl, oldest first. starts: of run.json, those that the run consists of."""

    folder: RunFolder
    records: list[dict[str, Any]]
    starts: list[dict[str, Any]]
    config: dict[str, Any]  # train_config.json; empty where it is not there
    unreadable: int  # lines of metrics.jsonl that are none

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """(tokens, values) of the lines that have a number for `key`."""
        found = [(r["tokens"], r[key]) for r in self.records if is_number(r.get(key))]
        return [tokens for tokens, _ in found], [value for _, value in found]

    def evaluations(self) -> list[str]:
        """The keys of the losses of evaluation sets, the main one first."""
        keys = dict.fromkeys(key for record in self.records for key in record)
        return [key for key in keys if key == EVALUATION or key.startswith(SET_LOSS)]

    def last(self, key: str) -> Any:
        """The newest value of `key`, None without any."""
        return next((r[key] for r in reversed(self.records) if r.get(key) is not None), None)

    def marks(self) -> list[Mark]:
        """Stops, resumes and rollbacks, by their tokens."""
        marks = [Mark(r["tokens"], "rolled back") for r in self.records if "rollback" in r]
        for start, following in zip_longest(self.starts, self.starts[1:]):
            ended = start.get("ended") or {}
            if ended.get("how") == "stopped":
                marks.append(Mark(ended["tokens"], "stopped"))
            if following is not None:
                marks.append(Mark(following["tokens"], "resumed"))
        return sorted(marks, key=lambda mark: mark.tokens)

    def gpu_hours(self) -> float | None:
        """GPUs times the hours that they were held, from the begin of each start to its end, or of one that died to its
        last line; None where that is not known, or on CPUs."""
        if not self.starts or not all(start.get("gpus") for start in self.starts):
            return None
        hours = 0.0
        ends = [start["time"] for start in self.starts[1:]] + [math.inf]
        for start, limit in zip(self.starts, ends, strict=True):
            times = [r["time"] for r in self.records if start["time"] <= r.get("time", 0) < limit]
            end = (start.get("ended") or {}).get("time") or max(times, default=start["time"])
            hours += start["gpus"] * (end - start["time"]) / 3600
        return hours

    def tokens_per_second(self) -> float | None:
        """See typical_speed."""
        return typical_speed(self.series("tokens_per_second")[1])

    def fp8(self) -> str:
        """What was proved, in short, of each start that took steps and of the stages of precision.schedule that began
        in it, without repetitions; of each stage what was proved last, as modules may have gone to other levels in it
        (precision.on_trouble)."""
        proved: list[str] = []
        for start, following in zip_longest(self.starts, self.starts[1:]):
            ends = following["step"] if following else (start.get("ended") or {}).get("step", math.inf)
            if start["step"] >= ends and (following or proved):
                continue
            for each in (start, *(stage for stage in start.get("stages") or [] if stage["step"] < ends)):
                said = str(each.get("fp8", ""))
                if not each.get("new_stage", True):
                    proved.pop()
                if proved[-1:] != [said]:
                    proved.append(said)
        return "; then ".join(proved)

    def state(self) -> str:
        """What became of its last start: done, stopped, interrupted or failed, by its export "export failed"."""
        ended = (self.starts[-1].get("ended") or {}) if self.starts else {}
        return str(ended.get("how", "runs, or was killed")) if self.starts else ""

    def why(self) -> str:
        """Why its last start failed, in its first line; "" where it did not, or nothing says."""
        ended = (self.starts[-1].get("ended") or {}) if self.starts else {}
        return str(ended.get("why", "")).partition("\n")[0]


def typical_speed(speeds: list[float]) -> float | None:
    """The median of the lines, without the first, where there are others: compilation and first allocations are in
    it."""
    return statistics.median(speeds[1:] or speeds) if speeds else None


def read_history(path: Path) -> History:
    """The run in the folder `path`. Raises HistoryError: there is none, or no line of metrics yet."""
    folder = RunFolder(path)
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise HistoryError(f"{path} {what}; give the folder of a run, its output_dir")
    try:
        text = folder.metrics.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        nearby = sorted(p.parent.name for p in path.glob("*/metrics.jsonl"))
        hint = f"; runs in it: {', '.join(nearby[:8])}" if nearby else ""
        raise HistoryError(
            f"{path} is not the folder of a run, or the run has not begun: there is no metrics.jsonl{hint}"
        ) from None
    except OSError as error:
        raise HistoryError(f"{folder.metrics} cannot be read: {error}") from error
    lines = text.splitlines()
    records = [record for record in map(_record, lines) if record is not None]
    if not records:
        what = "has none of a run's lines" if lines else "is empty: a run writes a line each logging_steps"
        raise HistoryError(f"{folder.metrics} {what}")
    cut_off = bool(lines) and not text.endswith("\n") and _record(lines[-1]) is None
    try:
        config = json.loads(folder.train_config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    return History(
        folder=folder,
        records=records,
        starts=of_this_run(read_starts(folder)),
        config=config if isinstance(config, dict) else {},
        unreadable=len(lines) - len(records) - cut_off,
    )


def of_this_run(starts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those starts that what is there consists of: without a run before it in the same folder, and without those that
    a later one left behind by beginning at an earlier step."""
    kept: list[dict[str, Any]] = []
    for start in starts:
        while kept and (start["step"] < kept[-1]["step"] or start["step"] == 0):
            kept.pop()
        kept.append(start)
    return kept


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    good = isinstance(record, dict) and all(type(record.get(key)) is int for key in ("step", "tokens"))
    return record if good else None


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def smoothed(values: list[float]) -> list[float]:
    """Exponential moving average over about a fiftieth of the values, without the bias of its begin; few values stay as
    they are."""
    decay = 1 - 1 / max(1.0, len(values) / SMOOTHED_SHARE)
    out, mean, weight = [], 0.0, 0.0
    for value in values:
        mean, weight = decay * mean + (1 - decay) * value, decay * weight + (1 - decay)
        out.append(mean / weight)
    return out


def labels(paths: list[Path]) -> list[str]:
    """A name of each folder: its own, with as many of the folders above as tell it from the others."""
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        found = ["/".join(part[-length:]) for part in parts]
        if len(set(found)) == len(set(parts)):
            break
    return found


COLUMNS = ("run", "steps", "loss", "eval_loss", "tokens", "tokens/s", "FP8", "GPU-hours", "state")


def table(histories: list[History]) -> str:
    """A row for each run: its newest values; "-" where one is not known."""
    rows = [COLUMNS]
    for name, history in zip(labels([h.folder.path for h in histories]), histories, strict=True):
        done, of = history.records[-1]["step"], history.config.get("max_steps")
        rate, hours = history.tokens_per_second(), history.gpu_hours()
        loss, eval_loss = history.last("loss"), history.last(EVALUATION)
        rows.append(
            (
                name,
                f"{done:,}/{of:,}" if isinstance(of, int) else f"{done:,}",
                "-" if loss is None else f"{loss:.4f}",
                "-" if eval_loss is None else f"{eval_loss:.4f}",
                f"{history.records[-1]['tokens']:,}",
                "-" if rate is None else f"{rate:,.0f}",
                history.fp8() or "-",
                "-" if hours is None else f"{hours:.2f}",
                history.state() or "-",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    right = {"steps", "loss", "eval_loss", "tokens", "tokens/s", "GPU-hours"}

    def line(row: tuple[str, ...]) -> str:
        cells = zip(COLUMNS, row, widths, strict=True)
        return "  ".join(f"{c:>{w}}" if name in right else f"{c:<{w}}" for name, c, w in cells).rstrip()

    return "\n".join(map(line, rows))
