#!/usr/bin/env python3
"""Start one process per rank on this node, forward signals, and return a meaningful exit status.

    python train/launch.py --nproc 8 train/train.py CONFIG [--key value]...
    srun --ntasks-per-node=1 --cpus-per-task=64 python train/launch.py --nproc 8 --nnodes 4 --master_addr HOST \\
        --master_port 29500 train/train.py CONFIG         (SLURM_PROCID is the node's rank)
    python train/launch.py --supervise [CONFIG] [--key value]...        (run_training.sh calls this)

Use this launcher instead of torchrun or deepspeed if you need the exit status: both of them return 1 for every failure
and wait 30 seconds for the other ranks when one dies. This launcher ends the other ranks within seconds and reports
which rank failed. It forwards SIGTERM, SIGUSR1 and SIGHUP to all ranks as SIGUSR1, then waits while they save a
checkpoint. The first Ctrl-C also requests a stop. A second Ctrl-C, or one after another signal, ends the ranks at once.

Before the launcher starts train/train.py, it checks the configuration and this machine (train/preflight).

--supervise prepares the embedded corpus if the run needs it, trains, restarts after a crash, requeues the Slurm job
after a stop request, and generates sample text at the end. Environment variables set its options; the head of
run_training.sh lists them. In a Slurm job with several nodes or a container, srun starts one launcher per node.

Exit status: 0 if all ranks returned 0; STOPPED (75) if they stopped on request; INTERRUPTED (130) after Ctrl-C; 2 if
the user has to change something first. Otherwise it is the status of the rank that failed first, or 128 + n if signal
n killed that rank.
"""

from __future__ import annotations

import argparse
import contextlib
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
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # avoids a traceback during the imports below

from model import need

need("starting ranks", "pydantic", "psutil")

import psutil

from model.errors import UserError
from model.keys import between
from train.checkpoint.files import committed, identity
from train.checkpoint.resume import resume_option
from train.config.arguments import TrainingArguments
from train.config.load import load_arguments, resolve_arguments
from train.files import again, may_pass, reason, remove_dead_buffers
from train.launchers import first_host, port_of
from train.monitor import signals
from train.monitor.signals import INTERRUPTED, NOT_AS_IT_IS, SIGNALS, STOPPED, WITHOUT_STEPS
from train.preflight.check import CHECKED, check
from train.preflight.machine import cuda_devices, memory_kills
from train.record.log import configure_logging
from train.record.run_folder import RunFolder

logger = logging.getLogger(__name__)
TRAIN = ROOT / "train/train.py"
CRASHED = 1

POLL_S = 0.2
# After one rank fails, the other ranks get this long to print their errors. Rank 0 prints first, the others after 2 s.
FAILED_GRACE_S = 4.0
INTERRUPTED_GRACE_S = 1.0
# Ranks that stop on request end together, after they commit the checkpoint.
STOPPED_GRACE_S = 60.0
OTHER_NODES_S = 2.0
# Pause before a restart without progress, so that a port, file system or node can recover.
PAUSE_S = 30.0

# The default configuration. Its batch is too small for more than two ranks.
TINY, TINY_RANKS = ROOT / "train_args/train_config_tiny.json", 2
# The name of the Python standard library's source text in train_args/ and prepare_data.py.
EMBEDDED_CORPUS = "python-stdlib"
INSTALL = 'set -euo pipefail; source "$ROOT/scripts/setup_env.sh"; install_requirements "$ROOT/requirements-prep.txt"'
# Options that a hostfile replaces.
NODES = ("nproc", "nnodes", "node_rank", "master_addr")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class LaunchError(UserError, ValueError):
    """An invalid launcher setting; `key` is the variable or file to change."""

    code = "launch"


def main(argv: list[str]) -> int:
    configure_logging()
    try:
        if argv[:1] == ["--supervise"]:
            return Supervisor(argv[1:], Children()).run()
        options = parse(argv)
        return run_ranks(options, Children())
    except (UserError, ValueError, OSError) as error:
        logger.error(reason(error))
        return CRASHED if may_pass(error) else NOT_AS_IT_IS


