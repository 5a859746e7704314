"""The command line of `bench_model.py`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from model.variants import ATTENTION_BACKENDS
from test_fp8.common import report
from test_fp8.model import rows as bench_rows

PROGRAM = "test_fp8/bench_model.py"
MEASURES = ("bare", "step")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: a positive whole number is expected")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e3:
        raise argparse.ArgumentTypeError(f"{text!r}: seconds are expected, such as 1.5")
    return value


def parse_arguments(argv: Sequence[str], description: str) -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )

    def add(name: str, default: Any, help: str, **options: Any) -> None:
        parser.add_argument(name, default=default, help=f"{help}; default: %(default)s", **options)

    rows = list(bench_rows.DEFAULT_ROWS if gpu else bench_rows.CPU_ROWS)
    step_rows = list(bench_rows.DEFAULT_STEP_ROWS if gpu else bench_rows.CPU_ROWS)
    add("--config", "hare_1.1b" if gpu else "tiny", "the model")
    add("--rows", rows, "names or patterns", nargs="*", metavar="PATTERN")
    add("--step_rows", step_rows, "which of these also in the measure step", nargs="*", metavar="PATTERN")
    parser.add_argument(
        "--row", nargs="+", action="append", default=[], metavar=("NAME", "key=value"), help="one more row"
    )
    add("--measure", list(MEASURES), "what is measured", nargs="+", choices=MEASURES)
    add("--micro_batch", [8, 16] if gpu else [2], "samples of a micro-batch", nargs="+", type=positive)
    add("--seq_length", 2048 if gpu else 64, "tokens of a sample", type=positive)
    add(
        "--document_length",
        512 if gpu else 16,
        "mean tokens of a document, in the rows documents_*",
        type=positive,
    )
    add("--attention", ["auto"], "of the te rows", nargs="+", choices=list(ATTENTION_BACKENDS))
    add("--accumulation", 8 if gpu else 2, "micro-batches of a step", type=positive)
    add("--rounds", 2, "visits to each row", type=positive)
    add(
        "--seconds",
        1.0 if gpu else 0.0,
        "of timed passes or steps a visit, at least 4 passes or a step",
        type=seconds,
    )
    parser.add_argument(
        "--deterministic", action="store_true", help="deterministic kernels, as train.py's default"
    )
    add("--seed", 42, "of weights and tokens", type=int)
    parser.add_argument(
        "--output", type=report.output_file, metavar="FILE.json", help="write JSON and a plot"
    )
    return parser.parse_args(argv)


def command(options: argparse.Namespace) -> str:
    """The command that repeats a run."""
    words: list[object] = ["--config", Path(options.config).name]
    for key in ("rows", "step_rows", "measure", "micro_batch", "attention"):
        words += [f"--{key}", *getattr(options, key)]
    for name, *pairs in options.row:
        words += ["--row", name, *pairs]
    for key in ("seq_length", "document_length", "accumulation", "rounds", "seconds", "seed"):
        words += [f"--{key}", getattr(options, key)]
    return report.command_line(PROGRAM, [*words, *(["--deterministic"] if options.deterministic else [])])
