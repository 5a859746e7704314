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

from model.fp8.machine import describe, headline
from model.keys import between
from test_fp8.common import report
from test_fp8.common.options import Options, public
from test_fp8.common.report import Result
from test_fp8.convergence.results import compared, plot, print_table, settings_of, training_of
from test_fp8.convergence.rows import LOG, PRESETS, Plan, make_plans, train_all

OPTIONS = Options(__file__, __doc__)
OPTIONS.add("config", "train_config_convergence", "the training", nargs="?", metavar="CONFIG")
OPTIONS.add("--rows", list(PRESETS), "which of these", nargs="*", choices=list(PRESETS))
OPTIONS.add_rows()
OPTIONS.add("--baseline", "bf16", "the row that the others are compared with")
OPTIONS.add("--noise_seed", None, "also train the baseline with this seed, as a yardstick", type=int)
OPTIONS.add("--tolerance", 0.005, "of the evaluation loss", type=between(0, 1, float))
OPTIONS.add("--max_steps", 300, "of each training", type=int)
OPTIONS.add("--logging_steps", 5, "steps between points of a curve", type=int)
OPTIONS.add("--nproc", 1, "processes, a GPU each", type=int)
OPTIONS.add("--work_dir", Path("output/compare_convergence"), "where the trainings are kept", type=Path)
OPTIONS.add_output("JSON and a plot")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; `training` is what follows --."""
    split = argv.index("--") if "--" in argv else len(argv)
    arguments = OPTIONS.parse_args(argv[:split])
    arguments.training = list(argv[split + 1 :])
    return arguments


def compare(plans: Sequence[Plan], records: dict[str, list[Result]], tolerance: float) -> list[Result]:
    """One result a row, the baseline's first."""
    base, results = plans[0], []
    for plan in plans:
        result = compared(
            plan.row.name,
            records[plan.row.name],
            records[base.row.name],
            base.config["warmup_steps"],
            tolerance,
            same_samples=not plan.measures_noise,
        )
        log = (plan.folder / LOG).read_text(encoding="utf-8", errors="replace")
        result |= {
            "overrides": {key: public(value) for key, value in plan.row.settings.items()},
            "settings": settings_of(plan.config),
            "measures_noise": plan.measures_noise,
            "fp8": next((line for line in log.splitlines() if line.startswith("FP8: ")), None),
        }
        results.append(result)
    return results


def main(argv: Sequence[str]) -> int:
    arguments = parse_arguments(argv)
    try:
        plans = make_plans(arguments)
        from model.config import load_config, num_parameters

        machine, versions = describe()
        training = training_of(plans[0].config)
        training["parameters"] = num_parameters(load_config(plans[0].config["model"]["config"]))
        print(headline(machine, versions))
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
        behind = ["--", *map(public, arguments.training)] if arguments.training else []
        report.write_json(arguments.output, OPTIONS.command(arguments, *behind), results, **more)
        print(
            f"wrote {arguments.output} and {plot(results, training, arguments.tolerance, arguments.output)}"
        )
    misses = [f"{result['row']}: {miss}" for result in results for miss in result["misses"]]
    for miss in misses:
        print(f"missed: {miss}", file=sys.stderr)
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
