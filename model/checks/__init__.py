"""Checks of FP8 before and during a training run.

- startup.py: checks before the first step that the modules run FP8 and that attention is correct.
- numerics.py: compares loss and gradients of a one-layer model with float32.
- gemm_counts.py: counts the FP8 GEMMs that ran.
- health.py: statistics of FP8 operands, which quantize_hooks.py intercepts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def pushed(stack: list[Any], item: Any) -> Iterator[None]:
    """Keep `item` on top of `stack` inside this context manager."""
    stack.append(item)
    try:
        yield
    finally:
        stack.pop()
