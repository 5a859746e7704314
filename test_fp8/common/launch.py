"""Start scripts of this repository as child processes, which are stopped when the parent process exits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from test_fp8.common.options import ROOT
from train.monitor.signals import signal_on_parent_exit


@dataclass
class Program:
    """A script in this repository that runs in child processes.

    script: path in the repository. options: command-line arguments. log: file that the output is appended to. ranks:
    number of processes, or 0 for one process without the launcher. gpus: indices of the GPUs to use among those that
    are visible to this process, or None for all.
    """

    script: str
    options: Sequence[object]
    log: Path
    ranks: int = 0
    gpus: Sequence[int] | None = None

    def command(self) -> list[str]:
        launcher = [ROOT / "train/launch.py", "--nproc", self.ranks] if self.ranks else []
        return [str(word) for word in (sys.executable, *launcher, ROOT / self.script, *self.options)]

    def environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        if self.gpus is not None:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            own = visible.split(",") if visible else list(map(str, range(max(self.gpus, default=-1) + 1)))
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(own[index] for index in self.gpus)
        return environment

    def start(self) -> subprocess.Popen:
        """Start the script in a child process. If this process exits, Linux sends SIGTERM to the child process."""
        with self.log.open("a", encoding="utf-8") as log:
            return subprocess.Popen(
                self.command(),
                env=self.environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C interrupts only this process
                preexec_fn=signal_on_parent_exit(signal.SIGTERM),
            )

    def last_lines(self) -> str:
        """Return the last three lines of the script's log, for error messages."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        return "\n".join([line.strip()[:500] for line in lines if line.strip()][-3:]) or "no output"


def run_together(programs: Sequence[Program]) -> list[int]:
    """Run several scripts at the same time and return their exit statuses."""
    running = [program.start() for program in programs]
    return [process.wait() for process in running]


def run(*programs: Program) -> None:
    """Run several scripts at the same time. Raises ValueError if any script fails."""
    for program, status in zip(programs, run_together(programs), strict=True):
        if status:
            raise ValueError(f"{program.script} exited with status {status}: {program.last_lines()}")
