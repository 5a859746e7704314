#!/usr/bin/env python3
"""Train the same model in bf16 and with each FP8 recipe, and compare the losses.

    python test_fp8/compare_convergence.py [CONFIG] [--rows bf16 delayed current block muon ...]
        [--row NAME key=value ...]... [--seeds 42 43 44 45] [--max_steps N] [--work_dir DIR] [--output FILE.json]
        [-- --key value ...]

Each benchmark case is a run of train/train.py in the folder --work_dir/NAME. Its configuration consists of CONFIG, the
keys after -- and the keys of the case. By default, all cases have the same seed and train on the same samples in the
same order. --row adds a case, which is defined by keys of the training configuration:

    --row fp8_lm_head precision.compute=fp8 precision.bf16_modules=[]
    --row branch precision.compute=fp8 resume_from_checkpoint=RUN/checkpoints/step-00000700 allow_changes_on_resume=true

With --seeds, each case is trained once with each seed, and compared with the baseline of the same seed. The folder of
a run is then --work_dir/NAME_seedN. The report contains the mean of the differences of the final evaluation losses and
its 95 % interval, according to the t distribution.

To continue after an interruption, run the same command again. Unfinished runs resume, and finished runs are not trained
again. --work_dir keeps the last checkpoint of each run. To combine runs of several machines, copy the files
metrics.jsonl and train_config.json of each run to --work_dir/NAME.

Differences are given in percent of the evaluation loss of the --baseline. "last tenth" is the mean difference between
the training losses in the last tenth of the steps, with its standard error. FILE.png shows the evaluation loss by
training time. FILE_differences.png shows the differences by step, those of the training loss for each twentieth of the
steps with a band of two standard errors. The errors are those of the mean over the samples. They do not contain the
noise between two runs of the same case, which --seeds measures. Losses are compared step by step only if a case has the
seed, batch size, sequence length, number of steps and data of the baseline. "equal loss" is the speedup to equal loss:
the time until the baseline reaches a loss 1 % above its final loss, divided by the time until the other run reaches the
same loss. A case whose final loss is slightly above that of the baseline can therefore also reach the target.

The exit status is 1 if the loss of a case that is compared step by step and has the baseline's optimizer is higher than
the tolerance allows, and 2 if a run failed. With several seeds, the lower end of the interval must be within the
tolerance.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model.config import load_sizes, num_parameters
from model.keys import between
from test_fp8.common import report
from test_fp8.common.cases import Case, CaseError, parse_cases
from test_fp8.common.launch import Program, run
from test_fp8.common.options import option, positive, shared, strip_folders
from test_fp8.common.report import Result
from train.config.arguments import TrainingArguments
from train.config.load import load_arguments, resolve_arguments
from train.record.fp8_health import FP8_HEALTH, values
from train.record.run_folder import RunFolder

RECIPES = ("delayed", "current", "block")
FP8 = {recipe: {"precision.compute": "fp8", "precision.recipe": recipe} for recipe in RECIPES}
PRESETS: dict[str, dict[str, Any]] = {
    "bf16": {"precision.compute": "bf16"},
    **FP8,
    "muon": {"precision.compute": "bf16", "optim": "muon"},
    **{f"muon_{recipe}": {**overrides, "optim": "muon"} for recipe, overrides in FP8.items()},
}
# Write a checkpoint only when the run stops or is complete, and keep only the newest one.
SAVE_OPTIONS = ("--save_strategy=steps", "--save_steps=0", "--save_minutes=0", "--save_total_limit=1")
TARGET = 1.01  # the loss to which times are measured, as a multiple of the baseline's final loss
WINDOWS = 20  # number of parts of a run for which the plot shows the difference of the training losses
# Runs with equal values of these keys train on the same samples at each step of schedules of equal length.
SAME_STEPS_KEYS = ("seed", "max_steps", "train_batch_size_tokens", "max_seq_length", "data")
# Half the width of a 95 % interval in standard errors of the mean, for 2 to 10 seeds (t distribution).
T_95 = dict(zip(range(2, 11), (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262), strict=True))
TRAINING_KEYS = "max_steps train_batch_size_tokens max_seq_length learning_rate warmup_steps seed".split()

OPTIONS = [
    option("config", "train_config_evidence", "Training configuration.", nargs="?", metavar="CONFIG"),
    option(
        "--rows",
        ["bf16", *RECIPES],
        "Names of the benchmark cases to train.",
        nargs="*",
        choices=list(PRESETS),
    ),
    *shared(row=[]),
    option("--seeds", [], "Seeds with which to train each case.", nargs="+", type=between(0)),
    option("--baseline", "bf16", "Name of the baseline, the case to which all other cases are compared."),
    option(
        "--tolerance",
        0.005,
        "Maximum allowed increase of a case's evaluation loss, as a fraction of the baseline's evaluation loss.",
        type=between(0, 1, float),
    ),
    option("--max_steps", None, "Number of steps per run. Default: max_steps in CONFIG.", type=positive),
    option("--nproc", 1, "Number of processes per run. Each process uses one GPU.", type=positive),
    option(
        "--work_dir",
        Path("output/compare_convergence"),
        "Folder in which an output folder is created for each run.",
        type=Path,
    ),
]
COLUMNS: report.Columns = {
    "row": ("row", "<"),
    "eval loss": ("eval_loss", ".4f"),
    "difference %": ("eval_difference_percent", "+.2f"),
    "last tenth %": (lambda r: r["last_tenth"] and r["last_tenth"]["mean_percent"], "+.2f"),
    "±": (lambda r: r["last_tenth"] and r["last_tenth"]["standard_error"], ".2f"),
    "skipped steps": ("skipped_steps", "d"),
    "tokens/s": ("tokens_per_second", ",.0f"),
    "ratio": ("speed_to_baseline", ".2f"),
    "equal loss": (lambda r: r["equal_loss"]["ratio"], ".2f"),
    "GiB": ("memory_gib", ".1f"),
    "FP8 alarms": (
        lambda r: r["health"] and f"{r['health']['alarms']} in {r['health']['checks']} checks",
        "<",
    ),
}


def chosen_cases(options: argparse.Namespace) -> list[Case]:
    """Return the benchmark cases that --rows and --row select, starting with the baseline.

    Raises CaseError if a --row option is invalid, the baseline is not among the cases, or --seeds has more than 10 or
    repeated values.
    """
    cases = {name: Case(name, PRESETS[name]) for name in options.rows}
    cases |= parse_cases(options.row, cases)
    if options.baseline not in cases:
        raise CaseError(
            f"--baseline {options.baseline}: there is no case with this name; choose one of {', '.join(cases)}"
        )
    if len({*options.seeds}) < len(options.seeds) or len(options.seeds) > max(T_95):
        raise CaseError(f"--seeds: use up to {max(T_95)} different seeds")
    return sorted(cases.values(), key=lambda case: case.name != options.baseline)


def with_seed(case: Case, seed: int) -> Case:
    return Case(f"{case.name}_seed{seed}", {**case.overrides, "seed": seed})


def training_command(case: Case, options: argparse.Namespace) -> list[str]:
    """Return the command-line arguments for training a benchmark case with train.py."""
    return [
        options.config,
        *([f"--max_steps={options.max_steps}"] if options.max_steps else []),
        *options.extra_arguments,
        *(f"--{key}={text}" for key, text in case.texts().items()),
        f"--output_dir={options.work_dir.resolve() / case.name}",
        *SAVE_OPTIONS,
    ]


def train(case: Case, config: TrainingArguments, options: argparse.Namespace) -> list[Result]:
    """Train the remaining steps of a benchmark case and return the records in metrics.jsonl.

    config: the resolved configuration of the case. Raises ValueError if the run fails.
    """
    folder = options.work_dir.resolve() / case.name
    if is_finished(folder, config):
        return read_records(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    has_checkpoint = any(RunFolder(folder).checkpoints.glob("step-*"))
    words = [*training_command(case, options), *["--resume_from_checkpoint=auto"] * has_checkpoint]
    ranks = options.nproc if options.nproc > 1 else 0
    program = Program("train/train.py", words, folder.with_suffix(".log"), ranks)
    print(f"training {case.name}; log file: {program.log}", flush=True)
    run(program)
    return read_records(folder)


def is_finished(folder: Path, config: TrainingArguments) -> bool:
    """Return whether a run with this configuration has trained all its steps."""
    run_folder = RunFolder(folder)
    if not run_folder.metrics.exists() or not run_folder.train_config.exists():
        return False
    saved = json.loads(run_folder.train_config.read_text(encoding="utf-8"))
    expected = config.to_dict() | {"output_dir": None}  # the folder may have been moved
    return agrees(saved, expected) and config.max_steps in by_step(read_records(folder), "eval_loss")


def agrees(saved: Any, expected: Any) -> bool:
    """Return whether a saved configuration has the expected values. train.py chooses the values that are None."""
    if isinstance(saved, dict) and isinstance(expected, dict):
        return all(key in saved and agrees(saved[key], value) for key, value in expected.items())
    return expected is None or saved == expected


def read_records(folder: Path) -> list[Result]:
    """Return the records in metrics.jsonl of a run, merged into one record per step.

    The keys of a record are "step", "tokens", "loss", "eval_loss", "tokens_per_second" and others. A key can be missing
    from a record. After a resume, the evaluation of a step is a separate line in the file. If an evaluation loss is not
    finite, the file contains null, and the record NaN.
    """
    records: dict[int, Result] = {}
    for line in RunFolder(folder).metrics.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record.get("eval_loss", 0.0) is None:
            record["eval_loss"] = math.nan
        records.setdefault(record["step"], {}).update(record)
    return list(records.values())


def by_step(records: Sequence[Result], key: str) -> dict[int, float]:
    """Return the value of `key` by step, for all records that contain it."""
    return {r["step"]: r[key] for r in records if r.get(key) is not None}


def step_seconds(records: Sequence[Result]) -> list[tuple[float, Result]]:
    """Return a pair (cumulative training time in seconds, record) per record. Evaluations and saves are excluded.

    A log interval with less than half of the median speed is assumed to include compilation or graph capture. Its time
    is therefore estimated from the median speed.
    """
    median = statistics.median(by_step(records, "tokens_per_second").values())
    found, elapsed, tokens = [], 0.0, 0 if records[0].get("tokens_per_second") else records[0]["tokens"]
    for record in records:
        if rate := record.get("tokens_per_second"):
            elapsed += (record["tokens"] - tokens) / (rate if rate > median / 2 else median)
            tokens = record["tokens"]
        found.append((elapsed, record))
    return found


def speed(records: Sequence[Result]) -> float:
    """Return the training speed in tokens/s. The first log interval is excluded if there are several."""
    timed = [(s, r) for s, r in step_seconds(records) if r.get("tokens_per_second")]
    (begin, first), (end, last) = timed[0], timed[-1]
    return (last["tokens"] - first["tokens"]) / (end - begin) if end > begin else first["tokens_per_second"]


def evaluations(records: Sequence[Result]) -> list[tuple[float, float]]:
    """Return a pair (training time in seconds, evaluation loss) for each evaluation."""
    return [(s, r["eval_loss"]) for s, r in step_seconds(records) if r.get("eval_loss") is not None]


def seconds_to_loss(points: Sequence[tuple[float, float]], loss: float) -> float | None:
    """Return the training time in seconds until the evaluation loss reaches `loss`, or None if it stays higher.

    points: time in seconds and loss of each evaluation. The time is interpolated between evaluations.
    """
    if points and points[0][1] <= loss:
        return points[0][0]
    for (before, high), (after, low) in pairwise(points):
        if low <= loss:
            return before + (after - before) * (high - loss) / (high - low)
    return None


def equal_loss(own: Sequence[Result], base: Sequence[Result]) -> Result:
    """Return the times that a run and the baseline need to reach the target loss, and the ratio of the times.

    "ratio" is the time of the baseline divided by the time of the run, or None if the run does not reach the target.
    """
    loss = TARGET * base[-1]["eval_loss"]
    seconds, others = (seconds_to_loss(evaluations(training), loss) for training in (own, base))
    ratio = others / seconds if seconds and others else None
    return {"eval_loss": loss, "seconds": seconds, "baseline_seconds": others, "ratio": ratio}


def loss_differences(own: Sequence[Result], base: Sequence[Result], windows: int) -> dict[int, Result]:
    """Return the mean difference between two runs' training losses in consecutive windows of the logged steps.

    The result maps the middle step of each window to the mean and its standard error, in percent of the baseline's
    loss. The standard error is None for a window of one step. All windows together cover many more tokens than an
    evaluation. Both runs must train on the same samples.
    """
    losses = [by_step(training, "loss") for training in (own, base)]
    steps = [step for step in losses[0] if step in losses[1]]
    count = min(windows, len(steps))
    found = {}
    for first, stop in pairwise(len(steps) - len(steps) * index // count for index in range(count, -1, -1)):
        differences = [percent(losses[0][step], losses[1][step]) for step in steps[first:stop]]
        error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else None
        found[steps[(first + stop) // 2]] = {
            "mean_percent": statistics.fmean(differences),
            "standard_error": error,
        }
    return found


def percent(value: float, baseline: float) -> float:
    """Return the difference between `value` and `baseline`, in percent of `baseline`."""
    return (value / baseline - 1) * 100


def health(records: Sequence[Result]) -> Result | None:
    """Summarize the FP8 health checks of a run, or return None if there are none.

    The summary contains the number of checks, the number of alarms, and the worst value of each statistic.
    """
    checks = [record for record in records if record.get(FP8_HEALTH)]
    worst: dict[str, float] = {}
    for record in checks:
        for _, _, statistic, by_layer in values(record[FP8_HEALTH]):
            known = [value for value in by_layer if value is not None]
            worst[statistic] = max([worst.get(statistic, 0.0), *known])
    alarms = max((record["fp8_alarms"]["count"] for record in records if record.get("fp8_alarms")), default=0)
    return {"checks": len(checks), "alarms": alarms, "worst": worst} if checks else None


def make_result(case: Case, config: Any, own: list[Result], base: list[Result], same_steps: bool) -> Result:
    """Return the report entry for a run, with its losses, its speed and the comparison with the baseline.

    same_steps: whether the losses can be compared step by step.
    """
    losses, eval_losses = by_step(own, "loss"), by_step(own, "eval_loss")
    base_losses = by_step(base, "eval_loss") if same_steps else {}
    differences = loss_differences(own, base, WINDOWS) if same_steps else {}
    own_speed = speed(own)
    return {
        "row": case.name,
        "overrides": {key: strip_folders(value) for key, value in case.overrides.items()},
        "seed": config.seed,
        "loss": [*losses.values()][-1],
        "eval_loss": own[-1]["eval_loss"],
        "eval_difference_percent": percent(own[-1]["eval_loss"], base[-1]["eval_loss"]),
        "last_tenth": [*loss_differences(own, base, 10).values()][-1] if same_steps else None,
        "skipped_steps": int(max(by_step(own, "skipped_steps").values(), default=0)),
        "tokens_per_second": own_speed,
        "speed_to_baseline": own_speed / speed(base),
        "equal_loss": equal_loss(own, base),
        "memory_gib": max(by_step(own, "memory_gib").values(), default=None),
        "health": health(own),
        "curves": {
            "step": [*losses],
            "loss": [*losses.values()],
            "grad_norm": [r.get("grad_norm") for r in own if r.get("loss") is not None],
            "difference_step": list(differences),
            "difference_percent": [window["mean_percent"] for window in differences.values()],
            "difference_standard_error": [window["standard_error"] for window in differences.values()],
            "eval_step": [*eval_losses],
            "eval_loss": [*eval_losses.values()],
            "eval_seconds": [seconds for seconds, _ in evaluations(own)],
            "eval_difference_percent": [
                percent(loss, base_losses[step]) if step in base_losses else None
                for step, loss in eval_losses.items()
            ],
        },
    }


def difference_band(curves: Result) -> tuple[list, ...]:
    """Return lists to plot: steps, training loss differences, and lower and upper bounds (two standard errors)."""
    means = curves["difference_percent"]
    errors = [2 * (error or 0) for error in curves["difference_standard_error"]]
    bounds = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
    return (curves["difference_step"], means, *bounds)


def late_losses(curves: Result) -> tuple[list, list]:
    """Return lists of training times (minutes) and evaluation losses to plot, without the first fifth of the run."""
    begin = len(curves["eval_loss"]) // 5
    return [seconds / 60 for seconds in curves["eval_seconds"][begin:]], curves["eval_loss"][begin:]


def measure(options: argparse.Namespace) -> report.Outcome:
    """Train all benchmark cases and compare the losses with the baseline.

    Raises ValueError before any training if a configuration is invalid, or later if a run fails.
    """
    chosen = chosen_cases(options)
    cases = [with_seed(case, seed) for seed in options.seeds for case in chosen] or chosen
    configs = [
        resolve_arguments(load_arguments(training_command(case, options)), options.nproc) for case in cases
    ]
    trained = [train(case, config, options) for case, config in zip(cases, configs, strict=True)]
    results, misses, is_checked, base = [], [], [], configs[0]
    for index, (case, config, records) in enumerate(zip(cases, configs, trained, strict=True)):
        first = index - index % len(chosen)  # the baseline of this seed
        same_steps = all(getattr(config, key) == getattr(configs[first], key) for key in SAME_STEPS_KEYS)
        result = make_result(case, config, records, trained[first], same_steps)
        results.append(result)
        is_checked.append(same_steps and config.optim == base.optim)
        if is_checked[-1] and result["skipped_steps"] > results[first]["skipped_steps"]:
            misses.append(
                f"{case.name} skipped {result['skipped_steps']} steps, but the baseline {cases[first].name} skipped "
                f"only {results[first]['skipped_steps']}"
            )
    differences = []
    for index, case in enumerate(chosen):
        own = results[index :: len(chosen)]
        found = interval([result["eval_difference_percent"] for result in own])
        differences.append({"row": case.name, "seeds": options.seeds, **found})
        lowest = found["mean_percent"] - (found["half_width"] or 0)
        if is_checked[index] and not lowest <= options.tolerance * 100:
            misses.append(
                f"{case.name}: the evaluation loss differs from the evaluation loss of {chosen[0].name} by "
                f"{describe(found)}, but at most {options.tolerance * 100:+g} % is allowed (--tolerance)"
            )
    training = {
        **{key: getattr(base, key) for key in TRAINING_KEYS},
        "model.config": Path(base.model.config).name,
        "data.sources": list(base.data.sources),
        "parameters": num_parameters(load_sizes(base.model.config)),
    }
    more = {"training": training, "tolerance": options.tolerance, "baseline": options.baseline}
    if options.seeds:
        more["differences"] = differences
    lines = [f"{one['row']}: {describe(one)}" for one in differences[1:] if options.seeds]
    labels = report.plain_labels(
        {c.name: plain_name(config) for c, config in zip(cases, configs, strict=True)}
    )
    tokens = base.max_steps * (base.train_batch_size_tokens or 0)
    title = f"{training['model.config']}, {tokens / 1e6:,.0f}M tokens"
    return report.Outcome(results, more, lines, misses, title, plots(results, labels))


def interval(percents: Sequence[float]) -> Result:
    """Return the mean of the differences of several seeds, and half the width of its 95 % interval.

    percents: the difference of each seed, in percent of the baseline's loss. The half width is None for one seed.
    """
    mean, count, half_width = statistics.fmean(percents), len(percents), None
    if count > 1:
        variance = sum((percent - mean) ** 2 for percent in percents) / (count - 1)
        half_width = T_95[count] * math.sqrt(variance / count)
    return {"percent": [*percents], "mean_percent": mean, "half_width": half_width}


def describe(found: Result) -> str:
    """Return the text for a result of `interval`."""
    if found["half_width"] is None:
        return f"{found['mean_percent']:+.2f} %"
    return (
        f"{found['mean_percent']:+.2f} % ± {found['half_width']:.2f} % (mean and 95 % interval of "
        f"{len(found['percent'])} seeds)"
    )


def plain_name(config: TrainingArguments) -> str:
    """Return a description of a case for the plots, such as "te_layer, FP8 delayed, AdamW"."""
    model, precision = config.model, config.precision
    name = {"hf": "transformers", "torchao": "transformers with torchao"}.get(model.variant, model.variant)
    compute = f"FP8 {precision.recipe}" if precision.compute == "fp8" else precision.compute
    return ", ".join((name, compute, {"adamw": "AdamW", "muon": "Muon"}[config.optim]))


def plots(results: Sequence[Result], labels: Mapping[str, str]) -> dict[str, list[report.Panel]]:
    """Return the panels of the plots: the loss by time, and the differences of the losses from the baseline by step.

    results: entries of the report, the baseline first. labels: labels of the cases by name.
    """
    curves = {labels[r["row"]]: r["curves"] for r in results}
    compared = {label: c for label, c in curves.items() if c["difference_step"]}
    base = next(iter(curves))
    return {
        "": [
            report.Panel(
                "training time (minutes)",
                "evaluation loss (nats per token)",
                {label: late_losses(c) for label, c in curves.items()},
                (TARGET * results[0]["eval_loss"], f"target: 1 % above the final loss of {base}"),
            )
        ],
        "_differences": [
            report.Panel("step", f"{kind} loss, difference from\n{base} (%)", series)
            for kind, series in (
                ("training", {label: difference_band(c) for label, c in compared.items()}),
                (
                    "evaluation",
                    {label: (c["eval_step"], c["eval_difference_percent"]) for label, c in compared.items()},
                ),
            )
        ],
    }


BENCHMARK = report.Benchmark(__file__, __doc__, OPTIONS, COLUMNS, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(sys.argv[1:]))
