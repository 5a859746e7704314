"""Run the pipelines of a data preparation in processes of this host, or on the nodes of a Slurm job.

Each completed task leaves a completion marker in the folder of its pipeline, and does not run again.
"""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from model.errors import UserError
from train import rank_env
from train.files import REPOSITORY

PROGRESS: dict[str, Any] = {"unit": "task", "mininterval": 5.0}  # options of all progress bars


@dataclass(frozen=True)
class Pipeline:
    """A part of a data preparation. The tasks of a pipeline run in parallel, after the previous pipeline is complete.

    Attributes:
        run: function that runs the task with the given index. The function is pickled for other processes.
    """

    name: str
    tasks: int
    run: Callable[[int], None]


class PreparationError(UserError, RuntimeError):
    """Error raised if preparation tasks did not complete. Running the same command again may complete the tasks."""

    code = "preparation"
    is_transient = True


def run_local(pipelines: list[Pipeline], folder: Path, workers: int | None) -> None:
    """Run the incomplete tasks of all pipelines on this host, one pipeline after another.

    Args:
        folder: the folder that contains a folder for each pipeline.
        workers: number of worker processes, or None for one per core, at most 16. With 1, the tasks run in this
            process.

    Raises:
        PreparationError: if a worker process died.
        Exception: if a task failed. The exception of the task is raised after the running tasks have completed.
    """
    workers = workers or min(os.cpu_count() or 1, 16)
    for pipeline in pipelines:
        ranks = incomplete_tasks(pipeline, folder)
        tasks = (
            _in_pool(pipeline, folder, ranks, workers)
            if workers > 1
            else map(partial(_run_task, pipeline, folder), ranks)
        )
        try:
            done = pipeline.tasks - len(ranks)
            for _ in tqdm(tasks, pipeline.name, pipeline.tasks, initial=done, **PROGRESS):
                pass
        except BrokenProcessPool as error:
            raise PreparationError(
                f"a worker process was killed in pipeline {pipeline.name}, possibly because the host ran out of "
                f"memory. {len(incomplete_tasks(pipeline, folder))} of {pipeline.tasks} tasks are incomplete. Run the "
                "same command again to resume. If memory was the cause, pass a smaller --workers",
                code="worker_died",
            ) from error


def incomplete_tasks(pipeline: Pipeline, folder: Path) -> list[int]:
    """Return the indices of the tasks that have no completion marker."""
    return [rank for rank in range(pipeline.tasks) if not _marker(pipeline, folder, rank).exists()]


def _marker(pipeline: Pipeline, folder: Path, rank: int) -> Path:
    return folder / pipeline.name / "completions" / f"{rank:05d}"


def _run_task(pipeline: Pipeline, folder: Path, rank: int) -> None:
    """Run a task, and write its completion marker."""
    pipeline.run(rank)
    marker = _marker(pipeline, folder, rank)
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()


def _in_pool(pipeline: Pipeline, folder: Path, ranks: list[int], workers: int) -> Iterator[None]:
    """Run the tasks in a process pool and yield after each completed task.

    Ctrl-C kills the workers immediately. If the command is run again, the incomplete tasks run from their beginning.
    """
    spawn = multiprocessing.get_context("spawn")  # fork is unsafe because tokenizers starts threads
    pool = ProcessPoolExecutor(workers, spawn, _exit_with_parent)
    # The workers inherit this signal mask. Otherwise each worker would print a traceback on Ctrl-C.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        tasks = [pool.submit(_run_task, pipeline, folder, rank) for rank in ranks]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for task in as_completed(tasks):
            yield task.result()
    except (KeyboardInterrupt, GeneratorExit):  # GeneratorExit: Ctrl-C between two tasks
        for worker in multiprocessing.active_children():
            worker.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _exit_with_parent() -> None:
    """Start a thread that ends this worker when its parent process ends.

    Without this thread, the worker would keep writing files.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_slurm(pipelines: list[Pipeline], folder: Path, workers: int | None) -> None:
    """Run the incomplete tasks of all pipelines with srun, one pipeline after another.

    Inside a Slurm job, srun uses the nodes of the job. Outside a job, srun waits until Slurm allocates nodes.

    Args:
        folder: the folder that contains a folder for each pipeline.
        workers: number of processes (srun's --ntasks), or None for the number of tasks of the job.

    Raises:
        PreparationError: if srun failed, because a process failed or the job was refused.
    """
    options = ["--kill-on-bad-exit=1", "--quit-on-interrupt", *([f"--ntasks={workers}"] if workers else [])]
    for pipeline in pipelines:
        if not (ranks := incomplete_tasks(pipeline, folder)):
            continue
        folder.mkdir(exist_ok=True)
        job = folder / f"{pipeline.name}.pickle"
        job.write_bytes(pickle.dumps((pipeline, folder, ranks)))
        command = ["srun", *options, sys.executable, "-m", "train.prepare.executors", str(job)]
        with subprocess.Popen(
            command, cwd=REPOSITORY
        ) as srun:  # not killed on Ctrl-C: it stops its processes itself
            srun.wait()
        if srun.returncode:
            raise PreparationError(
                f"srun ended with status {srun.returncode} in pipeline {pipeline.name}; see the messages of srun "
                "above. To resume, run the same command again",
                code="tasks_failed",
                key=pipeline.name,
            )


def run_share(job: str) -> None:
    """Run this process's share of the tasks in the file `job`, which `run_slurm` wrote."""
    pipeline, folder, ranks = pickle.loads(Path(job).read_bytes())
    rank_env.export_torch_variables()
    rank, world = rank_env.rank(), rank_env.world_size()
    title = f"{pipeline.name} (1 of {world} processes)"
    for task in tqdm(ranks[rank::world], title, disable=rank > 0, **PROGRESS):
        _run_task(pipeline, folder, task)


if __name__ == "__main__":
    run_share(sys.argv[1])
