"""Run the stages of a preparation with datatrove's executors: on this machine, as Slurm jobs or on a Ray cluster.

Each stage has a folder with datatrove's logs and completion markers. Completed tasks do not run again.
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
from datatrove.executor.ray import RayPipelineExecutor
from datatrove.executor.slurm import SlurmPipelineExecutor
from datatrove.utils.logging import logger
from tqdm import tqdm

from model import need
from model.errors import UserError
from train.data.format import DataError
from train.prepare.tally import Stage

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRESS_S = 5.0


class PreparationError(UserError, RuntimeError):
    """An error for tasks that did not complete; running the same command again may complete them."""

    code = "preparation"
    is_transient = True


_job: tuple[Stage, Path]  # of this worker process


def run_local(stages: list[Stage], folder: Path, workers: int) -> None:
    """Run the incomplete tasks of each stage in turn, with a progress bar per stage.

    Args:
        workers: the number of processes; with 1, the tasks run in this process.

    Raises:
        PreparationError: a worker died.
        Exception: the exception of a failed task, after the tasks already running have completed.
    """
    for stage in stages:
        ranks = incomplete_tasks(stage, folder)
        tasks = (
            _in_pool(stage, folder, ranks, workers)
            if workers > 1
            else map(partial(_run_task, stage, folder), ranks)
        )
        try:
            for _ in tqdm(
                tasks,
                stage.name,
                stage.tasks,
                initial=stage.tasks - len(ranks),
                unit="task",
                mininterval=PROGRESS_S,
            ):
                pass
        except BrokenProcessPool as error:
            raise PreparationError(
                f"a worker process died in stage {stage.name} (it was killed or ran out of memory). "
                f"{len(incomplete_tasks(stage, folder))} of {stage.tasks} tasks are left. Run the same command again "
                "to resume; if memory ran out, use fewer --workers",
                code="worker_died",
            ) from error


def incomplete_tasks(stage: Stage, folder: Path) -> list[int]:
    """Return the tasks without a completion marker, which all executors write to the same place."""
    return [rank for rank in range(stage.tasks) if not _marker(stage, folder, rank).exists()]


def _marker(stage: Stage, folder: Path, rank: int) -> Path:
    return folder / stage.name / "completions" / f"{rank:05d}"


def _run_task(stage: Stage, folder: Path, rank: int) -> None:
    """Run a task and mark it as completed, like datatrove's executors, but without their messages on the terminal."""
    logger.remove()
    data = None
    for block in deepcopy(stage.pipeline):
        data = block(data, rank, stage.tasks)
    deque(data or (), maxlen=0)
    marker = _marker(stage, folder, rank)
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()


def _in_pool(stage: Stage, folder: Path, ranks: list[int], workers: int) -> Iterator[None]:
    """Run the tasks in a process pool and yield after each one.

    datatrove's own pool would wait forever for a worker that died. Ctrl-C kills the workers at once; their incomplete
    tasks start again on the next run.
    """
    spawn = multiprocessing.get_context("spawn")  # fork is unsafe with the threads of tokenizers
    pool = ProcessPoolExecutor(workers, spawn, _start_worker, (dill.dumps((stage, folder)),))
    # the workers inherit this mask: the terminal sends Ctrl-C to them as well, and each would print a traceback
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

    def exit_with_parent() -> None:  # or the workers of a killed parent would keep writing its files
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def _run_rank(rank: int) -> None:
    _run_task(*_job, rank)


