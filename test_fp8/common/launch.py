"""Start scripts of this repository as child processes, and scripts that import vLLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

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


def run(program: Program) -> None:
    """Run a script and wait until it exits. Raises ValueError if the exit status is not 0."""
    if status := program.start().wait():
        raise ValueError(f"{program.script} exited with status {status}: {program.last_lines()}")


# ---------------------------------------------------------------- vLLM, which pins other package versions

# If the environment variable VLLM_PYTHONPATH is set, it replaces PYTHONPATH for the scripts that import vLLM.
# vLLM uses no network. The default sampler needs the package FlashInfer, which greedy decoding does not use. The
# warm-up of DeepGEMM would compile hundreds of kernels, one after the other.
VLLM_VARIABLES = {
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


def vllm_environment() -> dict[str, str] | None:
    """Return the environment variables for scripts that import vLLM, or None if vLLM is not installed."""
    environment = os.environ | VLLM_VARIABLES
    if site := environment.pop("VLLM_PYTHONPATH", ""):
        environment["PYTHONPATH"] = site
    path = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    return environment if PathFinder.find_spec("vllm", [*path, *sys.path]) else None


def call_with_vllm(
    function: str, calls: Sequence[Mapping[str, Any]], environment: Mapping[str, str], package: str = "vllm"
) -> dict[str, Any]:
    """Call a function of test_fp8/model/vllm_functions.py in a child process with the packages of vLLM.

    calls: the arguments of each call. package: the package that the function uses. Returns the "version" of the package
    and the result of each call ("found"). Raises ValueError if a call fails.
    """
    script = ROOT / "test_fp8/model/vllm_functions.py"
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "answer.json")
        request = {"function": function, "calls": calls, "package": package}
        asked.write_text(json.dumps(request), encoding="utf-8")
        status = subprocess.run([sys.executable, script, asked, answered], env=environment).returncode
        if status:
            raise ValueError(f"{script.name} exited with status {status}; see the output above")
        return json.loads(answered.read_text(encoding="utf-8"))
