"""What the programs of test_fp8/ share: timing, and reports that say where and with what they were measured.

A report is a JSON file {"command", "date", "machine", "versions", ..., "results"} with a plot beside it, a PNG of the
same stem. It names hardware and software, and nothing that names a host, a user or a path.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch

from model.fp8 import te_backend
from train.files import write_durably

Key = TypeVar("Key", bound=Hashable)

# Key in "versions" -> distribution. Named where installed; Transformer Engine is named by its backend.
PACKAGES = {
    "deepspeed": "deepspeed",
    "transformers": "transformers",
    "torchao": "torchao",
    "flash_attn_4": "flash-attn-4",
    "triton": "triton",
}


def timed_ms(step: Callable[[], Any]) -> float:
    """Milliseconds of one call: on a GPU by CUDA events, from the call to the end of the last kernel; else by the
    clock. The GPU is idle at the start, so that the time of launching is part of it wherever it is not hidden."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e3
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    before.record()
    step()
    after.record()
    after.synchronize()
    return before.elapsed_time(after)


def take_turns(
    steps: Mapping[Key, Callable[[], Any]],
    rounds: int,
    before: Mapping[Key, Callable[[], Any]] | None = None,
) -> dict[Key, list[float]]:
    """Milliseconds of each step in each of `rounds` rounds; `before` is what must run, untimed, before some of them.

    A round runs every step once, so that a clock that drifts meets all of them alike, and every second round runs
    them in reverse, so that none always follows the same one.
    """
    before = before or {}
    times: dict[Key, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name in list(steps) if turn % 2 == 0 else reversed(list(steps)):
            if name in before:
                before[name]()
            times[name].append(timed_ms(steps[name]))
    return times


def describe() -> tuple[dict[str, Any], dict[str, Any]]:
    """(machine, versions): processor, GPU, its memory and driver; Python, torch, CUDA, cuDNN, what runs FP8
    ("fp8"), and the packages that matter, where installed."""
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
    for key, distribution in PACKAGES.items():
        try:
            versions[key] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
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


def command_line(program: str, options: Iterable[object]) -> str:
    """The command that repeats a run: `program` relative to the repository root, `options` resolved and without
    the output file."""
    return shlex.join(["python", program, *map(str, options)])


def _finite(value: Any) -> Any:
    """`value` with null for every number that is not finite: JSON has no nan."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def write_json(path: str | os.PathLike[str], command: str, results: Sequence[Any], **more: Any) -> Path:
    """Write the report of a run with `command` (from `command_line`) to `path`, making its folder; `more` are keys
    beside "results". A number that is not finite becomes null.

    Raises ValueError: `more` has a key that is the report's own.
    """
    machine, versions = describe()
    report: dict[str, Any] = {
        "command": command,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine,
        "versions": versions,
    }
    if taken := report.keys() & more.keys():
        raise ValueError(f"write_json: {', '.join(sorted(taken))} is the report's own; give it another name")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, json.dumps(_finite({**report, **more, "results": results}), indent=2) + "\n")
    return path


def subplots(rows: int, columns: int, **options: Any) -> tuple[Any, Any]:
    """matplotlib's (figure, array [rows, columns] of axes), drawn without a display."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, squeeze=False, layout="constrained", **options)


def save_plot(figure: Any, output: str | os.PathLike[str]) -> Path:
    """Save `figure` as the PNG beside the JSON file `output`, and close it."""
    from matplotlib import pyplot

    path = Path(output).with_suffix(".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def output_file(text: str) -> Path:
    """The argparse type of --output: a path that ends in .json, which leaves its stem to the plot.

    Raises argparse.ArgumentTypeError, which argparse turns into a usage error: another ending.
    """
    if not text.endswith(".json"):
        raise argparse.ArgumentTypeError(
            f"{text!r}: a file that ends in .json is expected; the plot goes beside it, as a .png"
        )
    return Path(text)
