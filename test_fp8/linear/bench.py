"""Measure one Linear in each precision, launched normally and as a CUDA graph.

Results are checked against float32, then all cases are timed alternately. "step" is forward and backward with both
gradients. "forward" is the forward alone, including the tensors it saves for the backward. In FP8, the time includes
quantizing input, weight and gradient, and updating the scales of delayed scaling.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from model.autotune.timing import one_line
from model.errors import UserError
from model.fp8.hardware import fp8_gpu_problem
from model.fp8.precision import DTYPES, Precision, PrecisionError
from model.fp8.recipes import PrecisionConfig
from model.startup_check import verify_fp8
from test_fp8.common.report import Result
from test_fp8.common.timing import median_ms, time_alternately
from test_fp8.linear.shapes import Shape

GEMMS = {"step": 3, "forward": 1}
LAUNCHES = ("eager", "graph")
# A result with a larger relative error to float32 is wrong, not just rounded. bf16 rounds to 8 bits: 2e-3 for each of
# two operands and the result. e4m3 has 4 bits and e5m2 has 3: 0.03 and 0.05 per operand with a suitable scale.
ERROR_LIMITS = {"fp32": 1e-4, "bf16": 1e-2, "fp8": 0.1}
# fp32 runs at about 50 TFLOP/s, so larger steps would take most of the benchmark's time.
FP32_LIMIT_FLOP = 2e12
# A timed sample on a GPU repeats a step until it has about this many FLOP, at most MAX_CALLS times.
SAMPLE_FLOP, FP32_SAMPLE_FLOP, MAX_CALLS = 2e12, 2.5e11, 32
CEILING_SIZE = 8192  # size of the matrices that measure the GPU's peak speed; a product takes 1.4 ms in bf16

Tensors = dict[str, Tensor]
"""Any of "output" [batch, rows, out], "dgrad" [batch, rows, in] and "wgrad" [out, in]."""


class Inputs:
    """The float32 inputs of all precisions of a shape, and the `exact` results.

    The values are normally distributed with magnitudes as in training. Zeros would run faster, since they need less
    power.
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
    """A Linear in `precision`: torch.nn.Linear for "fp32" and "bf16", te.Linear on bf16 parameters for "fp8-RECIPE".

    Raises PrecisionError if FP8 cannot run on this machine or for this shape.
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
            # the reference modules do not have this object
            self._te_state = getattr(sys.modules[te.autocast.__module__], "FP8GlobalStateManager", None)
            self._scales = self._te_state and type(self._te_state.quantization_state)()
        else:
            self.module = nn.Linear(shape.inputs, shape.outputs, bias=False, dtype=dtype, device=device)
        with torch.no_grad():
            self.module.weight.copy_(inputs.weight)
        self.x = inputs.x.detach().to(dtype).requires_grad_()
        self.gradient = inputs.gradient.to(dtype)

    def run(self, part: str, calls: int) -> Tensors:
        """Run a part `calls` times and update only this Linear's scales.

        Transformer Engine would update the scales of all modules of the process.
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
            if part == "step":  # otherwise, `.grad` would accumulate
                gradients = torch.autograd.grad(output, (self.x, self.module.weight), self.gradient)
        return dict(zip(("output", "dgrad", "wgrad"), (output.detach(), *gradients), strict=False))


def capture_graph(run: Callable[[], Tensors]) -> Callable[[], Tensors]:
    """Capture `run`, which must have run before, on the current stream (not the default one)."""
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
    """Run a part once with this kind of launch. Return a function that runs it, and its errors.

    Raises ValueError if an error exceeds the limit, and StartupCheckError if the FP8 GEMMs are not the planned ones.
    """
    run: Callable[[], Tensors] = partial(linear.run, part, calls)
    if launch == "graph" and not inputs.x.is_cuda:
        raise PrecisionError("a CUDA graph needs a GPU")
    counted = part == "step" and linear.precision
    with verify_fp8(linear.module, counted, calls) if counted else nullcontext():
        run = capture_graph(run) if launch == "graph" else run
        results = run()
    errors = {
        k: float((t.float() - inputs.exact[k]).norm() / inputs.exact[k].norm()) for k, t in results.items()
    }
    for name, error in errors.items():
        if not error <= ERROR_LIMITS[linear.compute]:
            raise ValueError(f"wrong result: {name} has a relative error of {error:.1e} to float32")
    return run, errors


def measure_shape(
    shape: Shape, precisions: list[str], ceilings: dict[str, Any], iterations: int
) -> list[Result]:
    """Return one result per precision and kind of launch. A case that cannot run has a "reason"."""
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
                        f"fp32 is only measured up to {FP32_LIMIT_FLOP / 1e12:.0f} TFLOP per step"
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
    except RuntimeError as error:  # out of memory, which affects all precisions
        return [{"reason": one_line(error), **result} for result in results.values()]
    ms = {key: statistics.median(each) / calls[key[0]] for key, each in times.items()}
    for (precision, launch, part), median in ms.items():
        tflops = GEMMS[part] * shape.gemm_flop / median / 1e9
        ceiling, bf16 = ceilings.get(precision.partition("-")[0]), ms.get(("bf16", launch, part))
        results[precision, launch][part] = {
            "ms_median": median,
            "tflops": tflops,
            "share_of_ceiling": tflops / ceiling["tflops"] if ceiling else None,
            "speed_to_bf16": bf16 / median if bf16 else None,
        }
    return list(results.values())


def matrix_product(precision: str) -> Callable[[], Tensor]:
    """Return a function that multiplies two random matrices.

    FP8: the e4m3 operands are already quantized with one scale per tensor; fast accumulation and a bf16 result.
    """
    left, right = (torch.randn(CEILING_SIZE, CEILING_SIZE, device="cuda") for _ in range(2))
    if precision != "fp8":
        return partial(torch.mm, left.to(DTYPES[precision]), right.to(DTYPES[precision]))
    scales = [torch.finfo(torch.float8_e4m3fn).max / matrix.abs().max() for matrix in (left, right)]
    a, b = ((m * scale).to(torch.float8_e4m3fn) for m, scale in zip((left, right), scales, strict=True))
    inverse = {"scale_a": scales[0].reciprocal(), "scale_b": scales[1].reciprocal()}
    # the tensor cores need the second operand in column-major order
    return partial(torch._scaled_mm, a, b.t(), **inverse, out_dtype=torch.bfloat16, use_fast_accum=True)


def measure_ceilings(rounds: int) -> dict[str, Result]:
    """Measure the speed of plain matrix products: precision -> {"tflops", "size"}; {} without a GPU."""
    if not torch.cuda.is_available():
        return {}
    no_fp8 = fp8_gpu_problem(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    kinds = ["fp32", "bf16", *([] if no_fp8 else ["fp8"])]
    products = {kind: matrix_product(kind) for kind in kinds}
    for product in products.values():
        median_ms(product, rounds)
    ms = {kind: statistics.median(times) for kind, times in time_alternately(products, rounds).items()}
    return {kind: {"tflops": 2 * CEILING_SIZE**3 / ms[kind] / 1e9, "size": CEILING_SIZE} for kind in kinds}
