"""How the stages of a preparation are run: on this machine, as Slurm jobs, or on a Ray cluster; datatrove's executors.

Each stage has a folder with datatrove's logs and its marks of completed tasks: what is completed does not run again.
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

TAKEN_APART = re.compile(r"[\s\"'\\$`&;|<>()]")  # by the shell
ROOT = Path(__file__).resolve().parent.parent.parent
PROGRESS_S = 5.0


class PreparationError(UserError, RuntimeError):
    """Tasks did not end; the same command again may complete them."""

    code = "preparation"
    may_pass = True


_executor: LocalPipelineExecutor


def _log_to_file(folder: Any, rank: int, *others: Any, **named: Any) -> Any:
    """In the place of datatrove's, which writes the traceback of a task that failed to the terminal as well, and
    another one where the log is on a full disk; what happened the command says in its last line."""
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

    def exit_with_parent() -> None:  # a killed parent would leave its workers at work on its files
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def _run_rank(rank: int) -> None:
    _run_task(_executor, rank)


def run_local(stages: list[Stage], folder: Path, workers: int) -> None:
    """Run the tasks of the stages that are not completed, one stage after the other, in `workers` processes (1: in this
    one), with a progress bar for each stage.

    Raises:
        PreparationError: a worker died.
        Exception: what a task raised; the others that had begun are completed first.
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
                    f"a worker process died (killed, or out of memory) in stage {stage.name}: {stage.tasks - left} of "
                    f"{stage.tasks} tasks are done and kept. Run the same command again to resume, with fewer "
                    "--workers if memory was short",
                    code="worker_died",
                ) from error


def _in_pool(executor: LocalPipelineExecutor, ranks: list[int]) -> Iterator[None]:
    """Yield after each task. datatrove's own pool would wait for ever for a worker that died. Ctrl-C ends the workers
    at once; a task that is not completed starts again."""
    spawn = multiprocessing.get_context("spawn")  # fork is unsafe beside the tokenizers' threads
    workers = min(executor.workers, len(ranks))
    pool = ProcessPoolExecutor(workers, spawn, _start_worker, (dill.dumps(executor),))
    # the workers inherit this: a terminal sends Ctrl-C to them as well, and each would print a traceback
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        tasks = [pool.submit(_run_rank, rank) for rank in ranks]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for task in as_completed(tasks):
            task.result()
            yield
    except (KeyboardInterrupt, GeneratorExit):  # the latter: Ctrl-C came between two tasks
        for worker in multiprocessing.active_children():
            worker.kill()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        pool.shutdown(cancel_futures=True)


def run_ray(stages: list[Stage], folder: Path, workers: int) -> None:
    """Run the stages on the Ray cluster that RAY_ADDRESS names, else on one that is started here.

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
                    f"{len(left)} of {stage.tasks} tasks of stage {stage.name} failed, the first is {left[0]}: see its "
                    f"log in {folder / stage.name / 'logs'}, or Ray's. Run the same command again to go on",
                    code="tasks_failed",
                    key=stage.name,
                )
    finally:
        if started:
            ray.shutdown()


def need_slurm(output: Path) -> None:
    """That there are the commands which submit jobs and tell of them, and that jobs can find `output`.

    Raises:
        DataError: there is no sbatch, or no squeue; or bash would take the path apart, which datatrove does not quote.
    """
    if found := TAKEN_APART.search(str(output)):
        raise DataError(
            f"--executor slurm: datatrove's job scripts do not quote paths, and the shell would take {output} apart at "
            f"{found[0]!r}; choose an --output without it",
            code="shell_characters",
            key="--output",
        )
    for command in ("sbatch", "squeue"):
        if shutil.which(command) is None:
            raise DataError(
                f"--executor slurm: there is no {command} on the PATH; run this on a login node of the cluster",
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
    """Submit each stage as a job array that waits for the one before; returns the ids of the jobs.

    Each is also appended to the file `ids` at once: those before a stage that is refused are in the queue. The scripts
    are left in the stages' folders as launch_script.slurm, Slurm's output in slurm_logs beside them.

    Raises:
        DataError: sbatch refuses a job.
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
            # a job whose predecessor failed would wait in the queue for ever
            sbatch_args={"kill-on-invalid-dep": "yes", **sbatch},
            depends_job_id=jobs[-1] if jobs else None,
            logging_dir=str(folder),
            with_srun=False,  # a task is one process
        )
        try:
            executor.launch_job()
        except (OSError, subprocess.CalledProcessError) as error:
            raise DataError(
                f"sbatch refused stage {stage.name} ({error}); its script is {folder / 'launch_script.slurm'}. See "
                f"--slurm_partition, --slurm_time, --slurm_args. {ids} lists the jobs that are in the queue already: "
                "cancel them (scancel), or let them end, and run the same command again",
                code="sbatch_refused",
                key=stage.name,
            ) from error
        finally:  # the array may be in the queue although the job after it, for datatrove's statistics, is refused
            if executor.job_id not in (None, -1):
                with open(ids, "a", encoding="utf-8") as file:
                    file.write(f"{executor.job_id}\n")
        if executor.job_id != -1:  # -1: all its tasks are completed
            jobs.append(str(executor.job_id))
    return jobs


def running_slurm(jobs: list[str]) -> list[str]:
    """Which of the jobs still wait or run; none where Slurm does not know them any more.

    Raises:
        PreparationError: squeue fails, so that nobody knows.
    """
    if not jobs or shutil.which("squeue") is None:
        return []
    listed = subprocess.run(
        ["squeue", "--noheader", "--format=%F", f"--jobs={','.join(jobs)}"], capture_output=True, text=True
    )
    # an id is invalid to it when its job ended long ago
    if listed.returncode and "Invalid job id" not in listed.stderr:
        said = listed.stderr.strip() or f"it ended with status {listed.returncode}"
        raise PreparationError(
            f"squeue does not tell whether the jobs {', '.join(jobs)} of an earlier call still wait or run: {said}. "
            "Nothing was changed or submitted; try again when Slurm answers",
            code="squeue_failed",
        )
    return sorted(set(listed.stdout.split()) & set(jobs))


def _python_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
