"""Measure a linear layer in each precision for test_fp8.py, with normal kernel launches and with a CUDA graph.

All results are first compared with float32, and then all measurements alternate. The part "step" is the forward and
backward pass with both gradients. The part "forward" is the forward pass alone, which also saves tensors for the
backward pass. In FP8, the time includes quantizing input, weight and gradient, and updating the scales of delayed
scaling.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from model.autotune import one_line
from model.checks.startup import verify_fp8
from model.errors import UserError
from model.fp8.precision import DTYPES, Precision, PrecisionError
from model.fp8.recipes import PrecisionConfig
from test_fp8.common.report import Result
from test_fp8.common.timing import time_alternately

if TYPE_CHECKING:
    from test_fp8.test_fp8 import Shape

GEMMS = {"step": 3, "forward": 1}
LAUNCHES = ("eager", "graph")
# A result with a larger relative error compared with float32 is wrong and not only rounded. bf16 has 8 significant
# bits, so each of the two operands and the result has an error of 2e-3. e4m3 has 4 bits and e5m2 has 3 bits, so each
# operand has an error of 0.03 or 0.05 with a suitable scale.
ERROR_LIMITS = {"fp32": 1e-4, "bf16": 1e-2, "fp8": 0.1}
# fp32 runs at about 50 TFLOP/s, so larger steps would dominate the run time of the benchmark.
FP32_LIMIT_FLOP = 2e12
# On a GPU, a timed sample repeats a step up to MAX_CALLS times, until it has about this many FLOPs.
SAMPLE_FLOP, FP32_SAMPLE_FLOP, MAX_CALLS = 2e12, 2.5e11, 32

Tensors = dict[str, Tensor]
"""Some of the tensors "output" [batch, rows, outputs], "dgrad" [batch, rows, inputs] and "wgrad" [outputs, inputs]."""


class Inputs:
    """Random inputs for benchmarking a linear layer, and the `exact` results in float32.

    The values are normally distributed, with magnitudes similar to those in training. Inputs of zeros would need less
    power and therefore give speeds that are too high.
    """

    def __init__(self, shape: Shape):
        torch.manual_seed(0)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.weight = torch.randn(shape.outputs, shape.inputs, device=device) * 0.02
        self.x = torch.randn(shape.batch, shape.rows, shape.inputs, device=device)
        self.gradient = torch.randn(shape.batch, shape.rows, shape.outputs, device=device) * 1e-3
        self.exact = {
            "output": self.x @ self.weight.T,
            "dgrad": self.gradient @ self.weight,
            "wgrad": self.gradient.flatten(0, 1).T @ self.x.flatten(0, 1),
        }


class Linear:
    """A linear layer in the precision "fp32", "bf16" or "fp8-RECIPE".

    fp32 and bf16 use torch.nn.Linear. FP8 uses te.Linear with bf16 parameters. Raises PrecisionError if FP8 cannot run
    on this host or for this shape.
    """

    def __init__(self, shape: Shape, precision: str, inputs: Inputs):
        self.compute, _, recipe = precision.partition("-")
        device, dtype = inputs.x.device, DTYPES[self.compute]
        self.precision: Precision | None = None
        self._te_state: Any = None
        if self.compute == "fp8":
            if reason := shape.fp8_problem():
                raise PrecisionError(reason)
            self.precision = Precision(PrecisionConfig(recipe=recipe, bf16_modules=[]))
            te = self.precision.te
            self.module = te.Linear(
                shape.inputs, shape.outputs, bias=False, params_dtype=dtype, device=device
            )
            # the modules of the CPU reference implementation do not have this object
            self._te_state = getattr(sys.modules[te.autocast.__module__], "FP8GlobalStateManager", None)
            self._scales = self._te_state and type(self._te_state.quantization_state)()
        else:
            self.module = nn.Linear(shape.inputs, shape.outputs, bias=False, dtype=dtype, device=device)
        with torch.no_grad():
            self.module.weight.copy_(inputs.weight)
        self.x = inputs.x.detach().to(dtype).requires_grad_()
        self.gradient = inputs.gradient.to(dtype)

    def run(self, part: str, calls: int) -> Tensors:
        """Run a training step or a forward pass several times, and update only the FP8 scales of this layer.

        By default, Transformer Engine updates the scales of all modules in the process. part: "step" or "forward".
        """
        if self._te_state is None:
            return self._run(part, calls)
        outer, self._te_state.quantization_state = self._te_state.quantization_state, self._scales
        try:
            return self._run(part, calls)
        finally:
            self._te_state.quantization_state = outer

    def _run(self, part: str, calls: int) -> Tensors:
        gradients: tuple[Tensor, ...] = ()
        for _ in range(calls):
            with self.precision.autocast() if self.precision else nullcontext():
                output = self.module(self.x)
            if part == "step":  # autograd.grad does not accumulate in `.grad`
                gradients = torch.autograd.grad(output, (self.x, self.module.weight), self.gradient)
        return dict(zip(("output", "dgrad", "wgrad"), (output.detach(), *gradients), strict=False))


def capture_graph(run: Callable[[], Tensors]) -> Callable[[], Tensors]:
    """Capture a function in a CUDA graph, and return a function that replays the graph.

    The function must have been called before. The current stream must not be the default stream.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        results = run()

    def replay() -> Tensors:
        graph.replay()
        return results

    return replay


