#!/usr/bin/env python3
"""Does FP8 train as well as bf16? The same training in bf16 and with each FP8 recipe, and how far they come apart.

    python test_fp8/compare_convergence.py [CONFIG] [--rows bf16 delayed current block muon ...]
        [--noise_seed 43 ... [--noise_rows delayed ...]] [--row NAME key=value ...]... [--max_steps N]
        [--output FILE.json] [-- --key value ...]

Each row is a real run of train/train.py with CONFIG, the keys after -- and the row's own, from the same seed on the
same samples in the same order. --row adds rows, for instance

    --row fp8_lm_head precision.compute=fp8 precision.bf16_modules=[]
    --row fast_wgrad precision.fast_accumulation_wgrad=true
    --row torchao model.variant=torchao precision.recipe=tensorwise

A row may change how a step is computed and nothing else; that is checked. But for the optimizer: such a row (muon_*)
is compared with the one of the same optimizer in bf16. Nothing of the models is kept. A row that is finished in
--work_dir, with the same configuration, data, machine, versions and sources, is not run again: rows can be added later.

Two seeds of the same training end as far apart as its chaos takes them. --noise_seed trains the baseline with others,
too, and draws their band; a row of --noise_rows is trained with each of them, and is held to the mean of its
differences from the baseline of the same seed, told with its standard error.

It can be done in several calls: with --time_limit_s, SIGTERM or Ctrl-C what trains is stopped with a checkpoint, and
the same command goes on; --at_once N trains N rows at a time, each on GPUs of its own; --plan says how long it takes.
Where --work_dir is lost in between, --earlier RESULT.json takes finished rows from what --output wrote.

Exit status: 0; 1 when a row misses the tolerance; 2 when the rows could not be compared (a run failed); 3 when rows are
left to train: the table has those that are finished.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model.fp8.machine import describe, headline
from model.keys import between
from test_fp8.common import report
from test_fp8.common.options import Options, public
from test_fp8.common.report import Result
from test_fp8.convergence import durations, evidence
from test_fp8.convergence.earlier import take_over
from test_fp8.convergence.results import compared, over_seeds, plot, print_table, settings_of, training_of
from test_fp8.convergence.rows import (
    DEFAULT_ROWS,
    LOG,
    MAY_DIFFER,
    PRESETS,
    Plan,
    begun,
    changes_s,
    comparable,
    conditions,
    is_twin,
    make_plans,
    reference_of,
    trained_under,
)
from test_fp8.convergence.trainings import Limits, train_all
from train.config.arguments import TrainingArguments

OPTIONS = Options(__file__, __doc__)
OPTIONS.add("config", "train_config_convergence", "the training", nargs="?", metavar="CONFIG")
OPTIONS.add("--rows", DEFAULT_ROWS, "which of these", nargs="*", choices=list(PRESETS))
OPTIONS.add_rows()
OPTIONS.add("--baseline", "bf16", "the row that the others are compared with")
OPTIONS.add(
    "--noise_seed", [], "also train the baseline with these seeds, as a yardstick", nargs="+", type=int
)
OPTIONS.add(
    "--noise_rows", [], "and these rows: a difference is the mean over the seeds", nargs="+", metavar="ROW"
)
OPTIONS.add("--tolerance", 0.005, "of the evaluation loss", type=between(0, 1, float))
OPTIONS.add("--max_steps", None, "of each training, in place of CONFIG's", type=int)
OPTIONS.add("--logging_steps", None, "steps between points of a curve, in place of CONFIG's", type=int)
OPTIONS.add("--nproc", 1, "processes, a GPU each", type=int)
OPTIONS.add("--work_dir", Path("output/compare_convergence"), "where the trainings are kept", type=Path)
OPTIONS.add(
    "--earlier",
    [],
    "results of this program: rows that --work_dir has not are taken from these",
    nargs="+",
    type=Path,
)
OPTIONS.add("--at_once", 1, "rows at a time", type=between(1))
OPTIONS.add("--time_limit_s", 0, "then stop, with checkpoints; 0: never", type=between(0, 10**6, float))
OPTIONS.add(
    "--may_differ", [], "let finished rows stand whose sources, machine or versions were others, and say so",
    nargs="+", choices=MAY_DIFFER,
)  # fmt: skip
OPTIONS.add("--plan", None, "train nothing: how long each row takes on such a GPU", choices=("h100", "h200"))
OPTIONS.add_output("JSON and a plot")
NOT_FINISHED = 3


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; `training` is what follows --."""
    split = argv.index("--") if "--" in argv else len(argv)
    arguments = OPTIONS.parse_args(argv[:split])
    arguments.training = list(argv[split + 1 :])
    return arguments


