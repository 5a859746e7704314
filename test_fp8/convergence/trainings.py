"""The trainings of `compare_convergence.py`: runs of train/train.py in processes of their own, as many at a time as
there are GPUs for, stopped in time with a checkpoint, and gone on with by the next call."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from test_fp8.common.processes import own_environment
from test_fp8.common.report import Result
from test_fp8.convergence.rows import (
    CONDITIONS,
    LOG,
    ComparisonError,
    Plan,
    begun,
    conditions,
    read_metrics,
    state_of,
)
from train.config.arguments import TrainingArguments
from train.config.differences import differences, leaves
from train.files import locks, write_durably
from train.guard.signals import INTERRUPTED, STOPPED, at_parents_end

LAST_LINES = 20
POLL_S = 0.1
LOCK = ".lock"  # in --work_dir; no row has such a name
# With less time left a training is not started: until its first step it takes most of that on a GPU.
LEAST_S = 45.0


@dataclass(frozen=True)
class Limits:
    """How trainings are run: so many `at_once`, each with `nproc` processes; all stopped `time_limit_s` seconds after
    the begin of this program (0: never). gpus: how many there are."""

    at_once: int = 1
    nproc: int = 1
    gpus: int = 0
    time_limit_s: float = 0.0

    def __post_init__(self) -> None:
        """Raises ComparisonError: rows at a time would share GPUs; no row would ever begin."""
        if 0 < self.time_limit_s <= LEAST_S:
            raise ComparisonError(
                f"--time_limit_s {self.time_limit_s:g} trains nothing: no row begins with {LEAST_S:g} seconds left or "
                "less; give more, or 0 for no limit"
            )
        if self.at_once > 1 and 0 < self.gpus < (needed := self.at_once * self.nproc):
            raise ComparisonError(
                f"--at_once {self.at_once} with --nproc {self.nproc} takes {needed} GPUs, and {self.gpus} are here"
            )


@dataclass
class Training:
    """A process that trains a row, on the GPUs of place number `place`. asked: to stop."""

    plan: Plan
    process: subprocess.Popen
    place: int
    log: TextIO
    asked: bool = False


@contextmanager
def alone_in(folder: Path) -> Iterator[int]:
    """In the block no other call trains in `folder`, which is made. Yields the descriptor that holds it: who inherits
    it holds it too, so that a training that outlives its call keeps others out.

    Raises ComparisonError: another call, or what it left, trains there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as file:
        if not locks(file):
            raise ComparisonError(
                f"another call of this program, or a training that it left, is at work in {folder}; wait until it has "
                "ended, or give another --work_dir"
            )
        yield file.fileno()


def check_own(plan: Plan) -> None:
    """Raises ComparisonError: the row's folder holds something else than a row."""
    if begun(plan.folder) is None and plan.folder.exists() and any(plan.folder.iterdir()):
        raise ComparisonError(
            f"row {plan.row.name}: {plan.folder} has files and no {CONDITIONS} of this program: it is not a row of a "
            "comparison, and stays as it is; give another --work_dir, or remove it if it is worth nothing"
        )


def ready(plan: Plan, now: Result, may_differ: Sequence[str]) -> bool:
    """Whether the row is finished; says so, or what is to be done. What cannot stand is made ready to begin anew; what
    was finished under other conditions, or has a checkpoint of these, is kept beside it.

    Raises ComparisonError: as `check_own`.
    """
    name, state = plan.row.name, state_of(plan, now, may_differ)
    differ = f" ({' and '.join(state.differ)} were others)" if state.differ else ""
    if state.why is None:
        same = f"but for its {' and '.join(state.differ)}, " if state.differ else ""
        print(f"{name}: finished before in {plan.folder}, {same}under the same conditions: not run again")
        return True
    what = "goes on" if state.goes_on else "training"
    print(f"{name}: {state.why}{differ}; {what}, see {plan.folder / LOG}", flush=True)
    if not state.goes_on:
        check_own(plan)
        if state.finished or state.has_checkpoint:
            earlier = (plan.folder.with_name(f"{name}.earlier{number}") for number in itertools.count(1))
            kept = plan.folder.rename(next(path for path in earlier if not path.exists()))
            print(f"{name}: what was trained before is kept in {kept}", flush=True)
        shutil.rmtree(plan.folder, ignore_errors=True)
        plan.folder.mkdir(parents=True)
        note(plan, now, finished=False)
    return False


def note(plan: Plan, now: Result, finished: bool) -> None:
    done = {"finished": finished, "config": plan.config, "conditions": now}
    write_durably(plan.folder / CONDITIONS, json.dumps(done, indent=1) + "\n")


