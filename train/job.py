#!/usr/bin/env python3
"""All that run_training.sh does once the environment is set up; its head has the usage, settings and exit statuses.

    python train/job.py [CONFIG] [--key value]...      the command line of train/train.py; without CONFIG: TINY

prepare the embedded corpus, if it is used and not there -> train: start, start again after a crash, requeue the Slurm
job that was asked to stop -> generate a few lines from the result

The ranks are the launcher's (train/launch.py). This process starts it and passes signals on to it: a request to stop
may come at any moment, also to Slurm's batch shell, in whose place this process runs. Nothing here needs torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while it imports; signals.install comes later

from model.errors import UserError
from train.checkpoint.files import (
    CheckpointError,
    branch_at,
    committed,
    identity,
    name_of,
    newest_good,
    read_state,
)
from train.checkpoint.resume import to_go_on
from train.config.arguments import ConfigurationError, TrainingArguments
from train.config.differences import resume_differences
from train.config.load import load_arguments, resolve_arguments
from train.engine.launchers import first_host, nodes_by_hostfile, port_of
from train.files import again, locks, may_pass, reason, tell
from train.guard import signals
from train.guard.signals import INTERRUPTED, NOT_AS_IT_IS, SIGNALS, STOPPED
from train.record.run_folder import RunFolder

# Before a start that came no further is repeated: for a port, a file system or a node to be well again.
PAUSE_S = 30.0
CRASHED = 1
# What trains without CONFIG, on two ranks at most: its batch has tokens for no more.
TINY, TINY_RANKS = ROOT / "train_args/train_config_tiny.json", 2
# The name by which train_args/ and prepare_data.py know the Python standard library's own text.
EMBEDDED_CORPUS = "python-stdlib"
INSTALL = 'set -euo pipefail; source "$ROOT/scripts/setup_env.sh"; install_requirements "$ROOT/requirements-prep.txt"'


class JobError(UserError, RuntimeError):
    """The job cannot be done with these settings; the message names the one to change."""

    code = "job"


def main(argv: list[str]) -> int:
    try:
        job = Job(argv)
        signals.install(job.pass_on)
        return job.run()
    except (ConfigurationError, CheckpointError) as error:
        tell(str(error), file=sys.stderr)
        return NOT_AS_IT_IS
    except (JobError, OSError) as error:
        tell(f"run_training.sh: {reason(error)}", file=sys.stderr)
        return CRASHED if may_pass(error) else NOT_AS_IT_IS


class Job:
    """One start of run_training.sh with the command line `argv` of train.py."""

    def __init__(self, argv: list[str]):
        self.is_named = bool(argv) and not argv[0].startswith("--")
        self.argv = [*argv] if self.is_named else [str(TINY), *argv]
        self.max_restarts = whole_number("MAX_RESTARTS", "3", least=0)
        self.slurm_job = setting("SLURM_JOB_ID")
        try:
            os.environ.update(nodes_by_hostfile(os.environ))
        except ValueError as error:
            raise JobError(str(error)) from error
        self.first_node = setting("NODE_RANK", "0") == "0"
        self.child: subprocess.Popen | None = None
        self.trains = self.stop_asked = self.interrupted = False

    def run(self) -> int:
        """Returns the exit status.

        Raises ConfigurationError: train.py would refuse the command line. JobError: a setting is not what it should be.
        """
        self.arguments = load_arguments(self.argv)
        self.folder = RunFolder(self.arguments.output_dir)
        if self.slurm_job and not self.arguments.dry_run:
            self.go_on_if_requeued()
        processes = processes_per_node(math.inf if self.is_named else TINY_RANKS)
        set_environment(processes)
        if corpus := missing_corpus(self.arguments):  # a batch that so many cannot share is told before
            resolve_arguments(
                self.arguments, processes * whole_number("NNODES", setting("SLURM_NNODES", "1"), least=1)
            )
            if status := self.prepare(corpus):
                return self.ended(status)
        if self.arguments.dry_run:
            return self.call([*launch_command(processes), str(ROOT / "train/train.py"), *self.argv])
        state, checkpoint = run_state(self.arguments)
        anew = "--resume_from_checkpoint never"
        if state == "finished":
            done = f"training: {self.folder.path} is finished ({checkpoint}), nothing to train"
            tell(f"{done}. To start anew: {anew}; elsewhere: --output_dir DIR")
        else:
            if state == "resume":
                tell(f"training: {self.folder.path} goes on from {checkpoint} (to start anew: {anew})")
            if status := self.train(launch_command(processes)):
                return status
        samples = self.arguments.save_strategy != "no" and not setting("CONTAINER_IMAGE")
        if self.first_node and samples and not (self.stop_asked or self.interrupted):
            self.generate()
        return 0

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Handler of signals: what runs gets it too, SIGUSR1 for a stop, which srun hands to its tasks; SIGTERM could
        be meant for srun itself. Before anything runs it is remembered.

        A Ctrl-C came to what runs from the terminal, too: there the first is a request to stop in a training, and ends
        a preparation. The second is passed on as it is, for what did not get it: it ends the launcher at once."""
        again = number == signal.SIGINT and (self.stop_asked or self.interrupted)
        first_in_preparation = number == signal.SIGINT and not again and not self.trains
        self.interrupted |= number == signal.SIGINT
        self.stop_asked |= number != signal.SIGINT
        # not send_signal, which polls: a handler must not reap what call() is waiting for
        if self.child is None or self.child.returncode is not None or first_in_preparation:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child.pid, signal.SIGINT if again else signal.SIGUSR1)

    def call(self, command: list[str]) -> int:
        """Run a program to its end, however many signals arrive; returns its status, 128 + n if signal n ended it."""
        if self.interrupted:
            return self.nothing_ran()
        try:
            # killed itself, this process leaves nothing that trains on unwatched: it saves and stops
            self.child = subprocess.Popen(command, preexec_fn=signals.at_parents_end(signal.SIGUSR1))
        except OSError as error:
            tell(f"{command[0]}: {error}", file=sys.stderr)
            return 127
        if self.stop_asked or self.interrupted:  # before there was anybody to tell
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.child.pid, signal.SIGUSR1)
        # With a timeout it polls. A wait that blocks would not see a signal that came just before it.
        status = self.child.wait(timeout=math.inf)
        self.child = None
        return status if status >= 0 else 128 - status

    def ended(self, status: int) -> int:
        """The exit status after a program that did not end with 0; a Slurm job that was stopped is queued again, but
        not after Ctrl-C: who is there to press it goes on when it suits."""
        if self.interrupted and status - 128 in (signal.SIGINT, *SIGNALS):
            return INTERRUPTED
        if status != STOPPED and not (self.stop_asked and status - 128 in SIGNALS):
            return status  # a signal ends what has not yet begun: that is a stop, too
        at, how = f"training: stopped on request at {self.newest_name()}", to_go_on(self.arguments)
        if self.interrupted or not self.slurm_job or not self.first_node or setting("REQUEUE", "1") == "0":
            tell(f"{at}; the same command{how} goes on from there")
        elif output_of(["scontrol", "requeue", self.slurm_job]) is not None:
            tell(f"{at}; Slurm job {self.slurm_job} is requeued and goes on from there")
        else:
            tell(f"{at}; Slurm did not requeue job {self.slurm_job}: submit it again{how}", file=sys.stderr)
        return STOPPED

    def train(self, launch: list[str]) -> int:
        """Start it until it is done, stopped, or another start would not help; returns the exit status."""
        restarts, once_more, self.trains = 0, False, True
        begins = self.mark()
        while True:
            mark, step = self.mark(), self.last_step()
            self.folder.stopped.unlink(missing_ok=True)
            status = self.call([*launch, str(ROOT / "train/train.py"), *self.argv])
            if status == 0:
                return 0
            if self.folder.stopped.is_file():
                status = STOPPED  # srun makes one status of several nodes'; what rank 0 wrote is sure
            if status in (STOPPED, NOT_AS_IT_IS) or self.stop_asked or self.interrupted:
                return self.ended(status)
            how = f"training: ended with status {status}"
            if restarts == self.max_restarts:
                tell(f"{how}; not started again after {restarts} restarts (MAX_RESTARTS)", file=sys.stderr)
                return status
            restarts += 1
            again = f"restart {restarts} of {self.max_restarts} from {self.newest_name()}"
            if self.mark() != mark or self.last_step() > step:
                once_more = False
            elif once_more:
                tell(f"{how} and came no further than step {step} again; not started again", file=sys.stderr)
                return status
            else:
                once_more, how = True, f"{how} and came no further than step {step}"
                again += f" in {PAUSE_S:g} s, once more"
            tell(f"{how}; {again}", file=sys.stderr)
            if not self.wait(PAUSE_S * once_more):
                return self.ended(128 + signal.SIGUSR1)
            if self.mark() != begins:
                self.go_on_from_own_checkpoint()

    def wait(self, seconds: float = math.inf, until: Callable[[], bool] = lambda: False) -> bool:
        """For so long, or until something has come; False if this job is asked to stop first."""
        ends = time.monotonic() + seconds
        while not (self.stop_asked or self.interrupted):
            if until() or time.monotonic() >= ends:
                return True
            time.sleep(0.5)
        if self.interrupted:
            self.nothing_ran()
        return False

    def nothing_ran(self) -> int:
        """Say so after a Ctrl-C that no program could tell of; returns the status of a program that it ended."""
        tell("Ctrl-C: ended while nothing ran; the same command goes on", file=sys.stderr)
        return INTERRUPTED

    def newest_checkpoint(self) -> Path | None:
        return next(reversed(again(lambda: committed(self.folder.checkpoints))), None)

    def mark(self) -> str:
        """Which checkpoint is the newest: another one of its name has another mark; "" without any."""
        newest = self.newest_checkpoint()
        return f" {newest} {again(lambda: identity(newest))}" if newest else ""

    def newest_name(self) -> str:
        newest = self.newest_checkpoint()
        return newest.name if newest else "the beginning"

    def last_step(self) -> int:
        """The last step in the run's metrics, 0 without any."""
        try:
            lines = again(self.folder.metrics.read_bytes)
        except FileNotFoundError:
            return 0
        return max(map(int, re.findall(rb'^.*?"step": *(\d+)', lines, re.MULTILINE)), default=0)

    def go_on_from_own_checkpoint(self) -> None:
        """Another start of the same run must not do again what "--resume_from_checkpoint never" or a path asked for."""
        if self.newest_checkpoint():
            self.argv += ["--resume_from_checkpoint", "auto"]

    def go_on_if_requeued(self) -> None:
        """A requeued Slurm job has the command line of its first start. It goes on from what is new since then; an
        older checkpoint was there before this job, which may have ended before it began anew."""
        note, mine = self.folder.slurm_job, self.slurm_job + self.mark()
        lines = note.read_text().splitlines() if note.is_file() else []
        others = [line for line in lines if line.split()[:1] != [self.slurm_job]]  # one of them may still run
        if setting("SLURM_RESTART_COUNT", "0") != "0" and len(others) < len(lines):
            if mine not in lines:
                self.go_on_from_own_checkpoint()
                self.arguments = load_arguments(self.argv)
        elif self.first_node:
            self.folder.path.mkdir(parents=True, exist_ok=True)
            note.write_text("\n".join([*others, mine]))

    def prepare(self, corpus: Path) -> int:
        """Prepare the embedded corpus; of several nodes that start on one shared folder, one does and the others
        wait. Returns the status of the first program that fails, 0 if none does."""
        source, tokenizer = ("--input", EMBEDDED_CORPUS), corpus.parent / "tokenizer-4096"
        train_tokenizer = python(
            "train/train_tokenizer.py", *source, "--vocab_size", "4096", "--output", str(tokenizer)
        )
        folders = ("--tokenizer", str(tokenizer), "--output", str(corpus))
        # of about 600 files: enough of them for the evaluation to mean something
        prepare_data = python("train/prepare_data.py", *source, *folders, "--eval_fraction", "0.05")
        corpus.parent.mkdir(parents=True, exist_ok=True)
        with (corpus.parent / ".lock").open("w") as lock:
            if not self.wait(until=lambda: locks(lock)):
                return 128 + signal.SIGUSR1
            if (corpus / "manifest.json").is_file():
                return 0
            tell(f"data: preparing the embedded corpus (the Python standard library's own text) in {corpus}")
            os.environ.update(ROOT=str(ROOT), PY=sys.executable)  # what setup_env.sh goes by
            programs = [["bash", "-c", INSTALL], train_tokenizer, prepare_data]
            if (tokenizer / "tokenizer_config.json").is_file():
                programs.remove(train_tokenizer)
            return next(filter(None, map(self.call, programs)), 0)

    def generate(self) -> None:
        """The demo, in the place of this process: its status and the signals are its own."""
        folder, precision = str(self.folder.path), self.arguments.precision
        compute = precision.compute if precision.compute in ("fp32", "fp8") else "bf16"
        how = f"--precision {compute} --max_new_tokens 96 --temperature 0.8 --top_k 50 --seed 1"
        prompt = ("--prompt", setting("DEMO_PROMPT", "def __init__(self, "))
        program = "fp8_inference_demo/fp8_inference.py"
        demo = python(program, "--model", folder, *how.split(), "--ignore_eos", *prompt)
        command = ["python", os.path.relpath(ROOT / program), "--model", folder, *prompt]
        tell(f"\ndemo: {shlex.join(command)}")
        os.execv(demo[0], demo)


