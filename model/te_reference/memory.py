"""Keep freed memory in the process, so that large CPU tensors do not cause a page fault for each page."""

from __future__ import annotations

import ctypes
import os

# from glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 2**30


def keep_freed_memory() -> None:
    """Let the process keep up to 1 GiB of freed memory from now on.

    By default glibc maps each tensor of 32 MiB or more anew. The first access to its pages takes longer than the
    reference's computations on them: a third of a training step. Without glibc, or if a MALLOC_... environment variable
    is set, nothing changes.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