# ---------------------------------------------------------------- decisions: pure functions


class Action(Enum):
    """What the supervisor does after a training attempt."""

    END = auto()
    REQUEUE = auto()
    RESTART = auto()
    PAUSE_AND_RESTART = auto()


def next_action(
    status: int,
    stop_requested: bool,
    made_progress: bool,
    is_retry: bool,
    restarts_left: int,
    can_requeue: bool,
) -> Action:
    """Decide what to do after a training attempt.

    Args:
        status: exit status of the attempt.
        stop_requested: whether a signal asked this job to stop.
        made_progress: whether the attempt logged a new step or saved a new checkpoint.
        is_retry: whether the previous attempt made no progress either.
        can_requeue: whether this is a Slurm job that may requeue itself.
    """
    if status == STOPPED:
        return Action.REQUEUE if can_requeue else Action.END
    if status in (0, NOT_AS_IT_IS, INTERRUPTED) or stop_requested or not restarts_left:
        return Action.END
    if made_progress:
        return Action.RESTART
    return Action.END if is_retry else Action.PAUSE_AND_RESTART


def exit_status(failed: dict[int, int], stop_requested: bool, interrupted: bool) -> tuple[int, int | None]:
    """Return the exit status of the job and the rank to report as its cause, if any.

    Args:
        failed: return code of each failed rank, in the order in which they ended; -n if signal n killed the rank.
    """
    if not failed:
        return 0, None
    if INTERRUPTED in failed.values():  # the other ranks lost their connection to that one
        return INTERRUPTED, None
    if set(failed.values()) == {STOPPED}:
        return STOPPED, None
    # The first killed rank is the cause. Other ranks fail because they lose their connection to it.
    rank = min(failed, key=lambda rank: (failed[rank] >= 0, failed[rank] == STOPPED))
    status = failed[rank] if failed[rank] >= 0 else 128 - failed[rank]
    if (
        stop_requested and status - 128 in SIGNALS
    ):  # the signal came before the rank handled signals, so no step was done
        return INTERRUPTED if interrupted else STOPPED, None
    # rank 0 has already printed the error
    return status, None if (rank, status) == (0, NOT_AS_IT_IS) else rank


def grace_s(failed: dict[int, int]) -> float:
    """Return how many seconds the other ranks have to end; `failed` is as in `exit_status`."""
    if failed.get(0) == NOT_AS_IT_IS:
        return 0.0
    if INTERRUPTED in failed.values():
        return INTERRUPTED_GRACE_S
    return STOPPED_GRACE_S if set(failed.values()) == {STOPPED} else FAILED_GRACE_S


# ---------------------------------------------------------------- processes and signals


