"""List the GPUs of this host and recognize out-of-memory errors, without importing torch."""

from __future__ import annotations

import ctypes
import subprocess
import sys

# This code runs in a separate process, because a process that has initialized the CUDA driver cannot use CUDA in its
# forks.
QUERY = """
import ctypes
cuda, count, device, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0:
    for index in range(count.value):
        assert cuda.cuDeviceGet(ctypes.byref(device), index) == 0
        assert cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device) == 0
        print(size.value)
"""
QUERY_TIMEOUT_S = 120  # loading the driver after a reboot takes half a minute


def cuda_devices() -> list[int] | None:
    """Return the memory size of each visible CUDA device in bytes, or None if the driver does not respond.

    The list is empty on a host without CUDA devices.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    command = [sys.executable, "-I", "-S", "-c", QUERY]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True)
        return [int(line) for line in found.stdout.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def out_of_memory(error: BaseException) -> str:
    """Return the first line of an out-of-memory error, for GPU or host memory, or "" for other errors."""
    text = str(error)  # torch has an exception type for GPU memory, but none for host memory
    if isinstance(error, MemoryError) or "out of memory" in text or "allocate memory" in text:
        line = text.splitlines()[0] if text else "no memory left"
        return ". ".join(line.split(". ")[:3])  # drop torch's advice
    return ""
