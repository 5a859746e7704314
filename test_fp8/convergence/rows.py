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
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from test_fp8.common.options import ROOT
from test_fp8.common.rows import Row, RowError, parse_rows
from test_fp8.convergence.trainings import ComparisonError, Record, differences, read_metrics, unfinished
from train.config.arguments import TrainingArguments, load_arguments

# What a row may override: how a step is computed. All else says what is trained, and on what.
ROW_KEYS = (
    "model.variant",
    "model.attention_backend",
    "model.compile",
    "precision",
    "speed",
    "deepspeed",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "full_determinism",
)
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


def conditions(args: TrainingArguments, machine: Record, versions: Record) -> Record:
    """What a training's numbers depend on besides its configuration: machine, versions, the sources of model/ and
    train/, the content of the data and of the model's configuration.

    Raises DataError, ValueError: there is no such data or model configuration.
    """
    from model.config import load_config
    from train.data.stream import open_stream

    source, stream = hashlib.sha256(), {}
    for path in sorted(p for folder in ("model", "train") for p in (ROOT / folder).rglob("*.py")):
        source.update(path.read_bytes())
    for split in ("train", "eval"):
        stream[split] = open_stream(
            args.data.sources, args.data.weights, args.max_seq_length, args.seed, split=split
        ).fingerprint()
    model = load_config(args.model.config).to_dict()
    values = {"machine": machine, "versions": versions, "sources": source.hexdigest()}
    return json.loads(json.dumps({**values, "data": stream, "model": model}))


def why_to_run(plan: Plan, now: Record) -> str | None:
    """Why the training in the plan's folder cannot stand for it; None if it can: it is finished, its configuration is
    the plan's, and its conditions are `now`'s."""
    try:
        was = json.loads((plan.folder / CONDITIONS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "not trained yet"
    changed = differences({**was["config"], "output_dir": None}, {**plan.config, "output_dir": None})
    changed |= differences(was["conditions"], now)
    if changed:
        key, change = next(iter(changed.items()))
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return f"trained before, with other conditions ({key}: {change}{more})"
    return unfinished(
        read_metrics(plan.folder), plan.config["max_steps"], plan.config["train_batch_size_tokens"]
    )


def run(plan: Plan, now: Record) -> None:
    """Train one row; its output goes to log.txt in its folder.

    Raises ComparisonError: the training failed, with its last lines; or it left no whole metrics.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    (plan.folder / CONDITIONS).unlink(missing_ok=True)
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    environment["PYTHONUNBUFFERED"] = "1"
    log, start = plan.folder / LOG, time.perf_counter()
    with log.open("w", encoding="utf-8") as file:
        status = subprocess.run(
            plan.command, stdout=file, stderr=subprocess.STDOUT, env=environment
        ).returncode
    if status:
        last = "\n  ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:])
        raise ComparisonError(
            f"row {plan.row.name}: the training ended with status {status}; its last lines (all: {log}):\n  {last}"
        )
    done = {"config": plan.config, "conditions": now, "seconds": time.perf_counter() - start}
    (plan.folder / CONDITIONS).write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
    if reason := why_to_run(plan, now):
        raise ComparisonError(f"row {plan.row.name}: the training ended well, but {reason}; see {log}")


def train_all(plans: Sequence[Plan], machine: Record, versions: Record) -> dict[str, list[Record]]:
    """Row name -> records of its training, run now or before.

    Raises ComparisonError: as `run` does; the sources changed between two rows. Rows that are finished stay so for the
    next time.
    """
    records: dict[str, list[Record]] = {}
    sources = None
    for plan in plans:
        name = plan.row.name
        now = conditions(TrainingArguments.from_dict(plan.config), machine, versions)
        sources = sources or now["sources"]
        if now["sources"] != sources:
            raise ComparisonError(f"model/ or train/ was edited before row {name}; run the comparison again")
        if reason := why_to_run(plan, now):
            print(f"{name}: {reason}; training, see {plan.folder / LOG}", flush=True)
            run(plan, now)
        else:
            print(
                f"{name}: finished before in {plan.folder} under the same conditions, not run again",
                flush=True,
            )
        seconds = json.loads((plan.folder / CONDITIONS).read_text(encoding="utf-8"))["seconds"]
        records[name] = read_metrics(plan.folder)
        last = records[name][-1]
        print(
            f"{name}: {last['step']} steps in {seconds:.0f} s, evaluation loss {last['eval_loss']:.4f}",
            flush=True,
        )
    return records
