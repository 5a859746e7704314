#!/usr/bin/env python3
"""Start a script once for each rank of this node, pass signals on, and end with the status that the ranks mean.

    python train/launch.py --nproc 8 train/train.py CONFIG [--key value]...
    srun --ntasks-per-node=1 --cpus-per-task=64 python train/launch.py --nproc 8 --nnodes 4 --master_addr HOST \\
        --master_port 29500 train/train.py CONFIG         (the node's rank: SLURM_PROCID)
    python train/launch.py --supervise [CONFIG] [--key value]...        what run_training.sh does after the set-up

Use it instead of torchrun or deepspeed where the exit status matters: both exit with 1 whatever their ranks return, and
give the remaining ranks 30 seconds when one has died. Here a rank that dies ends the others within seconds, is named,
and its last lines are shown. SIGTERM, SIGUSR1 and SIGHUP reach every rank as SIGUSR1, and the ranks have the time they
need to save. The first Ctrl-C asks for the same; a second one, or one after another signal, ends the ranks at once.

Before it starts ranks of train/train.py it checks whether their run can start (train/preflight).

--supervise prepares the embedded corpus if it is used and missing, trains, restarts after a crash, requeues the Slurm
job that was asked to stop, and generates a few lines from the result. Its settings are environment variables; the head
of run_training.sh lists them. In a Slurm job of several nodes, or with a container, srun starts one launcher per node.

Exit status: 0 when every rank ended with 0; STOPPED (75) when they stopped on request; INTERRUPTED (130) when Ctrl-C
ended them; 2 for what has to be changed first; else that of the rank which failed first, 128 + n if signal n killed it.
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
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while it imports; signals.install comes later

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
# The other ranks have this long to print why they end once one has failed: rank 0 prints first, the others after 2 s.
FAILED_GRACE_S = 4.0
INTERRUPTED_GRACE_S = 1.0
# Ranks that stop on request leave together, after their checkpoint is committed.
STOPPED_GRACE_S = 60.0
OTHER_NODES_S = 2.0
# Before the restart after an attempt without progress: a port, a file system or a node may recover.
PAUSE_S = 30.0

# The configuration without CONFIG, on two ranks at most: its batch has tokens for no more.
TINY, TINY_RANKS = ROOT / "train_args/train_config_tiny.json", 2
# The name by which train_args/ and prepare_data.py know the Python standard library's own text.
EMBEDDED_CORPUS = "python-stdlib"
INSTALL = 'set -euo pipefail; source "$ROOT/scripts/setup_env.sh"; install_requirements "$ROOT/requirements-prep.txt"'
# The options that a hostfile stands for.
NODES = ("nproc", "nnodes", "node_rank", "master_addr")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class LaunchError(UserError, ValueError):
    """The ranks cannot be started with these settings; `key` is the variable or file to change."""

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


# ---------------------------------------------------------------- what follows: pure functions


class Action(Enum):
    """What the supervisor does after an attempt to train."""

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
    """Decide what follows an attempt to train.

    Args:
        status: the exit status of the attempt.
        stop_requested: a signal asked this job to stop.
        made_progress: the attempt logged a step or saved a checkpoint that the one before did not.
        is_retry: the attempt before it made no progress either.
        can_requeue: this is a Slurm job that may requeue itself.
    """
    if status == STOPPED:
        return Action.REQUEUE if can_requeue else Action.END
    if status in (0, NOT_AS_IT_IS, INTERRUPTED) or stop_requested or not restarts_left:
        return Action.END
    if made_progress:
        return Action.RESTART
    return Action.END if is_retry else Action.PAUSE_AND_RESTART


def exit_status(failed: dict[int, int], stop_requested: bool, interrupted: bool) -> tuple[int, int | None]:
    """Return the exit status of the job and the rank that is to be named as its cause, if any.

    Args:
        failed: return code by rank, -n if signal n killed it, in the order in which the ranks ended.
    """
    if not failed:
        return 0, None
    if INTERRUPTED in failed.values():  # the other ranks lost their connection to that one
        return INTERRUPTED, None
    if set(failed.values()) == {STOPPED}:
        return STOPPED, None
    # the first that was killed is the cause, those that lost their connection to it the consequence
    rank = min(failed, key=lambda rank: (failed[rank] >= 0, failed[rank] == STOPPED))
    status = failed[rank] if failed[rank] >= 0 else 128 - failed[rank]
    if stop_requested and status - 128 in SIGNALS:  # before the rank handled signals: it had done nothing
        return INTERRUPTED if interrupted else STOPPED, None
    # rank 0 has printed what has to be changed
    return status, None if (rank, status) == (0, NOT_AS_IT_IS) else rank


def grace_s(failed: dict[int, int]) -> float:
    """Seconds that the other ranks have to end by themselves; `failed` as in `exit_status`."""
    if failed.get(0) == NOT_AS_IT_IS:
        return 0.0
    if INTERRUPTED in failed.values():
        return INTERRUPTED_GRACE_S
    return STOPPED_GRACE_S if set(failed.values()) == {STOPPED} else FAILED_GRACE_S


# ---------------------------------------------------------------- processes and signals


class Children:
    """The processes that this one started and waits for, and what signals have asked of it."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen] = []
        self.first_rank = 0
        self.stop_requested = self.interrupted = self.ends_at_once = False
        self.are_training = True
        signals.install(self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Pass a request to stop on as SIGUSR1, which srun hands to its tasks; SIGTERM could be meant for srun itself.

        A terminal sends a Ctrl-C to the children too. A preparation ends by its own, and another signal would interrupt
        its end."""
        if number == signal.SIGINT:
            self.ends_at_once = self.stop_requested
            self.interrupted = True
        self.stop_requested = True
        if not self.ends_at_once and (self.are_training or number != signal.SIGINT):
            self._send(signal.SIGUSR1)

    def _send(self, number: int) -> None:
        for process in self.processes:
            # not send_signal, which polls: a handler must not reap what wait() is looking at
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def run(self, command: list[str], are_training: bool = False) -> int:
        """Run one program, srun with the launchers of all nodes or a preparation, and return its exit status."""
        self.processes, self.first_rank, self.are_training = [], 0, are_training
        try:
            # if this process is killed, what srun started saves and stops
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
            # no rank stays behind, holding a GPU, when the launcher is killed
            self._start(command, mine, signal.SIGKILL)

    def _start(self, command: list[str], environment: dict[str, str] | None, at_our_end: int) -> None:
        # inherited: in a child that does not handle signals yet, a Ctrl-C would be a traceback
        blocked = [signal.SIGINT] if environment else []
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        before = signals.at_parents_end(at_our_end)
        self.processes.append(subprocess.Popen(command, env=environment, preexec_fn=before))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        if self.stop_requested:  # before there was anybody to pass it on to
            self._send(signal.SIGUSR1)

    def wait(self) -> dict[int, int]:
        """Wait until all children have ended, or some failed and the others had their time to follow.

        Returns: return code by rank of those that failed, in the order in which they ended."""
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
        """The ranks that have not ended."""
        return [rank for rank, p in enumerate(self.processes, self.first_rank) if p.returncode is None]

    def kill(self) -> None:
        """End what still runs, at once."""
        self._send(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        remove_dead_buffers()


def free_port() -> int:
    """A port that is free now, and below those which systems give to outgoing connections: rank 0 listens there only
    after its imports."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("", port := random.randrange(20000, 32000)))
            return port


# ---------------------------------------------------------------- the ranks of this node


def run_ranks(options: argparse.Namespace, children: Children) -> int:
    """Start the ranks of this node once and wait for them; returns the exit status. Raises UserError, ValueError: see
    check_start."""
    check_start(options)
    kills = memory_kills()
    try:
        children.start_ranks(options)
        failed = children.wait()
        if children.ends_at_once:
            return INTERRUPTED
        status, cause = exit_status(failed, children.stop_requested, children.interrupted)
        if status == INTERRUPTED and INTERRUPTED not in failed.values():
            logger.warning(WITHOUT_STEPS)  # no rank could
        if cause is not None:
            report_failure(cause, failed[cause], children.running(), memory_kills() > kills)
        return status
    finally:
        children.kill()


def check_start(options: argparse.Namespace) -> None:
    """Check what can be known of a run of train.py before its ranks start. Raises UserError, ValueError: it cannot."""
    if Path(options.script).resolve() != TRAIN:
        return
    try:
        arguments = load_arguments(options.arguments)
        remarks = check(arguments, options.nnodes * options.nproc, options.nproc, cuda_devices())
    except (ValueError, UserError):
        if options.node_rank:
            time.sleep(OTHER_NODES_S)  # the first node prints first, and may end this one
        raise
    if options.node_rank == 0 and remarks:
        logger.info("\n".join(remarks))
    os.environ[CHECKED] = "1"


def report_failure(rank: int, code: int, ended_with_it: list[int], out_of_memory: bool) -> None:
    """Print which rank ended the job, and what is known of a SIGKILL, after which a rank prints nothing."""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    also = f"; ranks {ended_with_it} are ended with it" if ended_with_it else ""
    why = ""
    if code == -signal.SIGKILL:
        why = (
            "The system killed it because host memory ran out"
            if out_of_memory
            else "Host memory may have run out"
        )
        why = (
            f". {why} (see dmesg, or Slurm's sacct): fewer ranks a node, or save_async false, need less of it"
        )
    logger.error(f"rank {rank} {how}{also}{why}")


# ---------------------------------------------------------------- command line


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--nproc", type=between(1), help="ranks on this node")
    parser.add_argument("--nnodes", type=between(1))
    parser.add_argument(
        "--node_rank", type=between(0), help="0 to nnodes - 1; default: SLURM_PROCID, of one task a node"
    )
    parser.add_argument("--master_addr", help="the host of node 0; default, one node: this one")
    parser.add_argument(
        "--master_port", type=between(1, 65535), help="a free port there; default, one node: any"
    )
    text = 'in the place of the four before the port: lines of "host slots=N", as DeepSpeed has them; call it on each'
    parser.add_argument("--hostfile", metavar="FILE", help=text)
    parser.add_argument("script", help="what each rank runs, with the rest of the command line")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    if options.hostfile is not None:
        if given := [name for name in NODES if getattr(options, name) is not None]:
            parser.error(f"--hostfile says what --{given[0]} would: give one of them")
        vars(options).update(read_hostfile(options.hostfile, names_of_this_host()))
    elif options.nproc is None:
        parser.error("--nproc, the ranks on this node, or --hostfile is needed")
    options.nnodes = options.nnodes or 1
    if options.node_rank is None:
        options.node_rank = int(os.environ.get("SLURM_PROCID") or 0)
    if options.nnodes > 1 and not (options.master_addr and options.master_port):
        parser.error("several nodes need --master_addr and --master_port, the same on each")
    options.master_addr = options.master_addr or "127.0.0.1"
    if options.node_rank >= options.nnodes:
        parser.error(f"--node_rank {options.node_rank} must be below --nnodes {options.nnodes}")
    if not Path(options.script).is_file():
        parser.error(f"{options.script}: no such script; what each rank runs, such as train/train.py")
    return options


def read_hostfile(hostfile: str | Path, here: Collection[str]) -> dict[str, Any]:
    """Find this host in a hostfile of DeepSpeed's, lines of `host slots=N`, the first that of rank 0.

    Args:
        here: names and addresses of this host.

    Raises LaunchError: a line is no such line, hosts have unequal slots, this one is not among them."""
    slots: dict[str, int] = {}
    for line in Path(hostfile).read_text(encoding="utf-8").splitlines():
        if text := line.partition("#")[0].strip():
            match = re.fullmatch(r"(\S+)\s+slots=([1-9]\d*)", text)
            if not match or match[1] in slots:
                raise LaunchError(
                    f'hostfile {hostfile}: {text!r}; each line is "host slots=N", and each host is there once',
                    code="hostfile_line",
                    key=str(hostfile),
                )
            slots[match[1]] = int(match[2])
    if len(set(slots.values())) > 1:
        raise LaunchError(
            f"hostfile {hostfile}: {slots} have unequal slots; give each host the smallest number",
            code="hostfile_unequal_slots",
            key=str(hostfile),
        )
    hosts = list(slots)
    # any host is localhost, so that it means something only alone
    index = next(
        (n for n, host in enumerate(hosts) if host in here or hosts == [host] and host in LOOPBACK), None
    )
    if index is None:
        raise LaunchError(
            f"hostfile {hostfile} has {', '.join(hosts) or 'no host'}, and not this one, which is "
            f"{', '.join(sorted(here))}: use one of these names",
            code="hostfile_without_this_host",
            key=str(hostfile),
        )
    return dict(zip(NODES, (slots[hosts[index]], len(hosts), index, hosts[0]), strict=True))


def names_of_this_host() -> set[str]:
    """Its name with and without the domain, and the addresses of its interfaces."""
    name = socket.gethostname()
    addresses = [a for interface in psutil.net_if_addrs().values() for a in interface]
    names = {name, name.partition(".")[0], socket.getfqdn()}
    names.update(a.address for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6))
    return {name for name in names if not name.startswith("127.") and name not in LOOPBACK}


