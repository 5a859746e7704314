"""The rows of `compare_convergence.py`: which there are, how each is configured, and their trainings.

A row's folder is that of its run (train_config.json, metrics.jsonl), with the run's output in log.txt and, once it is
finished, conditions.json: what it was trained under, by which a later comparison knows whether it can stand.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from test_fp8.common.options import ROOT
from test_fp8.common.report import Result
from test_fp8.common.rows import Row, RowError, is_under, parse_rows
from train.config.arguments import TrainingArguments, load_arguments
from train.config.differences import differences, leaves

# What a row may override: how a step is computed. All else says what is trained, and on what.
ROW_KEYS = (
    "model.variant model.attention_backend model.compile precision speed deepspeed per_device_train_batch_size "
    "per_device_eval_batch_size gradient_accumulation_steps gradient_checkpointing full_determinism"
).split()
# Follow from per_device_train_batch_size and the tokens of a step.
DERIVED = ("per_device_eval_batch_size", "gradient_accumulation_steps")
PRESETS = {
    "bf16": {"precision.compute": "bf16"},
    **{
        recipe: {"precision.compute": "fp8", "precision.recipe": recipe}
        for recipe in ("delayed", "current", "block")
    },
}
CONDITIONS = "conditions.json"  # written into a row's folder when its training is finished
LOG = "log.txt"
LAST_LINES = 20
# What a launcher set for this process is not for the trainings that it starts.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
    def measures_noise(self) -> bool:
        """Whether it is the baseline with another seed, which shows what a difference means and is held to nothing."""
        return "seed" in self.row.settings


def chosen_rows(options: argparse.Namespace) -> list[Row]:
    """The rows of --rows and --row, the baseline first, and behind it its twin with another seed.

    Raises RowError: a bad --row; no row has the baseline's name.
    """
    rows = [Row(name, PRESETS[name]) for name in dict.fromkeys(options.rows)]
    rows += parse_rows(options.row, options.rows, ROW_KEYS, "another training; for all rows: -- --KEY VALUE")
    first = [row for row in rows if row.name == options.baseline]
    if not first:
        names = ", ".join(row.name for row in rows)
        raise RowError(
            f"the baseline {options.baseline} is not among the rows {names}; --baseline names another"
        )
    others = [row for row in rows if row.name != options.baseline]
    if options.noise_seed is not None:
        twin = {**first[0].settings, "seed": str(options.noise_seed)}
        first.append(Row(f"{options.baseline}_seed{options.noise_seed}", twin))
    return first + others


def make_plan(row: Row, arguments: argparse.Namespace) -> Plan:
    """How `row` is trained. Raises ConfigurationError: its configuration is not allowed."""
    folder = arguments.work_dir.resolve() / row.name
    options = [
        arguments.config,
        f"--max_steps={arguments.max_steps}",
        f"--logging_steps={arguments.logging_steps}",
        *arguments.training,
        *(f"--{key}={value}" for key, value in row.settings.items()),
        f"--output_dir={folder}",
        "--save_strategy=no",
        "--resume_from_checkpoint=never",
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
    """How the chosen rows are trained. Raises RowError, ConfigurationError, ComparisonError: as what it calls."""
    plans = [make_plan(row, arguments) for row in chosen_rows(arguments)]
    for plan in plans:
        overrides = [*plans[0].row.settings, *plan.row.settings]
        check_same_training(plan.row.name, overrides, plans[0].config, plan.config)
    return plans


def conditions(args: TrainingArguments, machine: Result, versions: Result) -> Result:
    """What a training's numbers depend on besides its configuration: machine, versions, the sources of model/ and
    train/, the content of the data and of the model's configuration.

    Raises DataError, ValueError: there is no such data or model configuration.
    """
    from model.config import load_config
    from train.data.stream import open_stream

    source = hashlib.sha256()
    for path in sorted(p for folder in ("model", "train") for p in (ROOT / folder).rglob("*.py")):
        source.update(path.read_bytes())
    streams = (
        open_stream(args.data.sources, args.data.weights, args.max_seq_length, args.seed, split=split)
        for split in ("train", "eval")
    )
    values = {
        "machine": machine,
        "versions": versions,
        "sources": source.hexdigest(),
        # without the seed, which the baseline's twin has for itself
        "data": {stream.split: stream.fingerprint()["sources"] for stream in streams},
        "model": load_config(args.model.config).to_dict(),
    }
    return json.loads(json.dumps(values))


def read_metrics(folder: Path) -> list[Result]:
    """The records of a run's metrics.jsonl; none where there is no such file or it ends within a line."""
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]
    except (OSError, ValueError):
        return []


def why_to_run(plan: Plan, now: Result) -> str | None:
    """Why the training in the plan's folder cannot stand for it; None if it can: it is finished, its configuration is
    the plan's, and its conditions are `now`'s."""
    try:
        was = json.loads((plan.folder / CONDITIONS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "not trained yet"
    here = {"output_dir": None}
    changed = differences(leaves(was["config"] | here), leaves(plan.config | here))
    changed += differences(leaves(was["conditions"]), leaves(now))
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return f"trained before, with other conditions ({changed[0]}{more})"
    last, steps = (read_metrics(plan.folder) or [{"step": 0}])[-1], plan.config["max_steps"]
    if last["step"] != steps or last.get("loss") is None or last.get("eval_loss") is None:
        return f"its metrics end at step {last['step']} of {steps}, or without a loss"
    return None


def run(plan: Plan, now: Result) -> None:
    """Train one row; its output goes to log.txt in its folder.

    Raises ComparisonError: the training failed, with its last lines; or it left no whole metrics.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    (plan.folder / CONDITIONS).unlink(missing_ok=True)
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    environment["PYTHONUNBUFFERED"] = "1"
    log = plan.folder / LOG
    with log.open("w", encoding="utf-8") as file:
        status = subprocess.run(
            plan.command, stdout=file, stderr=subprocess.STDOUT, env=environment
        ).returncode
    if status:
        last = "\n  ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:])
        raise ComparisonError(
            f"row {plan.row.name}: the training ended with status {status}; its last lines (all: {log}):\n  {last}"
        )
    done = {"config": plan.config, "conditions": now}
    (plan.folder / CONDITIONS).write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
    if reason := why_to_run(plan, now):
        raise ComparisonError(f"row {plan.row.name}: the training ended well, but {reason}; see {log}")


def train_all(plans: Sequence[Plan], machine: Result, versions: Result) -> dict[str, list[Result]]:
    """Row name -> records of its training, run now or before.

    Raises ComparisonError: as `run` does; sources, data or model changed between two rows. Rows that are finished stay
    so for the next time.
    """
    records: dict[str, list[Result]] = {}
    first: Result = {}
    for plan in plans:
        name = plan.row.name
        now = conditions(TrainingArguments.from_dict(plan.config), machine, versions)
        first = first or now
        if changed := differences(leaves(first), leaves(now)):
            raise ComparisonError(
                f"model/, train/ or the data was changed before row {name} ({changed[0].key}); run the comparison again"
            )
        if reason := why_to_run(plan, now):
            print(f"{name}: {reason}; training, see {plan.folder / LOG}", flush=True)
            run(plan, now)
        else:
            print(f"{name}: finished before in {plan.folder}, under the same conditions: not run again")
        records[name] = read_metrics(plan.folder)
        last = records[name][-1]
        print(f"{name}: {last['step']} steps, evaluation loss {last['eval_loss']:.4f}", flush=True)
    return records
