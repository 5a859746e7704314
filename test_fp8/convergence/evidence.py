"""What finished trainings say beyond their differences: the band of the baseline's seeds, how long each takes to the
loss of another, and how healthy FP8 was (precision.health_steps)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

from test_fp8.common.report import Result
from test_fp8.convergence.rows import AFTER_START, STAGE_ENDS
from train.record.fp8_health import FP8_HEALTH, values

FP8_ALARMS = "fp8_alarms"


def seconds(records: Sequence[Result]) -> list[tuple[float, Result]]:
    """(seconds of steps until then, record) of each record. Evaluations and saves are not in it, nor starts: the speed
    that the first record after one tells has compilation and capture in it, and is taken to be the median of the others
    of its stage of precision.schedule."""
    warm: dict[int, list[float]] = {}  # by stage
    stages, stage = [], 0
    for record in records:
        stages.append(stage)
        if (rate := record.get("tokens_per_second")) and not record.get(AFTER_START):
            warm.setdefault(stage, []).append(rate)
        stage += STAGE_ENDS in record
    every = [rate for rates in warm.values() for rate in rates]
    found, elapsed, tokens = [], 0.0, 0
    for record, stage in zip(records, stages, strict=True):
        if rate := record.get("tokens_per_second"):
            others = warm.get(stage, every)
            rate = statistics.median(others) if record.get(AFTER_START) and others else rate
            elapsed += (record["tokens"] - tokens) / rate
            tokens = record["tokens"]
        found.append((elapsed, record))
    return found


def speed(records: Sequence[Result]) -> float:
    """Tokens/s: the median of the intervals but the first, which holds what happens once: compilation, graphs, first
    allocations. Stages of precision.schedule have their own speeds: of these together the tokens by the seconds."""
    timed = [(s, r) for s, r in seconds(records) if r.get("tokens_per_second")]
    if len(timed) > 1 and any(STAGE_ENDS in record for record in records):
        (begin, first), (end, last) = timed[0], timed[-1]
        return (last["tokens"] - first["tokens"]) / (end - begin)
    rates = [record["tokens_per_second"] for _, record in timed]
    return statistics.median(rates[1:] or rates)


def time_to(records: Sequence[Result], loss: float) -> float | None:
    """Seconds of steps until the evaluation loss was `loss`, or less, for the first time: on a line between the
    evaluations around it. None: it never was."""
    points = [(s, r["eval_loss"]) for s, r in seconds(records) if r.get("eval_loss") is not None]
    if points and points[0][1] <= loss:
        return points[0][0]
    for (before, high), (after, low) in pairwise(points):
        if low <= loss:
            return before + (after - before) * (high - loss) / (high - low)
    return None


def equal_loss(records: Sequence[Result], others: dict[str, list[Result]]) -> Result:
    """Of this training and the one of `others` that ends at the least evaluation loss: the seconds that both take to
    the worse of their two final losses, which both came to, and the other's as a multiple of this one's: above 1, this
    one is sooner there."""
    row = min(others, key=lambda name: others[name][-1]["eval_loss"])
    other = others[row]
    loss = max(training[-1]["eval_loss"] for training in (records, other))
    own, theirs = time_to(records, loss), time_to(other, loss)
    ratio = theirs / own if own and theirs else None
    return {"row": row, "eval_loss": loss, "seconds": own, "others_seconds": theirs, "ratio": ratio}


def band(seeds: Sequence[Sequence[Result]]) -> Result:
    """Of trainings that differ in the seed, the baseline first: by step of an evaluation their mean loss, and where the
    lowest and the highest are, in percent of the baseline's; "final_mean": of the last."""
    by_step: dict[int, list[float]] = {}
    for records in seeds:
        for record in records:
            if record.get("eval_loss") is not None:
                by_step.setdefault(record["step"], []).append(record["eval_loss"])
    whole = {step: losses for step, losses in by_step.items() if len(losses) == len(seeds)}
    means = [statistics.fmean(losses) for losses in whole.values()]
    return {
        "seeds": len(seeds),
        "step": list(whole),
        "mean": means,
        "low_percent": [(min(losses) / losses[0] - 1) * 100 for losses in whole.values()],
        "high_percent": [(max(losses) / losses[0] - 1) * 100 for losses in whole.values()],
        "final_mean": means[-1],
    }


def health(records: Sequence[Result]) -> Result | None:
    """How many looks there were, how many alarms began and at which operands, and the worst value of each statistic
    with its GEMM, operand, layer and step. None: no look."""
    looks = [record for record in records if record.get(FP8_HEALTH)]
    if not looks:
        return None
    worst: dict[str, Result] = {}
    for record in looks:
        for gemm, operand, what, column in values(record[FP8_HEALTH]):
            for layer, value in enumerate(column):
                if value is not None and value > worst.get(what, {"value": -1.0})["value"]:
                    worst[what] = {
                        "value": value,
                        "gemm": gemm,
                        "operand": operand,
                        "layer": layer,
                        "step": record["step"],
                    }
    alarms = [record[FP8_ALARMS] for record in records if record.get(FP8_ALARMS)]
    began = [alarm for found in alarms for alarm in found["began"]]
    return {
        "looks": len(looks),
        "alarms": max((found["count"] for found in alarms), default=0),
        "active_at_end": alarms[-1]["active"] if alarms else 0,
        "began": began,
        "worst": worst,
    }
