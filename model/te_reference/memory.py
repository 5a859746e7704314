"""Large tensors on a CPU without a page fault for each of their pages."""

from __future__ import annotations

import ctypes
import os

# of glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 2**30


def keep_freed_memory() -> None:
    """From now on the process keeps up to 1 GiB that it frees. glibc would map each tensor of 32 MiB and more anew, and
    to touch its pages for the first time takes longer than what the reference computes in them: a third of a training
    step. Without glibc, or where the environment says MALLOC_..., nothing changes."""
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
