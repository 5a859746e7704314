#!/usr/bin/env python3
"""Check that training with any ZeRO stage on several ranks is equivalent to training on one rank.

The check covers each ZeRO stage with each model variant, in bf16 and each FP8 recipe, with and without gradient
checkpointing. It also covers Muon, low-precision optimizer states and offloading.

    python test_fp8/zero_matrix.py [--ranks 2] [--steps 4] [--rows 'zero3-*'] [--output FILE.json]

Each test case is a training configuration, which train/train.py trains on one rank and on --ranks ranks with the same
tokens in each step. A case passes if losses and gradient norms agree within the tolerance in all steps, or if
train/launch.py refuses the configuration. The exit status is 1 if a case does not pass."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model.errors import UserError
from model.keys import between
from model.variants import VARIANTS
from test_fp8.common import report
from test_fp8.common.cases import Case, select
from test_fp8.common.folders import make_folder
from test_fp8.common.launch import Program, run
from test_fp8.common.options import ROOT, option, positive
from test_fp8.common.report import Result
from train.config.load import build_arguments
from train.preflight.check import check
from train.preflight.machine import Device, cuda_devices
from train.record.run_folder import RunFolder

SEQ_LENGTH = 64
MICRO_BATCH = 2
ACCUMULATION = 2  # on several ranks; a single rank accumulates as many micro-batches as all ranks together
VOCAB = 512
SWITCHES: list[dict[str, Any]] = [
    *({"precision__optimizer_states": states} for states in ("bf16_remainder", "int8", "fp8")),
    {"optim": "muon"},
    *({"precision__gradient_communication": dtype} for dtype in ("fp32", "bf16")),
    {"zero_optimization__zero_quantized_gradients": True},
    *({f"zero_optimization__{name}": "cpu"} for name in ("offload_optimizer", "offload_param")),
]
PRECISIONS = ("bf16", "fp8")
# Largest allowed relative differences over all steps, and in the first step, in which the weights are still equal.
# The tolerance for FP8 is wider, because a different rounding of a sum can change an FP8 number. Also, delayed scaling
# updates its scales in each micro-batch, and with several ranks each rank has fewer micro-batches.
TOLERANCE = {
    "bf16": {"loss": 1e-4, "grad_norm": 5e-3, "first_grad_norm": 1e-3},
    "fp8": {"loss": 1e-3, "grad_norm": 5e-2, "first_grad_norm": 1e-3},
    "delayed": {"loss": 1e-3, "grad_norm": 5e-2, "first_grad_norm": 1e-2},
}

OPTIONS = [
    option(
        "--ranks",
        2,
        "Number of ranks in the runs that are compared with a single-rank run. On a host with GPUs, each "
        "rank uses one GPU.",
        type=between(2),
    ),
    option("--steps", 4, "Number of training steps per run.", type=positive),
    option(
        "--rows",
        ["*"],
        "Names of the cases to run. The wildcards * and ? are allowed.",
        nargs="+",
        metavar="PATTERN",
    ),
]
COLUMNS: report.Columns = {
    "row": ("row", "<"),
    "outcome": ("outcome", "<"),
    "loss": ("loss_difference", ".1e"),
    "grad_norm": ("grad_norm_difference", ".1e"),
    "in step 1": ("first_grad_norm_difference", ".1e"),
    "why": (lambda r: r.get("why", "").replace("\n", " "), "<"),
}


def make_case(stage: int, variant: str, precision: str, recompute: bool = False, /, **more: Any) -> Case:
    """Return a test case for a ZeRO stage, a model variant and a precision.

    more: additional configuration keys, with "__" instead of dots. zero_optimization__NAME sets a DeepSpeed key.
    """
    deepspeed = json.loads((ROOT / f"train_args/ds_config_zero{stage}.json").read_text(encoding="utf-8"))
    overrides: dict[str, Any] = {"model.variant": variant, "precision.compute": precision}
    recipes = VARIANTS[variant].recipes
    if precision == "fp8" and recipes:
        overrides["precision.recipe"] = recipes[0]
    for key, value in more.items():
        section, _, name = key.partition("__")
        if section == "zero_optimization":
            deepspeed[section][name] = {"device": value} if name.startswith("offload") else value
        else:
            overrides[key.replace("__", ".")] = value
    words = [f"{key.rpartition('__')[2]}_{value}" for key, value in more.items()]
    name = "-".join([f"zero{stage}", variant, precision, *["recompute"] * recompute, *words])
    return Case(name, overrides | {"gradient_checkpointing": recompute, "deepspeed": deepspeed})


def matrix() -> Iterator[Case]:
    """Yield all test cases.

    The first cases combine each ZeRO stage with each model variant, precision and recipe, with and without gradient
    checkpointing. The other cases use the variant te_layer in FP8 and vary the optimizer, optimizer states, gradient
    communication and offloading.
    """
    for stage, variant, precision, recompute in product(range(4), VARIANTS, PRECISIONS, (False, True)):
        yield make_case(stage, variant, precision, recompute)
        for recipe in VARIANTS[variant].recipes[1:] if precision == "fp8" else ():
            if recipe == "mxfp8":
                continue
            yield make_case(stage, variant, precision, recompute, precision__recipe=recipe)
    for recompute in (False, True):  # by default, torchao is compiled on a GPU, and ZeRO 3 is refused
        yield make_case(3, "torchao", "fp8", recompute, model__compile=False)
    for stage, switch in product(range(4), SWITCHES):
        yield make_case(stage, "te_layer", "fp8", False, **switch)


def training_settings(case: Case, steps: int, ranks: int, data: Path) -> dict[str, Any]:
    """Return the training configuration of a test case. A step uses the same tokens on one rank as on several ranks."""
    return case.configured(
        {
            "model": {"config": "tiny"},
            "precision": {},
            "data": {"sources": {"made": str(data)}},
            "max_steps": steps,
            "max_seq_length": SEQ_LENGTH,
            "per_device_train_batch_size": MICRO_BATCH,
            "train_batch_size_tokens": ACCUMULATION * ranks * MICRO_BATCH * SEQ_LENGTH,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "output_dir": "unused",
            "logging_steps": 1,
            "max_eval_samples": 2,
            "save_strategy": "no",
            "hang_timeout_s": 180,  # torch.compile may compile in the first step
            "resume_from_checkpoint": "never",
        }
    )


def make_data(folder: Path) -> Path:
    """Write prepared data that a model can learn, because each token depends mostly on the previous token."""
    random = np.random.default_rng(1)
    tokens = np.zeros(40_000, dtype=np.int64)
    noise = random.integers(0, 4, len(tokens))
    for place in range(1, len(tokens)):
        tokens[place] = (tokens[place - 1] * 5 + 1 + noise[place]) % VOCAB
    return make_folder(folder, {"train": [tokens[:36_000]], "eval": [tokens[36_000:]]}, vocab_size=VOCAB)


def train(settings: dict[str, Any], folder: Path, ranks: int) -> list[list[Result]]:
    """Train a configuration on several ranks and on one rank at the same time.

    Returns the records of both runs, starting with the run on several ranks. Raises ValueError if a run fails.
    """
    outputs = [folder / f"on_{n}" for n in (ranks, 1)]
    programs = []
    for n, output in zip((ranks, 1), outputs, strict=True):
        config = output.with_suffix(".json")
        config.write_text(json.dumps(settings | {"output_dir": str(output)}), encoding="utf-8")
        programs.append(Program("train/train.py", [config], output.with_suffix(".log"), n))
    run(*programs)
    lines = [RunFolder(output).metrics.read_text(encoding="utf-8").splitlines() for output in outputs]
    return [[record for record in map(json.loads, each) if "loss" in record] for each in lines]


def compare_runs(several: Sequence[Result], one: Sequence[Result], tolerance: Mapping[str, float]) -> Result:
    """Compare the losses and gradient norms of a run on several ranks with those of a run on one rank.

    Gradient norms are compared because AdamW and clipping hide a gradient that is wrong by a constant factor.

    Returns the compared values and the largest relative differences. If a difference exceeds `tolerance`, "why"
    describes the difference.
    """
    steps = [(r["step"], r["tokens"]) for r in several]
    if not steps or steps != [(r["step"], r["tokens"]) for r in one]:
        return {
            "why": f"steps: the number of steps ({len(several)} on several ranks, {len(one)} on one rank) or their "
            "tokens differ"
        }
    result: Result = {}
    apart = {}
    for key in ("loss", "grad_norm"):
        pairs = [(a[key], b[key]) for a, b in zip(several, one, strict=True)]
        result[key], result[f"{key}_one_rank"] = map(list, zip(*pairs, strict=True))
        relative = [math.inf if None in (a, b) else abs(a - b) / abs(b) for a, b in pairs]
        apart[key] = math.inf if any(map(math.isnan, relative)) else max(relative)
        apart[f"first_{key}"] = relative[0]
    result |= {f"{key}_difference": apart[key] for key in tolerance}
    beyond = [
        f"{k}: relative difference {apart[k]:.1e}, allowed {m:.0e}"
        for k, m in tolerance.items()
        if not apart[k] <= m
    ]
    return result | ({"why": "; ".join(beyond)} if beyond else {})


def train_case(case: Case, settings: dict[str, Any], ranks: int, devices: list[Device] | None) -> Result:
    """Train a test case, and return the outcome and a reason.

    The outcome is "equal", "refused", "apart" (the losses or gradient norms differ) or "failed".
    """
    try:
        check(build_arguments(settings), ranks, ranks, devices)
    except (ValueError, UserError) as error:
        return {"outcome": "refused", "why": str(error)}
    recipe, compute = case.overrides.get("precision.recipe", ""), case.overrides["precision.compute"]
    try:
        with tempfile.TemporaryDirectory() as folder:
            trained = train(settings, Path(folder), ranks)
    except ValueError as error:
        return {"outcome": "failed", "why": str(error)}
    found = compare_runs(trained[0], trained[1], TOLERANCE.get(recipe, TOLERANCE[compute]))
    return found | {"outcome": "apart" if "why" in found else "equal"}


def measure(options: argparse.Namespace) -> report.Outcome:
    """Train all test cases that --rows selects.

    Raises ValueError if the host has fewer GPUs than ranks, or if a pattern matches no case.
    """
    devices = cuda_devices()
    if devices and len(devices) < options.ranks:
        raise ValueError(
            f"--ranks {options.ranks}: this host has only {len(devices)} GPUs; use at most "
            f"{len(devices)} ranks"
        )
    every = {case.name: case for case in matrix()}
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        data = make_data(Path(name) / "data")
        for case in select(options.rows, every, "--rows"):
            settings = training_settings(case, options.steps, options.ranks, data)
            found = train_case(case, settings, options.ranks, devices)
            print(f"{case.name}: {found['outcome']}", flush=True)
            results.append({"row": case.name, "configuration": dict(case.overrides), **found})
    outcomes = Counter(r["outcome"] for r in results)
    wrong = [f"{r['row']}: {r['why']}" for r in results if r["outcome"] not in ("equal", "refused")]
    line = f"{len(results)} cases: {outcomes['equal']} equal, {outcomes['refused']} refused"
    return report.Outcome(results, {"ranks": options.ranks, "tolerance": TOLERANCE}, [line], wrong)


BENCHMARK = report.Benchmark(__file__, __doc__, OPTIONS, COLUMNS, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(sys.argv[1:]))
