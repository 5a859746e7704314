"""Describe the hardware and software for reports, and filter irrelevant log messages.

The description contains no host name, user name or path.
"""

from __future__ import annotations

import logging
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Packages whose versions are reported if installed. The backend reports Transformer Engine's.
PACKAGES = ("deepspeed", "transformers", "torchao", "flash-attn-4", "liger-kernel", "megatron-core", "triton")


def drop_log_messages(logger: str, *prefixes: str) -> None:
    """Drop messages that start with one of `prefixes` and are logged directly to the logger named `logger`."""
    logging.getLogger(logger).addFilter(lambda record: not record.getMessage().startswith(prefixes))


def describe() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two dictionaries that describe the hardware and the software versions.

    The hardware dictionary contains the processor, GPU, GPU memory and driver. The versions dictionary contains the
    versions of Python, torch, CUDA, cuDNN, the FP8 backend (under the key "fp8") and related packages, if installed.
    """
    import torch

    from model.fp8 import te_backend

    machine: dict[str, Any] = {"cpu": _cpu_model(), "torch_threads": torch.get_num_threads()}
    versions: dict[str, Any] = {"python": platform.python_version(), "torch": str(torch.__version__)}
    try:
        te = te_backend.load("auto")
        versions["fp8"] = te.version
    except te_backend.BackendError as error:
        te = None
        versions["fp8"] = f"none: {error}"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        machine |= {
            "gpu": properties.name,
            "gpus": torch.cuda.device_count(),
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "fp32_matmul_precision": torch.get_float32_matmul_precision(),
        }
        if driver := _driver_version():
            machine["driver"] = driver
        versions |= {"cuda": str(torch.version.cuda), "cudnn": _cudnn(torch.backends.cudnn.version() or 0)}
        if te is not None:
            versions["transformer_engine_cudnn"] = _cudnn(te_backend.cudnn_versions()[0])
    for package in PACKAGES:
        if version := te_backend.package_version(package):
            versions[package.replace("-", "_")] = version
    return machine, versions


def headline(machine: Mapping[str, Any], versions: Mapping[str, Any]) -> str:
    """Summarize the result of `describe` in one log line."""
    return f"{machine.get('gpu', machine['cpu'])}, torch {versions['torch']}, FP8 by {versions['fp8']}"


def _cpu_model() -> str:
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def _driver_version() -> str | None:
    """Return the version of the NVIDIA driver, or None if nvidia-smi is missing or fails."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.split("\n")[0].strip() or None


def _cudnn(number: int) -> str:
    """Convert cuDNN 9's integer version number to text, for example 91900 to "9.19.0"."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
