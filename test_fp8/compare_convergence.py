#!/usr/bin/env python3
"""Train the same model in bf16 and with each FP8 recipe, and compare the losses.

    python test_fp8/compare_convergence.py [CONFIG] [--rows bf16 delayed current block muon ...]
        [--row NAME key=value ...]... [--max_steps N] [--work_dir DIR] [--output FILE.json] [-- --key value ...]

Each case is a run of train/train.py in --work_dir/NAME, with CONFIG, the keys after -- and the keys of the case. By
default, all cases have the same seed and the same samples in the same order. --row adds a case, given by keys of the
training configuration:

    --row fp8_lm_head precision.compute=fp8 precision.bf16_modules=[]
    --row bf16_seed43 precision.compute=bf16 seed=43
    --row branch precision.compute=fp8 resume_from_checkpoint=RUN/checkpoints/step-00000700 allow_changes_on_resume=true

After a stop, run the same command again: unfinished cases resume, and finished cases are not trained again. --work_dir
keeps the last checkpoint of each case.

Differences are in percent of the --baseline's evaluation loss. "last tenth" is the difference of the training losses
over the last tenth of the steps, with its standard error. "equal loss" is the speedup in step time until both runs
reach the worse of their two final losses. To see the seed noise, add a case with another seed.

Exit status: 1 if a case with the baseline's seed and optimizer misses the tolerance; 2 if a run failed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
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
# Keep one checkpoint, written when the run stops or ends.
SAVE_OPTIONS = ("--save_strategy=steps", "--save_steps=0", "--save_minutes=0", "--save_total_limit=1")
TRAINING_KEYS = "max_steps train_batch_size_tokens max_seq_length learning_rate warmup_steps seed".split()

OPTIONS = [
    option("config", "train_config_convergence", "training configuration", nargs="?", metavar="CONFIG"),
    option("--rows", ["bf16", *RECIPES], "cases to train", nargs="*", choices=list(PRESETS)),
    *shared(row=[]),
    option("--baseline", "bf16", "case to compare the others with"),
    option(
        "--tolerance", 0.005, "allowed relative difference of the evaluation loss", type=between(0, 1, float)
    ),
    option("--max_steps", None, "steps per run; default: CONFIG's", type=positive),
    option("--nproc", 1, "processes per run, one GPU each", type=positive),
    option("--work_dir", Path("output/compare_convergence"), "folder of the runs", type=Path),
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
    """Return the cases of --rows and --row, the baseline first. Raises CaseError."""
    cases = {name: Case(name, PRESETS[name]) for name in options.rows}
    cases |= parse_cases(options.row, cases)
    if options.baseline not in cases:
        raise CaseError(f"--baseline {options.baseline}: unknown case; choose from {', '.join(cases)}")
    return sorted(cases.values(), key=lambda case: case.name != options.baseline)


def training_command(case: Case, options: argparse.Namespace) -> list[str]:
    """Return the arguments of train.py for a case. If its run has a checkpoint, it resumes from that."""
    folder = options.work_dir.resolve() / case.name
    has_checkpoint = any(RunFolder(folder).checkpoints.glob("step-*"))
    return [
        options.config,
        *([f"--max_steps={options.max_steps}"] if options.max_steps else []),
        *options.extra_arguments,
        *(f"--{key}={text}" for key, text in case.texts().items()),
        f"--output_dir={folder}",
        *SAVE_OPTIONS,
        *["--resume_from_checkpoint=auto"] * has_checkpoint,
    ]


def train(case: Case, options: argparse.Namespace) -> list[Result]:
    """Run train.py for the remaining steps of a case and return its records. Raises ValueError if the run fails."""
    folder = options.work_dir.resolve() / case.name
    folder.parent.mkdir(parents=True, exist_ok=True)
    ranks = options.nproc if options.nproc > 1 else 0
    program = Program("train/train.py", training_command(case, options), folder.with_suffix(".log"), ranks)
    print(f"{case.name}: see {program.log}", flush=True)
    run(program)
    return read_records(folder)


def read_records(folder: Path) -> list[Result]:
    """Return the records of metrics.jsonl, {"step", "tokens", "loss", "eval_loss", "tokens_per_second", ...}, per step.

    Not every record has every key. An evaluation after a resume is a separate line of the file.
    """
    records: dict[int, Result] = {}
    for line in RunFolder(folder).metrics.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        records.setdefault(record["step"], {}).update(record)
    return list(records.values())


def column(records: Sequence[Result], key: str) -> tuple[list[int], list[float]]:
    """Return (steps, values) of the records that have `key`."""
    points = [(r["step"], r[key]) for r in records if r.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def step_seconds(records: Sequence[Result]) -> list[tuple[float, Result]]:
    """Return (seconds of steps so far, record) for each record, without evaluations and saves.

    An interval below half of the median speed includes compilation or graph capture, so it counts at the median speed.
    """
    median = statistics.median(column(records, "tokens_per_second")[1])
    found, elapsed, tokens = [], 0.0, 0 if records[0].get("tokens_per_second") else records[0]["tokens"]
    for record in records:
        if rate := record.get("tokens_per_second"):
            elapsed += (record["tokens"] - tokens) / (rate if rate > median / 2 else median)
            tokens = record["tokens"]
        found.append((elapsed, record))
    return found


def speed(records: Sequence[Result]) -> float:
    """Return tokens/s of the steps, without the first interval if there are more."""
    timed = [(s, r) for s, r in step_seconds(records) if r.get("tokens_per_second")]
    (begin, first), (end, last) = timed[0], timed[-1]
    return (last["tokens"] - first["tokens"]) / (end - begin) if end > begin else first["tokens_per_second"]


def seconds_to_loss(records: Sequence[Result], loss: float) -> float | None:
    """Return the seconds of steps until the evaluation loss is `loss`, interpolated between evaluations, or None."""
    points = [(s, r["eval_loss"]) for s, r in step_seconds(records) if r.get("eval_loss") is not None]
    if points and points[0][1] <= loss:
        return points[0][0]
    for (before, high), (after, low) in pairwise(points):
        if low <= loss:
            return before + (after - before) * (high - loss) / (high - low)
    return None


def equal_loss(own: Sequence[Result], base: Sequence[Result]) -> Result:
    """Return the seconds until both runs reach the worse of their two final evaluation losses, and the speedup.

    "ratio" is the baseline's time divided by this run's.
    """
    loss = max(training[-1]["eval_loss"] for training in (own, base))
    seconds, others = seconds_to_loss(own, loss), seconds_to_loss(base, loss)
    ratio = others / seconds if seconds and others else None
    return {"eval_loss": loss, "seconds": seconds, "baseline_seconds": others, "ratio": ratio}


def last_tenth(own: Sequence[Result], base: Sequence[Result]) -> Result:
    """Return the mean difference of the training losses over the last tenth of the logged steps and its standard error.

    In percent of the baseline's loss. Covers many more tokens than an evaluation. Both runs must see the same samples.
    """
    losses = [dict(zip(*column(training, "loss"), strict=True)) for training in (own, base)]
    differences = [percent(losses[0][step], losses[1][step]) for step in losses[0] if step in losses[1]]
    last = differences[-max(1, len(differences) // 10) :]
    error = statistics.stdev(last) / len(last) ** 0.5 if len(last) > 1 else None
    return {"mean_percent": statistics.fmean(last), "standard_error": error}


def percent(value: float, baseline: float) -> float:
    """Return `value` - `baseline` in percent of `baseline`."""
    return (value / baseline - 1) * 100


def health(records: Sequence[Result]) -> Result | None:
    """Return the number of FP8 health checks and alarms, and the worst value of each statistic; None without checks."""
    checks = [record for record in records if record.get(FP8_HEALTH)]
    worst: dict[str, float] = {}
    for record in checks:
        for _, _, statistic, by_layer in values(record[FP8_HEALTH]):
            known = [value for value in by_layer if value is not None]
            worst[statistic] = max([worst.get(statistic, 0.0), *known])
    alarms = max((record["fp8_alarms"]["count"] for record in records if record.get("fp8_alarms")), default=0)
    return {"checks": len(checks), "alarms": alarms, "worst": worst} if checks else None


def make_result(case: Case, config: Any, own: list[Result], base: list[Result], same_samples: bool) -> Result:
    """Return the figures of a run and its comparison with the baseline."""
    steps, losses = column(own, "loss")
    eval_steps, eval_losses = column(own, "eval_loss")
    base_losses = column(base, "eval_loss")[1]
    own_speed = speed(own)
    return {
        "row": case.name,
        "overrides": {key: strip_folders(value) for key, value in case.overrides.items()},
        "seed": config.seed,
        "loss": losses[-1],
        "eval_loss": eval_losses[-1],
        "eval_difference_percent": percent(eval_losses[-1], base[-1]["eval_loss"]),
        "last_tenth": last_tenth(own, base) if same_samples else None,
        "skipped_steps": int(max(column(own, "skipped_steps")[1], default=0)),
        "tokens_per_second": own_speed,
        "speed_to_baseline": own_speed / speed(base),
        "equal_loss": equal_loss(own, base),
        "memory_gib": max(column(own, "memory_gib")[1], default=None),
        "health": health(own),
        "curves": {
            "step": steps,
            "loss": losses,
            "grad_norm": [r.get("grad_norm") for r in own if r.get("loss") is not None],
            "eval_step": eval_steps,
            "eval_loss": eval_losses,
            "eval_difference_percent": [
                percent(*pair) for pair in zip(eval_losses, base_losses, strict=False)
            ],
        },
    }


def measure(options: argparse.Namespace) -> report.Outcome:
    """Train all cases and compare them.

    Raises ValueError if a configuration is invalid, before any training, or if a run fails.
    """
    cases = chosen_cases(options)
    configs = [
        resolve_arguments(load_arguments(training_command(case, options)), options.nproc) for case in cases
    ]
    trained = [train(case, options) for case in cases]
    results, misses, base = [], [], configs[0]
    for case, config, records in zip(cases, configs, trained, strict=True):
        same_samples = config.seed == base.seed
        result = make_result(case, config, records, trained[0], same_samples)
        results.append(result)
        if not same_samples or config.optim != base.optim:
            continue
        if not abs(result["eval_difference_percent"]) <= options.tolerance * 100:
            misses.append(f"{case.name}: {result['eval_difference_percent']:+.2f} % from {cases[0].name}")
        if result["skipped_steps"] > results[0]["skipped_steps"]:
            misses.append(f"{case.name}: {result['skipped_steps']} skipped steps")
    training = {
        **{key: getattr(base, key) for key in TRAINING_KEYS},
        "model.config": Path(base.model.config).name,
        "data.sources": list(base.data.sources),
        "parameters": num_parameters(load_sizes(base.model.config)),
    }
    more = {"training": training, "tolerance": options.tolerance, "baseline": options.baseline}
    curves = {r["row"]: r["curves"] for r in results}
    panels = {
        "training loss": {name: (c["step"], c["loss"]) for name, c in curves.items()},
        "evaluation loss to the baseline's (%)": {
            name: (c["eval_step"], c["eval_difference_percent"]) for name, c in curves.items()
        },
    }
    return report.Outcome(results, more, failures=misses, panels=panels, xlabel="step")


BENCHMARK = report.Benchmark(__file__, __doc__, OPTIONS, COLUMNS, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(sys.argv[1:]))