class Children:
    """The child processes of the launcher and the stop requests received so far."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen] = []
        self.first_rank = 0
        self.stop_requested = self.interrupted = self.ends_at_once = False
        self.are_training = True
        signals.install(self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Forward a stop request to the children as SIGUSR1.

        srun forwards SIGUSR1 to its tasks, whereas SIGTERM might end srun itself. A terminal also sends Ctrl-C to the
        children, so it is not forwarded to data preparation: a second signal would interrupt its cleanup.
        """
        if number == signal.SIGINT:
            self.ends_at_once = self.stop_requested
            self.interrupted = True
        self.stop_requested = True
        if not self.ends_at_once and (self.are_training or number != signal.SIGINT):
            self._send(signal.SIGUSR1)

    def _send(self, number: int) -> None:
        for process in self.processes:
            # send_signal() polls, and a signal handler must not reap a process that wait() inspects
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def run(self, command: list[str], are_training: bool = False) -> int:
        """Run one program, such as srun or data preparation, and return its exit status."""
        self.processes, self.first_rank, self.are_training = [], 0, are_training
        try:
            # if this process is killed, the ranks that srun started save a checkpoint and stop
            self._start(command, None, signal.SIGUSR1)
        except OSError as error:
            logger.error(f"{command[0]}: {error}")
            return 127
        failed = self.wait()
        if self.ends_at_once:
            self._send(signal.SIGINT)
            self.processes[0].wait()
            return INTERRUPTED
        return exit_status(failed, self.stop_requested, self.interrupted)[0]

    def start_ranks(self, options: argparse.Namespace) -> None:
        """Start the ranks of this node, with the environment variables of torch and DeepSpeed."""
        self.processes, self.are_training = [], True
        self.first_rank = options.node_rank * options.nproc
        environment = dict(
            os.environ,
            WORLD_SIZE=str(options.nnodes * options.nproc),
            LOCAL_WORLD_SIZE=str(options.nproc),
            LOCAL_SIZE=str(options.nproc),  # DeepSpeed's name for it
            MASTER_ADDR=options.master_addr,
            MASTER_PORT=str(options.master_port or free_port()),
        )
        command = [sys.executable, "-u", options.script, *options.arguments]
        for local in range(options.nproc):
            mine = {**environment, "RANK": str(self.first_rank + local), "LOCAL_RANK": str(local)}
            # if the launcher is killed, no rank may stay behind and hold a GPU
            self._start(command, mine, signal.SIGKILL)

    def _start(self, command: list[str], environment: dict[str, str] | None, at_our_end: int) -> None:
        # The child inherits the blocked signal. Otherwise Ctrl-C during its imports would print a traceback.
        blocked = [signal.SIGINT] if environment else []
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        before = signals.at_parents_end(at_our_end)
        self.processes.append(subprocess.Popen(command, env=environment, preexec_fn=before))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        if self.stop_requested:  # the request came before this process existed
            self._send(signal.SIGUSR1)

    def wait(self) -> dict[int, int]:
        """Wait until all children have ended, or one failed and the grace period of the others is over.

        Returns: the return code of each failed rank, in the order in which they ended."""
        failed: dict[int, int] = {}
        deadline = math.inf
        while not self.ends_at_once:
            for rank, process in enumerate(self.processes, self.first_rank):
                if rank not in failed and process.poll() not in (None, 0):
                    failed[rank] = process.returncode
                    deadline = min(deadline, time.monotonic() + grace_s(failed))
            if time.monotonic() > deadline or all(p.returncode is not None for p in self.processes):
                break
            time.sleep(POLL_S)
        return failed

    def running(self) -> list[int]:
        """Return the ranks that are still running."""
        return [rank for rank, p in enumerate(self.processes, self.first_rank) if p.returncode is None]

    def kill(self) -> None:
        """Kill the children that are still running."""
        self._send(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        remove_dead_buffers()


def free_port() -> int:
    """Return a port that is free now.

    Rank 0 binds it only after its imports. The range is below the ephemeral ports, so that no outgoing connection
    takes it meanwhile.
    """
    while True:
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("", port := random.randrange(20000, 32000)))
            return port


# ---------------------------------------------------------------- the ranks of this node


def run_ranks(options: argparse.Namespace, children: Children) -> int:
    """Start the ranks of this node, wait for them and return the exit status.

    Raises: UserError, ValueError: as `check_start`."""
    check_start(options)
    kills = memory_kills()
    try:
        children.start_ranks(options)
        failed = children.wait()
        if children.ends_at_once:
            return INTERRUPTED
        status, cause = exit_status(failed, children.stop_requested, children.interrupted)
        if status == INTERRUPTED and INTERRUPTED not in failed.values():
            logger.warning(WITHOUT_STEPS)  # no rank has printed it
        if cause is not None:
            report_failure(cause, failed[cause], children.running(), memory_kills() > kills)
        return status
    finally:
        children.kill()


