"""Run the stages of a preparation with datatrove's executors: on this machine, as Slurm jobs or on a Ray cluster.

Each stage has a folder with datatrove's logs and completion markers. Completed tasks do not run again.
"""

import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import dill
from datatrove.executor import base
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.executor.ray import RayPipelineExecutor
from datatrove.executor.slurm import SlurmPipelineExecutor
from datatrove.utils.logging import logger
from tqdm import tqdm

from model import install_command
from model.errors import UserError
from train.data.format import DataError
from train.prepare.tally import Stage

TAKEN_APART = re.compile(r"[\s\"'\\$`&;|<>()]")  # characters that the shell interprets
ROOT = Path(__file__).resolve().parent.parent.parent
PROGRESS_S = 5.0


class PreparationError(UserError, RuntimeError):
    """An error for tasks that did not complete; running the same command again may complete them."""

    code = "preparation"
    may_pass = True


_executor: LocalPipelineExecutor


def _log_to_file(folder: Any, rank: int, *others: Any, **named: Any) -> Any:
    """Replace datatrove's `add_task_logger`, and log to the task's file only.

    datatrove's function also prints the traceback of a failed task to the terminal, and another one if the disk of the
    log is full. The command reports the error itself.
    """
    logger.remove()
    file = folder.open(f"logs/task_{rank:05d}.log", "w")

    def write(line: str) -> None:
        with suppress(OSError):
            file.write(line)
            file.flush()

    logger.add(write, level="DEBUG")
    return file


def _run_task(executor: LocalPipelineExecutor, rank: int) -> None:
    base.add_task_logger = _log_to_file
    deepcopy(executor)._run_for_rank(rank)


def _start_worker(pickled: bytes) -> None:
    global _executor
    _executor = dill.loads(pickled)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_with_parent() -> None:  # or the workers of a killed parent would keep writing its files
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def _run_rank(rank: int) -> None:
    _run_task(_executor, rank)


def run_local(stages: list[Stage], folder: Path, workers: int) -> None:
    """Run the incomplete tasks of each stage in turn, with a progress bar per stage.

    Args:
        workers: the number of processes; with 1, the tasks run in this process.

    Raises:
        PreparationError: a worker died.
        Exception: the exception of a failed task, after the tasks already running have completed.
    """
    for stage in stages:
        executor = LocalPipelineExecutor(
            stage.pipeline, stage.tasks, workers, logging_dir=str(folder / stage.name)
        )
        ranks = executor.get_incomplete_ranks()
        if not ranks:
            continue
        done = stage.tasks - len(ranks)
        with tqdm(
            total=stage.tasks, initial=done, desc=stage.name, unit="task", mininterval=PROGRESS_S
        ) as progress:
            try:
                for _ in (
                    map(partial(_run_task, executor), ranks) if workers == 1 else _in_pool(executor, ranks)
                ):
                    progress.update()
            except BrokenProcessPool as error:
                left = len(executor.get_incomplete_ranks())
                raise PreparationError(
                    f"a worker process died in stage {stage.name} (it was killed or ran out of memory). "
                    f"{stage.tasks - left} of {stage.tasks} tasks are complete and kept. Run the same command again to "
                    "resume; if memory ran out, use fewer --workers",
                    code="worker_died",
                ) from error


def _in_pool(executor: LocalPipelineExecutor, ranks: list[int]) -> Iterator[None]:
    """Run the tasks in a process pool and yield after each one.

    datatrove's own pool would wait forever for a worker that died. Ctrl-C kills the workers at once; their incomplete
    tasks start again on the next run.
    """
    spawn = multiprocessing.get_context("spawn")  # fork is unsafe with the threads of tokenizers
    workers = min(executor.workers, len(ranks))
    pool = ProcessPoolExecutor(workers, spawn, _start_worker, (dill.dumps(executor),))
    # the workers inherit this mask: the terminal sends Ctrl-C to them as well, and each would print a traceback
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        tasks = [pool.submit(_run_rank, rank) for rank in ranks]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for task in as_completed(tasks):
            task.result()
            yield
    except (KeyboardInterrupt, GeneratorExit):  # GeneratorExit: Ctrl-C between two tasks
        for worker in multiprocessing.active_children():
            worker.kill()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        pool.shutdown(cancel_futures=True)


