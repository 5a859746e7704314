"""What `compare_convergence.py` makes of finished trainings: are they the same, and how far are they apart.

A training is its metrics.jsonl, read into records {"step", "tokens", "loss", "eval_loss", "grad_norm", ...}; not every
record has every key. Losses are in nats a token, differences in percent of the baseline's.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from test_fp8.common.rows import is_under
from train.config.differences import leaves

Record = dict[str, Any]

# Follow from per_device_train_batch_size and the tokens of a step.
DERIVED = ("per_device_eval_batch_size", "gradient_accumulation_steps")
SMOOTHED_POINTS = 9  # of the moving mean, the point itself in the middle


class ComparisonError(ValueError):
    """The rows cannot be compared; the message names the row and what to do."""


# ---------------------------------------------------------------- the same training?


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, str]:
    """Dotted key -> "old -> new" of everything that differs between two JSON objects."""
    before, after = leaves(old), leaves(new)
    return {
        key: f"{json.dumps(before.get(key))} -> {json.dumps(after.get(key))}"
        for key in {**before, **after}
        if before.get(key) != after.get(key)
    }


def check_same_training(
    name: str, overrides: Sequence[str], baseline: dict[str, Any], config: dict[str, Any]
) -> None:
    """That the resolved configuration `config` of row `name` trains what `baseline` does: apart from output_dir they
    differ only in the keys `overrides` (the row's and the baseline's) and what follows from these.

    Raises ComparisonError: with every key in which they differ besides.
    """
    allowed = ["output_dir", *overrides, *DERIVED]
    others = [f"{k}: {v}" for k, v in differences(baseline, config).items() if not is_under(k, allowed)]
    if others:
        raise ComparisonError(
            f"row {name} would not train the same as the baseline:\n  " + "\n  ".join(others) + "\n"
            "a row may change how a step is computed; what changes more belongs behind --, for all rows (for instance "
            "-- --train_batch_size_tokens N where a row has another micro-batch)"
        )


def read_metrics(folder: Path) -> list[Record]:
    """The records of a run's metrics.jsonl; none where there is no such file or it ends within a line."""
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]
    except (OSError, ValueError):
        return []


def unfinished(records: Sequence[Record], max_steps: int, tokens_per_step: int) -> str | None:
    """Why these are not the records of a whole training of `max_steps` steps; None if they are."""
    if not records:
        return "it has no metrics"
    last = records[-1]
    if last["step"] != max_steps or last.get("loss") is None or last.get("eval_loss") is None:
        return f"its metrics end at step {last['step']} of {max_steps}, or without a loss"
    for record in records:
        if record["tokens"] != record["step"] * tokens_per_step:
            return f"at step {record['step']} it had consumed {record['tokens']} tokens, not {tokens_per_step} a step"
    return None


def check_same_steps(name: str, baseline: Sequence[Record], records: Sequence[Record]) -> None:
    """That two trainings logged and evaluated at the same steps after the same tokens, against the same data.

    Raises ComparisonError: they did not.
    """

    def trace(of: Sequence[Record]) -> list[tuple]:
        return [(r["step"], r["tokens"], "loss" in r, r.get("unigram_loss")) for r in of]

    for ours, theirs in zip(trace(baseline), trace(records), strict=False):
        if ours != theirs:
            raise ComparisonError(
                f"row {name} logged (step, tokens, with loss, unigram loss) {theirs} where the baseline has {ours}: "
                "they were not trained alike; remove the work_dir and run all rows again"
            )
    if len(baseline) != len(records):
        raise ComparisonError(f"row {name} logged {len(records)} times, the baseline {len(baseline)} times")


# ---------------------------------------------------------------- how far apart?


def percent(value: float, baseline: float) -> float:
    """How far `value` is above `baseline`, in percent of it."""
    return (value / baseline - 1) * 100


