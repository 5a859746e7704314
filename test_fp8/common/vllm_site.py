"""Run scripts with the packages of vLLM, which pins other versions than this project.

If the environment variable VLLM_PYTHONPATH is set, it replaces PYTHONPATH for these scripts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

# vLLM uses no network. The default sampler needs the package FlashInfer, which greedy decoding does not use. The
# warm-up of DeepGEMM would compile hundreds of kernels, one after the other.
VARIABLES = {
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
    environment = os.environ | VARIABLES
    if site := environment.pop("VLLM_PYTHONPATH", ""):
        environment["PYTHONPATH"] = site
    path = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    return environment if PathFinder.find_spec("vllm", [*path, *sys.path]) else None


def run_script(script: Path, request: Any, environment: Mapping[str, str]) -> Any:
    """Run `script REQUEST.json ANSWER.json` and return the answer. Raises ValueError if the script fails."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps(request), encoding="utf-8")
        status = subprocess.run([sys.executable, script, asked, answered], env=environment).returncode
        if status:
            raise ValueError(f"{script.name} exited with status {status}; its output is above")
        return json.loads(answered.read_text(encoding="utf-8"))