def check_start(options: argparse.Namespace) -> None:
    """Check a run of train.py before starting its ranks.

    Raises: UserError, ValueError: the run cannot start."""
    if Path(options.script).resolve() != TRAIN:
        return
    try:
        arguments = load_arguments(options.arguments)
        remarks = check(arguments, options.nnodes * options.nproc, options.nproc, cuda_devices())
    except (ValueError, UserError):
        if options.node_rank:
            time.sleep(OTHER_NODES_S)  # the first node prints the same error and may end this one
        raise
    if options.node_rank == 0 and remarks:
        logger.info("\n".join(remarks))
    os.environ[CHECKED] = "1"


def report_failure(rank: int, code: int, ended_with_it: list[int], out_of_memory: bool) -> None:
    """Log which rank ended the job. After SIGKILL, which the rank itself cannot report, also log the likely reason."""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    also = f"; stopping ranks {ended_with_it}" if ended_with_it else ""
    why = ""
    if code == -signal.SIGKILL:
        why = (
            "The system killed it because host memory ran out"
            if out_of_memory
            else "Host memory may have run out"
        )
        why = f". {why}; check dmesg or Slurm's sacct. Use fewer ranks per node, or pass --save_async false"
    logger.error(f"rank {rank} {how}{also}{why}")


# ---------------------------------------------------------------- command line


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--nproc", type=between(1), help="number of ranks on this node")
    parser.add_argument("--nnodes", type=between(1), help="number of nodes (default: 1)")
    parser.add_argument(
        "--node_rank",
        type=between(0),
        help="rank of this node, 0 to nnodes - 1 (default: SLURM_PROCID, or 0)",
    )
    parser.add_argument("--master_addr", help="host of node 0 (default with one node: 127.0.0.1)")
    parser.add_argument(
        "--master_port", type=between(1, 65535), help="free port on node 0 (default with one node: any)"
    )
    text = (
        'DeepSpeed hostfile with lines "host slots=N"; replaces --nproc, --nnodes, --node_rank and --master_addr. Run '
        "the same command on each host"
    )
    parser.add_argument("--hostfile", metavar="FILE", help=text)
    parser.add_argument("script", help="Python script that each rank runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    options = parser.parse_args(argv)
    if options.hostfile is not None:
        if given := [name for name in NODES if getattr(options, name) is not None]:
            parser.error(f"--hostfile and --{given[0]} exclude each other; pass one of them")
        vars(options).update(read_hostfile(options.hostfile, names_of_this_host()))
    elif options.nproc is None:
        parser.error("pass --nproc, the number of ranks on this node, or --hostfile")
    options.nnodes = options.nnodes or 1
    if options.node_rank is None:
        options.node_rank = int(os.environ.get("SLURM_PROCID") or 0)
    if options.nnodes > 1 and not (options.master_addr and options.master_port):
        parser.error("with several nodes, pass --master_addr and --master_port, the same on each node")
    options.master_addr = options.master_addr or "127.0.0.1"
    if options.node_rank >= options.nnodes:
        parser.error(f"--node_rank {options.node_rank} must be below --nnodes {options.nnodes}")
    if not Path(options.script).is_file():
        parser.error(
            f"{options.script}: no such script. Pass the script that each rank runs, such as train/train.py"
        )
    return options


def read_hostfile(hostfile: str | Path, here: Collection[str]) -> dict[str, Any]:
    """Find this host in a DeepSpeed hostfile: lines of `host slots=N`, starting with the host of rank 0.

    Args:
        here: names and addresses of this host.

    Returns: values of the options in NODES.

    Raises: LaunchError: a line is invalid, the hosts have unequal slots, or this host is not listed."""
    slots: dict[str, int] = {}
    for line in Path(hostfile).read_text(encoding="utf-8").splitlines():
        if text := line.partition("#")[0].strip():
            match = re.fullmatch(r"(\S+)\s+slots=([1-9]\d*)", text)
            if not match or match[1] in slots:
                raise LaunchError(
                    f'hostfile {hostfile}: invalid line {text!r}. Write "host slots=N", and each host only once',
                    code="hostfile_line",
                    key=str(hostfile),
                )
            slots[match[1]] = int(match[2])
    if len(set(slots.values())) > 1:
        raise LaunchError(
            f"hostfile {hostfile}: the hosts have unequal slots: {slots}. Give each host the smallest number",
            code="hostfile_unequal_slots",
            key=str(hostfile),
        )
    hosts = list(slots)
    # every host is localhost, so that name is unambiguous only if it is the only one
    index = next(
        (n for n, host in enumerate(hosts) if host in here or hosts == [host] and host in LOOPBACK), None
    )
    if index is None:
        raise LaunchError(
            f"hostfile {hostfile} lists {', '.join(hosts) or 'no host'}, but not this host. List it by one of "
            f"its names: {', '.join(sorted(here))}",
            code="hostfile_without_this_host",
            key=str(hostfile),
        )
    return dict(zip(NODES, (slots[hosts[index]], len(hosts), index, hosts[0]), strict=True))


def names_of_this_host() -> set[str]:
    """Return the name of this host with and without its domain, and the addresses of its interfaces."""
    name = socket.gethostname()
    addresses = [a for interface in psutil.net_if_addrs().values() for a in interface]
    names = {name, name.partition(".")[0], socket.getfqdn()}
    names.update(a.address for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6))
    return {name for name in names if not name.startswith("127.") and name not in LOOPBACK}