def series(records: Sequence[Record], key: str) -> tuple[list[int], list[float]]:
    """(steps, values) of the records that have `key`."""
    points = [(r["step"], r[key]) for r in records if r.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def smoothed(values: Sequence[float], points: int = SMOOTHED_POINTS) -> list[float]:
    """The mean over `points` (odd) values around each; towards the ends over those that there are."""
    reach = points // 2
    return [statistics.fmean(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]


def largest(steps: Sequence[int], values: Sequence[float], after: int) -> tuple[int, float] | None:
    """(step, value) of the value furthest from zero at steps after `after`; None when there is none."""
    points = [(step, value) for step, value in zip(steps, values, strict=True) if step > after]
    return max(points, key=lambda point: abs(point[1])) if points else None


def largest_rise(losses: Sequence[float]) -> float:
    """How far the loss ever stood above its minimum until then, in percent of that; 0 when it only falls.

    The loss of one batch rises without any instability when its text is harder: compare with the baseline's.
    """
    lowest, rise = float("inf"), 0.0
    for loss in losses:
        lowest = min(lowest, loss)
        rise = max(rise, percent(loss, lowest))
    return rise


def largest_spike(norms: Sequence[float]) -> float | None:
    """The largest gradient norm as a multiple of the median one; None without norms, or where the median is 0."""
    median = statistics.median(norms) if norms else 0.0
    return max(norms) / median if median else None


def summary(records: Sequence[Record], warmup_steps: int) -> Record:
    """What one training shows by itself. "After warmup" is every logged step after `warmup_steps`."""
    after = [r for r in records if r["step"] > warmup_steps]
    _, rates = series(records, "tokens_per_second")
    _, norms = series(after, "grad_norm")
    _, memory = series(records, "memory_gib")
    return {
        "loss": series(records, "loss")[1][-1],
        "eval_loss": records[-1]["eval_loss"],
        "largest_rise_percent": largest_rise(series(after, "loss")[1]),
        "skipped_steps": max(series(records, "skipped_steps")[1], default=0),
        "largest_grad_norm": max(norms, default=None),
        "largest_grad_norm_to_median": largest_spike(norms),
        # the first interval holds what happens once: compilation, graphs, first allocations
        "tokens_per_second": statistics.median(rates[1:] or rates),
        "memory_gib": max(memory, default=None),
    }


def relative(records: Sequence[Record], baseline: Sequence[Record], key: str) -> list[float]:
    """The differences of each value of `key` to the baseline's at the same step, in percent."""
    return [percent(a, b) for a, b in zip(series(records, key)[1], series(baseline, key)[1], strict=True)]


def curves(records: Sequence[Record], baseline: Sequence[Record], same_samples: bool) -> Record:
    """Losses by step, and their differences to the baseline's in percent, that of the training loss raw and smoothed:
    empty where it is not that of the same samples."""
    steps, losses = series(records, "loss")
    eval_steps, eval_losses = series(records, "eval_loss")
    raw = relative(records, baseline, "loss") if same_samples else []
    return {
        "step": steps,
        "loss": losses,
        "difference_percent": raw,
        "smoothed_difference_percent": smoothed(raw),
        "grad_norm": [r.get("grad_norm") for r in records if r.get("loss") is not None],
        "eval_step": eval_steps,
        "eval_loss": eval_losses,
        "eval_difference_percent": relative(records, baseline, "eval_loss"),
    }


def compared(
    name: str,
    records: Sequence[Record],
    baseline: Sequence[Record],
    warmup_steps: int,
    tolerance: float,
    same_samples: bool = True,
) -> Record:
    """The result of row `name`: its `summary`, its `curves`, and what sets it apart from the baseline.

    `same_samples`: it was trained on the baseline's samples in their order, so that the training losses compare.
    "misses" holds, in words, why the row does not train as well: a final evaluation loss further than `tolerance` (a
    fraction) from the baseline's, or more skipped steps.

    Raises ComparisonError: the two were not trained alike.
    """
    check_same_steps(name, baseline, records)
    own, base = summary(records, warmup_steps), summary(baseline, warmup_steps)
    curve = curves(records, baseline, same_samples)
    difference = percent(own["eval_loss"], base["eval_loss"])
    misses = []
    if not abs(difference) <= tolerance * 100:
        misses.append(
            f"evaluation loss {own['eval_loss']:.4f} is {difference:+.2f} % from the baseline's "
            f"{base['eval_loss']:.4f}; allowed are {tolerance * 100:g} %"
        )
    if own["skipped_steps"] > base["skipped_steps"]:
        misses.append(
            f"{own['skipped_steps']} steps were skipped for gradients that are not finite, in the baseline "
            f"{base['skipped_steps']}"
        )
    worst = {
        f"largest_{kind}_after_warmup": largest(curve["step"], curve[kind], warmup_steps)
        for kind in ("difference_percent", "smoothed_difference_percent")
        if same_samples
    }
    return {
        "row": name,
        **own,
        "eval_difference_percent": difference,
        **{key: {"step": point[0], "percent": point[1]} for key, point in worst.items() if point},
        "speed_to_baseline": own["tokens_per_second"] / base["tokens_per_second"],
        "misses": misses,
        "curves": curve,
    }
