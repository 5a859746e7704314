#!/usr/bin/env python3
"""Start a script once for each rank of this node, pass signals on, and end with the status that the ranks mean.

    python train/launch.py --nproc 8 train/train.py CONFIG [--key value]...
    srun --ntasks-per-node=1 --cpus-per-task=64 python train/launch.py --nproc 8 --nnodes 4 --master_addr HOST \\
        --master_port 29500 train/train.py CONFIG         (the node's rank: SLURM_PROCID)

What it is for, beside deepspeed and torchrun, which start the same script: both exit with 1 whatever their ranks say,
so that a stop on request, a wrong key and a crash look alike, and give the ranks that are left 30 seconds to end when
one has died; deepspeed's kills its ranks 30 seconds after a SIGTERM. Here SIGTERM, SIGUSR1 and SIGHUP go to every rank,
which then has the time it needs to save; when a rank dies, the others end within seconds. The first Ctrl-C, which the
ranks get from the terminal themselves, asks for the same; the second, or one after another signal, ends them at once.

Before it starts ranks of train/train.py it looks whether their run can start (train/preflight), so that what keeps it
from that is told at once, and by one.

Exit status: 0 when every rank ended with 0; STOPPED (75) when they stopped on request; INTERRUPTED (130) when Ctrl-C
ended them; 2 for what has to be changed first; else that of the rank which failed first, 128 + n if signal n killed it.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

sys.path[0] = str(Path(__file__).resolve().parent.parent)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while it imports; signals.install comes later

from model import need

need("starting ranks", "pydantic", "psutil")

from model.errors import UserError
from model.keys import between
from train.engine.launchers import Nodes, names_of_this_host, nodes_of
from train.files import remove_dead_buffers, tell
from train.guard import signals
from train.guard.signals import INTERRUPTED, NOT_AS_IT_IS, SIGNALS, STOPPED, WITHOUT_STEPS
from train.preflight.machine import cuda_devices, memory_kills
from train.record.log import last_lines
from train.record.run_folder import RunFolder

TRAIN = Path(__file__).resolve().parent / "train.py"

POLL_S = 0.2
# For the others to say what they have to say once a rank has failed: rank 0 speaks first, the others after 2 s.
FAILED_GRACE_S = 4.0
# After a Ctrl-C nobody is waited for but one that is about to end, too.
INTERRUPTED_GRACE_S = 1.0
OTHER_NODES_S = 2.0
# Ranks that stop on request leave together, after their checkpoint is committed.
STOPPED_GRACE_S = 60.0


def main(argv: list[str]) -> int:
    options = parse(argv)
    if problem := what_prevents(options):
        if options.node_rank:
            time.sleep(OTHER_NODES_S)  # the first node speaks first, and may end this one
        tell(f"error: {problem}", file=sys.stderr)
        return NOT_AS_IT_IS
    launcher = Launcher(options)
    try:
        return launcher.wait()
    finally:
        launcher.kill()


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
    parser.set_defaults(folder=None)  # of a run of train/train.py
    options = parser.parse_args(argv)
    if options.hostfile is not None:
        if given := [name for name in vars(Nodes(1, 1, 0, "")) if getattr(options, name) is not None]:
            parser.error(f"--hostfile says what --{given[0]} would: give one of them")
        try:
            found = nodes_of(options.hostfile, names_of_this_host())
        except ValueError as error:
            parser.error(str(error))
    elif options.nproc is None:
        parser.error("--nproc, the ranks on this node, or --hostfile is needed")
    else:
        node = options.node_rank
        node = int(os.environ.get("SLURM_PROCID") or 0) if node is None else node
        found = Nodes(options.nproc, options.nnodes or 1, node, options.master_addr or "127.0.0.1")
    vars(options).update(vars(found))
    if options.node_rank >= options.nnodes:
        parser.error(f"--node_rank {options.node_rank} must be below --nnodes {options.nnodes}")
    if options.master_port is None and options.nnodes > 1:
        parser.error("several nodes need --master_port, the same on each")
    if not Path(options.script).is_file():
        parser.error(f"{options.script}: no such script; what each rank runs, such as train/train.py")
    return options


def what_prevents(options: argparse.Namespace) -> str:
    """Why no rank needs to be started; "" if nothing is known that speaks against it."""
    if options.master_port and options.node_rank == 0 and is_taken(options.master_port):
        return (
            f"--master_port {options.master_port} (MASTER_PORT) is in use on this host by another process; give "
            "another, the same on each node, or with one node none"
        )
    if Path(options.script).resolve() != TRAIN:
        return ""
    # not for other scripts: imports of half a second
    from train.config.load import load_arguments
    from train.preflight.check import CHECKED, check

    try:
        arguments = load_arguments(options.arguments)
        remarks = check(arguments, options.nnodes * options.nproc, options.nproc, cuda_devices())
    except (ValueError, UserError) as error:
        return str(error)
    if options.node_rank == 0:
        tell(*remarks)
    options.folder = RunFolder(arguments.output_dir)
    os.environ[CHECKED] = "1"
    return ""


def is_taken(port: int) -> bool:
    """Whether a process of this host listens there."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as s:
        s.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # a connection that ended a moment ago is none
        try:
            s.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def free_port() -> int:
    """A port that is free now, and below those which systems give to outgoing connections: rank 0 listens there only
    after its imports."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("", port := random.randrange(20000, 32000)))
            return port


class Launcher:
    """The ranks of this node."""

    def __init__(self, options: argparse.Namespace):
        self.first_rank = options.node_rank * options.nproc
        self.asked_to_stop = self.interrupted = self.ends = False
        self.processes: list[subprocess.Popen] = []
        self.memory_kills = memory_kills()
        logs = [] if options.folder is None else map(options.folder.rank_log, self._ranks(options.nproc))
        # what earlier starts wrote in them is not this one's
        self.logs = [(log, log.stat().st_size if log.is_file() else 0) for log in logs]
        signals.install(self._pass_on)
        environment = dict(
            os.environ,
            WORLD_SIZE=str(options.nnodes * options.nproc),
            LOCAL_WORLD_SIZE=str(options.nproc),
            LOCAL_SIZE=str(options.nproc),  # DeepSpeed's name for it
            MASTER_ADDR=options.master_addr,
            MASTER_PORT=str(options.master_port or free_port()),
        )
        command = [sys.executable, "-u", options.script, *options.arguments]
        # inherited: in a rank that does not take signals yet, a Ctrl-C would be a traceback
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        for local in range(options.nproc):
            mine = {**environment, "RANK": str(self.first_rank + local), "LOCAL_RANK": str(local)}
            # no rank stays behind, holding a GPU, when the launcher is killed
            dies_with_it = signals.at_parents_end(signal.SIGKILL)
            self.processes.append(subprocess.Popen(command, env=mine, preexec_fn=dies_with_it))
            if self.asked_to_stop:
                self.processes[-1].send_signal(signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

    def _ranks(self, count: int) -> range:
        return range(self.first_rank, self.first_rank + count)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            # Not by another request to stop before it: train/job.py's, of this very Ctrl-C, may be here first.
            if self.interrupted:
                self.ends = True  # wait() does, and then the ranks
                return
            # Not as SIGINT, which ranks of this terminal have already. Those that do not take signals yet end by this.
            self.interrupted, number = True, signal.SIGTERM
        self.asked_to_stop = True
        for process in self.processes:
            # not send_signal, which polls: a handler must not reap what wait() is looking at
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def wait(self) -> int:
        """Watch the ranks until all have ended or must be; returns the exit status."""
        failed: dict[int, int] = {}  # rank -> status, in the order of their ends
        deadline: float | None = None
        while not self.ends:
            for rank, process in enumerate(self.processes, self.first_rank):
                if rank not in failed and process.poll() not in (None, 0):
                    failed[rank] = process.returncode
                    grace = STOPPED_GRACE_S if set(failed.values()) == {STOPPED} else FAILED_GRACE_S
                    if process.returncode == INTERRUPTED:
                        grace = INTERRUPTED_GRACE_S
                    if rank == 0 and process.returncode == NOT_AS_IT_IS:
                        grace = 0.0  # it said why, for all of them
                    deadline = min(deadline or float("inf"), time.monotonic() + grace)
            if all(process.returncode is not None for process in self.processes):
                break
            if deadline is not None and time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        if (
            self.ends or INTERRUPTED in failed.values()
        ):  # a rank that lost its connection to such a one is no news
            return INTERRUPTED
        left = [rank for rank, p in enumerate(self.processes, self.first_rank) if p.returncode is None]
        self._show_last_lines(failed)
        return self._status(failed, left)

    def _status(self, failed: dict[int, int], left: list[int]) -> int:
        if not failed:
            return 0
        if set(failed.values()) == {STOPPED}:
            return STOPPED
        # the first that was killed is the cause, those that lost their connection to it the consequence
        rank = min(failed, key=lambda rank: (failed[rank] >= 0, failed[rank] == STOPPED))
        status = failed[rank]
        if status < 0 and self.asked_to_stop and -status in SIGNALS:
            # so early that the rank did not yet take signals: it had done nothing
            if not self.interrupted:
                return STOPPED
            tell(WITHOUT_STEPS, file=sys.stderr)
            return INTERRUPTED
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        also = f"; ranks {left} are ended with it" if left else ""
        why = self._why_killed() if status == -signal.SIGKILL else ""
        if (rank, status) != (0, NOT_AS_IT_IS):  # which said what has to be changed
            tell(f"launch: rank {rank} {how}{also}{why}", file=sys.stderr)
        return 128 - status if status < 0 else status

    def _show_last_lines(self, failed: dict[int, int]) -> None:
        """Of the logs of ranks that a signal ended, which could not say on the console what they died of."""
        for rank in [rank for rank, status in failed.items() if rank and status < 0 and self.logs]:
            path, since = self.logs[rank - self.first_rank]
            if lines := last_lines(path, since):
                tell(f"launch: the last lines of rank {rank}, of {path}:", *lines, file=sys.stderr)

    def _why_killed(self) -> str:
        """What is known of a SIGKILL, which leaves a rank no word of its own."""
        if memory_kills() > self.memory_kills:
            why = "The system did it, for host memory ran out"
        else:
            why = (
                "Somebody did it, or the system where host memory ran out (dmesg, or Slurm's sacct, says so)"
            )
        return f". {why}: fewer ranks a node, or save_async false, need less of it"

    def kill(self) -> None:
        """End what still runs, at once."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()
        remove_dead_buffers()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