# ---------------------------------------------------------------- supervising a training


def setting(name: str, default: str = "") -> str:
    """An environment variable; an empty one counts as not set."""
    return os.environ.get(name) or default


class Supervisor:
    """A training from its data to a sample of its text, with restarts; see the head of run_training.sh.

    Args:
        argv: the command line of train.py; without CONFIG that of TINY.

    Raises UserError: the command line or a setting is wrong.
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
        """Returns the exit status."""
        set_environment(self.options.nproc)
        nodes = f" on each of {self.options.nnodes} nodes" * (self.options.nnodes > 1)
        logger.info(f"training: {self.options.nproc} ranks{nodes}")
        if corpus := missing_corpus(self.arguments):
            resolve_arguments(
                self.arguments, self.options.nproc * self.options.nnodes
            )  # a wrong batch is told before
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
        """Start all ranks that this job is responsible for, once; returns the exit status."""
        if self.srun:
            python = setting("CONTAINER_PYTHON", "python3") if setting("CONTAINER_IMAGE") else sys.executable
            launcher = [python, str(ROOT / "train/launch.py"), *self.rank_options]
            status = self.children.run([*self.srun, *launcher, str(TRAIN), *self.argv], are_training=True)
        else:
            options = parse([*self.rank_options, str(TRAIN), *self.argv])
            status = run_ranks(options, self.children)
        # srun makes one status of several nodes'; what rank 0 wrote is certain
        return STOPPED if self.folder.stopped.is_file() and not self.arguments.dry_run else status

    def train(self) -> int:
        """Train until it is done, stopped, or another attempt would not help; returns the exit status."""
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
            pause = f" after {PAUSE_S:g} s, as no step was done" * is_retry
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
        # not requeued after Ctrl-C: who pressed it starts again when it suits
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
        """Print how to continue, and requeue the Slurm job if that is to follow; returns the exit status."""
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
        """Wait for `seconds` or until a condition holds; returns False if the job is asked to stop first."""
        deadline = time.monotonic() + seconds
        while not self.children.stop_requested:
            if until() or time.monotonic() >= deadline:
                return True
            time.sleep(0.5)
        return False

    def stopped_status(self) -> int:
        """The exit status of a stop while nothing ran."""
        return INTERRUPTED if self.children.interrupted else STOPPED

    # ------------------------------------------------------------ progress and resume

    def progress(self) -> Progress:
        return again(partial(read_progress, self.folder))

    def resume_own_checkpoint(self) -> None:
        """Override "--resume_from_checkpoint never" or a path: what it asked for must not happen a second time."""
        self.argv += ["--resume_from_checkpoint", "auto"]
        self.arguments = load_arguments(self.argv)

    def resume_after_requeue(self) -> None:
        """A requeued Slurm job has the command line of its first start. It resumes from what is new since then; an
        older checkpoint may be one that the first start did not live to set aside."""
        note, now = self.folder.slurm_job, self.progress()
        mine = f"{self.slurm_job} {now.identity}".strip()
        lines = note.read_text().splitlines() if note.is_file() else []
        others = [line for line in lines if line.split()[:1] != [self.slurm_job]]  # one of them may still run
        if setting("SLURM_RESTART_COUNT", "0") != "0" and len(others) < len(lines):
            if now.identity and mine not in lines:
                self.resume_own_checkpoint()
        else:
            self.folder.path.mkdir(parents=True, exist_ok=True)
            note.write_text("\n".join([*others, mine]))

    # ------------------------------------------------------------ before and after the training

    def prepare(self, corpus: Path) -> int:
        """Prepare the embedded corpus. Of several nodes that share the folder, the first does, and the others wait.

        Returns the status of the first program that fails, 0 if none does."""
        if not self.is_first_node:
            is_there = self.wait(math.inf, until=(corpus / "manifest.json").is_file)
            return 0 if is_there else self.stopped_status()
        logger.info(
            f"data: preparing the embedded corpus (the Python standard library's own text) in {corpus}"
        )
        source, tokenizer = ["--input", EMBEDDED_CORPUS], corpus.parent / "tokenizer-4096"
        programs = [["bash", "-c", INSTALL]]
        if not (tokenizer / "tokenizer_config.json").is_file():
            options = ["--vocab_size", "4096", "--output", str(tokenizer)]
            programs.append(python("train/train_tokenizer.py", *source, *options))
        # of about 600 files: enough of them for the evaluation to mean something
        options = ["--tokenizer", str(tokenizer), "--output", str(corpus), "--eval_fraction", "0.05"]
        programs.append(python("train/prepare_data.py", *source, *options))
        os.environ.update(ROOT=str(ROOT), PY=sys.executable)  # for setup_env.sh
        return next(filter(None, map(self.children.run, programs)), 0)

    def generate(self) -> None:
        """Run the demo in the place of this process: its status and the signals are its own."""
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
    """How far a run has come: name and identity of its newest checkpoint, and the last step in its metrics."""

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
    """Folder of the embedded corpus, if it is a source and has no manifest, the last file that is written."""
    found = [Path(f) for f in arguments.data.sources.values() if Path(f).name == EMBEDDED_CORPUS]
    return next((folder for folder in found if not (folder / "manifest.json").is_file()), None)


def rank_options(most: int | None, by_srun: bool) -> list[str]:
    """The options of this launcher that the settings in the environment stand for.

    Args:
        most: the largest number of ranks where NPROC does not set it.
        by_srun: in a Slurm job, where srun starts one launcher per node.
    """
    job, nodes = setting("SLURM_JOB_ID"), setting("SLURM_NNODES", "1")
    names = {"NPROC": "--nproc", "MASTER_PORT": "--master_port"}
    found: dict[str, str] = {}
    if by_srun:
        if not (host := first_host(setting("SLURM_JOB_NODELIST"))):
            raise LaunchError(
                f"SLURM_JOB_NODELIST is not set: which nodes has Slurm job {job}? Pass its environment on",
                key="SLURM_JOB_NODELIST",
            )
        found = {"--nnodes": nodes, "--master_addr": host, "--master_port": port_of(job)}
    elif setting("NNODES") or setting("HOSTFILE"):
        names |= {"HOSTFILE": "--hostfile", "NNODES": "--nnodes"}
        names |= {"NODE_RANK": "--node_rank", "MASTER_ADDR": "--master_addr"}
        found = {"--master_port": "29500"}
        if setting("NNODES", "1") != "1" and not setting("NODE_RANK"):
            raise LaunchError("NNODES needs NODE_RANK too: 0 to NNODES - 1", key="NODE_RANK")
    found |= {option: setting(name) for name, option in names.items() if setting(name)}
    if "--nproc" not in found and "--hostfile" not in found:
        found["--nproc"] = str(count_devices() if most is None else min(count_devices(), most))
    return [word for pair in found.items() for word in pair]


def count_devices() -> int:
    """The CUDA devices of this node, or 2 ranks on a machine without any."""
    if setting("HAS_GPU") != "1":
        return 2
    if not (devices := cuda_devices()):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
        raise LaunchError(
            f"there is a GPU, but CUDA offers none (CUDA_VISIBLE_DEVICES={visible})",
            key="CUDA_VISIBLE_DEVICES",
        )
    return len(devices)


def requeue(job: str) -> bool:
    """Ask Slurm to queue the job again; returns whether it does."""
    try:
        return subprocess.call(["scontrol", "requeue", job]) == 0
    except OSError:
        return False


def srun_command() -> list[str]:
    """srun with its options, which starts one launcher per node of a Slurm job; [] where no srun is needed.

    CONTAINER_IMAGE is passed to Pyxis; this repository and the working folder are mounted where they are here."""
    job, nodes, image = setting("SLURM_JOB_ID"), setting("SLURM_NNODES", "1"), setting("CONTAINER_IMAGE")
    by_hand = setting("NNODES") or setting("HOSTFILE") or not job
    if image and by_hand:
        raise LaunchError(
            "CONTAINER_IMAGE is for Slurm jobs with Pyxis, by srun; elsewhere start this in the container",
            key="CONTAINER_IMAGE",
        )
    if by_hand or (nodes == "1" and not image):
        return []
    srun = f"srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --kill-on-bad-exit=1".split()
    # of sbatch, from which srun does not take it since Slurm 22.05
    if cpus := setting("SLURM_CPUS_PER_TASK"):
        srun.append(f"--cpus-per-task={cpus}")
    if image:
        own = [f"{folder}:{folder}" for folder in dict.fromkeys((str(ROOT), os.getcwd()))]
        mounts = ",".join(filter(None, [*own, setting("CONTAINER_MOUNTS")]))
        srun += [f"--container-image={image}", f"--container-mounts={mounts}"]
        srun.append(f"--container-workdir={os.getcwd()}")
    return srun


def set_environment(processes: int) -> None:
    """Set the environment of all programs that are started from here."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # each process would otherwise start a thread a core, which is many times slower
    threads = setting("OMP_NUM_THREADS", str(max(1, cores // processes)))
    os.environ.update(OMP_NUM_THREADS=threads, TOKENIZERS_PARALLELISM="false", PYTHONUNBUFFERED="1")


def python(script: str, *options: str) -> list[str]:
    """The command of a program of this repository."""
    return [sys.executable, str(ROOT / script), *options]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
