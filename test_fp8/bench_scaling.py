#!/usr/bin/env python3
"""How a training scales over the GPUs of one host: whole steps of bench_model.py on 1, 2, 4, ... of them, at each ZeRO
stage, in bf16 and FP8, compared with the predictions of train/plan.py.

    python test_fp8/bench_scaling.py --config hare_1.1b --output FILE.json
    python test_fp8/bench_scaling.py --config mistral_7b --seq_length 4096 --gpus 8 --micro_batch 2 --stages 1 2

Predictions are printed before the first measurement. One GPU is measured on each of those that are used, all at the
same time, since GPUs of one host differ: the share is of what these GPUs do alone, in the same run. Every second
round runs in reverse.

Each case is a process of bench_model.py, which checks it: the same model, FP8 and attention as they are named. --row
adds cases, in keys of the training configuration. Exit status: 1 if a case could not be measured."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model.config import load_sizes
from model.variants import ATTENTION_BACKENDS, VARIANTS
from test_fp8.common import report
from test_fp8.common.cases import Case, parse_cases
from test_fp8.common.launch import Program, run_together
from test_fp8.common.options import ByMachine, Options, positive
from test_fp8.common.report import Result
from test_fp8.model.cases import CASE_KEYS, arguments_of
from train.config.ds_config import resolve_ds_config
from train.planning.memory import WORKSPACES_GIB
from train.planning.plan import Prediction
from train.planning.setting import Setting
from train.preflight.machine import cuda_devices

CONDITION_KEYS = "micro_batch seq_length rounds steps".split()
OPTIONS = Options(__file__, __doc__)
OPTIONS.add("--gpus", None, "numbers of them; default: 1, 2, 4, ... of the host's", type=positive, nargs="+")
OPTIONS.add("--stages", ByMachine([0, 1, 2, 3], [1]), "of ZeRO", type=int, nargs="*", choices=range(4))
OPTIONS.add("--variant", "te_layer", "of the model", choices=[v.name for v in VARIANTS.values() if v.te])
OPTIONS.add("--precisions", ["bf16", "fp8"], "to compute in", nargs="+", choices=("bf16", "fp8"))
OPTIONS.add("--attention", "auto", "of Transformer Engine", choices=list(ATTENTION_BACKENDS))
OPTIONS.add_shared(
    config=ByMachine("hare_1.1b", "tiny"),
    row=[],
    micro_batch=ByMachine(16, 2),
    seq_length=ByMachine(2048, 64),
    accumulation=ByMachine(8, 2),
    rounds=ByMachine(2, 1),
    steps=ByMachine(5, 1),
    seconds=ByMachine(1.0, 0.0),
    deterministic=False,
    seed=42,
)
OPTIONS.add_output()

COLUMNS: report.Columns = {
    "row": ("row", "<"),
    "GPUs": ("ranks", "d"),
    "tokens a step": ("step_tokens", ",d"),
    "tokens/s": ("tokens_per_second", ",.0f"),
    "of each alone": ("share_of_alone", ".3f"),
    "planned": ("planned_tokens_per_second", ",.0f"),
    "error": (lambda r: plan_error(r, "tokens_per_second"), "+.1%"),
    "GiB": ("peak_gib", ".1f"),
    "planned GiB": ("planned_peak_gib", ".1f"),
    "GiB error": (lambda r: plan_error(r, "peak_gib"), "+.1%"),
}


def plan_error(r: Result, key: str) -> float | None:
    """How far the prediction is above the measurement, as a share; None: one of them is unknown."""
    planned, found = r.get(f"planned_{key}"), r.get(key)
    return planned / found - 1 if planned and found else None


def cases_of(options: argparse.Namespace) -> dict[str, Case]:
    """The cases of --stages, --precisions and --row. Raises CaseError."""
    cases = {}
    for stage, precision in product(options.stages, options.precisions):
        how = {"precision.compute": precision, "deepspeed": f"ds_config_zero{stage}.json"}
        name = f"zero_{stage}_{precision}"
        cases[name] = Case(name, {"model.variant": options.variant, **how})
    return cases | parse_cases(options.row, cases, CASE_KEYS)


def planned(options: argparse.Namespace, case: Case, ranks: int, gpu: str) -> Result:
    """What the report says of a case on `ranks` GPUs before it is measured, with the prediction."""
    arguments = arguments_of(case, options, options.attention, options.micro_batch, ranks)
    ds_config = resolve_ds_config(arguments, ranks)
    result: Result = {
        "row": case.name,
        "ranks": ranks,
        "stage": ds_config["zero_optimization"]["stage"],
        "compute": arguments.precision.compute,
        "configuration": dict(case.overrides),
        "accumulation": options.accumulation,
        "step_tokens": arguments.train_batch_size_tokens,
    }
    if gpu:
        setting = replace(Setting.of(arguments, ds_config, load_sizes(options.config), ranks), eval_batch=0)
        prediction = Prediction.of(setting, gpu).to_json()
        result |= {f"planned_{k}": prediction.get(k) for k in ("peak_gib", "tokens_per_second", "basis")}
    return result


def program_of(
    options: argparse.Namespace, case: Case, ranks: int, gpus: Sequence[int] | None, stem: Path
) -> Program:
    """bench_model.py for one case, with its report and log beside `stem`."""
    words: list[object] = ["--measure", "step", "--rows", "--step_rows", "--rounds", 1]
    for key in "config micro_batch seq_length accumulation attention steps seconds seed".split():
        words += [f"--{key}", getattr(options, key)]
    words += ["--deterministic"] * options.deterministic
    words += ["--output", stem.with_suffix(".json")]
    words += ["--row", case.name, *(f"{key}={text}" for key, text in case.texts().items())]
    return Program("test_fp8/bench_model.py", words, stem.with_suffix(".log"), ranks, gpus)


def measure_case(
    options: argparse.Namespace, case: Case, ranks: int, gpus: int, folder: Path
) -> list[Result]:
    """Return bench_model.py's results of one round: of each GPU alone, or of all ranks together."""
    alone = ranks == 1 and gpus > 0
    places = (
        [[place] for place in range(max(options.gpus))] if alone else [list(range(ranks)) if gpus else None]
    )
    programs = [program_of(options, case, ranks, own, folder / f"{n}") for n, own in enumerate(places)]
    results = []
    for program, status in zip(programs, run_together(programs), strict=True):
        written = program.log.with_suffix(".json")
        if written.is_file():
            results += json.loads(written.read_text(encoding="utf-8"))["results"]
        else:
            results.append({"reason": f"bench_model.py ended with status {status}: {program.last_lines()}"})
    return results