# ---------------------------------------------------------------- what the configuration says of the run


def run_state(arguments: TrainingArguments) -> tuple[str, str]:
    """("new", ""); ("resume", what it goes on from); ("finished", the last checkpoint): all steps done and exported,
    and configured as now. Raises CheckpointError: all steps are done, and all checkpoints are damaged."""
    if arguments.resume_from_checkpoint == "never":
        return "new", ""
    folder = RunFolder(arguments.output_dir)
    if (given := arguments.resume_from_checkpoint) != "auto":
        try:
            branch = branch_at(folder.checkpoints, Path(given))
        except CheckpointError:  # train.py says it
            branch = None
        if branch is None:
            return "resume", given
    found = committed(folder.checkpoints)
    if not found:
        return "new", ""
    done = found[-1].name == name_of(arguments.max_steps) and folder.is_exported(identity(found[-1]))
    done = done and is_configured_as(found[-1], arguments)
    if done and newest_good(folder.checkpoints) == found[-1]:
        return "finished", found[-1].name
    return "resume", found[-1].name  # train.py says what is different


def is_configured_as(checkpoint: Path, arguments: TrainingArguments) -> bool:
    """Whether `arguments` are of the run that wrote the checkpoint, and name the same data folders and model."""
    try:
        saved = read_state(checkpoint)
        now = resolve_arguments(arguments, saved.world_size).to_dict()
    except (CheckpointError, ConfigurationError):
        return False
    before = saved.train_config
    same = before["data"]["sources"] == now["data"]["sources"] and before["model"] == now["model"]
    return same and not resume_differences(before, now)


