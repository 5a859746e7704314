"""What `compare_convergence.py` makes of finished trainings: how far they are apart, as a table and a plot.

A training is its metrics.jsonl, read into records {"step", "tokens", "loss", "eval_loss", "grad_norm", ...}; not every
record has every key. Losses are in nats a token, differences in percent of the baseline's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from test_fp8.common import report
from test_fp8.common.report import Result
from test_fp8.common.rows import is_under
from test_fp8.convergence.evidence import speed
from test_fp8.convergence.rows import AFTER_START, ROW_KEYS, STAGE_ENDS
from train.config.differences import leaves
from train.files import drawing

SMOOTHED_POINTS = 9  # of the moving mean, the point itself in the middle
# Keys that say where a run is kept and told of, not what it is.
NOT_TRAINING = (
    "output_dir save_minutes save_steps save_strategy save_total_limit resume_from_checkpoint report_to run_name "
    "wandb_project".split()
)


def percent(value: float, baseline: float) -> float:
    """How far `value` is above `baseline`, in percent of it."""
    return (value / baseline - 1) * 100


def series(records: Sequence[Result], key: str) -> tuple[list[int], list[float]]:
    """(steps, values) of the records that have `key`."""
    points = [(r["step"], r[key]) for r in records if r.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def smoothed(values: Sequence[float], points: int = SMOOTHED_POINTS) -> list[float]:
    """The mean over `points` (odd) values around each; towards the ends over those that there are."""
    reach = points // 2
    return [statistics.fmean(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]


def largest_rise(losses: Sequence[float]) -> float:
    """How far the loss ever stood above its minimum until then, in percent of that; 0 when it only falls.

    The loss of one batch rises without any instability when its text is harder: compare with the baseline's.
    """
    lowest = accumulate(losses, min)
    return max((percent(*pair) for pair in zip(losses, lowest, strict=True)), default=0.0)


def largest_spike(norms: Sequence[float]) -> float | None:
    """The largest gradient norm as a multiple of the median one; None without norms, or where the median is 0."""
    median = statistics.median(norms) if norms else 0.0
    return max(norms) / median if median else None


def summary(records: Sequence[Result], warmup_steps: int) -> Result:
    """What one training shows by itself. "After warmup" is every logged step after `warmup_steps`."""
    after = [r for r in records if r["step"] > warmup_steps]
    _, norms = series(after, "grad_norm")
    _, memory = series(records, "memory_gib")
    return {
        "loss": series(records, "loss")[1][-1],
        "eval_loss": records[-1]["eval_loss"],
        "largest_rise_percent": largest_rise(series(after, "loss")[1]),
        "skipped_steps": max(series(records, "skipped_steps")[1], default=0),
        "largest_grad_norm": max(norms, default=None),
        "largest_grad_norm_to_median": largest_spike(norms),
        "tokens_per_second": speed(records),
        "memory_gib": max(memory, default=None),
    }


def relative(records: Sequence[Result], baseline: Sequence[Result], key: str) -> list[float]:
    """The differences of each value of `key` to the baseline's at the same step, in percent."""
    return [percent(a, b) for a, b in zip(series(records, key)[1], series(baseline, key)[1], strict=True)]


def curves(records: Sequence[Result], baseline: Sequence[Result], same_samples: bool) -> Result:
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
        "tokens_per_second": [r.get("tokens_per_second") for r in records if r.get("loss") is not None],
        "after_start": [r["step"] for r in records if r.get(AFTER_START)],
        "stage_ends": [r["step"] for r in records if STAGE_ENDS in r],
        "eval_step": eval_steps,
        "eval_loss": eval_losses,
        "eval_difference_percent": relative(records, baseline, "eval_loss"),
    }


