"""The rows of `compare_convergence.py`: which there are, how each is configured, and with which it is compared.

A row's folder is that of its run (train_config.json, metrics.jsonl), with the run's output in log.txt and, from its
begin on, conditions.json: what it is trained under, and whether it is finished. By it a later comparison knows whether
the row can stand, or go on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from test_fp8.common.options import ROOT
from test_fp8.common.report import Result
from test_fp8.common.rows import Row, RowError, is_under, parse_rows
from train.config.arguments import TrainingArguments, load_arguments
from train.config.differences import differences, leaves, unread_by_either
from train.record.provenance import read_starts, sources_sha256
from train.record.run_folder import RunFolder

# What a row may override: how a step is computed. All else says what is trained, and on what.
ROW_KEYS = (
    "model.variant model.attention_backend model.compile precision speed deepspeed per_device_train_batch_size "
    "per_device_eval_batch_size gradient_accumulation_steps gradient_checkpointing full_determinism"
).split()
# And its optimizer: such a row trains otherwise, and is compared with the one that does so in the baseline's precision.
OPTIMIZER_KEYS = ("optim", "learning_rate", "muon_momentum")
# Follow from per_device_train_batch_size and the tokens of a step.
DERIVED = ("per_device_eval_batch_size", "gradient_accumulation_steps")
RECIPES = ("delayed", "current", "block")
FP8 = {recipe: {"precision.compute": "fp8", "precision.recipe": recipe} for recipe in RECIPES}
PRESETS = {
    "bf16": {"precision.compute": "bf16"},
    **FP8,
    "muon": {"precision.compute": "bf16", "optim": "muon"},
    **{f"muon_{recipe}": {**settings, "optim": "muon"} for recipe, settings in FP8.items()},
}
DEFAULT_ROWS = ["bf16", *RECIPES]
CONDITIONS = "conditions.json"
LOG = "log.txt"
AFTER_START = "after_start"
STAGE_ENDS = "precision_stage"  # in the record of the last step of a stage of precision.schedule
# What of `conditions` may be another than today's, if that is asked for; the report says which rows differ.
MAY_DIFFER = ("sources", "machine", "versions")
# How a row is kept while it trains, not what it trains. A change of precision.schedule needs checkpoints.
KEPT = ("--save_strategy=steps", "--save_steps=0", "--save_minutes=0", "--save_total_limit=1")
KEPT_KEYS = tuple(
    option[2:].partition("=")[0] for option in (*KEPT, "--resume_from_checkpoint=", "--output_dir=")
)


class ComparisonError(ValueError):
    """The rows cannot be compared; the message names the row and what to do."""


@dataclass(frozen=True)
class Plan:
    """A row with its resolved configuration (what train_config.json will hold), command and folder."""

    row: Row
    config: dict[str, Any]
    command: list[str]
    folder: Path

    @property
    def seed(self) -> str | None:
        """Its own in place of the configuration's: it is the twin of a row, shows what a difference means, and is held
        to nothing by itself."""
        return self.row.settings.get("seed")

    @property
    def optimizer(self) -> dict[str, Any]:
        """What of OPTIMIZER_KEYS the row has for itself."""
        return {key: value for key, value in self.row.settings.items() if is_under(key, OPTIMIZER_KEYS)}

    @property
    def has_fp8(self) -> bool:
        """In one of its stages, at least."""
        section = self.config["precision"]
        return any((section | stage)["compute"] == "fp8" for stage in section.get("schedule") or [{}])

    @property
    def computes(self) -> dict[str, Any]:
        """What else it has for itself but the seed: how a step is computed."""
        return {
            key: value
            for key, value in self.row.settings.items()
            if key not in self.optimizer and key != "seed"
        }


def chosen_rows(options: argparse.Namespace) -> list[Row]:
    """The rows of --rows and --row, the baseline first, and behind it and each of --noise_rows its twins with the other
    seeds.

    Raises RowError: a bad --row; no row has the baseline's name, or one of --noise_rows; these without seeds.
    """
    rows = [Row(name, PRESETS[name]) for name in dict.fromkeys(options.rows)]
    allowed = [*ROW_KEYS, *OPTIMIZER_KEYS]
    rows += parse_rows(options.row, options.rows, allowed, "another training; for all rows: -- --KEY VALUE")
    first = [row for row in rows if row.name == options.baseline]
    if not first:
        names = ", ".join(row.name for row in rows)
        raise RowError(
            f"the baseline {options.baseline} is not among the rows {names}; --baseline names another"
        )
    others = [row for row in rows if row.name != options.baseline]
    seeds = [str(seed) for seed in dict.fromkeys(options.noise_seed)]
    if unknown := [name for name in options.noise_rows if name not in (row.name for row in rows)]:
        raise RowError(
            f"--noise_rows {unknown[0]}: there is no such row; there are {', '.join(r.name for r in rows)}"
        )
    if options.noise_rows and not seeds:
        raise RowError("--noise_rows are trained with the seeds of --noise_seed; give some, or leave it out")
    chosen = []
    for row in first + others:
        twice = seeds if row is first[0] or row.name in options.noise_rows else []
        chosen += [row, *(Row(f"{row.name}_seed{seed}", {**row.settings, "seed": seed}) for seed in twice)]
    return chosen


def make_plan(row: Row, arguments: argparse.Namespace) -> Plan:
    """How `row` is trained. Raises ConfigurationError: its configuration is not allowed."""
    folder = arguments.work_dir.resolve() / row.name
    given = {key: getattr(arguments, key) for key in ("max_steps", "logging_steps")}
    options = [
        arguments.config,
        *(f"--{key}={value}" for key, value in given.items() if value is not None),
        *arguments.training,
        *(f"--{key}={value}" for key, value in row.settings.items()),
        f"--output_dir={folder}",
        *KEPT,
    ]
    launcher = [str(ROOT / "train/launch.py"), "--nproc", str(arguments.nproc)]
    script = [*(launcher if arguments.nproc > 1 else []), str(ROOT / "train/train.py")]
    command = [sys.executable, *script, *options]
    config = load_arguments(options).resolve(arguments.nproc).to_dict()
    return Plan(row, json.loads(json.dumps(config)), command, folder)


def check_same_training(
    name: str, overrides: Sequence[str], baseline: dict[str, Any], config: dict[str, Any]
) -> None:
    """That the resolved configuration `config` of row `name` trains what `baseline` does: apart from output_dir they
    differ only in the keys `overrides` (the row's and the baseline's) and what follows from these.

    Raises ComparisonError: with every key in which they differ besides.
    """
    allowed = ["output_dir", *overrides, *DERIVED]
    changed = differences(leaves(baseline), leaves(config))
    others = [str(change) for change in changed if not is_under(change.key, allowed)]
    if others:
        raise ComparisonError(
            f"row {name} would not train the same as the baseline:\n  " + "\n  ".join(others) + "\n"
            "a row may change how a step is computed; what changes more belongs behind --, for all rows (for instance "
            "-- --train_batch_size_tokens N where a row has another micro-batch)"
        )


def make_plans(arguments: argparse.Namespace) -> list[Plan]:
    """How the chosen rows are trained. Raises RowError, ConfigurationError, ComparisonError: as what it calls; among
    them that a row has no reference, or that another seed is none."""
    plans = [make_plan(row, arguments) for row in chosen_rows(arguments)]
    for plan in plans:
        if plan.seed is not None and plan.config["seed"] == plans[0].config["seed"]:
            raise ComparisonError(f"--noise_seed {plan.seed} is the seed of the rows themselves; give others")
        overrides = [*plans[0].row.settings, *plan.row.settings]
        check_same_training(plan.row.name, overrides, plans[0].config, plan.config)
        reference_of(plan, plans)
    return plans


def conditions(args: TrainingArguments, machine: Result, versions: Result) -> Result:
    """What a training's numbers depend on besides its configuration: machine, versions, the sources of model/ and
    train/, the content of the data and of the model's configuration.

    Raises DataError, ValueError: there is no such data or model configuration.
    """
    from model.config import load_config
    from train.data.stream import open_stream

    streams = (
        open_stream(args.data.sources, args.data.weights, args.max_seq_length, args.seed, split=split)
        for split in ("train", "eval")
    )
    values = {
        "machine": machine,
        "versions": versions,
        "sources": sources_sha256("model", "train"),
        # without the seed, which the baseline's twin has for itself
        "data": {stream.split: stream.fingerprint()["sources"] for stream in streams},
        "model": load_config(args.model.config).to_dict(),
    }
    return json.loads(json.dumps(values))


def read_metrics(folder: Path) -> list[Result]:
    """The records of a run's metrics.jsonl; none where there is no such file or it ends within a line. An evaluation
    that a stopped run made up for has a line of its own: it is joined with its step's. AFTER_START is set in the first
    with a speed since each start of the run, and of a stage of precision.schedule."""
    records: list[Result] = []
    try:
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if records and records[-1]["step"] == record["step"]:
                records[-1] |= record
            else:
                records.append(record)
    except (OSError, ValueError):
        return []
    starts = read_starts(RunFolder(folder))
    stages = [stage for start in starts for stage in start.get("stages", [])]
    for begin in {0, *(each["step"] for each in (*starts, *stages))}:
        timed = [r for r in records if r["step"] > begin and r.get("tokens_per_second")]
        for first in timed[:1]:
            first[AFTER_START] = True
    return records


def changes_s(folder: Path) -> list[float | None]:
    """Seconds that each change of the precision in a row's training took; None where the training's version did not
    note them. Of a row that was taken over what there is."""
    starts = read_starts(RunFolder(folder))
    if not starts:
        return (begun(folder) or {}).get("changes_s", [])
    return [stage.get("took_s") for start in starts for stage in start.get("stages", [])]


def at_logging_steps(records: Sequence[Result], logging_steps: int) -> list[Result]:
    """The records with their losses at the steps where each row has one: a stage of precision.schedule that ends
    between two of them has a line of its own, and what that tells is put into the next one, over the steps of both."""
    found = [dict(record) for record in records]
    lines = [record for record in found if record.get("loss") is not None]
    for line, after in pairwise(lines):
        if STAGE_ENDS not in line or not line["step"] % logging_steps:
            continue
        begin = line["step"] - line["step"] % logging_steps
        first, second = line["step"] - begin, after["step"] - line["step"]
        after["loss"] = (first * line.pop("loss") + second * after["loss"]) / (first + second)
        rates = line.pop("tokens_per_second"), after["tokens_per_second"]
        after["tokens_per_second"] = (first + second) / (first / rates[0] + second / rates[1])
        after[STAGE_ENDS] = line.pop(STAGE_ENDS)
        line.pop("grad_norm", None)
    return found


def reference_of(plan: Plan, plans: Sequence[Plan]) -> Plan:
    """The row that `plan` is compared with: that of its optimizer and seed which computes as the baseline, the first,
    does; of that one itself the baseline, of the same seed where it has another optimizer. Raises ComparisonError:
    there is none."""
    base = plans[0]
    for other in plans:
        alike = (other.optimizer, other.seed) == (plan.optimizer, plan.seed)
        if alike and other.computes == base.computes:
            if other is not plan:
                return other
            same_seed = (p for p in plans if is_twin(p, base) and p.seed == plan.seed and p is not plan)
            return next(same_seed, base)
    keys = " ".join(f"{key}={value}" for key, value in {**base.computes, **plan.optimizer}.items())
    seeded = "" if plan.seed is None else " and name it in --noise_rows"
    raise ComparisonError(
        f"row {plan.row.name} has another optimizer than the baseline {base.row.name}, and no row has it in the "
        f"baseline's precision{'' if plan.seed is None else ' and with this seed'}; add one, such as --row NAME {keys}"
        f"{seeded}"
    )


def is_twin(plan: Plan, other: Plan) -> bool:
    """Whether `plan` is `other` with another seed, and `other` has the configuration's."""
    alike = plan.optimizer == other.optimizer and plan.computes == other.computes
    return alike and plan.seed is not None and other.seed is None