def missing_corpus(arguments: TrainingArguments) -> Path | None:
    """Folder of the embedded corpus, if it is a source and has no manifest, the last file that is written."""
    found = [Path(f) for f in arguments.data.sources.values() if Path(f).name == EMBEDDED_CORPUS]
    return next((folder for folder in found if not (folder / "manifest.json").is_file()), None)


# ---------------------------------------------------------------- what the machine and its settings say


def in_container(launch: list[str]) -> tuple[list[str], list[str]]:
    """(srun's options for Pyxis, the command there) with CONTAINER_IMAGE; this repository and the working folder are
    mounted where they are here."""
    if not (image := setting("CONTAINER_IMAGE")):
        return [], launch
    own = [f"{folder}:{folder}" for folder in dict.fromkeys((str(ROOT), os.getcwd()))]
    mounts = ",".join(filter(None, [*own, setting("CONTAINER_MOUNTS")]))
    options = {"image": image, "mounts": mounts, "workdir": os.getcwd()}
    command = [setting("CONTAINER_PYTHON", "python3"), *launch[1:]]
    return [f"--container-{name}={value}" for name, value in options.items()], command


def processes_per_node(most: float = math.inf) -> int:
    """NPROC, or the GPUs that torch sees, but not more than `most`, or 2."""
    if setting("NPROC"):
        return whole_number("NPROC", "", least=1)
    if setting("HAS_GPU") != "1":
        return 2
    count = output_of([sys.executable, "-c", "import torch; print(torch.cuda.device_count())"])
    if not count or int(count) == 0:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
        raise JobError(f"there is a GPU, but torch sees none (CUDA_VISIBLE_DEVICES={visible})")
    if int(count) > most:
        tell(f"training: without CONFIG on {most} of {int(count)} GPUs; a configuration takes all")
    return int(min(int(count), most))


