"""Count the FP8 GEMMs that actually ran in the forward and backward pass.

Neither the type of a module nor an enabled switch proves that FP8 runs. For example, with NVTE_BACKWARD_OVERRIDE,
Transformer Engine computes all gradients for the recipes current and block in bf16, but its modules still report `fp8`.
Each weight has three GEMMs: the output, the input gradient and the weight gradient.

    with count_gemms(model, precision) as gemms:
        model(ids, labels=labels).loss.backward()
    if problem := gemms.problem():
        raise ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from model.checks import pushed
from model.fp8 import te_backend, torchao_fp8
from model.fp8.modules import fp8_modules, gemm_modules, matrices, uses_transformer_engine
from model.fp8.precision import Precision

_counting: list[Gemms | None] = []  # nested contexts; only the innermost counts


class Gemms:
    """Counts of the FP8 GEMMs that ran. GEMMs recomputed during the backward pass are not counted.

    Attributes:
        forward: number of forward GEMMs per module.
        backward: number of gradient GEMMs in all modules together.
    """

    def __init__(self, model: nn.Module, precision: Precision):
        self.report = fp8_modules(model, precision)
        modules = gemm_modules(model, precision)
        self.weights = {name: len(matrices(modules[name])) for name in self.report.planned}
        # modules whose gradients are also computed in FP8
        self.backwards = [name for name in self.weights if precision.module_recipe(name) != "bf16_backward"]
        # an lm_head with FP8 GEMMs only for its gradients
        self.gradients_alone = 2 * sum(getattr(module, "fp8_gradients", False) for module in modules.values())
        self.recipe = precision.config.recipe if precision.fp8 else None
        self.forward: Counter[str] = Counter()
        self.backward = 0
        self._module: str | None = None  # the module whose forward is running

    def _record_gemm(self) -> None:
        if _counting[-1] is self:
            in_backward = torch._C._current_graph_task_id() != -1
            if self._module is None:
                self.backward += 1
            elif not in_backward:
                self.forward[self._module] += 1

    def _enter(self, name: str, *_: Any) -> None:
        self._module = name

    def _leave(self, *_: Any) -> None:
        self._module = None

    @property
    def ran(self) -> list[str]:
        """Return the names of the modules that ran an FP8 GEMM in their forward pass."""
        return [name for name, count in self.forward.items() if count]

    def problem(self, passes: int = 1, backward: bool = True) -> str:
        """Return an error message with advice if the FP8 GEMMs that ran differ from the plan, or "" if they match.

        Args:
            passes: number of counted passes.
            backward: whether each forward pass was followed by a backward pass.
        """
        if self.weights and not self.ran:
            return (
                "FP8 is configured, but no module ran FP8; set precision.compute to bf16 to train without FP8"
            )
        planned = {name: weights * passes for name, weights in self.weights.items()}
        wrong = sorted(name for name in {*planned, *self.ran} if self.forward[name] != planned.get(name, 0))
        if wrong:
            return (
                f"{len(wrong)} modules did not run in their planned precision. For example, {wrong[0]} ran "
                f"{self.forward[wrong[0]]} FP8 GEMMs instead of {planned.get(wrong[0], 0)}. Check "
                "precision.bf16_modules"
            )
        of_modules = 2 * sum(planned[name] for name in self.backwards)
        expected = of_modules + self.gradients_alone * passes if backward else 0
        if self.backward != expected:
            return (
                f"the backward pass of {len(self.backwards)} FP8 modules ran {self.backward} FP8 GEMMs instead of "
                f"{expected}. Unset all environment variables that start with NVTE_, because some change Transformer "
                "Engine's precision, and install the package versions in requirements-gpu.txt"
            )
        return ""

    def lines(self) -> list[str]:
        """Return log lines that list the modules running FP8."""
        return self.report.lines(self.recipe, len(self.ran))


@contextmanager
def count_gemms(model: nn.Module, precision: Precision) -> Iterator[Gemms]:
    """Count the FP8 GEMMs that `model`, or a single module, runs inside this context manager.

    torchao models run without torch.compile inside the context. If contexts are nested, only the innermost context
    counts GEMMs.
    """
    gemms = Gemms(model, precision)
    with ExitStack() as stack:
        for name, module in gemm_modules(model, precision).items():
            hooks = (
                module.register_forward_pre_hook(partial(gemms._enter, name)),
                module.register_forward_hook(gemms._leave, always_call=True),
            )
            for hook in hooks:
                stack.callback(hook.remove)
        if uses_transformer_engine(model):
            stack.enter_context(te_backend.intercept_gemms(precision.te, gemms._record_gemm))
        elif precision.torchao:
            stack.enter_context(torchao_fp8.intercept_gemms(precision.emulated, gemms._record_gemm))
        stack.enter_context(pushed(_counting, gemms))
        yield gemms


def pause_counting() -> AbstractContextManager[None]:
    """Return a context manager in which GEMMs are not counted.

    An operation that runs in several parts uses this context for all parts except the first, so that it counts once.
    """
    return pushed(_counting, None)


def count_replay(forward: Counter[str], backward: int = 0) -> None:
    """Add the GEMMs of a replayed CUDA graph to the active `count_gemms` context.

    Args:
        forward, backward: the counts from the capture of the graph (see `Gemms`).
    """
    if _counting and (gemms := _counting[-1]) is not None:
        gemms.forward.update(forward)
        gemms.backward += backward