def run_ray(stages: list[Stage], folder: Path, workers: int) -> None:
    """Run the stages on the Ray cluster at RAY_ADDRESS, or start a local one if it is not set.

    Raises:
        DataError: ray is not installed.
        PreparationError: tasks failed.
    """
    try:
        import ray
    except ImportError as error:
        raise DataError(
            "--executor ray needs the package ray, which is not installed. Install it with "
            + install_command("ray", requirements="requirements-prep.txt"),
            code="package_missing",
            key="ray",
        ) from error
    logger.remove()  # datatrove's lines about itself
    started = not ray.is_initialized()
    if started:
        ray.init(runtime_env={"env_vars": {"PYTHONPATH": _python_path()}}, log_to_driver=False)
    try:
        for stage in stages:
            executor = RayPipelineExecutor(
                stage.pipeline, tasks=stage.tasks, workers=workers, logging_dir=str(folder / stage.name)
            )
            executor.run()
            if left := executor.get_incomplete_ranks():
                raise PreparationError(
                    f"{len(left)} of {stage.tasks} tasks of stage {stage.name} failed, the first one is task "
                    f"{left[0]}. See its log in {folder / stage.name / 'logs'}, or Ray's log. Run the same command "
                    "again to resume",
                    code="tasks_failed",
                    key=stage.name,
                )
    finally:
        if started:
            ray.shutdown()


def need_slurm(output: Path) -> None:
    """Check that Slurm's commands are available and that job scripts can use the path `output`.

    Raises:
        DataError: sbatch or squeue is missing, or the path has characters that the shell interprets, which datatrove
            does not quote.
    """
    if found := TAKEN_APART.search(str(output)):
        raise DataError(
            f"--executor slurm cannot use --output {output}: the path contains {found[0]!r}, and datatrove's job "
            "scripts do not quote paths. Choose an --output without this character",
            code="shell_characters",
            key="--output",
        )
    for command in ("sbatch", "squeue"):
        if shutil.which(command) is None:
            raise DataError(
                f"--executor slurm needs {command}, which is not on the PATH; run this on a login node of the cluster",
                code="command_missing",
                key=command,
            )


def submit_slurm(
    stages: list[tuple[Stage, Path]],
    workers: int,
    partition: str,
    time: str,
    sbatch: dict[str, str],
    ids: Path,
) -> list[str]:
    """Submit each stage as a job array that depends on the one before.

    The script of a stage is launch_script.slurm in its folder; Slurm's output is in slurm_logs there.

    Args:
        stages: each stage with its folder.
        workers: the number of tasks to run at a time, or -1 for all.
        sbatch: additional sbatch options.
        ids: a file to which each job id is appended at once, so that the jobs are known if a later one is refused.

    Returns:
        The job ids.

    Raises:
        DataError: sbatch refused a job.
    """
    logger.remove()  # datatrove's lines about itself
    python_path, programs = shlex.quote(_python_path()), shlex.quote(str(Path(sys.executable).parent))
    environment = f"export PYTHONPATH={python_path}\nexport PATH={programs}:$PATH"
    jobs: list[str] = []
    for stage, folder in stages:
        executor = SlurmPipelineExecutor(
            stage.pipeline,
            tasks=stage.tasks,
            time=time,
            partition=partition,
            workers=workers,
            job_name=f"prepare_{stage.name}",
            qos=sbatch.get("qos", ""),
            env_command=environment,
            # otherwise a job whose predecessor failed would stay in the queue forever
            sbatch_args={"kill-on-invalid-dep": "yes", **sbatch},
            depends_job_id=jobs[-1] if jobs else None,
            logging_dir=str(folder),
            with_srun=False,  # a task is one process
        )
        try:
            executor.launch_job()
        except (OSError, subprocess.CalledProcessError) as error:
            raise DataError(
                f"sbatch refused stage {stage.name} ({error}). Its script is {folder / 'launch_script.slurm'}. Check "
                f"--slurm_partition, --slurm_time and --slurm_args. {ids} lists the jobs already in the queue: cancel "
                "them (scancel) or let them finish, then run the same command again",
                code="sbatch_refused",
                key=stage.name,
            ) from error
        finally:  # the array may be queued even if datatrove's statistics job after it was refused
            if executor.job_id not in (None, -1):
                with open(ids, "a", encoding="utf-8") as file:
                    file.write(f"{executor.job_id}\n")
        if executor.job_id != -1:  # -1: all tasks are complete
            jobs.append(str(executor.job_id))
    return jobs


def running_slurm(jobs: list[str]) -> list[str]:
    """Return the jobs that are still pending or running. Jobs that Slurm no longer knows count as ended.

    Raises:
        PreparationError: squeue failed, so the state is unknown.
    """
    if not jobs or shutil.which("squeue") is None:
        return []
    listed = subprocess.run(
        ["squeue", "--noheader", "--format=%F", f"--jobs={','.join(jobs)}"], capture_output=True, text=True
    )
    # squeue calls the id of a job that ended long ago invalid
    if listed.returncode and "Invalid job id" not in listed.stderr:
        said = listed.stderr.strip() or f"it ended with status {listed.returncode}"
        raise PreparationError(
            f"squeue failed, so it is unknown whether the earlier jobs {', '.join(jobs)} are still running: {said}. "
            "Nothing was changed or submitted; try again when Slurm responds",
            code="squeue_failed",
        )
    return sorted(set(listed.stdout.split()) & set(jobs))


def _python_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
