"""Rows of `compare_convergence.py` taken from a result that it wrote, where the folder in which they were trained is
gone: a result has what a comparison needs of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from test_fp8.common.options import public
from test_fp8.common.report import Result
from test_fp8.convergence.results import settings_of, training_of
from test_fp8.convergence.rows import (
    AFTER_START,
    CONDITIONS,
    LOG,
    STAGE_ENDS,
    ComparisonError,
    Plan,
)
from train.config.differences import differences, leaves, unread_by_either
from train.files import write_durably
from train.record.run_folder import RunFolder


def take_over(plans: Sequence[Plan], paths: Sequence[Path]) -> None:
    """Give each row that has no folder what the first result among `paths` that has it knows of it, as a finished row;
    whether its conditions are today's is judged as of any other (rows.state_of). Says so.

    Raises ComparisonError: a file is no such result; a row of it with this name was another training.
    """
    known = [(path, _read(path)) for path in paths]
    for plan in plans:
        if plan.folder.exists():
            continue
        for path, result in known:
            rows = [row for row in result["results"] if row["row"] == plan.row.name]
            if not rows:
                continue
            if changed := _changed(plan, plans[0], result, rows[0]):
                raise ComparisonError(
                    f"row {plan.row.name}: {path} has one of this name that was trained otherwise ({changed[0]}); give "
                    "the row another name, or leave the file out"
                )
            _write(plan, rows[0], path.name)
            print(f"{plan.row.name}: taken from {path}")
            break


def _read(path: Path) -> Result:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        rows = [(row["row"], row["curves"]["loss"], row["trained_under"]) for row in result["results"]]
        if rows and result["training"]:
            return result
    except OSError as error:
        raise ComparisonError(
            f"--earlier {path}: {error.strerror}; give a JSON that --output wrote"
        ) from error
    except (ValueError, KeyError, TypeError):
        pass
    raise ComparisonError(f"--earlier {path} is no result of this program; give a JSON that --output wrote")


def _changed(plan: Plan, base: Plan, result: Result, row: Result) -> list[Any]:
    """What of the training and of the row's own keys is another now. Of DeepSpeed's configuration a result has the ZeRO
    stage alone."""
    training = {key: value for key, value in result["training"].items() if key != "parameters"}
    was = {"training": training, "settings": row["settings"], "overrides": row["overrides"]}
    overrides = {key: public(value) for key, value in plan.row.settings.items()}
    now = {"training": training_of(base.config), "settings": settings_of(plan.config), "overrides": overrides}
    unread = unread_by_either(*({"precision": _precision(each["settings"])} for each in (was, now)))
    found = differences(leaves(was), leaves(json.loads(json.dumps(now))))
    return [change for change in found if change.key.removeprefix("settings.") not in unread]


def _precision(settings: Result) -> Result:
    named = (key.partition(".") for key in settings)
    return {key: settings[f"precision.{key}"] for section, _, key in named if section == "precision"}


def _write(plan: Plan, row: Result, name: str) -> None:
    curves, batch = row["curves"], plan.config["train_batch_size_tokens"]
    rates = curves.get("tokens_per_second") or [row["tokens_per_second"]] * len(curves["step"])
    records: dict[int, Result] = {
        step: {
            "step": step,
            "tokens": step * batch,
            "loss": loss,
            "grad_norm": norm,
            "tokens_per_second": rate,
        }
        for step, loss, norm, rate in zip(
            curves["step"], curves["loss"], curves["grad_norm"], rates, strict=True
        )
    }
    for step in curves.get("after_start", ()):
        records[step][AFTER_START] = True
    for step in curves.get("stage_ends", ()):
        records[step][STAGE_ENDS] = True
    for step, loss in zip(curves["eval_step"], curves["eval_loss"], strict=True):
        records.setdefault(step, {"step": step, "tokens": step * batch})["eval_loss"] = loss
    last = records[max(records)]
    last |= {"skipped_steps": row["skipped_steps"], "memory_gib": row["memory_gib"]}
    # whole or not there: a folder without its conditions would be taken for somebody's own
    folder = plan.folder.with_name(f"{plan.row.name}.taken")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    lines = (json.dumps(records[step]) + "\n" for step in sorted(records))
    RunFolder(folder).metrics.write_text("".join(lines), encoding="utf-8")
    (folder / LOG).write_text(f"taken from {name}\n{row['fp8'] or ''}\n", encoding="utf-8")
    done = {
        "finished": True,
        "config": plan.config,
        "conditions": row["trained_under"],
        "health": row["health"],
        "changes_s": row.get("changes_s", []),
    }
    write_durably(folder / CONDITIONS, json.dumps(done, indent=1) + "\n")
    folder.rename(plan.folder)