def compare(
    plans: Sequence[Plan], records: dict[str, list[Result]], of: Result, tolerance: float
) -> tuple[list[Result], Result | None]:
    """One result a row of `records` (`comparable`), the baseline's first; and the band of the baseline's seeds, None of
    one. of: the `conditions` of the report, from which a row's may differ."""
    base = plans[0]
    plans = [plan for plan in plans if plan.row.name in records]
    seeds = [records[plan.row.name] for plan in plans if plan is base or is_twin(plan, base)]
    band = evidence.band(seeds) if len(seeds) > 1 else None
    without_fp8 = [plan for plan in plans if not plan.has_fp8] or [base]
    results = []
    for plan in plans:
        reference = reference_of(plan, plans)
        own, other = records[plan.row.name], records[reference.row.name]
        # the best of the same seed; of the baseline's twins, which show what chance does, that of the configuration's
        others = [p for p in without_fp8 if p.seed == reference.seed] or [base]
        paired, twins = None, [p for p in plans if plan is not base and is_twin(p, plan)]
        if twins:
            seeded = [plan, *twins]
            theirs = [records[reference_of(p, plans).row.name] for p in seeded]
            paired = over_seeds([records[p.row.name] for p in seeded], theirs)
        result = compared(
            plan.row.name,
            own,
            other,
            base.config["warmup_steps"],
            tolerance,
            same_samples=plan.seed == reference.seed,
            held=plan is not base and plan.seed is None and plan.optimizer == reference.optimizer,
            mean=band["final_mean"] if band and plan.optimizer == base.optimizer else None,
            paired=paired,
        )
        log = (plan.folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
        under = trained_under(plan)
        alike = [p for p in others if p.optimizer == plan.optimizer] or [reference]
        result |= {
            "overrides": {key: public(value) for key, value in plan.row.settings.items()},
            "settings": settings_of(plan.config),
            "seed": plan.config["seed"],
            "measures_noise": plan.seed is not None,
            "trains_otherwise": plan.optimizer != reference.optimizer,
            "compared_with": None if plan is base else reference.row.name,
            "equal_loss": evidence.equal_loss(own, {p.row.name: records[p.row.name] for p in others}),
            "equal_loss_same_optimizer": evidence.equal_loss(
                own, {p.row.name: records[p.row.name] for p in alike}
            ),
            # of a row that was taken over what there is
            "health": evidence.health(own) or (begun(plan.folder) or {}).get("health"),
            "trained_under": under,
            "conditions_differ": [key for key in MAY_DIFFER if under[key] != of[key]],
            "fp8": "; then ".join(text for text, _ in groupby(told_by(log, "FP8: "))) or None,
            "changes_s": changes_s(plan.folder),
        }
        results.append(result)
    return results, band


def told_by(log: Sequence[str], begin: str) -> list[str]:
    """Its lines that begin so."""
    return [line for line in log if line.startswith(begin)]


def conditions_of(plans: Sequence[Plan], now: Result) -> Result:
    """The conditions that a report of these finished rows is of: today's, `now`, where a row was trained under them,
    else the first row's: it was only put together here."""
    under = [trained_under(plan) for plan in plans]
    return now if any(all(each[key] == now[key] for key in MAY_DIFFER) for each in under) else under[0]


def main(argv: Sequence[str]) -> int:
    arguments = parse_arguments(argv)
    try:
        plans = make_plans(arguments)
        if arguments.plan:
            print("\n".join(durations.lines(plans, arguments.plan, arguments.at_once, arguments.nproc)))
            return 0
        from model.config import load_config, num_parameters

        machine, versions = describe()
        training = training_of(plans[0].config)
        training["parameters"] = num_parameters(load_config(plans[0].config["model"]["config"]))
        print(headline(machine, versions))
        print(
            f"{training['model.config']}, {training['parameters'] / 1e6:,.1f} M parameters; each row: "
            f"{training['max_steps']:,} steps of {training['train_batch_size_tokens']:,} tokens", flush=True
        )  # fmt: skip
        limits = Limits(arguments.at_once, arguments.nproc, machine.get("gpus") or 0, arguments.time_limit_s)
        now = conditions(TrainingArguments.from_dict(plans[0].config), machine, versions)
        take_over(plans, arguments.earlier)
        records = comparable(plans, train_all(plans, now, limits, arguments.may_differ))
        left = [plan.row.name for plan in plans if plan.row.name not in records]
        if plans[0].row.name not in records:
            print(f"not finished: {', '.join(left)}; the same command goes on")
            return NOT_FINISHED
        of = conditions_of([plan for plan in plans if plan.row.name in records], now)
        results, seeds = compare(plans, records, of, arguments.tolerance)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_table(results, training["warmup_steps"])
    if arguments.output:
        more = {"training": training, "tolerance": arguments.tolerance, "baseline": arguments.baseline}
        more |= {"seeds": seeds, "not_finished": left}
        behind = ["--", *map(public, arguments.training)] if arguments.training else []
        measured_on = None if of is now else (of["machine"], of["versions"])
        report.write_json(arguments.output, OPTIONS.command(arguments, *behind), results, measured_on, **more)
        drawn = plot(results, training, arguments.tolerance, arguments.output, seeds)
        print(f"wrote {arguments.output} and {drawn}")
    misses = [f"{result['row']}: {miss}" for result in results for miss in result["misses"]]
    for miss in misses:
        print(f"missed: {miss}", file=sys.stderr)
    if left:
        print(f"not finished: {', '.join(left)}; the same command goes on")
        return NOT_FINISHED
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
