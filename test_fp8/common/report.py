"""What the programs of test_fp8/ make of their results: a table, and a report that says where and with what they were
measured.

A report is a JSON file {"command", "date", "machine", "versions", ..., "results"} with a plot beside it, a PNG of the
same stem. It names hardware and software, and nothing that names a host, a user or a path.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from train.files import write_durably

Result = dict[str, Any]
"""What a report says of a row. It has a "reason" in place of figures where the row could not be measured."""

Columns = Mapping[str, tuple[str | Callable[[Result], Any], str]]
"""Title -> (key of a result, or a function of it; format specification, which ends in < for a column of text)."""

# Distributions of which "versions" tells, where installed; Transformer Engine is named by its backend.
PACKAGES = ("deepspeed", "transformers", "torchao", "flash-attn-4", "triton")


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


def write_json(path: Path, command: str, results: Sequence[Result], **more: Any) -> None:
    """Write the report of a run with `command` (from `Options.command`) to `path`, making its folder; `more` are keys
    beside "results". A number that is not finite becomes null.

    Raises TypeError: `more` has a key that is the report's own.
    """
    machine, versions = describe()
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    report = dict(command=command, date=date, machine=machine, versions=versions, **more, results=results)
    finite = json.loads(json.dumps(report), parse_constant=lambda number: None)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, json.dumps(finite, indent=2) + "\n")


def measured(results: Sequence[Result]) -> list[Result]:
    return [r for r in results if "reason" not in r]


def table(results: Sequence[Result], columns: Columns) -> str:
    """The results as lines of text, "-" for what is None or missing."""
    lines, forms = [list(columns)], [form for _, form in columns.values()]
    for r in results:
        values = [r.get(get) if isinstance(get, str) else get(r) for get, _ in columns.values()]
        lines.append(["-" if v is None else format(v, form) for v, form in zip(values, forms, strict=True)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = [
        f"{'<' if form.endswith('<') else '>'}{width}" for form, width in zip(forms, widths, strict=True)
    ]
    return "\n".join("  ".join(map(format, line, sides)).rstrip() for line in lines)


def bars(
    axis: Any, labels: Sequence[str], values: Sequence[float], offset: float = 0.0, **options: Any
) -> None:
    """Horizontal bars from the top down, `offset` below their labels; `options` as axis.barh takes them."""
    axis.barh([place + offset for place in range(len(labels))], values, **options)
    axis.set_yticks(range(len(labels)), labels, fontsize=8)
    axis.set_ylim(len(labels) - 0.4, -0.6)
    axis.grid(axis="x", alpha=0.3)