def checked(
    linear: Linear, part: str, launch: str, calls: int, inputs: Inputs
) -> tuple[Callable[[], Tensors], dict[str, float]]:
    """Run one part of a linear layer's training step and check the results.

    part: "step" or "forward". launch: "eager" or "graph". calls: the number of times to run the part.

    Returns a pair: a function that runs the part again, and a dictionary with the relative error of each result. Raises
    ValueError if an error exceeds the limit, and StartupCheckError if the expected FP8 GEMMs did not run.
    """
    run: Callable[[], Tensors] = partial(linear.run, part, calls)
    if launch == "graph" and not inputs.x.is_cuda:
        raise PrecisionError("CUDA graphs need a GPU")
    counted = part == "step" and linear.precision
    with verify_fp8(linear.module, counted, calls) if counted else nullcontext():
        run = capture_graph(run) if launch == "graph" else run
        results = run()
    errors = {
        k: float((t.float() - inputs.exact[k]).norm() / inputs.exact[k].norm()) for k, t in results.items()
    }
    for name, error in errors.items():
        if not error <= ERROR_LIMITS[linear.compute]:
            raise ValueError(
                f"the relative error of {name} compared with float32 is {error:.1e}, but at most "
                f"{ERROR_LIMITS[linear.compute]:.1e} is allowed in {linear.compute}"
            )
    return run, errors


def measure_shape(shape: Shape, precisions: list[str], iterations: int) -> list[Result]:
    """Measure a linear layer in each precision, launched eagerly and as a CUDA graph.

    Returns one result per precision and kind of launch. A measurement that cannot run has a "reason" and no figures.
    """
    gpu, flop = torch.cuda.is_available(), GEMMS["step"] * shape.gemm_flop
    sizes = {"shape": str(shape), **shape._asdict()}
    results = {(p, way): {**sizes, "precision": p, "launch": way} for p in precisions for way in LAUNCHES}
    samples = {p: FP32_SAMPLE_FLOP if p == "fp32" else SAMPLE_FLOP for p in precisions}
    calls = {p: max(1, min(MAX_CALLS, round(sample / flop))) if gpu else 1 for p, sample in samples.items()}
    parts: dict[tuple[str, str, str], Callable[[], Tensors]] = {}
    try:
        inputs = Inputs(shape)
        for precision in precisions:
            try:
                if gpu and precision == "fp32" and flop > FP32_LIMIT_FLOP:
                    raise PrecisionError(
                        f"fp32 is measured only for shapes with at most {FP32_LIMIT_FLOP / 1e12:.0f} TFLOP per "
                        "step"
                    )
                linear = Linear(shape, precision, inputs)
                for _ in range(2):
                    linear.run("step", 1)
                for launch in LAUNCHES:
                    ready = {part: checked(linear, part, launch, calls[precision], inputs) for part in GEMMS}
                    results[precision, launch] |= {
                        "ran_fp8": linear.compute == "fp8",
                        "calls_a_sample": calls[precision],
                        "errors": ready["step"][1],
                    }
                    parts |= {(precision, launch, part): run for part, (run, _) in ready.items()}
            except (RuntimeError, ValueError, AssertionError, UserError) as error:
                for launch in LAUNCHES:
                    if "errors" not in results[precision, launch]:
                        results[precision, launch]["reason"] = one_line(error)
        time_alternately(parts, 1)
        times = time_alternately(parts, iterations)
    except RuntimeError as error:  # memory ran out, which affects all precisions
        return [{"reason": one_line(error), **result} for result in results.values()]
    ms = {key: statistics.median(each) / calls[key[0]] for key, each in times.items()}
    for (precision, launch, part), median in ms.items():
        bf16 = ms.get(("bf16", launch, part))
        results[precision, launch][part] = {
            "ms_median": median,
            "tflops": GEMMS[part] * shape.gemm_flop / median / 1e9,
            "speed_to_bf16": bf16 / median if bf16 else None,
        }
    return list(results.values())