def at_the_end(curve: Result) -> Result | None:
    """How far the training loss is from the baseline's over the last tenth of the logged steps: `mean_of` the
    differences. It is of many more tokens than an evaluation; where they come in a second epoch it also says how well
    they are remembered. None where the samples are not the baseline's.
    """
    raw = curve["difference_percent"]
    last = raw[-max(1, len(raw) // 10) :]
    if not last:
        return None
    return mean_of(last)


def over_seeds(own: Sequence[Sequence[Result]], others: Sequence[Sequence[Result]]) -> Result:
    """How far the final evaluation losses of a row's trainings are from those of another row with the same seeds, each
    pair on the same samples from the same initial weights: "percent" of each, and their `mean_of`."""
    pairs = zip(own, others, strict=True)
    apart = [percent(one[-1]["eval_loss"], other[-1]["eval_loss"]) for one, other in pairs]
    return {"percent": apart, **mean_of(apart)}


def mean_of(percents: Sequence[float]) -> Result:
    """Their "mean_percent" and its "standard_error", None of a single one."""
    error = statistics.stdev(percents) / len(percents) ** 0.5 if len(percents) > 1 else None
    return {"mean_percent": statistics.fmean(percents), "standard_error": error}


def told(mean: Result) -> str:
    """A mean difference with its standard error, in words."""
    error = mean["standard_error"]
    return f"{mean['mean_percent']:+.2f}{'' if error is None else f' ± {error:.2f}'} %"


def compared(
    name: str,
    records: Sequence[Result],
    baseline: Sequence[Result],
    warmup_steps: int,
    tolerance: float,
    same_samples: bool = True,
    held: bool = True,
    mean: float | None = None,
    paired: Result | None = None,
) -> Result:
    """The result of row `name`: its `summary`, its `curves`, and what sets it apart from the baseline.

    `same_samples`: it was trained on the baseline's samples in their order, so that the training losses compare.
    `mean`: final evaluation loss of the baseline's seeds; `paired`: of a row that was trained with them, too
    (`over_seeds`). "misses" holds, in words, why a row that is `held` to it does not train as well: a final
    evaluation loss further than `tolerance` (a fraction) from the baseline's in the mean over the seeds, or from
    `mean`, or without seeds from the baseline's, or more skipped steps.
    """
    own, base = summary(records, warmup_steps), summary(baseline, warmup_steps)
    curve = curves(records, baseline, same_samples)
    difference = percent(own["eval_loss"], base["eval_loss"])
    misses = []
    of, allowed = ("the baseline's", base["eval_loss"]) if mean is None else ("the seeds' mean", mean)
    apart = percent(own["eval_loss"], allowed)
    found = f"evaluation loss {own['eval_loss']:.4f} is {apart:+.2f} % from {of} {allowed:.4f}"
    if paired:
        number = len(paired["percent"])
        found = f"evaluation loss is {told(paired)} from the baseline's in the mean of {number} seeds"
    if not abs(paired["mean_percent"] if paired else apart) <= tolerance * 100:
        misses.append(f"{found}; allowed are {tolerance * 100:g} %")
    if own["skipped_steps"] > base["skipped_steps"]:
        misses.append(
            f"{own['skipped_steps']} steps were skipped for gradients that are not finite, in the baseline "
            f"{base['skipped_steps']}"
        )
    largest = {}
    for kind in ("difference_percent", "smoothed_difference_percent") if same_samples else ():
        points = [p for p in zip(curve["step"], curve[kind], strict=True) if p[0] > warmup_steps]
        if points:
            step, value = max(points, key=lambda point: abs(point[1]))
            largest[f"largest_{kind}_after_warmup"] = {"step": step, "percent": value}
    return {
        "row": name,
        **own,
        "eval_difference_percent": difference,
        "difference_to_seeds_mean_percent": None if mean is None else apart,
        "over_seeds": paired,
        **largest,
        "last_tenth": at_the_end(curve),
        "speed_to_baseline": own["tokens_per_second"] / base["tokens_per_second"],
        "misses": misses if same_samples and held else [],
        "curves": curve,
    }


def training_of(config: dict[str, Any]) -> Result:
    """What a resolved configuration says of the training that all rows share, dotted key -> value, without paths."""
    left_out = (*ROW_KEYS, *NOT_TRAINING, "data.sources")
    values = {key: value for key, value in leaves(config).items() if not is_under(key, left_out)}
    for key in ("model.config", "model.init_from"):
        values[key] = values[key] and Path(values[key]).name
    return {**values, "data.sources": list(config["data"]["sources"])}


def settings_of(config: dict[str, Any]) -> Result:
    """How a row computes, dotted key -> value: what a row may change, of the DeepSpeed configuration the ZeRO stage."""
    values = {
        key: value
        for key, value in leaves(config).items()
        if is_under(key, ROW_KEYS) and not is_under(key, ["deepspeed"])
    }
    return {**values, "zero_stage": config["deepspeed"].get("zero_optimization", {}).get("stage", 0)}


def print_table(results: Sequence[Result], warmup_steps: int) -> None:
    """The results on the terminal; the first row is the baseline."""
    base, seeds = results[0], any(r["measures_noise"] for r in results)
    optimizers = any(r["equal_loss"]["row"] != r["equal_loss_same_optimizer"]["row"] for r in results)

    def to_base(get: Callable[[Result], str]) -> Callable[[Result], str]:
        return lambda r: "-" if r is base else get(r)

    columns: report.Columns = {
        "row": ("row", ""),
        "eval loss": ("eval_loss", ".4f"),
        "difference": (to_base(lambda r: f"{r['eval_difference_percent']:+.2f} %"), ""),
        **({"to seeds' mean": (_to_seeds, "")} if seeds else {}),
        **({"over seeds": (_over_seeds, "")} if any(r["over_seeds"] for r in results) else {}),
        "last tenth": (to_base(_last_tenth), ""),
        "largest": (to_base(lambda r: _at_step(r, "difference_percent")), ""),
        "smoothed": (to_base(lambda r: _at_step(r, "smoothed_difference_percent")), ""),
        "rise": (lambda r: f"{r['largest_rise_percent']:.1f} %", ""),
        "grad norm": ("largest_grad_norm", ".2f"),
        "x median": ("largest_grad_norm_to_median", ".1f"),
        "skipped": ("skipped_steps", ""),
        "tokens/s": ("tokens_per_second", ",.0f"),
        "ratio": ("speed_to_baseline", ".2f"),
        "equal loss": (lambda r: r["equal_loss"]["ratio"], ".2f"),
        **(
            {"same optimizer": (lambda r: r["equal_loss_same_optimizer"]["ratio"], ".2f")}
            if optimizers
            else {}
        ),
        "GiB": ("memory_gib", ".1f"),
    }
    print(
        f"\n{report.table(results, columns)}\n"
        f"difference: to {base['row']}, with an optimizer of its own to that one's row in the same precision; last "
        "tenth, largest, smoothed: of the training loss, the first of the last tenth of the steps with its standard "
        "error. Largest, smoothed, the rise of the loss over its minimum until then, and the gradient "
        f"norm: after warmup (step {warmup_steps}). equal loss: how many times sooner than "
        f"{base['equal_loss']['row']}, the best row without FP8, at the worse of the two's final evaluation losses, in "
        "time of steps."
    )
    for r in results:
        if found := r["health"]:
            places = ", ".join(
                f"{what} {v['value']:.3g} ({v['gemm'].rpartition('.')[2]}, {v['operand']}, layer {v['layer']}, step "
                f"{v['step']})"
                for what, v in found["worst"].items()
            )
            print(f"{r['row']}: {found['alarms']} FP8 alarms in {found['looks']} looks; worst: {places}")
        if r["compared_with"] not in (None, base["row"]):
            print(f"{r['row']}: compared with {r['compared_with']}")
        if r["conditions_differ"]:
            print(f"{r['row']}: {' and '.join(r['conditions_differ'])} were others than those of this report")
        if r["fp8"] and (r["settings"]["precision.compute"] == "fp8" or r["changes_s"]):
            print(f"{r['row']}: {r['fp8']}")
        if r["changes_s"]:
            seconds = ("?" if s is None else f"{s:.1f}" for s in r["changes_s"])
            print(f"{r['row']}: to change the precision took {', '.join(seconds)} s")
        if r["measures_noise"] and r["compared_with"] == base["row"]:
            print(
                f"{r['row']} differs from {base['row']} in initial weights and in the order of samples: "
                f"evaluation losses {abs(r['eval_difference_percent']):.2f} % apart, or less, may be so by chance."
            )


def _to_seeds(result: Result) -> str:
    found = result["difference_to_seeds_mean_percent"]
    return "-" if found is None else f"{found:+.2f} %"


def _last_tenth(result: Result) -> str:
    if (found := result["last_tenth"]) is None:
        return "-"
    return told(found)


def _over_seeds(result: Result) -> str:
    return told(result["over_seeds"]) if result["over_seeds"] else "-"


def _at_step(result: Result, kind: str) -> str:
    point = result.get(f"largest_{kind}_after_warmup")
    return f"{point['percent']:+.2f} % at {point['step']}" if point else "-"


def plot(
    results: Sequence[Result], training: Result, tolerance: float, output: Path, seeds: Result | None = None
) -> Path:
    """Losses above, their differences to the baseline below, into the PNG beside `output`; returns its path.
    `seeds`: evidence.band of the baseline's."""
    path, warmup, allowed = output.with_suffix(".png"), training["warmup_steps"], tolerance * 100
    # twins of rows say what they have to say in the mean over the seeds, many of the baseline in their band
    few = seeds is None or seeds["seeds"] == 2
    results = [
        r for r in results if not r["measures_noise"] or (few and not r["curves"]["difference_percent"])
    ]
    with drawing(path, 2, figsize=(9, 8), sharex=True, height_ratios=[3, 2]) as (_, ((above,), (below,))):
        inside = [allowed]  # what the lower axis must show; what happens in warmup must not flatten it
        for number, r in enumerate(results):
            curve, color = r["curves"], f"C{number}"
            difference = f" ({r['eval_difference_percent']:+.2f} %)" if number else ""
            label = f"{r['row']}: eval loss {r['eval_loss']:.4f}{difference}"
            style = "--" if r["measures_noise"] else "-"
            above.plot(curve["step"], curve["loss"], style, color=color, linewidth=1, label=label)
            above.plot(curve["eval_step"], curve["eval_loss"], "o", color=color, markersize=4)
            if not number or r["trains_otherwise"]:
                continue
            base = results[0]["row"]
            label = r["row"] if r["compared_with"] == base else f"{r['row']}, to {r['compared_with']}"
            evaluated = curve["eval_difference_percent"]
            below.plot(curve["eval_step"], evaluated, "o", color=color, markersize=4, label=label)
            inside += map(abs, evaluated[-1:])
            if mean := r["over_seeds"]:
                label = f"{r['row']}: mean of {len(mean['percent'])} seeds, its standard error"
                place, error = curve["eval_step"][-1] * (1 + number / 100), mean["standard_error"]
                below.errorbar(
                    place, mean["mean_percent"], error, fmt="s", color=color, capsize=4, label=label
                )
                inside.append(abs(mean["mean_percent"]) + error)
            if not r["measures_noise"]:
                raw, smooth = curve["difference_percent"], curve["smoothed_difference_percent"]
                below.plot(curve["step"], raw, color=color, linewidth=0.6, alpha=0.5)
                below.plot(curve["step"], smooth, color=color, linewidth=1.8)
                inside += [abs(d) for step, d in zip(curve["step"], smooth, strict=True) if step > warmup]
        if seeds is not None:
            between = seeds["step"], seeds["low_percent"], seeds["high_percent"]
            below.fill_between(*between, color="C0", alpha=0.3, label=f"between {seeds['seeds']} seeds")
        below.set_ylim(-2 * max(inside), 2 * max(inside))
        below.axhspan(-allowed, allowed, color="gray", alpha=0.15, label=f"± {allowed:g} %")
        for axis in (above, below):
            if warmup >= min(
                results[0]["curves"]["step"]
            ):  # rows that go on from a checkpoint begin behind it
                axis.axvline(warmup, color="gray", linestyle=":", linewidth=1)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)
        above.set(
            ylabel="loss (nats a token); dots: evaluation",
            title=f"{training['model.config']}, {training['parameters'] / 1e6:,.1f} M parameters, "
            f"{training['train_batch_size_tokens']:,} tokens a step, seed {training['seed']}",
        )
        below.set(
            xlabel="step (dotted: end of warmup); thick: smoothed, dots: evaluation",
            ylabel=f"difference to {results[0]['row']} (%)",
        )
    return path
