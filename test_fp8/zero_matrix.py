#!/usr/bin/env python3
"""Does every ZeRO stage train what one rank trains? Each stage with each variant, in FP8 and bf16, with recomputation
and without; then Muon, the optimizer's states and offloading.

    python test_fp8/zero_matrix.py [--ranks 2] [--steps 4] [--stages 0 1 2 3] [--output FILE.json]

Each cell is a configuration of train/train.py, trained on one rank and on --ranks with the same tokens in each step.
Either the losses and the gradient norms of all steps are equal within the tolerance, or train/launch.py would refuse to
start, by a message about the cell's own keys, which the table has.

Exit status: 0; 1 when a cell is neither; 2 when there is no matrix (too few GPUs).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model.fp8.machine import describe, headline
from model.keys import between
from model.variants import VARIANTS
from test_fp8.common import report
from test_fp8.common.options import ROOT, Options, model_config, positive
from test_fp8.common.report import Result
from test_fp8.zero.ranks import train_all
from train.preflight.machine import cuda_devices

PRECISIONS = ("bf16", "fp8")
RANKS = ROOT / "test_fp8/zero/ranks.py"
# Relative, the largest of all steps, and in the first, before weights differ. What was measured: docs/validation.md.
# FP8's is wider: delayed scaling moves its scales with each micro-batch, and a rank of several has fewer of them.
TOLERANCE = {
    "bf16": {"loss": 1e-4, "grad_norm": 5e-3, "first_grad_norm": 1e-3},
    "fp8": {"loss": 1e-3, "grad_norm": 5e-2, "first_grad_norm": 5e-3},
}

OPTIONS = Options(__file__, __doc__)
OPTIONS.add("--config", "tiny", "the model", type=model_config)
OPTIONS.add("--ranks", 2, "a GPU each, where there are any", type=between(2))
OPTIONS.add("--steps", 4, "of each training", type=positive)
OPTIONS.add("--stages", [0, 1, 2, 3], "of ZeRO", type=int, nargs="+", choices=range(4))
OPTIONS.add("--variants", ["hf", "te_linear", "te_layer"], "of the model", nargs="+", choices=list(VARIANTS))
OPTIONS.add("--precisions", list(PRECISIONS), "to compute in", nargs="+", choices=PRECISIONS)
OPTIONS.add("--work_dir", None, "keeps the trainings here; else they are removed", type=Path)
OPTIONS.add_output("JSON")

COLUMNS: report.Columns = {
    "cell": ("cell", "<"),
    "outcome": ("outcome", "<"),
    "loss apart": ("loss_difference", ".1e"),
    "grad_norm apart": ("grad_norm_difference", ".1e"),
    "in step 1": ("first_grad_norm_difference", ".1e"),
    "reason": (lambda r: r.get("reason", "").replace("\n", " "), "<"),
}


def measure(options: argparse.Namespace, folder: Path, devices: list[int] | None) -> list[Result]:
    """One result a cell; its "outcome" is equal, refused, apart or failed."""
    from test_fp8.zero.cells import cells, compared, is_about, make_data, records, refusal

    data = make_data(folder / "data")
    matrix = list(cells(options.stages, options.variants, options.precisions))
    outputs = {ranks: folder / f"ranks_{ranks}" for ranks in (1, options.ranks)}
    reasons: dict[str, str] = {}
    for cell in matrix:
        settings = cell.settings(options, data, outputs[options.ranks])
        if (reason := refusal(cell, settings, options.ranks, devices)) is not None:
            reasons[cell.name] = reason
    errors: dict[int, dict[str, str | None]] = {}
    for ranks, output in outputs.items():
        settings_of = {c.name: c.settings(options, data, output) for c in matrix if c.name not in reasons}
        errors[ranks] = train_all(RANKS, output, ranks, settings_of, lambda text: print(text, flush=True))
    results = []
    for cell in matrix:
        result: Result = {"cell": cell.name, "stage": cell.stage, "variant": cell.variant}
        result |= {"precision": cell.precision, "recomputation": cell.recomputes, "more": dict(cell.more)}
        reason = reasons.get(cell.name)
        failed = {ranks: error for ranks in outputs if (error := errors[ranks].get(cell.name)) is not None}
        if reason is not None:
            result |= {"outcome": "refused" if is_about(cell, reason) else "failed", "reason": reason}
        elif failed:
            reason = "; ".join(f"on {ranks} ranks: {error}" for ranks, error in failed.items())
            result |= {"outcome": "failed", "reason": reason}
        else:
            several, one = (records(outputs[ranks] / cell.name) for ranks in (options.ranks, 1))
            result |= compared(several, one, TOLERANCE[cell.precision])
            result["outcome"] = "apart" if "reason" in result else "equal"
        results.append(result)
    return results


def main(argv: Sequence[str]) -> int:
    options = OPTIONS.parse_args(argv)
    devices = cuda_devices()
    if devices and len(devices) < options.ranks:
        print(
            f"error: --ranks {options.ranks}, and {len(devices)} GPUs are here, one a rank", file=sys.stderr
        )
        return 2
    print(headline(*describe()), flush=True)
    with contextlib.ExitStack() as stack:
        if options.work_dir is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
        else:
            options.work_dir.mkdir(parents=True, exist_ok=True)
            folder = tempfile.mkdtemp(dir=options.work_dir.resolve())
        results = measure(options, Path(folder), devices)
    print(report.table(results, COLUMNS))
    wrong = [r for r in results if r["outcome"] not in ("equal", "refused")]
    equal = sum(r["outcome"] == "equal" for r in results)
    print(
        f"{len(results)} cells: {equal} equal on {options.ranks} ranks and on one, "
        f"{len(results) - equal - len(wrong)} refused, {len(wrong)} neither"
    )
    if options.output:
        command = OPTIONS.command(options)
        report.write_json(options.output, command, results, ranks=options.ranks, tolerance=TOLERANCE)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
