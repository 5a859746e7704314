#!/usr/bin/env python3
"""Start one process per rank on this node, forward signals, and return a meaningful exit status.

    python train/launch.py --nproc 8 train/train.py CONFIG [--key value]...
    srun --ntasks-per-node=1 --cpus-per-task=64 python train/launch.py --nproc 8 --nnodes 4 --master_addr HOST \\
        --master_port 29500 train/train.py CONFIG         (SLURM_PROCID sets --node_rank)
    python train/launch.py --supervise [CONFIG] [--key value]...        (run_training.sh calls this)

Use this launcher instead of torchrun or deepspeed if you need the exit status. torchrun and deepspeed return 1 for
every failure, and wait 30 seconds for the other ranks when one rank dies. This launcher terminates the other ranks
within seconds and reports which rank failed. It forwards SIGTERM, SIGUSR1 and SIGHUP to all ranks as SIGUSR1, then
waits while the ranks save a checkpoint. The first Ctrl-C also requests a stop. A second Ctrl-C, or a Ctrl-C after
another signal, terminates the ranks immediately.

Before the launcher starts train/train.py, it checks the configuration and this node (train/preflight).

--supervise prepares the built-in corpus if the run needs it, trains, restarts after a crash, requeues the Slurm job
after a stop request, and generates sample text at the end. The supervisor reads CONFIG once, so that a later edit of
the file affects neither restarts nor requeued jobs. The options of the supervisor are environment variables, which are
documented at the top of run_training.sh. In a Slurm job with several nodes or a container, srun starts one launcher per
node.

Exit status: 0 if all ranks returned 0; STOPPED (75) if they stopped on request; INTERRUPTED (130) after Ctrl-C; 2 if
the command, the configuration or the environment has to be fixed first. Otherwise, it is the status of the rank that
failed first, or 128 + n if signal n killed that rank.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import FrameType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # avoids a traceback during the imports below

from model import require_packages

require_packages("starting ranks", "pydantic")

from model.errors import UserError
from model.keys import between
from train.checkpoint.files import committed, identity
from train.config.load import CONFIGURATION, load_arguments, load_deepspeed, read_configuration
from train.files import describe_error, is_transient, remove_dead_buffers, write_durably
from train.monitor import signals
from train.monitor.signals import DO_NOT_RESTART, INTERRUPTED, SIGNALS, STOPPED
from train.preflight.check import CHECKED, check
from train.preflight.machine import cuda_devices
from train.preflight.sizes import completion
from train.rank_env import LauncherError, check_only_node, first_hostname, step_port
from train.record.log import configure_logging
from train.record.run_folder import RunFolder

logger = logging.getLogger(__name__)
TRAIN = ROOT / "train/train.py"
CRASHED = 1
# The supervisor sets this environment variable for the attempts after the first one.
RESTARTED = "FP8_RESTARTED"

POLL_S = 0.2
# Time for the other ranks to print their errors after one rank fails. Rank 0 prints first, the others 2 s later.
FAILED_GRACE_S = 4.0
# Time for the other ranks to exit after one rank has stopped on request. All ranks commit the checkpoint before that.
STOPPED_GRACE_S = 60.0
# Pause before a restart after an attempt without progress, so that a port, file system or node can recover.
PAUSE_S = 30.0

# The default configuration. Its batch is too small for more than two ranks.
TINY, TINY_RANKS = ROOT / "train_args/train_config_tiny.json", 2
# Name of the Python standard library's source code as a corpus, in train_args/ and prepare_data.py.
EMBEDDED_CORPUS = "python-stdlib"
INSTALL = 'set -euo pipefail; source "$ROOT/scripts/setup_env.sh"; install_requirements "$ROOT/requirements-prep.txt"'


def main(argv: list[str]) -> int:
    configure_logging()
    try:
        if argv[:1] == ["--supervise"]:
            return Supervisor(argv[1:], Children()).run()
        return run_ranks(parse_arguments(argv), Children())
    except (UserError, ValueError, OSError) as error:
        return report(error)


def report(error: Exception) -> int:
    """Log an error, and return the exit status: CRASHED if a restart may help, otherwise DO_NOT_RESTART.

    In a restarted job, every error returns CRASHED, because the first attempt passed the same checks. The cause may
    therefore be temporary, such as an unavailable file system.
    """
    logger.error(describe_error(error))
    return CRASHED if is_transient(error) or os.environ.get(RESTARTED) else DO_NOT_RESTART


# ---------------------------------------------------------------- decisions: pure functions


def should_restart(status: int, stop_requested: bool, made_progress: bool, is_retry: bool) -> bool:
    """Return whether to restart the training after an attempt has ended.

    Args:
        status: Exit status of the attempt.
        stop_requested: Whether a signal has asked this job to stop.
        made_progress: Whether the attempt logged a new step or saved a new checkpoint.
        is_retry: Whether the previous attempt made no progress. Two consecutive attempts without progress end the job.
    """
    if status in (0, STOPPED, DO_NOT_RESTART, INTERRUPTED) or stop_requested:
        return False
    return made_progress or not is_retry


def exit_status(failed: dict[int, int], stop_requested: bool, interrupted: bool) -> tuple[int, int | None]:
    """Determine the exit status of a job from the return codes of its failed processes.

    Args:
        failed: Maps the index of each failed process to its return code, in the order in which the processes exited.
            The return code is -n if signal n killed the process.

    Returns:
        The exit status, and the index of the process to report as the cause. The index is None if nothing needs to be
        reported.
    """
    if not failed:
        return 0, None
    if (
        INTERRUPTED in failed.values()
    ):  # other ranks failed because they lost the connection to the interrupted rank
        return INTERRUPTED, None
    if set(failed.values()) == {STOPPED}:
        return STOPPED, None
    # The cause is the first killed rank, or else the first rank with an error that a restart cannot fix. Other ranks
    # fail because they lose their connection to it.
    order = {DO_NOT_RESTART: 1, STOPPED: 3}
    cause = min(failed, key=lambda index: 0 if failed[index] < 0 else order.get(failed[index], 2))
    status = failed[cause] if failed[cause] >= 0 else 128 - failed[cause]
    # the signal killed the rank before its signal handler was installed, so no step was done
    if stop_requested and status - 128 in SIGNALS:
        return INTERRUPTED if interrupted else STOPPED, None
    # rank 0 has already printed the error
    return status, None if (cause, status) == (0, DO_NOT_RESTART) else cause


def grace_period_s(failed: dict[int, int]) -> float:
    """Return how long the other ranks may take to exit after a failure, in seconds.

    Args:
        failed: The failed processes as in `exit_status`.
    """
    if failed.get(0) == DO_NOT_RESTART:  # the other ranks would print the same error
        return 0.0
    return STOPPED_GRACE_S if set(failed.values()) == {STOPPED} else FAILED_GRACE_S


# ---------------------------------------------------------------- processes and signals


class Children:
    """Manager for the launcher's child processes.

    It starts the processes, forwards stop requests to them, and waits for them to exit.
    """

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen] = []
        self.stop_requested = self.interrupted = self.ends_at_once = False
        self.are_training = True
        signals.install(self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Forward a stop request to the child processes as SIGUSR1.

        srun forwards SIGUSR1 to its tasks, whereas SIGTERM might terminate srun itself. Ctrl-C is not forwarded to data
        preparation: the terminal has already sent SIGINT to that process, and a second signal would interrupt its
        cleanup.
        """
        if number == signal.SIGINT:
            self.ends_at_once = self.stop_requested
            self.interrupted = True
        self.stop_requested = True
        if not self.ends_at_once and (self.are_training or number != signal.SIGINT):
            self._send(signal.SIGUSR1)

    def _send(self, number: int) -> None:
        for process in self.processes:
            # send_signal() polls the process, and a signal handler must not reap a process that wait() is waiting for
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def run_program(self, command: list[str], are_training: bool = False) -> int:
        """Run a command such as srun or data preparation, and return its exit status.

        If the launcher is killed, the command receives SIGUSR1, so that ranks started by srun save a checkpoint and
        stop.
        """
        self.processes, self.are_training = [], are_training
        self._start(command, None, signal.SIGUSR1)
        failed = self._wait()
        self._send_and_wait(signal.SIGINT)
        return exit_status(failed, self.stop_requested, self.interrupted)[0]

    def run_ranks(self, command: list[str], environments: list[dict[str, str]]) -> int:
        """Run the ranks of this node and return their exit status. Log which rank failed first.

        If the launcher is killed, the ranks receive SIGKILL, so that no rank keeps using a GPU.
        """
        self.processes, self.are_training = [], True
        try:
            for environment in environments:
                self._start(command, environment, signal.SIGKILL)
            failed = self._wait()
        finally:
            self._send_and_wait(signal.SIGKILL)
            remove_dead_buffers()
        status, cause = exit_status(failed, self.stop_requested, self.interrupted)
        if cause is not None:
            report_failure(environments[cause]["RANK"], failed[cause])
        return status

    def _start(self, command: list[str], environment: dict[str, str] | None, exit_signal: int) -> None:
        # The child inherits the blocked signal. Otherwise Ctrl-C during its imports would print a traceback.
        blocked = [signal.SIGINT] if environment else []
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        before = signals.signal_on_parent_exit(exit_signal)
        self.processes.append(subprocess.Popen(command, env=environment, preexec_fn=before))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        if self.stop_requested:  # the request came before the child existed
            self._send(signal.SIGUSR1)

    def _wait(self) -> dict[int, int]:
        """Wait until all child processes have exited, the grace period after a failure is over, or Ctrl-C is repeated.

        Returns:
            The failed processes as in `exit_status`. The result is {0: INTERRUPTED} after a second Ctrl-C.
        """
        failed: dict[int, int] = {}
        deadline = math.inf
        while not self.ends_at_once:
            for index, process in enumerate(self.processes):
                if index not in failed and process.poll() not in (None, 0):
                    failed[index] = process.returncode
                    deadline = min(deadline, time.monotonic() + grace_period_s(failed))
            if time.monotonic() > deadline or all(p.returncode is not None for p in self.processes):
                break
            time.sleep(POLL_S)
        return {0: INTERRUPTED} if self.ends_at_once else failed

    def _send_and_wait(self, number: int) -> None:
        """Send the signal `number` to the child processes that are still running, and wait until they have exited."""
        self._send(number)
        for process in self.processes:
            process.wait()

    def pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until a stop is requested."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.stop_requested:
            time.sleep(POLL_S)


