#!/usr/bin/env python3
"""Does FP8 train as well as bf16? The same training in bf16 and with each FP8 recipe, and how far they come apart.

    python test_fp8/compare_convergence.py [CONFIG] [--rows bf16 delayed current block] [--noise_seed 43]
        [--row NAME key=value ...]... [--max_steps 300] [--output FILE.json] [-- --key value ...]

Each row is a real run of train/train.py with CONFIG, the keys after -- and the row's own, from the same seed on the
same samples in the same order. --row adds rows, for instance

    --row fp8_lm_head precision.compute=fp8 precision.bf16_modules=[]
    --row fast_wgrad precision.fast_accumulation_wgrad=true
    --row torchao model.variant=torchao precision.recipe=tensorwise

A row may change how a step is computed and nothing else; that is checked. Nothing of the models is saved. A row that
is finished in --work_dir, with the same configuration, data, machine, versions and sources, is not run again: rows can
be added later.

Exit status: 0; 1 when a row misses the tolerance; 2 when the rows could not be compared (a run failed).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model.accounting import num_parameters
from model.config import load_config
from test_fp8.common import report
from test_fp8.convergence.report import plot, print_table, settings_of, shown, training_of
from test_fp8.convergence.rows import (
    LOG,
    PRESETS,
    Plan,
    make_plan,
    parse_rows,
    train_all,
    with_baseline_first,
)
from test_fp8.convergence.trainings import Record, check_same_training, compared

PROGRAM = "test_fp8/compare_convergence.py"


def compare(plans: Sequence[Plan], records: dict[str, list[Record]], tolerance: float) -> list[Record]:
    """One result a row, the baseline's first. Raises ComparisonError: rows that were not trained alike."""
    base, results = plans[0], []
    for plan in plans:
        result = compared(
            plan.row.name,
            records[plan.row.name],
            records[base.row.name],
            base.config["warmup_steps"],
            tolerance,
            same_samples=not plan.row.measures_noise,
        )
        if plan.row.measures_noise:
            result["misses"] = []
        log = (plan.folder / LOG).read_text(encoding="utf-8", errors="replace")
        result |= {
            "overrides": {key: shown(value) for key, value in plan.row.overrides.items()},
            "settings": settings_of(plan.config),
            "measures_noise": plan.row.measures_noise,
            "fp8": next((line for line in log.splitlines() if line.startswith("FP8: ")), None),
        }
        results.append(result)
    return results


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; `training` is what follows --."""
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "config", nargs="?", default="train_config_convergence", metavar="CONFIG", help="default: %(default)s"
    )
    add("--rows", nargs="*", choices=list(PRESETS), default=list(PRESETS), help="default: all of these")
    add("--row", nargs="+", action="append", default=[], metavar=("NAME", "key=value"), help="one more row")
    add("--baseline", default="bf16", help="the row that the others are compared with; default: %(default)s")
    add("--noise_seed", type=int, help="also train the baseline with this seed, as a yardstick")
    add("--tolerance", type=_fraction, default=0.005, help="of the evaluation loss; default: %(default)s")
    add("--max_steps", type=int, default=300, help="default: %(default)s")
    add("--logging_steps", type=int, default=5, help="steps between points of a curve; default: %(default)s")
    add("--nproc", type=int, default=1, help="processes, a GPU each; default: %(default)s")
    add("--work_dir", type=Path, default=Path("output/compare_convergence"), help="default: %(default)s")
    add("--output", type=report.output_file, help="JSON report; the plot goes beside it as PNG")
    arguments = parser.parse_args(argv[:split])
    arguments.training = list(argv[split + 1 :])
    return arguments


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: a fraction between 0 and 1 is expected, such as 0.005 for 0.5 %"
        )
    return value


def command(arguments: argparse.Namespace) -> str:
    """The command that repeats this comparison."""
    options: list[object] = [shown(arguments.config), "--rows", *arguments.rows]
    for name, *pairs in arguments.row:
        options += ["--row", name, *map(shown, pairs)]
    for key in ("baseline", "noise_seed", "tolerance", "max_steps", "logging_steps", "nproc"):
        if getattr(arguments, key) is not None:
            options += [f"--{key}", getattr(arguments, key)]
    if arguments.training:
        options += ["--", *map(shown, arguments.training)]
    return report.command_line(PROGRAM, options)


def main(argv: Sequence[str]) -> int:
    arguments = parse_arguments(argv)
    try:
        rows = with_baseline_first(
            parse_rows(arguments.rows, arguments.row), arguments.baseline, arguments.noise_seed
        )
        plans = [make_plan(row, arguments) for row in rows]
        for plan in plans:
            overrides = [*plans[0].row.overrides, *plan.row.overrides]
            check_same_training(plan.row.name, overrides, plans[0].config, plan.config)
        machine, versions = report.describe()
        training = training_of(plans[0].config)
        training["parameters"] = num_parameters(load_config(plans[0].config["model"]["config"]))
        print(report.headline(machine, versions))
        print(
            f"{training['model.config']}, {training['parameters'] / 1e6:,.1f} M parameters; each row: "
            f"{training['max_steps']:,} steps of {training['train_batch_size_tokens']:,} tokens", flush=True
        )  # fmt: skip
        results = compare(plans, train_all(plans, machine, versions), arguments.tolerance)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_table(results, training["warmup_steps"])
    if arguments.output:
        more = {"training": training, "tolerance": arguments.tolerance, "baseline": arguments.baseline}
        report.write_json(arguments.output, command(arguments), results, **more)
        print(
            f"wrote {arguments.output} and {plot(results, training, arguments.tolerance, arguments.output)}"
        )
    misses = [f"{result['row']}: {miss}" for result in results for miss in result["misses"]]
    for miss in misses:
        print(f"missed: {miss}", file=sys.stderr)
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
