"""What the metrics of a training say: its losses, its speed, the time until a loss, the health of FP8.

A training is its metrics.jsonl, read into records {"step", "tokens", "loss", "eval_loss", "tokens_per_second", ...};
not every record has every key. Losses are in nats a token.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from test_fp8.common.report import Result
from train.record.fp8_health import FP8_HEALTH, values
from train.record.provenance import read_starts
from train.record.run_folder import RunFolder

WARM_UP = (
    "warm_up"  # in the first record with a speed since a start, or since a phase of precision.schedule began
)


def read_records(folder: Path) -> list[Result]:
    """The records of a run, one a step. An evaluation that a resumed run caught up on has a line of its own."""
    records: dict[int, Result] = {}
    for line in RunFolder(folder).metrics.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        records.setdefault(record["step"], {}).update(record)
    starts = read_starts(RunFolder(folder))
    phases = [phase for start in starts for phase in start.get("stages", [])]
    for begin in {0, *(each["step"] for each in (*starts, *phases))}:
        timed = [r for r in records.values() if r["step"] > begin and r.get("tokens_per_second")]
        for first in timed[:1]:
            first[WARM_UP] = True
    return list(records.values())


def column(records: Sequence[Result], key: str) -> tuple[list[int], list[float]]:
    """(steps, values) of the records that have `key`."""
    points = [(r["step"], r[key]) for r in records if r.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def step_seconds(records: Sequence[Result]) -> list[tuple[float, Result]]:
    """(seconds of steps until then, record) of the records with a speed or an evaluation. Evaluations and saves do not
    count; an interval with compilation or capture counts at the speed of the next one."""
    timed = [r for r in records if r.get("tokens_per_second")]
    rates = {r["step"]: r["tokens_per_second"] for r in timed}
    for first, second in pairwise(timed):
        if first.get(WARM_UP) and not second.get(WARM_UP):
            rates[first["step"]] = second["tokens_per_second"]
    found, elapsed, tokens = [], 0.0, records[0]["tokens"] if records[0]["step"] not in rates else 0
    for record in records:
        if rate := rates.get(record["step"]):
            elapsed += (record["tokens"] - tokens) / rate
            tokens = record["tokens"]
        found.append((elapsed, record))
    return found


def speed(records: Sequence[Result]) -> float:
    """Tokens/s of the steps. The first interval does not count if there are others."""
    timed = [(s, r) for s, r in step_seconds(records) if r.get("tokens_per_second")]
    (begin, first), (end, last) = timed[0], timed[-1]
    return (last["tokens"] - first["tokens"]) / (end - begin) if end > begin else first["tokens_per_second"]


def time_to(records: Sequence[Result], loss: float) -> float | None:
    """Seconds of steps until the evaluation loss first was `loss` or less, on a line between evaluations; None:
    never."""
    points = [(s, r["eval_loss"]) for s, r in step_seconds(records) if r.get("eval_loss") is not None]
    if points and points[0][1] <= loss:
        return points[0][0]
    for (before, high), (after, low) in pairwise(points):
        if low <= loss:
            return before + (after - before) * (high - loss) / (high - low)
    return None


def equal_loss(own: Sequence[Result], base: Sequence[Result]) -> Result:
    """The seconds in which both reach the worse of their two final evaluation losses, and the baseline's as a
    multiple of this training's ("ratio")."""
    loss = max(training[-1]["eval_loss"] for training in (own, base))
    seconds, others = time_to(own, loss), time_to(base, loss)
    ratio = others / seconds if seconds and others else None
    return {"eval_loss": loss, "seconds": seconds, "baseline_seconds": others, "ratio": ratio}


def last_tenth(own: Sequence[Result], base: Sequence[Result]) -> Result:
    """The mean difference of the training losses over the last tenth of the logged steps, in percent of the baseline's,
    with its standard error. It is of many more tokens than an evaluation; the samples must be the same."""
    losses = [dict(zip(*column(training, "loss"), strict=True)) for training in (own, base)]
    differences = [percent(losses[0][step], losses[1][step]) for step in losses[0] if step in losses[1]]
    last = differences[-max(1, len(differences) // 10) :]
    error = statistics.stdev(last) / len(last) ** 0.5 if len(last) > 1 else None
    return {"mean_percent": statistics.fmean(last), "standard_error": error}


def percent(value: float, baseline: float) -> float:
    """How far `value` is above `baseline`, in percent of it."""
    return (value / baseline - 1) * 100


def health(records: Sequence[Result]) -> Result | None:
    """The number of FP8 health checks and alarms, and the worst value of each statistic with its place. None: no
    check."""
    checks = [record for record in records if record.get(FP8_HEALTH)]
    worst: dict[str, Result] = {}
    for record in checks:
        for gemm, operand, what, by_layer in values(record[FP8_HEALTH]):
            for layer, value in enumerate(by_layer):
                if value is not None and value > worst.get(what, {"value": -1.0})["value"]:
                    place = {"gemm": gemm, "operand": operand, "layer": layer, "step": record["step"]}
                    worst[what] = {"value": value, **place}
    alarms = max((record["fp8_alarms"]["count"] for record in records if record.get("fp8_alarms")), default=0)
    return {"looks": len(checks), "alarms": alarms, "worst": worst} if checks else None
