#!/usr/bin/env python3
"""Does every ZeRO stage train what one rank trains? Each stage with each variant, in bf16 and each FP8 recipe, with
recomputation and without; and with Muon, the optimizer's states and offloading.

    python test_fp8/zero_matrix.py [--ranks 2] [--steps 4] [--stages 0 1 2 3] [--output FILE.json]

Each case is a configuration of train/train.py, trained on one rank and on --ranks with the same tokens in each step.
Either the losses and gradient norms of all steps are equal within the tolerance, or train/launch.py refuses to start,
with a message about the case's own keys. Exit status: 1 if a case is neither."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model.keys import between
from model.variants import VARIANTS
from test_fp8.common import report
from test_fp8.common.cases import Case, select
from test_fp8.common.launch import Program, run
from test_fp8.common.options import Options, model_config, positive
from test_fp8.common.report import Result
from test_fp8.zero.cases import is_about_case, make_data, matrix, refusal, settings_of
from train.preflight.machine import cuda_devices
from train.record.run_folder import RunFolder

PRECISIONS = ("bf16", "fp8")
# Relative: the largest difference of all steps, and in the first step, before weights differ. What was measured is in
# docs/validation.md. FP8's is wider, because a different rounding of a sum may give the next FP8 number, and delayed
# scaling moves its scales with each micro-batch, of which a rank of several has fewer.
TOLERANCE = {
    "bf16": {"loss": 1e-4, "grad_norm": 5e-3, "first_grad_norm": 1e-3},
    "fp8": {"loss": 1e-3, "grad_norm": 5e-2, "first_grad_norm": 1e-3},
    "delayed": {"loss": 1e-3, "grad_norm": 5e-2, "first_grad_norm": 1e-2},
}

OPTIONS = Options(__file__, __doc__)
OPTIONS.add("--config", "tiny", "the model", type=model_config)
OPTIONS.add("--ranks", 2, "on a GPU each, if there are any", type=between(2))
OPTIONS.add("--steps", 4, "of each training", type=positive)
OPTIONS.add("--stages", [0, 1, 2, 3], "of ZeRO", type=int, nargs="+", choices=range(4))
OPTIONS.add("--variants", list(VARIANTS), "of the model", nargs="+", choices=list(VARIANTS))
OPTIONS.add("--precisions", list(PRECISIONS), "to compute in", nargs="+", choices=PRECISIONS)
OPTIONS.add(
    "--rows", ["*"], "only cases with such a name: patterns, with * and ?", nargs="+", metavar="PATTERN"
)
OPTIONS.add_output("JSON")

COLUMNS: report.Columns = {
    "row": ("row", "<"),
    "outcome": ("outcome", "<"),
    "loss": ("loss_difference", ".1e"),
    "grad_norm": ("grad_norm_difference", ".1e"),
    "in step 1": ("first_grad_norm_difference", ".1e"),
    "why": (lambda r: r.get("why", "").replace("\n", " "), "<"),
}


def train(settings: dict[str, Any], folder: Path, ranks: int) -> list[list[Result]]:
    """Train a configuration on `ranks` and on one, at the same time; return the records of both. Raises ValueError: a
    run failed."""
    outputs = [folder / f"on_{n}" for n in (ranks, 1)]
    programs = []
    for n, output in zip((ranks, 1), outputs, strict=True):
        config = output.with_suffix(".json")
        config.write_text(json.dumps(settings | {"output_dir": str(output)}), encoding="utf-8")
        programs.append(Program("train/train.py", [config], output.with_suffix(".log"), n))
    run(*programs)
    lines = [RunFolder(output).metrics.read_text(encoding="utf-8").splitlines() for output in outputs]
    return [[record for record in map(json.loads, each) if "loss" in record] for each in lines]


def compared(several: Sequence[Result], one: Sequence[Result], tolerance: Mapping[str, float]) -> Result:
    """Return loss and gradient norm of each step on several ranks and on one, the largest relative differences, and
    "why" if one is beyond `tolerance`. AdamW and clipping hide a factor of the gradient; its norm shows it."""
    steps = [(r["step"], r["tokens"]) for r in several]
    if not steps or steps != [(r["step"], r["tokens"]) for r in one]:
        return {"why": f"steps: {len(several)} on several ranks, {len(one)} on one, or with other tokens"}
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
        f"{k}: difference {apart[k]:.1e}, allowed {m:.0e}" for k, m in tolerance.items() if not apart[k] <= m
    ]
    return result | ({"why": "; ".join(beyond)} if beyond else {})


def outcome(case: Case, settings: dict[str, Any], ranks: int, devices: list[int] | None) -> Result:
    """Whether a case is equal, refused, apart or failed, and why."""
    if why := refusal(settings, ranks, devices):
        return {"outcome": "refused" if is_about_case(why) else "failed", "why": why}
    recipe, compute = case.overrides.get("precision.recipe", ""), case.overrides["precision.compute"]
    try:
        with tempfile.TemporaryDirectory() as folder:
            trained = train(settings, Path(folder), ranks)
    except ValueError as error:
        return {"outcome": "failed", "why": str(error)}
    found = compared(trained[0], trained[1], TOLERANCE.get(recipe, TOLERANCE[compute]))
    return found | {"outcome": "apart" if "why" in found else "equal"}


def measure(options: argparse.Namespace) -> report.Outcome:
    """Train all cases. Raises ValueError: there are fewer GPUs than ranks; no case has such a name."""
    devices = cuda_devices()
    if devices and len(devices) < options.ranks:
        raise ValueError(f"--ranks {options.ranks}: this host has {len(devices)} GPUs")
    every = {case.name: case for case in matrix(options.stages, options.variants, options.precisions)}
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        data = make_data(Path(name) / "data")
        for case in select(options.rows, every, "--rows"):
            settings = settings_of(case, options.config, options.steps, options.ranks, data)
            found = outcome(case, settings, options.ranks, devices)
            print(f"{case.name}: {found['outcome']}", flush=True)
            results.append({"row": case.name, "configuration": dict(case.overrides), **found})
    outcomes = Counter(r["outcome"] for r in results)
    wrong = [f"{r['row']}: {r['why']}" for r in results if r["outcome"] not in ("equal", "refused")]
    line = f"{len(results)} cases: {outcomes['equal']} equal, {outcomes['refused']} refused"
    return report.Outcome(results, {"ranks": options.ranks, "tolerance": TOLERANCE}, [line], wrong)


def main(argv: list[str]) -> int:
    return report.run(OPTIONS, argv, measure, COLUMNS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
