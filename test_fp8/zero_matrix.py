#!/usr/bin/env python3
"""Does every ZeRO stage train what one rank trains? Each stage with each variant, in bf16 and each FP8 recipe, with
recomputation and without; and with Muon, the optimizer's states and offloading.

    python test_fp8/zero_matrix.py [--ranks 2] [--steps 4] [--stages 0 1 2 3] [--output FILE.json]
    python test_fp8/zero_matrix.py --work_dir FOLDER --time_limit_s 270     (again, and it goes on in the folder)

Each cell is a configuration of train/train.py, trained on one rank and on --ranks with the same tokens in each step.
Either the losses and the gradient norms of all steps are equal within the tolerance, or train/launch.py would refuse to
start, by a message about the cell's own keys, which the table has. What matters most comes first.

Exit status: 0; 1 when a cell is neither; 2 when there is no matrix (too few GPUs, a folder of another matrix); 3 when
time ran out before the last cell; 130 after Ctrl-C and 143 after SIGTERM, which end the ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model.fp8.machine import describe, headline
from model.keys import between
from model.variants import VARIANTS
from test_fp8.common import report
from test_fp8.common.options import ROOT, Options, model_config, positive
from test_fp8.common.processes import noted_signals
from test_fp8.common.report import Result
from test_fp8.common.work_dir import work_dir
from test_fp8.zero.ranks import Trainings, train_all
from train.files import reason
from train.preflight.machine import cuda_devices
from train.record.provenance import sources_sha256

if TYPE_CHECKING:
    from test_fp8.zero.cells import Cell

PRECISIONS = ("bf16", "fp8")
RANKS = ROOT / "test_fp8/zero/ranks.py"
SOURCES = ("model", "train", "test_fp8/zero")
# Relative, the largest of all steps, and in the first, before weights differ. What was measured: docs/validation.md.
# FP8's is wider: a sum that is rounded otherwise may be the next number of a format of few bits. Delayed scaling moves
# its scales with each micro-batch, and a rank of several has fewer of them. In the first step that was 1.5e-3 at most,
# and is 5.2e-3 since gradients of lm_head are FP8 products, which hand each rounding on to all layers.
TOLERANCE = {
    "bf16": {"loss": 1e-4, "grad_norm": 5e-3, "first_grad_norm": 1e-3},
    "fp8": {"loss": 1e-3, "grad_norm": 5e-2, "first_grad_norm": 1e-3},
    "delayed": {"loss": 1e-3, "grad_norm": 5e-2, "first_grad_norm": 1e-2},
}

OPTIONS = Options(__file__, __doc__)
OPTIONS.add("--config", "tiny", "the model", type=model_config)
OPTIONS.add("--ranks", 2, "a GPU each, where there are any", type=between(2))
OPTIONS.add("--steps", 4, "of each training", type=positive)
OPTIONS.add("--stages", [0, 1, 2, 3], "of ZeRO", type=int, nargs="+", choices=range(4))
OPTIONS.add("--variants", list(VARIANTS), "of the model", nargs="+", choices=list(VARIANTS))
OPTIONS.add("--precisions", list(PRECISIONS), "to compute in", nargs="+", choices=PRECISIONS)
OPTIONS.add(
    "--cells", ["*"], "only those with such a name: patterns, with * and ?", nargs="+", metavar="PATTERN"
)
OPTIONS.add("--work_dir", None, "keeps the trainings here, and takes those that are; else removed", type=Path)
OPTIONS.add("--time_limit_s", None, "after which no training begins; needs --work_dir", type=positive)
OPTIONS.add_output("JSON")

COLUMNS: report.Columns = {
    "cell": ("cell", "<"),
    "outcome": ("outcome", "<"),
    "loss apart": ("loss_difference", ".1e"),
    "grad_norm apart": ("grad_norm_difference", ".1e"),
    "in step 1": ("first_grad_norm_difference", ".1e"),
    "reason": (lambda r: r.get("reason", "").replace("\n", " "), "<"),
}


def matrix_of(options: argparse.Namespace) -> list[Cell]:
    """What --stages, --variants, --precisions and --cells leave. Exits: a pattern of --cells that is of no cell, also
    without the others; nothing is left."""
    from test_fp8.zero.cells import cells

    every = list(cells(options.stages, options.variants, options.precisions))
    left = [cell for cell in every if any(fnmatchcase(cell.name, pattern) for pattern in options.cells)]
    names = {cell.name for cell in (*every, *cells(range(4), list(VARIANTS), PRECISIONS))}
    unknown = [pattern for pattern in options.cells if not any(fnmatchcase(name, pattern) for name in names)]
    if unknown or not left:
        OPTIONS.error(
            f"--cells {' '.join(unknown or options.cells)}: no cell has such a name; there are:\n  "
            + "\n  ".join(cell.name for cell in every)
        )
    return left


def measure(
    options: argparse.Namespace,
    matrix: list[Cell],
    folder: Path,
    devices: list[int] | None,
    stops: Sequence[int],
) -> list[Result]:
    """One result a cell; its "outcome" is equal, refused, apart, failed, or left for want of time. Exits: one of
    `stops` has come, signals."""
    from test_fp8.zero.cells import compared, is_about, make_data, records, refusal

    until = time.time() + options.time_limit_s if options.time_limit_s else None
    data = folder / "data"
    if not (data / "manifest.json").is_file():
        make_data(data)
    outputs = {ranks: folder / f"ranks_{ranks}" for ranks in (1, options.ranks)}
    reasons: dict[str, str] = {}
    for cell in matrix:
        settings = cell.settings(options, data, outputs[options.ranks])
        if (reason := refusal(cell, settings, options.ranks, devices)) is not None:
            reasons[cell.name] = reason
    trained = {
        ranks: Trainings(
            output,
            ranks,
            {c.name: c.settings(options, data, output) for c in matrix if c.name not in reasons},
            until,
        )
        for ranks, output in outputs.items()
    }
    train_all(RANKS, list(trained.values()), lambda text: print(text, flush=True), stops)
    if stops:
        sys.exit(128 + stops[0])
    results = []
    for cell in matrix:
        result: Result = {"cell": cell.name, "stage": cell.stage, "variant": cell.variant}
        result |= {
            "precision": cell.precision,
            "recipe": cell.recipe,
            "recomputation": cell.recomputes,
            "more": dict(cell.more),
        }
        reason = reasons.get(cell.name)
        found = {ranks: of_ranks.found for ranks, of_ranks in trained.items()}
        failed = {ranks: error for ranks in found if (error := found[ranks].get(cell.name)) is not None}
        if reason is not None:
            result |= {"outcome": "refused" if is_about(cell, reason) else "failed", "reason": reason}
        elif failed:
            reason = "; ".join(f"on {ranks} ranks: {error}" for ranks, error in failed.items())
            result |= {"outcome": "failed", "reason": reason}
        elif any(cell.name not in of_ranks for of_ranks in found.values()):
            result["outcome"] = "left"
        else:
            several, one = (records(outputs[ranks] / cell.name) for ranks in (options.ranks, 1))
            result |= compared(several, one, TOLERANCE.get(cell.recipe or "", TOLERANCE[cell.precision]))
            result["outcome"] = "apart" if "reason" in result else "equal"
        results.append(result)
    return results


def made_for(options: argparse.Namespace) -> Result:
    """What trainings are kept for."""
    machine, versions = describe()
    own = {"machine": machine, "versions": versions, "sources": sources_sha256(*SOURCES)}
    return own | {k: getattr(options, k) for k in ("config", "ranks", "steps")}


def main(argv: Sequence[str]) -> int:
    options = OPTIONS.parse_args(argv)
    if options.time_limit_s and options.work_dir is None:
        OPTIONS.error("--time_limit_s needs --work_dir, in which the same command goes on")
    matrix = matrix_of(options)
    devices = cuda_devices()
    if devices and len(devices) < options.ranks:
        print(
            f"error: --ranks {options.ranks}, and {len(devices)} GPUs are here, one a rank", file=sys.stderr
        )
        return 2
    print(headline(*describe()), flush=True)
    with contextlib.ExitStack() as stack:
        stops = stack.enter_context(noted_signals())
        try:
            folder = stack.enter_context(work_dir(options.work_dir, made_for(options), "its trainings are"))
        except (ValueError, OSError) as error:
            print(f"error: {reason(error)}", file=sys.stderr)
            return 2
        results = measure(options, matrix, folder, devices, stops)
    print(report.table(results, COLUMNS))
    outcomes = Counter(r["outcome"] for r in results)
    equal, refused, left = (outcomes.pop(outcome, 0) for outcome in ("equal", "refused", "left"))
    wrong = outcomes.total()
    print(
        f"{len(results)} cells: {equal} equal on {options.ranks} ranks and on one, {refused} refused, {wrong} neither"
    )
    if left:
        print(f"{left} cells are left for want of time; the same command goes on with them")
    if options.output:
        more = {"ranks": options.ranks, "tolerance": TOLERANCE}
        report.write_json(options.output, OPTIONS.command(options), results, **more)
    return 1 if wrong else 3 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
