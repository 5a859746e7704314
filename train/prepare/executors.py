"""Run the pipelines of a data preparation on this host or as Slurm jobs.

Each pipeline has a folder with datatrove's logs and completion markers. Completed tasks do not run again.
"""

import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from copy import deepcopy
from functools import partial
from pathlib import Path

import dill
from datatrove.executor.slurm import SlurmPipelineExecutor
from datatrove.utils.logging import logger
from tqdm import tqdm

from model.errors import UserError
from train.data.format import DataError
from train.prepare.tally import Pipeline

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRESS_S = 5.0


class PreparationError(UserError, RuntimeError):
    """Error raised for preparation tasks that did not complete. Running the same command again may complete them."""

    code = "preparation"
    is_transient = True


_job: tuple[Pipeline, Path]  # set in each worker process when it starts


def run_local(pipelines: list[Pipeline], folder: Path, workers: int) -> None:
    """Run the incomplete tasks of all pipelines on this host, one pipeline after another.

    Args:
        folder: the folder that contains a folder for each pipeline.
        workers: number of worker processes. With 1, the tasks run in this process.

    Raises:
        PreparationError: if a worker process died.
        Exception: if a task failed. Its exception is raised after the running tasks have completed.
    """
    for pipeline in pipelines:
        ranks = incomplete_tasks(pipeline, folder)
        tasks = (
            _in_pool(pipeline, folder, ranks, workers)
            if workers > 1
            else map(partial(_run_task, pipeline, folder), ranks)
        )
        try:
            for _ in tqdm(
                tasks,
                pipeline.name,
                pipeline.tasks,
                initial=pipeline.tasks - len(ranks),
                unit="task",
                mininterval=PROGRESS_S,
            ):
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
    """Run a task as datatrove's executors do, but without their console output, and write its completion marker."""
    logger.remove()
    data = None
    for block in deepcopy(pipeline.blocks):
        data = block(data, rank, pipeline.tasks)
    deque(data or (), maxlen=0)
    marker = _marker(pipeline, folder, rank)
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()


def _in_pool(pipeline: Pipeline, folder: Path, ranks: list[int], workers: int) -> Iterator[None]:
    """Run the tasks in a process pool and yield after each completed task.

    datatrove's own pool is not used because it would wait forever for a worker that died. Ctrl-C kills the workers
    immediately. Their incomplete tasks start again when the command is run again.
    """
    spawn = multiprocessing.get_context("spawn")  # fork is unsafe because tokenizers starts threads
    pool = ProcessPoolExecutor(workers, spawn, _start_worker, (dill.dumps((pipeline, folder)),))
    # The workers inherit this signal mask. Otherwise each worker would print a traceback on Ctrl-C.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        tasks = [pool.submit(_run_rank, rank) for rank in ranks]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for task in as_completed(tasks):
            yield task.result()
    except (KeyboardInterrupt, GeneratorExit):  # GeneratorExit: Ctrl-C between two tasks
        for worker in multiprocessing.active_children():
            worker.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(pickled: bytes) -> None:
    global _job
    _job = dill.loads(pickled)
    parent = multiprocessing.parent_process()
    assert parent is not None

    # Without this thread, the workers would keep writing files after their parent process was killed.
    def exit_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def _run_rank(rank: int) -> None:
    _run_task(*_job, rank)


def submit_slurm(
    pipelines: list[Pipeline],
    folder: Path,
    workers: int,
    partition: str,
    time: str,
    sbatch: dict[str, str],
    ids: Path,
) -> list[str]:
    """Submit each pipeline as a Slurm job array that depends on the job array of the previous pipeline.

    The folder of each pipeline contains the job script launch_script.slurm, and Slurm's output in slurm_logs.

    Args:
        folder: the folder that contains a folder for each pipeline.
        workers: maximum number of tasks that run at the same time, or -1 for no limit.
        time: time limit per task, in Slurm's format.
        sbatch: additional sbatch options.
        ids: the file for the job ids. It is updated after each submission, because a later one may fail.

    Returns:
        The job ids.

    Raises:
        DataError: if the path of `folder` contains characters that the shell interprets, or sbatch refused a job.
    """
    if shlex.quote(str(folder)) != str(folder):
        raise DataError(
            f"--executor slurm cannot use {folder}, because datatrove's job scripts do not quote paths. Choose an "
            "--output without spaces or shell metacharacters",
            code="shell_characters",
            key="--output",
        )
    logger.remove()  # silence datatrove's own log lines
    python_path, programs = shlex.quote(_python_path()), shlex.quote(str(Path(sys.executable).parent))
    environment = f"export PYTHONPATH={python_path}\nexport PATH={programs}:$PATH"
    jobs: list[str] = []
    for pipeline in pipelines:
        executor = SlurmPipelineExecutor(
            pipeline.blocks,
            tasks=pipeline.tasks,
            time=time,
            partition=partition,
            workers=workers,
            job_name=f"prepare_{pipeline.name}",
            qos=sbatch.get("qos", ""),
            env_command=environment,
            # Without this option, a job would stay in the queue forever after the job it depends on failed.
            sbatch_args={"kill-on-invalid-dep": "yes", **sbatch},
            depends_job_id=jobs[-1] if jobs else None,
            logging_dir=str(folder / pipeline.name),
            with_srun=False,  # each task has a single process
        )
        try:
            executor.launch_job()
        except (OSError, subprocess.CalledProcessError) as error:
            raise DataError(
                f"sbatch refused the job of pipeline {pipeline.name} ({error}). The job script is "
                f"{folder / pipeline.name / 'launch_script.slurm'}. Run the command on a login node of the cluster, "
                f"and check --slurm_partition, --slurm_time and --slurm_args. {ids} lists the jobs that were already "
                "submitted. Cancel them with scancel or let them finish, then run the same command again",
                code="sbatch_refused",
                key=pipeline.name,
            ) from error
        finally:  # The job array may be queued even if datatrove's statistics job, submitted after it, was refused.
            if executor.job_id not in (None, -1):  # -1 means that all tasks are complete
                jobs.append(str(executor.job_id))
                ids.write_text("\n".join(jobs), encoding="utf-8")
    return jobs


def running_slurm(ids: Path) -> list[str]:
    """Return the ids of the Slurm jobs listed in the file `ids` that are still pending or running.

    Jobs that Slurm no longer knows are assumed to have finished.

    Raises:
        PreparationError: if squeue failed and the state of the jobs is therefore unknown.
    """
    jobs = ids.read_text(encoding="utf-8").split() if ids.exists() else []
    if not jobs:
        return []
    listed = subprocess.run(
        ["squeue", "--noheader", "--format=%F", f"--jobs={','.join(jobs)}"], capture_output=True, text=True
    )
    # squeue reports "Invalid job id" for a job that finished long ago.
    if listed.returncode and "Invalid job id" not in listed.stderr:
        raise PreparationError(
            f"squeue failed with status {listed.returncode}: {listed.stderr.strip()}. The earlier jobs "
            f"{', '.join(jobs)} may still be running, so nothing was changed or submitted. Try again when Slurm "
            "responds",
            code="squeue_failed",
        )
    return sorted(set(listed.stdout.split()) & set(jobs))


def _python_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