def report_failure(rank: str, code: int) -> None:
    """Log which rank caused the job to end and how that rank exited.

    After SIGKILL, which the rank itself cannot report, also log the likely reason.
    """
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    reason = (
        ". The host may have run out of memory (check dmesg or Slurm's sacct). If so, use fewer ranks per node, or "
        "pass --save_async false"
    )
    logger.error(f"rank {rank} {how}{reason if code == -signal.SIGKILL else ''}")


def free_port() -> int:
    """Return a TCP port that is currently free.

    Rank 0 binds the port only after its imports. The port is below the range of ephemeral ports, so that no outgoing
    connection can use it in the meantime.
    """
    while True:
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("", port := random.randrange(20000, 32000)))
            return port


# ---------------------------------------------------------------- the ranks of this node


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--nproc", type=between(1), required=True, help="number of ranks on this node")
    parser.add_argument("--nnodes", type=between(1), default=1, help="number of nodes (default: 1)")
    parser.add_argument(
        "--node_rank",
        type=between(0),
        default=os.environ.get("SLURM_PROCID") or 0,
        help="rank of this node, 0 to nnodes - 1 (default: SLURM_PROCID, or 0)",
    )
    parser.add_argument(
        "--master_addr", help="host name or address of node 0 (default for one node: 127.0.0.1)"
    )
    parser.add_argument(
        "--master_port",
        type=between(1, 65535),
        help="free TCP port on node 0 (default for one node: any free port)",
    )
    parser.add_argument("script", help="Python script that each rank runs, such as train/train.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    options = parser.parse_args(argv)
    if not options.script.endswith(".py"):
        parser.error(
            f"{options.script} is not a Python script; to train, pass train/train.py before the configuration"
        )
    if options.nnodes > 1 and not (options.master_addr and options.master_port):
        parser.error(
            "multi-node runs require --master_addr and --master_port; pass the same values on every node"
        )
    if options.node_rank >= options.nnodes:
        parser.error(
            f"--node_rank is {options.node_rank}, but it must be less than --nnodes ({options.nnodes})"
        )
    if options.nnodes == 1:
        check_only_node()
    return options


def run_ranks(options: argparse.Namespace, children: Children) -> int:
    """Start the ranks of this node and return their exit status. For train.py, check the configuration first.

    Raises:
        UserError, ValueError: The configuration or this node does not pass the checks.
    """
    world = options.nnodes * options.nproc
    if Path(options.script).resolve() == TRAIN:
        remarks = check(load_arguments(options.arguments), world, options.nproc, cuda_devices())
        if options.node_rank == 0 and remarks:
            logger.info("\n".join(remarks))
        os.environ[CHECKED] = "1"
    environment = dict(
        os.environ,
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(options.nproc),
        LOCAL_SIZE=str(options.nproc),  # DeepSpeed's name for it
        MASTER_ADDR=options.master_addr or "127.0.0.1",
        MASTER_PORT=str(options.master_port or free_port()),
    )
    first = options.node_rank * options.nproc
    ranks = [
        {**environment, "RANK": str(first + local), "LOCAL_RANK": str(local)}
        for local in range(options.nproc)
    ]
    return children.run_ranks([sys.executable, "-u", options.script, *options.arguments], ranks)


# ---------------------------------------------------------------- the supervisor


def setting(name: str, default: str = "") -> str:
    """Return the value of an environment variable, or `default` if the variable is unset or empty."""
    return os.environ.get(name) or default


class Supervisor:
    """Supervisor of a training job. It prepares the data, trains with restarts, and generates sample text.

    The top of run_training.sh documents the behavior and the settings.

    Args:
        argv: Command line of train.py. Without CONFIG, the configuration TINY is used.
        children: The child processes of this launcher.

    Raises:
        UserError, ValueError: The command line or a setting is invalid.
    """

    def __init__(self, argv: list[str], children: Children):
        self.children = children
        is_tiny = not argv or argv[0].startswith("--")
        self.argv = [str(TINY), *argv] if is_tiny else [*argv]
        self.slurm_job = setting("SLURM_JOB_ID")
        # records how this Slurm job started; a job may run several command lines
        self.record = Path(f"slurm-{self.slurm_job}-{zlib.crc32(json.dumps(self.argv).encode()):08x}.json")
        first = None
        if setting("SLURM_RESTART_COUNT", "0") != "0" and self.record.is_file():
            logger.info(
                f"using the configuration that this Slurm job recorded when it first started ({self.record})"
            )
            self.raw, self.source, first = json.loads(self.record.read_text())
        else:
            self.raw, self.source = read_configuration(self.argv)
        self.arguments = load_arguments(self.argv, (self.raw, self.source))
        self.raw["deepspeed"] = load_deepspeed(self.arguments.deepspeed)
        self.folder = RunFolder(self.arguments.output_dir)
        # Identity of the newest checkpoint when this job first started. A requeued Slurm job runs the same command line
        # again. It must resume only from checkpoints that it has saved itself. Older checkpoints may still exist if the
        # first start ended before it could move them away.
        self.first = read_progress(self.folder).identity if first is None else first
        if not (most := setting("MAX_RESTARTS", "3")).isdecimal():
            raise LauncherError(
                f"MAX_RESTARTS is {most!r}; set MAX_RESTARTS to 0 or a positive integer", key="MAX_RESTARTS"
            )
        self.max_restarts = int(most)
        self.srun = srun_command()
        self.rank_options = rank_options(TINY_RANKS if is_tiny else math.inf, by_srun=bool(self.srun))
        self.options = parse_arguments([*self.rank_options, str(TRAIN)])

    def run(self) -> int:
        """Prepare the data and train. Requeue the Slurm job after a stop request, or generate sample text at the end.

        Returns:
            The exit status.
        """
        set_environment(self.options.nproc)
        nodes = f" on each of {self.options.nnodes} nodes" if self.options.nnodes > 1 else ""
        logger.info(f"starting {self.options.nproc} rank{'s' * (self.options.nproc > 1)}{nodes}")
        was_complete = bool(completion(self.arguments))  # train.py reports it
        status = self.prepare() or (self.start_ranks() if self.arguments.dry_run else self.train())
        is_first_node = self.options.node_rank == 0
        # after Ctrl-C the user decides when to start again
        may_requeue = self.slurm_job and setting("REQUEUE", "1") != "0" and not self.children.interrupted
        if status == STOPPED and may_requeue and is_first_node:
            logger.info(f"training: requeueing Slurm job {self.slurm_job}")
            subprocess.call(["bash", "-c", f"scontrol requeue {self.slurm_job}"])
        if status != STOPPED and is_first_node:
            with contextlib.suppress(OSError):
                self.record.unlink(missing_ok=True)
        has_sample = self.arguments.save_strategy != "no" and not setting("CONTAINER_IMAGE")
        is_wanted = not (status or was_complete or self.arguments.dry_run or self.children.stop_requested)
        is_wanted &= setting("DEMO") != "0"
        if is_wanted and has_sample and is_first_node:
            self.run_demo()
        return status

    def prepare(self) -> int:
        """Prepare the built-in corpus on the first node if the run uses it.

        Returns:
            The exit status of the first command that fails, or 0.
        """
        folders = [Path(f) for f in self.arguments.data.sources.values() if Path(f).name == EMBEDDED_CORPUS]
        # data preparation writes this file last
        corpus = next((folder for folder in folders if not (folder / "manifest.json").is_file()), None)
        if corpus is None:
            return 0
        if self.options.node_rank:
            logger.error(
                f"error: node 0 prepares {corpus}. Repeat this command when {corpus}/manifest.json exists"
            )
            return 2
        logger.info(
            f"data: preparing the built-in corpus (source code of the Python standard library) in {corpus}"
        )
        given, tokenizer = ["--input", EMBEDDED_CORPUS], corpus.parent / "tokenizer-4096"
        programs = [["bash", "-c", INSTALL]]
        if not (tokenizer / "tokenizer_config.json").is_file():
            options = ["--vocab_size", "4096", "--output", str(tokenizer)]
            programs.append(python("train/train_tokenizer.py", *given, *options))
        # the corpus has about 600 files, so a larger share than the default is needed for a meaningful evaluation
        options = ["--tokenizer", str(tokenizer), "--output", str(corpus), "--eval_fraction", "0.05"]
        programs.append(python("train/prepare_data.py", *given, *options))
        os.environ.update(ROOT=str(ROOT), PY=sys.executable)  # for setup_env.sh
        return next(filter(None, map(self.children.run_program, programs)), 0)

    def train(self) -> int:
        """Train until the run is complete, is stopped or has no restarts left. Return the exit status."""
        if self.slurm_job and self.options.node_rank == 0:
            write_durably(self.record, json.dumps((self.raw, self.source, self.first), indent=1) + "\n")
        restarts, is_retry, now = 0, False, Progress("", 0)
        while True:
            status, before, now = self.attempt(now)
            if now.identity not in ("", before.identity):
                restarts = 0
            made_progress = now.identity != before.identity or now.step > before.step
            if restarts >= self.max_restarts or not should_restart(
                status, self.children.stop_requested, made_progress, is_retry
            ):
                return status
            restarts, is_retry = restarts + 1, not made_progress
            os.environ[RESTARTED] = "1"
            pause = f" after a pause of {PAUSE_S:g} s, because there was no progress" * is_retry
            logger.warning(
                f"training failed with exit status {status}; starting restart {restarts} of "
                f"{self.max_restarts}{pause}"
            )
            self.children.pause(PAUSE_S * is_retry)

    def attempt(self, last: Progress) -> tuple[int, Progress, Progress]:
        """Train once.

        Args:
            last: Progress after the previous attempt.

        Returns:
            The exit status, and the progress of the run before and after the attempt.
        """
        status, before, now = 0, last, last
        try:
            found = read_progress(self.folder)
            if last.identity and not found.identity:
                raise LauncherError(
                    f"the checkpoints of this run are no longer in {self.folder.checkpoints}. Restore them, or "
                    "start a new run",
                    key="output_dir",
                )
            before = now = found
            # After this job has saved a checkpoint, a restart resumes from it, even if the command line requests a new
            # run or another checkpoint.
            resume = {} if before.identity in ("", self.first) else {"resume_from_checkpoint": "auto"}
            self.folder.stopped.unlink(missing_ok=True)
            status = self.start_ranks(**resume)
            if self.folder.stopped.is_file():  # srun merges the exit statuses of all nodes into one
                status = STOPPED
            now = read_progress(self.folder)
        except (UserError, ValueError, OSError) as error:
            status = status or report(error)
        return status, before, now

    def start_ranks(self, **changes: str) -> int:
        """Run all ranks of this job once and return their exit status.

        Args:
            changes: Configuration keys to override for this attempt, and their values.
        """
        if self.children.stop_requested:  # the request came while no rank was running
            return INTERRUPTED if self.children.interrupted else STOPPED
        os.environ[CONFIGURATION] = json.dumps((self.raw | changes, self.source))
        words = (word for key, value in changes.items() for word in (f"--{key}", value))
        self.options.arguments = [*self.argv, *words]
        if not self.srun:
            return run_ranks(self.options, self.children)
        python = setting("CONTAINER_PYTHON", "python3") if setting("CONTAINER_IMAGE") else sys.executable
        launcher = [python, str(ROOT / "train/launch.py"), *self.rank_options, str(TRAIN)]
        return self.children.run_program([*self.srun, *launcher, *self.options.arguments], are_training=True)

    def run_demo(self) -> None:
        """Generate sample text. A failure does not change the exit status, because the training is complete."""
        compute = self.arguments.precision.compute
        how = "--max_new_tokens 96 --temperature 0.8 --top_k 50 --seed 1 --ignore_eos --precision".split()
        asked = ["--model", str(self.folder.path), "--prompt", setting("DEMO_PROMPT", "def __init__(self,")]
        demo = python("fp8_inference_demo/fp8_inference.py", *asked)
        logger.info(f"\ndemo: {shlex.join(['python', os.path.relpath(demo[1]), *asked])}")
        status = self.children.run_program([*demo, *how, compute if compute in ("fp32", "fp8") else "bf16"])
        if status and not self.children.stop_requested:
            logger.warning(
                f"the training is complete, but the demo failed with exit status {status}. To skip the demo, set DEMO=0"
            )


class Progress(NamedTuple):
    """Progress of a run, used to decide whether a failed attempt is followed by a restart.

    `identity` identifies the newest checkpoint ("" without a checkpoint). `step` is the last step in metrics.jsonl.
    """

    identity: str
    step: int


def read_progress(folder: RunFolder) -> Progress:
    newest = next(reversed(committed(folder.checkpoints)), None)
    lines = folder.metrics.read_bytes() if folder.metrics.is_file() else b""
    step = max(map(int, re.findall(rb'^.*?"step": *(\d+)', lines, re.MULTILINE)), default=0)
    return Progress(f"{newest} {identity(newest)}" if newest else "", step)


def rank_options(most: float, by_srun: bool) -> list[str]:
    """Convert the environment variables of run_training.sh to command-line options for this launcher.

    Args:
        most: Maximum number of ranks per node if NPROC is not set.
        by_srun: Whether srun starts one launcher per node of a Slurm job.
    """
    names = {"NPROC": "--nproc", "MASTER_PORT": "--master_port"}
    found: dict[str, str] = {}
    if by_srun:
        found = {
            "--nnodes": setting("SLURM_NNODES", "1"),
            "--master_addr": first_hostname(setting("SLURM_JOB_NODELIST")),
            "--master_port": step_port(setting("SLURM_JOB_ID")),
        }
    elif setting("NNODES"):
        names |= {"NNODES": "--nnodes", "NODE_RANK": "--node_rank", "MASTER_ADDR": "--master_addr"}
        found = {"--master_port": "29500"}
    found |= {option: setting(name) for name, option in names.items() if setting(name)}
    if "--nproc" not in found:
        found["--nproc"] = str(min(count_devices(), most))
    return [word for pair in found.items() for word in pair]


def count_devices() -> int:
    """Return the default number of ranks on this node: one per CUDA device, or 2 on a node without a GPU."""
    devices = cuda_devices()
    if setting("HAS_GPU") == "1" and not devices:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
        raise LauncherError(
            f"this node has a GPU, but CUDA finds no device. CUDA_VISIBLE_DEVICES is {visible}. Check this "
            "variable and the GPU driver",
            key="CUDA_VISIBLE_DEVICES",
        )
    return len(devices) if devices else 2


def srun_command() -> list[str]:
    """Return the srun command that starts one launcher per node of a Slurm job, or [] if srun is not needed.

    If CONTAINER_IMAGE is set, the ranks run in this container image with Pyxis. This repository and the working folder
    are mounted in the container under the same paths.

    Raises:
        LauncherError: CONTAINER_IMAGE is set outside of a Slurm job, or together with NNODES.
    """
    nodes, image, here = setting("SLURM_NNODES", "1"), setting("CONTAINER_IMAGE"), os.getcwd()
    by_hand = setting("NNODES") or not setting("SLURM_JOB_ID")
    if image and by_hand:
        raise LauncherError(
            "CONTAINER_IMAGE needs a Slurm job with Pyxis, and NNODES must not be set. Elsewhere, unset "
            "CONTAINER_IMAGE and run this command inside the container",
            key="CONTAINER_IMAGE",
        )
    if by_hand or (nodes == "1" and not image):
        return []
    srun = f"srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --kill-on-bad-exit=1".split()
    # since Slurm 22.05, srun does not inherit this option from sbatch
    if cpus := setting("SLURM_CPUS_PER_TASK"):
        srun.append(f"--cpus-per-task={cpus}")
    if image:
        mounts = [*(f"{folder}:{folder}" for folder in {str(ROOT): 0, here: 0}), setting("CONTAINER_MOUNTS")]
        srun.append(f"--container-mounts={','.join(filter(None, mounts))}")
        srun += [f"--container-image={image}", f"--container-workdir={here}"]
    return srun


def set_environment(processes: int) -> None:
    """Set the environment variables for `processes` ranks on this node. All child processes inherit the variables."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # by default, each process starts one thread per core, which is many times slower
    threads = setting("OMP_NUM_THREADS", str(max(1, cores // processes)))
    os.environ.update(
        OMP_NUM_THREADS=threads,
        TOKENIZERS_PARALLELISM="false",
        PYTHONUNBUFFERED="1",
        SLURM_EXPORT_ENV="ALL",  # sbatch --export=NONE sets NONE, and srun would not pass the variables on
    )


def python(script: str, *options: str) -> list[str]:
    """Return the command that runs a script in this repository with the current Python interpreter."""
    return [sys.executable, str(ROOT / script), *options]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
