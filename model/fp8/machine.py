"""What a report says of where it was made: the machine, and the software that FP8 ran on. It names hardware and
versions, and nothing that names a host, a user or a path. And which remarks of that software a user need not read."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Distributions of which "versions" tells, where installed; Transformer Engine is named by its backend.
PACKAGES = ("deepspeed", "transformers", "torchao", "flash-attn-4", "liger-kernel", "megatron-core", "triton")


def leave_out(logger: str, *beginnings: str) -> None:
    """Drop what is logged to exactly `logger` and begins so."""
    logging.getLogger(logger).addFilter(lambda record: not record.getMessage().startswith(beginnings))


def describe() -> tuple[dict[str, Any], dict[str, Any]]:
    """(machine, versions): processor, GPU, its memory and driver; Python, torch, CUDA, cuDNN, what runs FP8
    ("fp8"), and the packages that matter, where installed."""
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
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package.replace("-", "_")] = importlib.metadata.version(package)
    return machine, versions


def headline(machine: Mapping[str, Any], versions: Mapping[str, Any]) -> str:
    """One line of `describe`, for the log."""
    return f"{machine.get('gpu', machine['cpu'])}, torch {versions['torch']}, FP8 by {versions['fp8']}"


def _cpu_model() -> str:
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def _driver_version() -> str | None:
    """The NVIDIA driver's version; None where nvidia-smi is missing or fails."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.split("\n")[0].strip() or None


def _cudnn(number: int) -> str:
    """91900 -> "9.19.0", the encoding of cuDNN 9."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
