#!/usr/bin/env python3
"""How far the gradients of FP8 and bf16 are from float32's, at the same weights and on the same samples.

    python test_fp8/compare_gradients.py --init_from output/RUN/hf --data data/pretrain [--output FILE.json]

Two trainings drift apart by chance, and a difference of half a percent between their losses needs many of them to be
told from that. Here nothing drifts: every row computes the gradient of the same samples at the same weights.

"loss": how far it is from float32's. "error": |g - r| / |r| over all parameters, r in float32, of a micro-batch (the
mean over --batches of them) and of the sum of all of them: chance averages out in the sum, what remains is systematic.
"along": (g . r) / (r . r) of the sum: below 1 the gradient is too short. "worst": the largest error of the sum in one
weight matrix.

Weights that were trained for a while tell more than random ones: --init_from takes the Hugging Face folder that a run
leaves. Without a GPU the CPU reference computes the rows; float32 always is the reference modules' with torch's SDPA.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model.errors import UserError
from model.fp8.machine import describe, headline
from test_fp8.common import report
from test_fp8.common.options import ByMachine, Options, model_config, positive
from test_fp8.common.report import Result
from train.files import drawing

ROWS: dict[str, dict[str, Any]] = {
    "bf16": {"compute": "bf16"},
    "delayed_hybrid": {"recipe": "delayed", "fp8_format": "hybrid"},
    "delayed_e4m3": {"recipe": "delayed", "fp8_format": "e4m3"},
    "delayed_e4m3_bf16_head": {"recipe": "delayed", "fp8_format": "e4m3", "fp8_head_gradients": False},
    "delayed_e4m3_fp8_head": {"recipe": "delayed", "fp8_format": "e4m3", "bf16_modules": []},
    "delayed_e4m3_fast_wgrad": {"recipe": "delayed", "fp8_format": "e4m3", "fast_accumulation_wgrad": True},
    "current_hybrid": {"recipe": "current", "fp8_format": "hybrid"},
    "current_e4m3": {"recipe": "current", "fp8_format": "e4m3"},
    "block": {"recipe": "block"},
}


def hugging_face_folder(text: str) -> Path:
    """The argparse type of --init_from."""
    folder = Path(text)
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "is not a folder"
        raise argparse.ArgumentTypeError(
            f"{text!r} {what}; give a Hugging Face folder, such as a run's output/RUN/hf"
        )
    return folder


OPTIONS = Options(__file__, __doc__)
OPTIONS.add("--config", ByMachine("mistral_0.4b", "tiny"), "with random weights", type=model_config)
OPTIONS.add("--init_from", None, "a Hugging Face folder with weights instead", type=hugging_face_folder)
OPTIONS.add("--data", None, "of prepare_data.py; default: random tokens", type=Path, metavar="FOLDER")
OPTIONS.add("--rows", list(ROWS), "which of them", nargs="+", choices=list(ROWS))
OPTIONS.add("--micro_batch", 2, "samples of a micro-batch", type=positive)
OPTIONS.add("--batches", 8, "micro-batches", type=positive)
OPTIONS.add("--seq_length", ByMachine(2048, 64), "tokens of a sample", type=positive)
OPTIONS.add_output("JSON and a plot")


def plot(results: Sequence[Result], title: str, output: Path) -> None:
    names = [r["row"] for r in results]
    with drawing(output.with_suffix(".png"), figsize=(8, 0.5 * len(results) + 1.4)) as (_, ((axis,),)):
        for key, label, offset in (("batch", "a micro-batch", -0.2), ("sum", "their sum", 0.2)):
            errors = [r[f"error_of_{key}"] for r in results]
            report.bars(axis, names, errors, offset, height=0.4, label=f"of {label}")
        axis.set(xlabel="relative error of the gradient to float32", title=title)
        axis.legend(fontsize=8)


def main(argv: Sequence[str]) -> int:
    options = OPTIONS.parse_args(argv)
    OPTIONS.settle(options)
    from test_fp8.model.gradients import measure

    machine, versions = describe()
    print(headline(machine, versions), flush=True)
    results: list[Result] = []
    try:
        for r in measure(options, {name: ROWS[name] for name in options.rows}):
            if not results:
                print(f"{'row':24} {'loss':>9} {'error':>8} {'of sum':>8} {'along':>8} {'worst':>8}")
            print(
                f"{r['row']:24} {r['loss_difference']:+9.5f} {r['error_of_batch']:8.4f} {r['error_of_sum']:8.4f} "
                f"{r['along']:8.4f} {r['worst']:8.4f} {r['worst_matrix']}",
                flush=True,
            )
            results.append(r)
    except (ValueError, OSError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.output:
        options.config = None if options.init_from else options.config
        report.write_json(options.output, OPTIONS.command(options), results)
        plot(results, f"gradients against float32, {machine.get('gpu', machine['cpu'])}", options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