def run_ray(stages: list[Stage], folder: Path, workers: int) -> None:
    """Run the stages on the Ray cluster at RAY_ADDRESS, or start a local one if it is not set.

    Raises:
        SystemExit: ray is not installed.
        PreparationError: tasks failed.
    """
    need("--executor ray", "ray", requirements="requirements-prep.txt")
    import ray

    logger.remove()  # datatrove's lines about itself
    with ray.init(runtime_env={"env_vars": {"PYTHONPATH": _python_path()}}, log_to_driver=False):
        for stage in stages:
            RayPipelineExecutor(
                stage.pipeline, tasks=stage.tasks, workers=workers, logging_dir=str(folder / stage.name)
            ).run()
            if left := incomplete_tasks(stage, folder):
                raise PreparationError(
                    f"{len(left)} of {stage.tasks} tasks of stage {stage.name} failed, the first one is task "
                    f"{left[0]}. See its log in {folder / stage.name / 'logs'}, or Ray's log. Run the same command "
                    "again to resume",
                    code="tasks_failed",
                    key=stage.name,
                )


def submit_slurm(
    stages: list[Stage],
    folder: Path,
    workers: int,
    partition: str,
    time: str,
    sbatch: dict[str, str],
    ids: Path,
) -> list[str]:
    """Submit each stage as a job array that depends on the one before.

    The script of a stage is launch_script.slurm in its folder; Slurm's output is in slurm_logs there.

    Args:
        folder: the folder with the folders of all stages.
        workers: the number of tasks to run at a time, or -1 for all.
        sbatch: additional sbatch options.
        ids: a file to which each job id is appended at once, so that the jobs are known if a later one is refused.

    Returns:
        The job ids.

    Raises:
        DataError: the path of the folder has characters that the shell interprets, or sbatch refused a job.
    """
    if shlex.quote(str(folder)) != str(folder):
        raise DataError(
            f"--executor slurm cannot use {folder}: datatrove's job scripts do not quote paths. Choose an --output "
            "without spaces and characters that the shell interprets",
            code="shell_characters",
            key="--output",
        )
    logger.remove()  # datatrove's lines about itself
    python_path, programs = shlex.quote(_python_path()), shlex.quote(str(Path(sys.executable).parent))
    environment = f"export PYTHONPATH={python_path}\nexport PATH={programs}:$PATH"
    jobs: list[str] = []
    for stage in stages:
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
            logging_dir=str(folder / stage.name),
            with_srun=False,  # a task is one process
        )
        try:
            executor.launch_job()
        except (OSError, subprocess.CalledProcessError) as error:
            raise DataError(
                f"sbatch refused stage {stage.name} ({error}). Its script is "
                f"{folder / stage.name / 'launch_script.slurm'}. Check that this is a login node of the cluster, and "
                f"--slurm_partition, --slurm_time and --slurm_args. {ids} lists the jobs already in the queue: cancel "
                "them (scancel) or let them finish, then run the same command again",
                code="sbatch_refused",
                key=stage.name,
            ) from error
        finally:  # the array may be queued even if datatrove's statistics job after it was refused
            if executor.job_id not in (None, -1):  # -1: all tasks are complete
                jobs.append(str(executor.job_id))
                ids.write_text("\n".join(jobs), encoding="utf-8")
    return jobs


def running_slurm(ids: Path) -> list[str]:
    """Return the jobs in the file `ids` that are still pending or running. Jobs that Slurm forgot count as ended.

    Raises:
        PreparationError: squeue failed, so the state is unknown.
    """
    jobs = ids.read_text(encoding="utf-8").split() if ids.exists() else []
    if not jobs:
        return []
    listed = subprocess.run(
        ["squeue", "--noheader", "--format=%F", f"--jobs={','.join(jobs)}"], capture_output=True, text=True
    )
    # squeue calls the id of a job that ended long ago invalid
    if listed.returncode and "Invalid job id" not in listed.stderr:
        raise PreparationError(
            f"squeue failed with status {listed.returncode}, so it is unknown whether the earlier jobs "
            f"{', '.join(jobs)} are still running: {listed.stderr.strip()}. Nothing was changed or submitted; try "
            "again when Slurm responds",
            code="squeue_failed",
        )
    return sorted(set(listed.stdout.split()) & set(jobs))


def _python_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
