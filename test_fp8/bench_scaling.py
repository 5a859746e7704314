#!/usr/bin/env python3
"""Measure how training scales across the GPUs of one host.

The benchmark runs bench_model.py with the model variant te_layer on 1, 2, 4, ... GPUs, for each ZeRO stage, in bf16 and
FP8. bench_model.py starts once for each number of GPUs, and also checks the model, the FP8 GEMMs and the attention.

    python test_fp8/bench_scaling.py --config hare_1.1b --output FILE.json
    python test_fp8/bench_scaling.py --config mistral_7b --seq_length 4096 --gpus 8 --micro_batch 2 --stages 1 2

The GPUs of a host differ in speed, and every step waits for the slowest. Therefore, single-GPU training runs on every
GPU at the same time. The column "of each alone" is the speed of several GPUs divided by the summed speeds of the same
GPUs in single-GPU training. The column "of the slowest" replaces each speed by the lowest one. Every second round runs
in reverse order. train/plan.py predicts the same figures.

--row adds a case, which is defined by keys of the training configuration. If a case fails on several GPUs, no case is
measured on this number of GPUs. The exit status is 1 if a case could not be measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model.config import load_sizes
from test_fp8.common import report
from test_fp8.common.cases import Case, CaseError, parse_cases
from test_fp8.common.launch import Program, run_together
from test_fp8.common.options import STEP_OPTIONS, DeviceDefault, option, positive, shared
from test_fp8.common.report import Result
from test_fp8.model.cases import CASE_KEYS, training_arguments
from train.config.ds_config import resolve_ds_config
from train.preflight.machine import cuda_devices

FORWARDED_OPTIONS = (
    "config",
    "micro_batch",
    "seq_length",
    "accumulation",
    "steps",
    "seconds",
)  # options that are passed to bench_model.py
CONDITION_KEYS = ("micro_batch", "seq_length", "rounds", "steps")
PRECISIONS = ("bf16", "fp8")

OPTIONS = [
    option(
        "--gpus",
        None,
        "GPU counts to measure. Default: 1, 2, 4, ... up to all GPUs of the host.",
        type=positive,
        nargs="+",
    ),
    option(
        "--stages",
        DeviceDefault([0, 1, 2, 3], [1]),
        "ZeRO stages to measure.",
        type=int,
        nargs="*",
        choices=range(4),
    ),
    option("--precisions", list(PRECISIONS), "Precisions to measure.", nargs="+", choices=PRECISIONS),
    *STEP_OPTIONS,
    *shared(micro_batch=DeviceDefault(16, 2), rounds=DeviceDefault(2, 1)),
]
COLUMNS: report.Columns = {
    "row": ("row", "<"),
    "GPUs": ("ranks", "d"),
    "tokens a step": ("step_tokens", ",d"),
    "tokens/s": ("tokens_per_second", ",.0f"),
    "of each alone": ("share_of_alone", ".3f"),
    "of the slowest": ("share_of_slowest", ".3f"),
    "GiB": ("peak_gib", ".1f"),
}


def chosen_cases(options: argparse.Namespace) -> dict[str, Case]:
    """Return the benchmark cases that --stages, --precisions and --row select.

    Raises CaseError if a --row option is invalid or no case is selected.
    """
    cases = {}
    for stage, precision in product(options.stages, options.precisions):
        how = {"precision.compute": precision, "deepspeed": f"ds_config_zero{stage}.json"}
        name = f"zero_{stage}_{precision}"
        cases[name] = Case(name, {"model.variant": "te_layer", **how})
    cases |= parse_cases(options.row, cases, CASE_KEYS)
    if not cases:
        raise CaseError("no case is selected. Select a ZeRO stage with --stages, or add a case with --row")
    return cases


def describe_case(options: argparse.Namespace, case: Case, ranks: int) -> Result:
    """Return the configuration of a benchmark case for the report.

    Raises CaseError or ConfigurationError if the case is invalid.
    """
    arguments = training_arguments(case, options, "auto", options.micro_batch, ranks)
    ds_config = resolve_ds_config(arguments, load_sizes(arguments.model.config), ranks)
    return {
        "row": case.name,
        "ranks": ranks,
        "stage": ds_config["zero_optimization"]["stage"],
        "compute": arguments.precision.compute,
        "configuration": dict(case.overrides),
        "accumulation": options.accumulation,
        "step_tokens": arguments.train_batch_size_tokens,
    }


def make_programs(
    options: argparse.Namespace, cases: Mapping[str, Case], ranks: int, gpus: int, folder: Path
) -> list[Program]:
    """Return the programs that run at the same time in one round.

    If `ranks` is 1, one program runs on each GPU. Otherwise, a single program runs on several ranks. gpus: the number
    of GPUs on this host.
    """
    places: list[list[int] | None] = [list(range(ranks)) if gpus else None]
    if ranks == 1 and gpus:
        places = [[gpu] for gpu in range(max(options.gpus))]
    words = ["--rows", "--rounds", 1]
    words += ["--deterministic"] * options.deterministic
    words += [word for key in FORWARDED_OPTIONS for word in (f"--{key}", getattr(options, key))]
    for case in cases.values():
        words += ["--row", case.name, *(f"{key}={text}" for key, text in case.texts().items())]
    stems = [folder / str(number) for number in range(len(places))]
    return [
        Program(
            "test_fp8/bench_model.py",
            [*words, "--output", stem.with_suffix(".json")],
            stem.with_suffix(".log"),
            ranks,
            place,
        )
        for stem, place in zip(stems, places, strict=True)
    ]


def measure_round(programs: Sequence[Program], names: Iterable[str]) -> list[dict[str, Result]]:
    """Run several processes of bench_model.py at the same time, and return the results of each process by case name.

    names: the names of all cases. If a process fails, the result of each case contains only the reason.
    """
    results = []
    for program, status in zip(programs, run_together(programs), strict=True):
        written = program.log.with_suffix(".json")
        if written.is_file():
            found = json.loads(written.read_text(encoding="utf-8"))["results"]
            results.append({one["row"]: one for one in found})
        else:
            reason = f"bench_model.py exited with status {status}: {program.last_lines()}"
            results.append({name: {"reason": reason} for name in names})
    return results


def summarize(rounds: Sequence[Sequence[Result]], ranks: int, alone: Sequence[float]) -> Result:
    """Return the speed and memory of a benchmark case.

    rounds: for each round, the results that were measured at the same time. alone: the speed of each GPU in single-GPU
    training, in tokens/s, or [] if it was not measured.
    """
    found = [r for results in rounds for r in results]
    if reason := next((r["reason"] for r in found if "reason" in r), None):
        return {"reason": reason}
    each = [[r["tokens_per_second"] for r in of_gpu] for of_gpu in zip(*rounds, strict=True)]
    speeds = [statistics.median(speeds) for speeds in each]
    result: Result = {
        "tokens_per_second": statistics.fmean(speeds),
        "rounds": each,
        "peak_gib": max(r["allocated_gib"] for r in found),
        "attention": found[0]["attention"],
        "notes": found[0]["startup_checks"],
    }
    if ranks == 1:
        result["alone"] = speeds
    elif alone:
        # on a CPU, a single measurement is used for all ranks
        used = alone[:ranks] if len(alone) > 1 else [alone[0]] * ranks
        result["share_of_alone"] = result["tokens_per_second"] / sum(used)
        result["share_of_slowest"] = result["tokens_per_second"] / (ranks * min(used))
    return result


def measure(options: argparse.Namespace) -> report.Outcome:
    gpus = len(cuda_devices() or [])
    counts = [2**n for n in range(gpus.bit_length())] if gpus else [1, 2]
    options.gpus = sorted(set(options.gpus or counts))
    if gpus and max(options.gpus) > gpus:
        raise ValueError(f"--gpus {max(options.gpus)}: the largest possible value on this host is {gpus}")
    cases = chosen_cases(options)
    results = [describe_case(options, case, ranks) for ranks in options.gpus for case in cases.values()]
    rounds: dict[int, list[list[dict[str, Result]]]] = {ranks: [] for ranks in options.gpus}
    for turn in range(options.rounds):
        forward = turn % 2 == 0
        order = cases if forward else dict(reversed(cases.items()))
        for ranks in options.gpus if forward else reversed(options.gpus):
            print(f"round {turn + 1}: measuring {', '.join(order)} on {ranks} GPUs", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                programs = make_programs(options, order, ranks, gpus, Path(folder))
                rounds[ranks].append(measure_round(programs, cases))
    alone: dict[str, list[float]] = {}
    for r in results:
        found = [[of_gpu[r["row"]] for of_gpu in of_round] for of_round in rounds[r["ranks"]]]
        r |= summarize(found, r["ranks"], alone.get(r["row"], []))
        alone.setdefault(r["row"], r.get("alone", []))
    return report.Outcome(
        results,
        {"model": Path(options.config).name, **{key: getattr(options, key) for key in CONDITION_KEYS}},
        failures=[f"{r['row']} on {r['ranks']} GPUs" for r in results if "reason" in r],
        title=f"{Path(options.config).name} with micro-batches of {options.micro_batch} x {options.seq_length} tokens",
        plots={"": panels(results)},
    )


def panels(results: Sequence[Result]) -> list[report.Panel]:
    """Return the panels of the plot, one per number of GPUs, with the speed of each case in tokens/s over all GPUs."""
    measured = report.measured(results)
    names = {r["row"]: f"ZeRO {r['stage']}, {r['compute'].replace('fp8', 'FP8')}" for r in measured}
    labels = report.plain_labels(names)
    return [
        report.Panel(
            "tokens/s",
            f"{ranks} GPU{'s' * (ranks > 1)}",
            {labels[r["row"]]: r["tokens_per_second"] for r in measured if r["ranks"] == ranks},
        )
        for ranks in dict.fromkeys(r["ranks"] for r in measured)
    ]


BENCHMARK = report.Benchmark(__file__, __doc__, OPTIONS, COLUMNS, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(sys.argv[1:]))