def start(plan: Plan, place: int, limits: Limits, lock: int) -> Training:
    """Start, or go on with, the training of a row; its output goes to log.txt in its folder. It has the descriptor
    `lock` open, and stops with a checkpoint when this program ends, however it does."""
    own = range(place * limits.nproc, (place + 1) * limits.nproc)
    environment = own_environment(own if limits.at_once > 1 and limits.gpus else None)
    environment["PYTHONUNBUFFERED"] = "1"
    log = (plan.folder / LOG).open("a", encoding="utf-8")
    process = subprocess.Popen(
        plan.command,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        pass_fds=(lock,),
        preexec_fn=at_parents_end(signal.SIGTERM),
    )
    return Training(plan, process, place, log)


def ended(training: Training, now: Result, may_differ: Sequence[str]) -> bool:
    """Whether a training whose process has ended is finished; False: it was stopped on request.

    Raises ComparisonError: it failed, with its last lines; or it left no whole metrics.
    """
    training.log.close()
    plan, status = training.plan, training.process.returncode
    log = plan.folder / LOG
    if status in (STOPPED, INTERRUPTED, -signal.SIGTERM):  # the last two before its first step
        return False
    if status:
        last = "\n  ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:])
        raise ComparisonError(
            f"row {plan.row.name}: the training ended with status {status}; its last lines (all: {log}):\n  {last}"
        )
    began = json.loads((plan.folder / CONDITIONS).read_text(encoding="utf-8"))["conditions"]
    note(plan, began, finished=True)
    if reason := state_of(plan, now, may_differ).why:
        raise ComparisonError(f"row {plan.row.name}: the training ended well, but {reason}; see {log}")
    for name in ("checkpoints", "hf"):  # of 1.1 B parameters 15 GB a row
        shutil.rmtree(plan.folder / name, ignore_errors=True)
    return True


class Asked:
    """Whether this program was asked to end: by SIGTERM, by Ctrl-C, or as its time is over."""

    def __init__(self, time_limit_s: float) -> None:
        self.until = time.monotonic() + time_limit_s if time_limit_s else float("inf")
        self.by_signal = False

    @property
    def left_s(self) -> float:
        return 0.0 if self.by_signal else self.until - time.monotonic()

    @contextmanager
    def listening(self) -> Iterator[None]:
        def hear(*_: Any) -> None:
            self.by_signal = True

        before = {number: signal.signal(number, hear) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def train_all(
    plans: Sequence[Plan],
    now: Result,
    limits: Limits = Limits(),
    may_differ: Sequence[str] = (),
) -> dict[str, list[Result]]:
    """Row name -> records of its training, run now or before; of the rows that are finished. now: `conditions`.

    Raises ComparisonError: as `ended`, `alone_in` and, before any training, `check_own` do; sources, data or model
    changed before a row. Rows that are finished stay so for the next time, others that run meanwhile are stopped with a
    checkpoint.
    """
    asked, running = Asked(limits.time_limit_s), []
    waiting, finished = iter(plans), {}

    def check_unchanged(plan: Plan) -> None:
        arguments = TrainingArguments.from_dict(plan.config)
        if changed := differences(
            leaves(now), leaves(conditions(arguments, now["machine"], now["versions"]))
        ):
            raise ComparisonError(
                f"model/, train/ or the data was changed before row {plan.row.name} ({changed[0].key}); run the "
                "comparison again"
            )

    def close(plan: Plan) -> None:
        records = finished[plan.row.name] = read_metrics(plan.folder)
        last = records[-1]
        print(f"{plan.row.name}: {last['step']} steps, evaluation loss {last['eval_loss']:.4f}", flush=True)

    def next_of(place: int) -> Training | None:
        for plan in waiting:
            check_unchanged(plan)
            if ready(plan, now, may_differ):
                close(plan)
            else:
                return start(plan, place, limits, lock)
        return None

    for plan in plans:
        check_own(plan)
    with alone_in(plans[0].folder.parent) as lock, asked.listening():
        try:
            places = list(range(limits.at_once))
            while True:
                while places and asked.left_s > (LEAST_S if limits.time_limit_s else 0):
                    if (training := next_of(places[0])) is None:
                        break
                    running.append(training)
                    places.pop(0)
                if not running:
                    break
                if not asked.left_s > 0:
                    stop(running)
                time.sleep(POLL_S)
                for training in [t for t in running if t.process.poll() is not None]:
                    running.remove(training)
                    places.append(training.place)
                    if ended(training, now, may_differ):
                        close(training.plan)
                    else:
                        plan = training.plan
                        goes_on = state_of(plan, now, may_differ).goes_on
                        what = "with a checkpoint" if goes_on else "before its first step"
                        print(f"{plan.row.name}: stopped {what}", flush=True)
        finally:
            stop(running)
            for training in running:
                training.process.wait()
                training.log.close()
    for plan in waiting:  # no time was left for them, but they may be there
        check_unchanged(plan)
        if state_of(plan, now, may_differ).why is None:
            close(plan)
    return {plan.row.name: finished[plan.row.name] for plan in plans if plan.row.name in finished}


def stop(running: Sequence[Training]) -> None:
    """Ask trainings to end after their step, with a checkpoint; once each: a second signal would end them at once."""
    for training in running:
        if training.process.poll() is None and not training.asked:
            training.process.terminate()
            training.asked = True
