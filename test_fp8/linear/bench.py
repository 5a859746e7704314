"""One Linear in each precision, launched normally and as CUDA graphs: checked against float32, then timed in turns.

"step" is forward and backward with both gradients, "forward" the forward alone, with what it saves for the backward. In
FP8 the quantization of input, weight and gradient counts, and the update of delayed scaling's scales.
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
from model.fp8.precision import DTYPES, Precision, PrecisionError
from model.fp8.recipes import PrecisionConfig, why_no_fp8
from model.startup_check import verify_fp8
from test_fp8.common.report import Result
from test_fp8.common.timing import median_ms, take_turns
from test_fp8.linear.shapes import Shape

GEMMS = {"step": 3, "forward": 1}
LAUNCHES = ("eager", "graph")
# Relative errors to float32 above which a result is wrong, not rounded. bf16 rounds to 8 bits: 2e-3 each for two
# operands and the result. e4m3 has 4 and e5m2 3 bits: 0.03 and 0.05 for an operand that its scale fits.
ERROR_LIMITS = {"fp32": 1e-4, "bf16": 1e-2, "fp8": 0.1}
# fp32 runs at some 50 TFLOP/s: larger steps would take most of the time of a sweep.
FP32_LIMIT_FLOP = 2e12
# A timed sample on a GPU repeats a step until it has about this many FLOP, at most MAX_CALLS times.
SAMPLE_FLOP, FP32_SAMPLE_FLOP, MAX_CALLS = 2e12, 2.5e11, 32
CEILING_SIZE = 8192  # of the matrices whose product shows what the GPU reaches: 1.4 ms in bf16

Tensors = dict[str, Tensor]
"""Any of "output" [batch, rows, out], "dgrad" [batch, rows, in] and "wgrad" [out, in]."""


class Inputs:
    """The float32 tensors that all precisions of a shape compute with, and the `exact` results. They are normal numbers
    of the size that training has: zeros would run faster, for less power."""

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
    """A Linear in `precision`: "fp32" and "bf16" are torch.nn.Linear, "fp8-RECIPE" te.Linear on bf16 parameters. Raises
    PrecisionError: FP8 cannot run on this machine or on this shape."""

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
            # the reference modules have no such object
            self._te_state = getattr(sys.modules[te.autocast.__module__], "FP8GlobalStateManager", None)
            self._scales = self._te_state and type(self._te_state.quantization_state)()
        else:
            self.module = nn.Linear(shape.inputs, shape.outputs, bias=False, dtype=dtype, device=device)
        with torch.no_grad():
            self.module.weight.copy_(inputs.weight)
        self.x = inputs.x.detach().to(dtype).requires_grad_()
        self.gradient = inputs.gradient.to(dtype)

    def run(self, part: str, calls: int) -> Tensors:
        """Run a part `calls` times with this Linear's scales alone: Transformer Engine updates those of all modules of
        the process."""
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
            if part == "step":  # `.grad` would accumulate
                gradients = torch.autograd.grad(output, (self.x, self.module.weight), self.gradient)
        return dict(zip(("output", "dgrad", "wgrad"), (output.detach(), *gradients), strict=False))


def as_graph(run: Callable[[], Tensors]) -> Callable[[], Tensors]:
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
    """Return a part launched this way, after one run, and its errors. Raises ValueError: an error above the limit;
    StartupCheckError: other than the planned FP8 GEMMs ran."""
    run: Callable[[], Tensors] = partial(linear.run, part, calls)
    if launch == "graph" and not inputs.x.is_cuda:
        raise PrecisionError("a CUDA graph needs a GPU")
    counted = part == "step" and linear.precision
    with verify_fp8(linear.module, counted, calls) if counted else nullcontext():
        run = as_graph(run) if launch == "graph" else run
        results = run()
    errors = {
        k: float((t.float() - inputs.exact[k]).norm() / inputs.exact[k].norm()) for k, t in results.items()
    }
    for name, error in errors.items():
        if not error <= ERROR_LIMITS[linear.compute]:
            raise ValueError(f"wrong: {name} is off by {error:.1e} relative to float32")
    return run, errors


def measure_shape(
    shape: Shape, precisions: list[str], ceilings: dict[str, Any], iterations: int
) -> list[Result]:
    """Return one result for each precision and launch; what cannot run has a "reason"."""
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
                    raise PrecisionError(f"fp32 is measured up to {FP32_LIMIT_FLOP / 1e12:.0f} TFLOP a step")
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
        take_turns(parts, 1)
        times = take_turns(parts, iterations)
    except RuntimeError as error:  # out of memory, which concerns all precisions
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
    """A product of two random matrices. FP8: of e4m3 operands that are quantized already, with one scale a tensor, fast
    accumulation and a bf16 result."""
    left, right = (torch.randn(CEILING_SIZE, CEILING_SIZE, device="cuda") for _ in range(2))
    if precision != "fp8":
        return partial(torch.mm, left.to(DTYPES[precision]), right.to(DTYPES[precision]))
    scales = [torch.finfo(torch.float8_e4m3fn).max / matrix.abs().max() for matrix in (left, right)]
    a, b = ((m * scale).to(torch.float8_e4m3fn) for m, scale in zip((left, right), scales, strict=True))
    inverse = {"scale_a": scales[0].reciprocal(), "scale_b": scales[1].reciprocal()}
    # the tensor cores take the second operand by columns
    return partial(torch._scaled_mm, a, b.t(), **inverse, out_dtype=torch.bfloat16, use_fast_accum=True)


def measure_ceilings(rounds: int) -> dict[str, Result]:
    """What the GPU reaches in plain matrix products: precision -> {"tflops", "size"}. {} without a GPU."""
    if not torch.cuda.is_available():
        return {}
    no_fp8 = why_no_fp8(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    kinds = ["fp32", "bf16", *([] if no_fp8 else ["fp8"])]
    products = {kind: matrix_product(kind) for kind in kinds}
    for product in products.values():
        median_ms(product, rounds)
    ms = {kind: statistics.median(times) for kind, times in take_turns(products, rounds).items()}
    return {kind: {"tflops": 2 * CEILING_SIZE**3 / ms[kind] / 1e9, "size": CEILING_SIZE} for kind in kinds}