# ---------------------------------------------------------------- the supervisor


def setting(name: str, default: str = "") -> str:
    """Return an environment variable; an empty one counts as unset."""
    return os.environ.get(name) or default


class Supervisor:
    """Prepares data, trains with restarts and generates sample text; see the head of run_training.sh.

    Args:
        argv: command line of train.py; without CONFIG, TINY is the configuration.

    Raises: UserError: the command line or a setting is invalid.
    """

    def __init__(self, argv: list[str], children: Children):
        self.children = children
        is_tiny = not argv or argv[0].startswith("--")
        self.argv = [str(TINY), *argv] if is_tiny else [*argv]
        self.arguments = load_arguments(self.argv)
        self.folder = RunFolder(self.arguments.output_dir)
        self.slurm_job = setting("SLURM_JOB_ID")
        try:
            self.max_restarts = int(between(0)(setting("MAX_RESTARTS", "3")))
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise LaunchError(f"MAX_RESTARTS={error}", key="MAX_RESTARTS") from error
        self.srun = srun_command()
        self.rank_options = rank_options(TINY_RANKS if is_tiny else None, by_srun=bool(self.srun))
        self.options = parse([*self.rank_options, str(TRAIN), *self.argv])
        self.is_first_node = self.options.node_rank == 0

    def run(self) -> int:
        """Run all phases and return the exit status."""
        set_environment(self.options.nproc)
        nodes = f" on each of {self.options.nnodes} nodes" * (self.options.nnodes > 1)
        logger.info(f"training: {self.options.nproc} ranks{nodes}")
        if corpus := missing_corpus(self.arguments):
            resolve_arguments(
                self.arguments, self.options.nproc * self.options.nnodes
            )  # reports an invalid batch size before the preparation
            if status := self.prepare(corpus):
                return self.end(status, self.decide(status))
        if self.arguments.dry_run:
            return self.attempt()
        if self.slurm_job and self.is_first_node:
            self.resume_after_requeue()
        if status := self.train():
            return status
        has_sample = self.arguments.save_strategy != "no" and not setting("CONTAINER_IMAGE")
        if self.is_first_node and has_sample and not self.children.stop_requested:
            self.generate()
        return 0

    def attempt(self) -> int:
        """Start all ranks of this job once and return the exit status."""
        if self.srun:
            python = setting("CONTAINER_PYTHON", "python3") if setting("CONTAINER_IMAGE") else sys.executable
            launcher = [python, str(ROOT / "train/launch.py"), *self.rank_options]
            status = self.children.run([*self.srun, *launcher, str(TRAIN), *self.argv], are_training=True)
        else:
            options = parse([*self.rank_options, str(TRAIN), *self.argv])
            status = run_ranks(options, self.children)
        # srun merges the statuses of all nodes into one, but the file that rank 0 wrote is reliable
        return STOPPED if self.folder.stopped.is_file() and not self.arguments.dry_run else status

    def train(self) -> int:
        """Train until the run is complete, stopped, or out of restarts. Return the exit status."""
        first, restarts, is_retry = self.progress(), 0, False
        while True:
            before = self.progress()
            self.folder.stopped.unlink(missing_ok=True)
            status = self.attempt()
            now = self.progress()
            made_progress = now.identity != before.identity or now.step > before.step
            action = self.decide(status, made_progress, is_retry, self.max_restarts - restarts)
            if action in (Action.END, Action.REQUEUE):
                return self.end(status, action)
            restarts, is_retry = restarts + 1, action is Action.PAUSE_AND_RESTART
            pause = f" after {PAUSE_S:g} s, because no step was done" * is_retry
            how = f"restart {restarts} of {self.max_restarts} from {now.checkpoint}{pause}"
            logger.warning(f"training: status {status}; {how}")
            if is_retry and not self.wait(PAUSE_S):
                status = self.stopped_status()
                return self.end(status, self.decide(status))
            if now.identity not in ("", first.identity):
                self.resume_own_checkpoint()

    def decide(
        self, status: int, made_progress: bool = False, is_retry: bool = False, restarts_left: int = 0
    ) -> Action:
        # after Ctrl-C the user decides when to start again
        may_requeue = self.is_first_node and not self.children.interrupted and setting("REQUEUE", "1") != "0"
        return next_action(
            status,
            stop_requested=self.children.stop_requested,
            made_progress=made_progress,
            is_retry=is_retry,
            restarts_left=restarts_left,
            can_requeue=bool(self.slurm_job) and may_requeue,
        )

    def end(self, status: int, action: Action) -> int:
        """Log how to continue, requeue the Slurm job if `action` says so, and return the exit status."""
        if status == STOPPED:
            what = f"the same command{resume_option(self.arguments)} continues"
            if action is Action.REQUEUE:
                requeued = requeue(self.slurm_job)
                what = (
                    f"Slurm job {self.slurm_job} is requeued"
                    if requeued
                    else f"Slurm did not requeue it; {what}"
                )
            logger.info(f"training: stopped on request at {self.progress().checkpoint}; {what}")
        elif status not in (0, NOT_AS_IT_IS, INTERRUPTED) and not self.children.stop_requested:
            logger.error(f"training: status {status}; not restarted (MAX_RESTARTS={self.max_restarts})")
        return status

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Wait for `seconds`, or until the condition `until` holds. Return False if the job is asked to stop first."""
        deadline = time.monotonic() + seconds
        while not self.children.stop_requested:
            if until() or time.monotonic() >= deadline:
                return True
            time.sleep(0.5)
        return False

    def stopped_status(self) -> int:
        """Return the exit status for a stop request that came while no rank was running."""
        return INTERRUPTED if self.children.interrupted else STOPPED

    # ------------------------------------------------------------ progress and resume

    def progress(self) -> Progress:
        return again(partial(read_progress, self.folder))

    def resume_own_checkpoint(self) -> None:
        """Resume from the run's own checkpoint, even if the command line says "never" or names another checkpoint.

        A restart must not start over or from the other checkpoint a second time.
        """
        self.argv += ["--resume_from_checkpoint", "auto"]
        self.arguments = load_arguments(self.argv)

    def resume_after_requeue(self) -> None:
        """Resume from the run's own checkpoint if this Slurm job was requeued and has saved a checkpoint.

        A requeued job has the command line of its first start. A checkpoint from before that start does not count: the
        first start may have ended before it could move it away.
        """
        note, now = self.folder.slurm_job, self.progress()
        mine = f"{self.slurm_job} {now.identity}".strip()
        lines = note.read_text().splitlines() if note.is_file() else []
        # keep the lines of other jobs, which may still be running
        others = [line for line in lines if line.split()[:1] != [self.slurm_job]]
        if setting("SLURM_RESTART_COUNT", "0") != "0" and len(others) < len(lines):
            if now.identity and mine not in lines:
                self.resume_own_checkpoint()
        else:
            self.folder.path.mkdir(parents=True, exist_ok=True)
            note.write_text("\n".join([*others, mine]))

    # ------------------------------------------------------------ before and after the training

    def prepare(self, corpus: Path) -> int:
        """Prepare the embedded corpus on the first node, while the other nodes wait for it.

        Returns: the exit status of the first program that fails, or 0."""
        if not self.is_first_node:
            is_there = self.wait(math.inf, until=(corpus / "manifest.json").is_file)
            return 0 if is_there else self.stopped_status()
        logger.info(
            f"data: preparing the embedded corpus (source code of the Python standard library) in {corpus}"
        )
        source, tokenizer = ["--input", EMBEDDED_CORPUS], corpus.parent / "tokenizer-4096"
        programs = [["bash", "-c", INSTALL]]
        if not (tokenizer / "tokenizer_config.json").is_file():
            options = ["--vocab_size", "4096", "--output", str(tokenizer)]
            programs.append(python("train/train_tokenizer.py", *source, *options))
        # the corpus has about 600 files, so a larger share than the default is needed for a meaningful evaluation
        options = ["--tokenizer", str(tokenizer), "--output", str(corpus), "--eval_fraction", "0.05"]
        programs.append(python("train/prepare_data.py", *source, *options))
        os.environ.update(ROOT=str(ROOT), PY=sys.executable)  # for setup_env.sh
        return next(filter(None, map(self.children.run, programs)), 0)

    def generate(self) -> None:
        """Replace this process with the inference demo, which then handles signals and sets the exit status."""
        folder, compute = str(self.folder.path), self.arguments.precision.compute
        how = f"--precision {compute if compute in ('fp32', 'fp8') else 'bf16'}"
        how += " --max_new_tokens 96 --temperature 0.8 --top_k 50 --seed 1"
        prompt = ("--prompt", setting("DEMO_PROMPT", "def __init__(self, "))
        program = "fp8_inference_demo/fp8_inference.py"
        demo = python(program, "--model", folder, *how.split(), "--ignore_eos", *prompt)
        logger.info(
            f"\ndemo: {shlex.join(['python', os.path.relpath(ROOT / program), '--model', folder, *prompt])}"
        )
        os.execv(demo[0], demo)


@dataclass(frozen=True)
class Progress:
    """Progress of a run: name and identity of its newest checkpoint, and the last step in its metrics."""

    checkpoint: str
    identity: str
    step: int


def read_progress(folder: RunFolder) -> Progress:
    newest = next(reversed(committed(folder.checkpoints)), None)
    lines = folder.metrics.read_bytes() if folder.metrics.is_file() else b""
    step = max(map(int, re.findall(rb'^.*?"step": *(\d+)', lines, re.MULTILINE)), default=0)
    return Progress(
        newest.name if newest else "the beginning", f"{newest} {identity(newest)}" if newest else "", step
    )


def missing_corpus(arguments: TrainingArguments) -> Path | None:
    """Return the folder of the embedded corpus if the run uses it and its preparation is not complete.

    The manifest is the last file that the preparation writes.
    """
    found = [Path(f) for f in arguments.data.sources.values() if Path(f).name == EMBEDDED_CORPUS]
    return next((folder for folder in found if not (folder / "manifest.json").is_file()), None)


def rank_options(most: int | None, by_srun: bool) -> list[str]:
    """Return the command-line options of this launcher that the environment variables request.

    Args:
        most: largest number of ranks if NPROC is not set.
        by_srun: whether srun starts one launcher per node of a Slurm job.
    """
    job, nodes = setting("SLURM_JOB_ID"), setting("SLURM_NNODES", "1")
    names = {"NPROC": "--nproc", "MASTER_PORT": "--master_port"}
    found: dict[str, str] = {}
    if by_srun:
        if not (host := first_host(setting("SLURM_JOB_NODELIST"))):
            raise LaunchError(
                f"SLURM_JOB_NODELIST is not set, so the nodes of Slurm job {job} are unknown. Pass the job's "
                "environment on with --export=ALL",
                key="SLURM_JOB_NODELIST",
            )
        found = {"--nnodes": nodes, "--master_addr": host, "--master_port": port_of(job)}
    elif setting("NNODES") or setting("HOSTFILE"):
        names |= {"HOSTFILE": "--hostfile", "NNODES": "--nnodes"}
        names |= {"NODE_RANK": "--node_rank", "MASTER_ADDR": "--master_addr"}
        found = {"--master_port": "29500"}
        if setting("NNODES", "1") != "1" and not setting("NODE_RANK"):
            raise LaunchError(
                "NNODES is set, but NODE_RANK is not. Set it to 0 ... NNODES - 1", key="NODE_RANK"
            )
    found |= {option: setting(name) for name, option in names.items() if setting(name)}
    if "--nproc" not in found and "--hostfile" not in found:
        found["--nproc"] = str(count_devices() if most is None else min(count_devices(), most))
    return [word for pair in found.items() for word in pair]


def count_devices() -> int:
    """Return the number of CUDA devices of this node, or 2 on a machine without a GPU."""
    if setting("HAS_GPU") != "1":
        return 2
    if not (devices := cuda_devices()):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
        raise LaunchError(
            f"this machine has a GPU, but CUDA finds no device (CUDA_VISIBLE_DEVICES={visible})",
            key="CUDA_VISIBLE_DEVICES",
        )
    return len(devices)


def requeue(job: str) -> bool:
    """Ask Slurm to requeue the job. Return whether that succeeded."""
    try:
        return subprocess.call(["scontrol", "requeue", job]) == 0
    except OSError:
        return False


def srun_command() -> list[str]:
    """Return the srun command that starts one launcher per node of a Slurm job, or [] if srun is not needed.

    CONTAINER_IMAGE is passed to Pyxis. This repository and the working folder are mounted under the same paths.

    Raises: LaunchError: CONTAINER_IMAGE is set without a Slurm job."""
    job, nodes, image = setting("SLURM_JOB_ID"), setting("SLURM_NNODES", "1"), setting("CONTAINER_IMAGE")
    by_hand = setting("NNODES") or setting("HOSTFILE") or not job
    if image and by_hand:
        raise LaunchError(
            "CONTAINER_IMAGE works only in Slurm jobs with Pyxis. Elsewhere, run this command inside the container",
            key="CONTAINER_IMAGE",
        )
    if by_hand or (nodes == "1" and not image):
        return []
    srun = f"srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --kill-on-bad-exit=1".split()
    # since Slurm 22.05, srun does not inherit this option from sbatch
    if cpus := setting("SLURM_CPUS_PER_TASK"):
        srun.append(f"--cpus-per-task={cpus}")
    if image:
        own = [f"{folder}:{folder}" for folder in dict.fromkeys((str(ROOT), os.getcwd()))]
        mounts = ",".join(filter(None, [*own, setting("CONTAINER_MOUNTS")]))
        srun += [f"--container-image={image}", f"--container-mounts={mounts}"]
        srun.append(f"--container-workdir={os.getcwd()}")
    return srun


def set_environment(processes: int) -> None:
    """Set the environment variables that all child processes inherit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # by default each process starts one thread per core, which is many times slower
    threads = setting("OMP_NUM_THREADS", str(max(1, cores // processes)))
    os.environ.update(OMP_NUM_THREADS=threads, TOKENIZERS_PARALLELISM="false", PYTHONUNBUFFERED="1")


def python(script: str, *options: str) -> list[str]:
    """Return the command that runs a script of this repository."""
    return [sys.executable, str(ROOT / script), *options]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
