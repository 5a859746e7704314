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
from collections.abc import Callable, Sequence
from functools import partial
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

Part = Sequence[Callable[[], Results]]
"""The last is timed and has the results; what is before it runs each time before, untimed."""


class Tensors:
    """What all precisions of a shape compute with, float32: `weight` [out, in], `x` [batch, rows, in], `gradient` of
    the output [batch, rows, out], and the `exact` results.

    Normal ones of the sizes that training has: zeros would run faster than any data, for less power.
    """

    def __init__(self, shape: Shape, device: torch.device):
        torch.manual_seed(0)
        self.weight = torch.randn(shape.outputs, shape.inputs, device=device) * 0.02
        self.x = torch.randn(shape.batch, shape.rows, shape.inputs, device=device)
        self.gradient = torch.randn(shape.batch, shape.rows, shape.outputs, device=device) * 1e-3
        self.exact = {
            "output": self.x @ self.weight.T,
            "dgrad": self.gradient @ self.weight,
            "wgrad": self.gradient.flatten(0, 1).T @ self.x.flatten(0, 1),
        }

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
        self._manager: Any = None
        if self.compute == "fp8":
            if reason := shape.why_not_fp8():
                raise PrecisionError(reason)
            self.precision = Precision(PrecisionConfig(recipe=recipe, bf16_modules=[]))
            te = self.precision.te
            linear = te.Linear(shape.inputs, shape.outputs, bias=False, params_dtype=dtype, device=device)
            # the reference has no such object; nobody reads its speed
            self._manager = getattr(sys.modules[te.autocast.__module__], "FP8GlobalStateManager", None)
            self._scales = self._manager and type(self._manager.quantization_state)()
        else:
            linear = nn.Linear(shape.inputs, shape.outputs, bias=False, dtype=dtype, device=device)
        with torch.no_grad():
            linear.weight.copy_(tensors.weight)
        self.linear = linear
        self.x = tensors.x.detach().to(dtype).requires_grad_()
        self.gradient = tensors.gradient.to(dtype)
        self._cached_weight = cached_weight
        self._forwards = 0

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
        """The parts, launched normally."""
        outputs: list[Tensor] = []

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

        def before(name: str) -> Results:
            self.need(name)
            outputs[:] = [self.forward() for _ in range(calls)]
            return {}

        def backward(name: str) -> Results:
            while outputs:
                gradients = self.backward(outputs.pop(), name)
            return gradients

        parts = {"step": [step], "forward": [forward]}
        parts |= {name: [partial(before, name), partial(backward, name)] for name in ("dgrad", "wgrad")}
        return {
            name: [partial(self._with_own_scales, stage) for stage in part] for name, part in parts.items()
        }

    def _with_own_scales(self, stage: Callable[[], Results]) -> Results:
        """The modules whose scales Transformer Engine updates at the end of an autocast or a backward are those of the
        whole process, in the autocasts of other recipes too. A row must pay for its own only."""
        if self._manager is None:
            return stage()
        outer, self._manager.quantization_state = self._manager.quantization_state, self._scales
        try:
            return stage()
        finally:
            self._manager.quantization_state = outer


def as_graph(stage: Callable[[], Results], pool: Any) -> Callable[[], Results]:
    """`stage`, which must have run before, as the replay of a CUDA graph on the current stream (not the default one),
    with its memory in `pool`. The results are the same tensors each time.

    Raises RuntimeError: what cannot be captured.
    """
    graph, cause = torch.cuda.CUDAGraph(), None
    try:
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
            try:
                results = stage()
            except Exception as error:
                cause = error  # ending the capture raises another one, which says less
                raise
    except Exception as error:
        raise RuntimeError(f"cannot be captured as a CUDA graph: {cause or error}") from error

    def replay() -> Results:
        graph.replay()
        return results

    return replay
