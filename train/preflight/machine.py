"""List the GPUs and the free memory of this host, and recognize out-of-memory errors, without importing torch."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import psutil

from model.fp8.hardware import Capability

# This code runs in a separate process, because a process that has initialized the CUDA driver cannot use CUDA in its
# forks.
QUERY = """
import ctypes
cuda, count, device, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
major, minor = ctypes.c_int(), ctypes.c_int()
if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0:
    for index in range(count.value):
        assert cuda.cuDeviceGet(ctypes.byref(device), index) == 0
        assert cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device) == 0
        assert cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device) == 0
        assert cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device) == 0
        print(size.value, major.value, minor.value)
"""
QUERY_TIMEOUT_S = 120  # loading the driver after a reboot takes half a minute


class Device(NamedTuple):
    """Memory size in bytes and compute capability of a CUDA device."""

    memory: int
    capability: Capability


def cuda_devices() -> list[Device] | None:
    """Return the visible CUDA devices, or None if the driver does not respond.

    The list is empty on a host without CUDA devices.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    command = [sys.executable, "-I", "-S", "-c", QUERY]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True)
        rows = [[*map(int, line.split())] for line in found.stdout.splitlines()]
        return [Device(memory, (major, minor)) for memory, major, minor in rows]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def free_host_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the host memory that new processes can use, in bytes.

    In a container, the result does not exceed the container's memory limit (cgroup v2).
    """
    free = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):  # no file, or "max": no limit
        limit, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        cached = int(statistics["active_file"]) + int(statistics["inactive_file"])  # evicted if needed
        free = min(free, limit - used + cached)
    return free


def out_of_memory(error: BaseException) -> str:
    """Return the first line of the error message if `error` means that GPU or host memory ran out, or else ""."""
    text = str(error)  # torch has an exception type for GPU memory, but none for host memory
    if isinstance(error, MemoryError) or "out of memory" in text or "allocate memory" in text:
        line = text.splitlines()[0] if text else "no memory left"
        return ". ".join(line.split(". ")[:3])  # drop torch's advice
    return ""