def figures(rounds: Sequence[Sequence[Result]], ranks: int, alone: list[float] | None) -> Result:
    """The figures of all `rounds` of a case, of each the results of GPUs that were measured at the same time. alone:
    the speed of each GPU."""
    found = [r for results in rounds for r in results]
    if reason := next((r["reason"] for r in found if "reason" in r), None):
        return {"reason": reason}
    each = [[r["tokens_per_second"] for r in of_gpu] for of_gpu in zip(*rounds, strict=True)]
    speeds = [statistics.median(speeds) for speeds in each]
    # without what was allocated before the model was built
    peaks = [
        r["allocated_gib"] - max(0.0, r["before_gib"] - WORKSPACES_GIB) for r in found if r["allocated_gib"]
    ]
    result: Result = {
        "tokens_per_second": statistics.fmean(speeds),
        "rounds": each,
        "peak_gib": max(peaks, default=None),
        "attention": found[0]["attention"],
        "notes": found[0]["proof"],
    }
    if ranks == 1:
        return result | {"alone": speeds}
    if alone:
        used = (alone * ranks)[:ranks] if len(alone) == 1 else alone[:ranks]
        result["share_of_alone"] = result["tokens_per_second"] / sum(used)
    return result


def measure(options: argparse.Namespace) -> report.Outcome:
    import torch

    gpus = len(cuda_devices() or [])
    counts = [2**n for n in range(gpus.bit_length())] if gpus else [1, 2]
    options.gpus = sorted(set(options.gpus or counts))
    if gpus and max(options.gpus) > gpus:
        raise ValueError(f"--gpus {max(options.gpus)}: this host has {gpus}")
    gpu = torch.cuda.get_device_name() if gpus else ""
    cases = cases_of(options)
    results = [planned(options, case, ranks, gpu) for ranks in options.gpus for case in cases.values()]
    print(
        report.table(results, {k: v for k, v in COLUMNS.items() if "planned" in k or k in ("row", "GPUs")}),
        flush=True,
    )
    rounds: dict[tuple[str, int], list[list[Result]]] = {}
    for turn in range(options.rounds):
        for r in results if turn % 2 == 0 else reversed(results):
            print(f"round {turn + 1}: {r['row']} on {r['ranks']} GPUs", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                found = measure_case(options, cases[r["row"]], r["ranks"], gpus, Path(folder))
            rounds.setdefault((r["row"], r["ranks"]), []).append(found)
    alone: dict[str, list[float]] = {}
    for r in results:
        r |= figures(rounds[r["row"], r["ranks"]], r["ranks"], alone.get(r["row"]))
        alone[r["row"]] = r.get("alone", alone.get(r["row"], []))
    good = [r | {"each": r["tokens_per_second"] / r["ranks"]} for r in report.measured(results)]
    return report.Outcome(
        results,
        {"model": Path(options.config).name, **{key: getattr(options, key) for key in CONDITION_KEYS}},
        failures=[f"{r['row']} on {r['ranks']} GPUs" for r in results if "reason" in r],
        panels={"tokens/s of a GPU": report.curves(good, "row", "ranks", "each")},
        xlabel="GPUs",
    )


def main(argv: list[str]) -> int:
    return report.run(OPTIONS, argv, measure, COLUMNS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
