"""A timer for model/autotune that needs no GPU and always says the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Script:
    """A timer that runs everything and says what it is told: `kernels` are the (FP8, bf16) times of the module shapes,
    `steps` those of the steps, in the order in which they are measured."""

    def __init__(self, kernels: list[tuple[float, float]], steps: list[float]):
        # each shape in five rounds, each step once to find the length of a window and then in five windows
        self.kernels: Iterator[float] = iter([ms for pair in kernels for _ in range(5) for ms in pair])
        self.steps: Iterator[float] = iter([ms for ms in steps for _ in range(6)])

    def kernels_ms(self, run: Callable[[], Any]) -> float:
        run()
        return next(self.kernels)

    def elapsed_ms(self, run: Callable[[], Any]) -> float:
        run()
        return next(self.steps)