def set_environment(processes: int) -> None:
    """Of all programs started from here."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # each process would otherwise start a thread a core, which is many times slower
    threads = setting("OMP_NUM_THREADS", str(max(1, cores // processes)))
    os.environ.update(OMP_NUM_THREADS=threads, TOKENIZERS_PARALLELISM="false", PYTHONUNBUFFERED="1")


def launch_command(processes: int) -> list[str]:
    """What starts the ranks on all nodes that this job is responsible for, but for the script and its arguments.

    Raises JobError: several nodes, and what they need to find each other is not given.
    """
    launch = python("train/launch.py", "--nproc", str(processes))
    job, nodes, port = setting("SLURM_JOB_ID"), setting("NNODES"), setting("MASTER_PORT")
    slurm_nodes = setting("SLURM_NNODES", "1")
    container, launch = in_container(launch)
    if container and (nodes or not job):
        raise JobError(
            "CONTAINER_IMAGE is for Slurm jobs with Pyxis, by srun; elsewhere start this in the container"
        )
    if job and not nodes and (int(slurm_nodes) > 1 or container):
        port = port or port_of(job)
        if not (host := first_host(setting("SLURM_JOB_NODELIST"))):
            raise JobError(
                f"SLURM_JOB_NODELIST is not set: which nodes has Slurm job {job}? Pass its environment on"
            )
        where = f"(Slurm job {job}, rank 0 at {host}:{port})"
        tell(f"training: {slurm_nodes} nodes x {processes} processes {where}")
        srun = f"srun --nodes={slurm_nodes} --ntasks={slurm_nodes} --ntasks-per-node=1 --kill-on-bad-exit=1".split()
        # of sbatch, from which srun does not take it since Slurm 22.05
        if cpus := setting("SLURM_CPUS_PER_TASK"):
            srun.append(f"--cpus-per-task={cpus}")
        where_to_meet = ["--nnodes", slurm_nodes, "--master_addr", host, "--master_port", port]
        return [*srun, *container, *launch, *where_to_meet]
    if whole_number("NNODES", "1", least=1) > 1:
        rank, host = setting("NODE_RANK"), setting("MASTER_ADDR")
        if not rank:
            raise JobError("NNODES needs NODE_RANK too: 0 to NNODES - 1")
        if not host:
            raise JobError("NNODES needs MASTER_ADDR: the host of node 0")
        tell(f"training: node {rank} of {nodes}, {processes} processes")
        mine = ["--nnodes", nodes, "--node_rank", rank, "--master_addr", host]
        return [*launch, *mine, "--master_port", port or "29500"]
    tell(f"training: {processes} process{'es' * (processes > 1)}")
    return [*launch, "--master_port", port] if port else launch


def python(script: str, *options: str) -> list[str]:
    """The command of a program of this repository."""
    return [sys.executable, str(ROOT / script), *options]


def setting(name: str, default: str = "") -> str:
    """An environment variable; an empty one counts as not set."""
    return os.environ.get(name) or default


def whole_number(name: str, default: str, least: int) -> int:
    text = setting(name, default)
    if not re.fullmatch("[0-9]+", text) or int(text) < least:
        raise JobError(f"{name}={text}: a whole number is expected, at least {least}")
    return int(text)


def output_of(command: list[str]) -> str | None:
    """What a short program prints; None if it fails or is not there."""
    try:
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        tell(f"{command[0]}: {error}", file=sys.stderr)
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
