"""What this machine has, by its own libraries and counters: torch takes seconds to import."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

# In a process of its own: where the driver was initialized, forks have no CUDA.
QUERY = """
import ctypes
cuda, count, device, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0:
    for index in range(count.value):
        assert cuda.cuDeviceGet(ctypes.byref(device), index) == 0
        assert cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device) == 0
        print(size.value)
"""
COUNTERS = Path("/proc/vmstat")
QUERY_TIMEOUT_S = 120  # a driver that loads for the first GPU program since the boot takes half a minute


def cuda_devices() -> list[int] | None:
    """Bytes of memory of each CUDA device that a run from here may use, [] without any; None: it is not known."""
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
    """The first line of an error that says that memory ran out, of a GPU or of the host; "" of any other."""
    text = str(error)  # torch has a type of its own for a GPU alone
    if isinstance(error, MemoryError) or "out of memory" in text or "allocate memory" in text:
        return text.splitlines()[0] if text else "no memory left"
    return ""


def memory_kills() -> int:
    """How many processes the system has killed since its boot because memory ran out; 0 where it does not say."""
    try:
        counters = dict(line.split() for line in COUNTERS.read_text().splitlines())
        return int(counters.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0