def comparable(plans: Sequence[Plan], records: dict[str, list[Result]]) -> dict[str, list[Result]]:
    """Of the records of finished rows those whose reference is finished too, `at_logging_steps`; says of the others
    what they wait for."""
    found = {}
    for plan in plans:
        name, reference = plan.row.name, reference_of(plan, plans).row.name
        if name in records and reference in records:
            found[name] = at_logging_steps(records[name], plan.config["logging_steps"])
        elif name in records:
            print(f"{name}: finished; it is compared with {reference}, which is not")
    return found


@dataclass(frozen=True)
class State:
    """How far the training in a row's folder is. why: it cannot stand for the row; None if it can. goes_on: it has
    a checkpoint, from which it may be continued. differ: what of MAY_DIFFER was another then. finished, has_checkpoint:
    under whichever conditions."""

    why: str | None
    goes_on: bool = False
    differ: tuple[str, ...] = ()
    finished: bool = False
    has_checkpoint: bool = False


def begun(folder: Path) -> Result | None:
    """conditions.json of the row that was begun in `folder`: "config", "conditions", "finished"; None: no row was."""
    try:
        was = json.loads((folder / CONDITIONS).read_text(encoding="utf-8"))
        # before rows could be stopped the file was written when they were finished, and did not say so
        return {"finished": True, **was, "config": was["config"], "conditions": was["conditions"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def state_of(plan: Plan, now: Result, may_differ: Sequence[str] = ()) -> State:
    """Of the training in the plan's folder, which stands if it is finished, its configuration is the plan's, and its
    conditions are `now`'s but for `may_differ`."""
    if (was := begun(plan.folder)) is None:
        return State("not trained yet")
    finished, has_checkpoint = was["finished"], any(plan.folder.glob("checkpoints/step-*"))
    here = {"config": dict.fromkeys(KEPT_KEYS)}
    configs = leaves(was["config"] | here["config"]), leaves(plan.config | here["config"])
    unread = unread_by_either(was["config"], plan.config)
    changed = [change for change in differences(*configs) if change.key not in unread]
    # transformers writes its version into every model's configuration; `versions` has it
    under = differences(leaves(was["conditions"]), leaves(now))
    changed += [change for change in under if change.key != "model.transformers_version"]
    differ = tuple(key for key in may_differ if any(is_under(change.key, [key]) for change in changed))
    if changed := [change for change in changed if not is_under(change.key, differ)]:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        why = f"trained before, with other conditions ({changed[0]}{more})"
        return State(why, finished=finished, has_checkpoint=has_checkpoint)
    last, steps = (read_metrics(plan.folder) or [{"step": 0}])[-1], plan.config["max_steps"]
    if not finished:
        return State("not finished", goes_on=has_checkpoint, differ=differ, has_checkpoint=has_checkpoint)
    if last["step"] != steps or last.get("loss") is None or last.get("eval_loss") is None:
        why = f"its metrics end at step {last['step']} of {steps}, or without a loss"
        return State(why, finished=True)
    return State(None, differ=differ, finished=True)


def trained_under(plan: Plan) -> Result:
    """The conditions of a training that is finished: machine, versions, sources, data, model."""
    return json.loads((plan.folder / CONDITIONS).read_text(encoding="utf-8"))["conditions"]
