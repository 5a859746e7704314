"""One Linear in one precision, taken apart into what the microtest times, launched normally or as CUDA graphs.

The parts, each `calls` times in a row, so that a short one is longer than its first launch:

    step      forward, then backward with both gradients
    forward   as in training: with what it saves (FP8: and transposes) for the backward
    dgrad     only the backward, only the input needs a gradient; its forwards run before, untimed
    wgrad     only the backward, only the weight needs a gradient; likewise

In FP8 the quantization of input and weight is part of forward, that of the output's gradient part of dgrad and wgrad,
of both, where a step does it once for both; and with delayed scaling the update of the scales, which a model does
once for all its modules, is part of each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from model.fp8.precision import DTYPES, Precision, PrecisionError
from model.fp8.recipes import PrecisionConfig
from test_fp8.linear.shapes import Shape

# Relative errors to float32 above which a result is wrong, not rounded. bf16 rounds to 8 bits: 2e-3 each for two
# operands and the result. e4m3 has 4 and e5m2 3 bits: 0.03 and 0.05 for an operand that its scale fits.
ERROR_LIMITS = {"fp32": 1e-4, "bf16": 1e-2, "fp8": 0.1}

Results = dict[str, Tensor]
"""Any of "output" [batch, rows, out], "dgrad" [batch, rows, in] and "wgrad" [out, in]."""


@dataclass
class Part:
    """`work` is what is timed, `before` what has to run before each time, if anything."""

    work: Callable[[], Results]
    before: Callable[[], Any] | None = None


@dataclass
class Tensors:
    """What all precisions of a shape compute with, float32: `weight` [out, in], `x` [batch, rows, in], `gradient` of
    the output [batch, rows, out], and the `exact` results."""

    weight: Tensor
    x: Tensor
    gradient: Tensor
    exact: Results

    @classmethod
    def random(cls, shape: Shape, device: torch.device) -> Tensors:
        """Normal ones of the sizes that training has: zeros would run faster than any data, for less power."""
        torch.manual_seed(0)
        weight = torch.randn(shape.outputs, shape.inputs, device=device) * 0.02
        x = torch.randn(shape.batch, shape.rows, shape.inputs, device=device)
        gradient = torch.randn(shape.batch, shape.rows, shape.outputs, device=device) * 1e-3
        exact = {
            "output": x @ weight.T,
            "dgrad": gradient @ weight,
            "wgrad": gradient.flatten(0, 1).T @ x.flatten(0, 1),
        }
        return cls(weight, x, gradient, exact)

    def errors(self, results: Results) -> dict[str, float]:
        """Relative error of each result in the Frobenius norm."""
        return {
            name: ((result.float() - self.exact[name]).norm() / self.exact[name].norm()).item()
            for name, result in results.items()
        }


class Case:
    """A Linear in the precision `name` ("fp32", "bf16" or "fp8-RECIPE") on `tensors`.

    fp32 and bf16 are torch.nn.Linear, the baseline; FP8 is te.Linear on bf16 parameters. `cached_weight`: FP8 quantizes
    the weight in the first two forwards only, as a step with gradient accumulation does.
    Raises PrecisionError: FP8 that this machine or this shape cannot run.
    """

    def __init__(self, shape: Shape, name: str, tensors: Tensors, cached_weight: bool = False):
        self.compute, _, recipe = name.partition("-")
        device, dtype = tensors.x.device, DTYPES[self.compute]
        self.precision: Precision | None = None
        if self.compute == "fp8":
            if reason := shape.why_not_fp8():
                raise PrecisionError(reason)
            self.precision = Precision(PrecisionConfig(recipe=recipe, bf16_modules=[]))
            self._scales = _OwnScales(self.precision.te)
            linear = self.precision.te.Linear(
                shape.inputs, shape.outputs, bias=False, params_dtype=dtype, device=device
            )
        else:
            linear = nn.Linear(shape.inputs, shape.outputs, bias=False, dtype=dtype, device=device)
        with torch.no_grad():
            linear.weight.copy_(tensors.weight)
        self.linear = linear
        self.x = tensors.x.detach().to(dtype).requires_grad_()
        self.gradient = tensors.gradient.to(dtype)
        self._cached_weight = cached_weight
        self._forwards = 0

    @property
    def ran_fp8(self) -> bool:
        return bool(getattr(self.linear, "fp8", False))

    def forward(self) -> Tensor:
        if self.precision is None:
            return self.linear(self.x)
        first = None
        if self._cached_weight:
            # twice, as delayed scaling knows the weight's scale only after its first forward
            first, self._forwards = self._forwards < 2, self._forwards + 1
        with self.precision.autocast():
            return self.linear(self.x, is_first_microbatch=first)

    def backward(self, output: Tensor, *names: str) -> Results:
        """Gradients of "dgrad" and "wgrad" by `names`. torch.autograd.grad, as `.grad` would be accumulated into."""
        of = {"dgrad": self.x, "wgrad": self.linear.weight}
        return dict(
            zip(names, torch.autograd.grad(output, [of[name] for name in names], self.gradient), strict=True)
        )

    def need(self, *names: str) -> None:
        """Which of "dgrad" and "wgrad" the following forwards shall prepare."""
        self.x.requires_grad_("dgrad" in names)
        self.linear.weight.requires_grad_("wgrad" in names)

    def parts(self, calls: int) -> dict[str, Part]:
        """The PARTS, launched normally."""

        def forward() -> Results:
            self.need("dgrad", "wgrad")
            for _ in range(calls):
                output = self.forward()
            return {"output": output.detach()}

        def step() -> Results:
            self.need("dgrad", "wgrad")
            for _ in range(calls):
                output = self.forward()
                gradients = self.backward(output, "dgrad", "wgrad")
            return {"output": output.detach(), **gradients}

        def backward_of(name: str) -> Part:
            outputs: list[Tensor] = []

            def before() -> None:
                self.need(name)
                outputs[:] = [self.forward() for _ in range(calls)]

            def work() -> Results:
                while outputs:
                    gradients = self.backward(outputs.pop(), name)
                return gradients

            return Part(work, before)

        parts = {"step": Part(step), "forward": Part(forward)}
        parts |= {name: backward_of(name) for name in ("dgrad", "wgrad")}
        return parts if self.precision is None else {k: self._with_own_scales(p) for k, p in parts.items()}

    def _with_own_scales(self, part: Part) -> Part:
        def scoped(function: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                with self._scales():
                    return function()

            return run

        return Part(scoped(part.work), scoped(part.before) if part.before else None)


class _OwnScales:
    """The modules whose scales Transformer Engine updates at the end of an autocast or a backward are those of the
    whole process, in the autocasts of other recipes too. A row must pay for its own only: as long as the context is
    entered, the process has the state of this object."""

    def __init__(self, te: Any):
        # the reference has no such object; nobody reads its speed
        self.manager = getattr(sys.modules[te.autocast.__module__], "FP8GlobalStateManager", None)
        self.state = self.manager and type(self.manager.quantization_state)()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self.manager is None:
            yield
            return
        outer, self.manager.quantization_state = self.manager.quantization_state, self.state
        try:
            yield
        finally:
            self.manager.quantization_state = outer


def as_graphs(part: Part, pool: Any) -> Part:
    """`part`, which must have run before, as replays of CUDA graphs on the current stream (not the default one), with
    their memory in `pool`. The results are the same tensors each time.

    Raises RuntimeError: what cannot be captured.
    """
    before = None
    if part.before:
        before, _ = _capture(part.before, pool)
    work, results = _capture(part.work, pool)

    def replay() -> Results:
        work.replay()
        return results

    return Part(replay, before.replay if before else None)


def _capture(function: Callable[[], Any], pool: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph, cause = torch.cuda.CUDAGraph(), None
    try:
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
            try:
                result = function()
            except Exception as error:
                cause = error  # ending the capture raises another one, which says less
                raise
    except Exception as error:
        raise RuntimeError(f"cannot be captured as a CUDA graph: {cause or error}") from error
    return graph, result
