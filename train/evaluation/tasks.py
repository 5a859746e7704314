"""Run tasks of the lm-eval harness on a model (train/evaluate.py --tasks). This module needs the package lm_eval."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from model.errors import UserError
from train.checkpoint.files import RUN_STATE, identity, read_state, trained_tokenizer
from train.evaluation.models import BATCH_SIZE, EvaluationError, find_model
from train.export import export
from train.monitor.lock import Lock
from train.record.history import is_number, read_history
from train.record.run_folder import RunFolder
from train.record.trackers import Trackers

logger = logging.getLogger(__name__)


class Model(HFLM):
    """Model class of the lm-eval harness that begins texts with one BOS token instead of two in perplexity tasks."""

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, with one BOS token at its beginning.

        The harness adds this BOS token, so the tokenizer must not add another one.
        """
        with mock.patch.object(self, "add_bos_token", False):
            return super().loglikelihood_rolling(requests, disable_tqdm)


def run_tasks(args: argparse.Namespace) -> dict[str, Any]:
    """Run the tasks, print the results, and return the report.

    For a checkpoint of a run, the results are also added to the metrics of the run.

    Args:
        args: The parsed command line of evaluate.py.

    Raises:
        EvaluationError: There is no model, or a task is unknown.
        LockError: The run is in progress.
    """
    path = find_model(args.model)
    is_checkpoint = (path / RUN_STATE).is_file()
    run = RunFolder(path.resolve().parent.parent)
    is_in_run = is_checkpoint and run.metrics.is_file()
    if is_in_run:
        Lock(run.lock).check_unlocked()  # two processes must not write to the same metrics
    manager = TaskManager(include_path=args.task_path and str(args.task_path))
    if unknown := sorted(set(args.tasks) - set(manager.all_tasks)):
        raise EvaluationError(
            f"--tasks {','.join(unknown)}: unknown task. To list the tasks of the harness, run `lm_eval ls tasks`. To "
            "use your own tasks, pass --task_path FOLDER",
            code="unknown_task",
            key=unknown[0],
        )
    with exported(path, run) if is_checkpoint else contextlib.nullcontext(path) as folder:
        model = Model(
            str(folder),
            device="cuda" if torch.cuda.is_available() else "cpu",
            batch_size=args.batch_size or BATCH_SIZE,
        )
        found = simple_evaluate(
            model, tasks=args.tasks, task_manager=manager, limit=args.max_samples, log_samples=False
        )
    print(make_table(found), flush=True)
    if is_in_run:
        try:
            add_to_metrics(run, path, found["results"])
        except (UserError, OSError) as error:  # for example, the run was restarted meanwhile
            logger.warning(f"the results were not added to {run.metrics}: {error}")
    kept = ("results", "groups", "configs", "versions", "n-shot", "n-samples")
    return {"model": str(path), **{key: found[key] for key in kept if key in found}}


@contextlib.contextmanager
def exported(checkpoint: Path, run: RunFolder) -> Iterator[Path]:
    """Yield the folder of the exported model for a checkpoint.

    If hf/ of the run contains the export of this checkpoint, this folder is returned. Otherwise, the checkpoint is
    exported to a temporary folder, which is deleted after the `with` block.
    """
    if run.exported()[1] == identity(checkpoint):
        yield run.hf
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "hf"
        export(checkpoint, out, trained_tokenizer(checkpoint, read_state(checkpoint)))
        yield out


def add_to_metrics(run: RunFolder, checkpoint: Path, results: dict[str, dict[str, Any]]) -> None:
    """Add a line with the step of the checkpoint and the task results to metrics.jsonl and the trackers.

    The results have keys of the form tasks/TASK/METRIC.

    Args:
        results: For each task, a dictionary with the results under "METRIC,FILTER". Its other keys are ignored.
    """
    state = read_state(checkpoint)
    values = {
        f"tasks/{task}/{name.removesuffix(',none')}": value
        for task, metrics in results.items()
        for name, value in metrics.items()
        if "," in name and is_number(value)
    }
    line = {"step": state.step, "tokens": state.consumed_tokens, **values, "time": round(time.time(), 1)}
    lock = Lock(run.lock)
    lock.acquire()
    try:
        # the last step, so that TensorBoard hides no later lines
        last = max(record["step"] for record in read_history(run.path).records)
        with run.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        trackers = Trackers(run, state.train_config, last)
        trackers.log(line)
        trackers.close()
    finally:
        lock.release()
    logger.info(f"added the results to {run.metrics}")
