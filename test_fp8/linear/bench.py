"""All precisions of one Linear side by side: prepared, checked against float32, then timed in turns."""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from typing import Any

import torch

from model.autotune.timing import one_line
from model.fp8.precision import PrecisionError
from model.proof import proving_fp8
from test_fp8.common import timing
from test_fp8.common.report import Result
from test_fp8.linear.cases import ERROR_LIMITS, Case, Part, Tensors, as_graph
from test_fp8.linear.shapes import GEMMS, LAUNCHES, Shape

# fp32 runs at some 50 TFLOP/s: steps of more than this would take most of the time of a sweep.
FP32_LIMIT_FLOP = 2e12
# A sample on a GPU is so many calls that forward + backward is about this many FLOP, 3 ms in bf16 and 5 in fp32,
# against which the first launch is little; at most MAX_CALLS calls.
SAMPLE_FLOP, FP32_SAMPLE_FLOP, MAX_CALLS = 2e12, 2.5e11, 32
# Samples of a shape stop after this time, if there are enough for a median.
SECONDS_A_SHAPE, MIN_SAMPLES = 1.5, 5
# By estimate a large shape takes this of GPU memory for each element of input, output and weight: the float32 originals
# and results, and what bf16 and three recipes make of them, launched and as graphs.
BYTES_PER_ELEMENT = 40


def calls_a_sample(shape: Shape, name: str) -> int:
    if not torch.cuda.is_available():
        return 1
    sample = FP32_SAMPLE_FLOP if name == "fp32" else SAMPLE_FLOP
    return max(1, min(MAX_CALLS, round(sample / (GEMMS["step"] * shape.gemm_flop))))


def check_memory(shape: Shape) -> None:
    """Raises RuntimeError: too large for the GPU memory that is free."""
    elements = shape.all_rows * (shape.inputs + shape.outputs) + shape.inputs * shape.outputs
    needed, free = BYTES_PER_ELEMENT * elements / 2**30, torch.cuda.mem_get_info()[0] / 2**30
    if needed > free:
        raise RuntimeError(f"needs about {needed:.0f} GiB, and {free:.0f} GiB of GPU memory are free")


def run(part: Part) -> dict[str, torch.Tensor]:
    for stage in part:
        results = stage()
    return results


def check(part: Part, tensors: Tensors, limit: float, errors: dict[str, float]) -> None:
    """Run `part`; its errors go into `errors`. Raises ValueError: an error above `limit`."""
    results = run(part)
    for name, error in tensors.errors(results).items():
        if not error <= limit:
            raise ValueError(
                f"wrong: {name} is off by {error:.1e} relative to float32, allowed are {limit:.0e}"
            )
        errors[name] = max(error, errors.get(name, 0.0))
    results.clear()  # a graph would keep them


def measure_shape(
    shape: Shape,
    what: list[str],
    names: list[str],
    ceilings: dict[str, Any],
    *,
    iterations: int,
    warmup: int,
    cached_weight: bool,
) -> list[Result]:
    """One result for each precision of `names` and launch; what cannot run has a "reason" instead of figures."""
    gpu = torch.cuda.is_available()
    sizes: Result = {"what": what, "shape": str(shape), **shape._asdict()}
    rows = {(n, launch): {**sizes, "precision": n, "launch": launch} for n in names for launch in LAUNCHES}
    calls = {name: calls_a_sample(shape, name) for name in names}
    parts: dict[tuple[str, str, str], Part] = {}
    times: dict[tuple[str, str, str], list[float]] = {}

    def prepare(name: str) -> None:
        """Into `parts` and `rows`. Raises RuntimeError, ValueError, AssertionError: from some launch on it cannot."""
        if gpu and name == "fp32" and GEMMS["step"] * shape.gemm_flop > FP32_LIMIT_FLOP:
            limit = f"{FP32_LIMIT_FLOP / 1e12:.0f} TFLOP a step"
            raise PrecisionError(f"fp32 is measured up to {limit}, it takes too long")
        case = Case(shape, name, tensors, cached_weight)
        for _ in range(warmup):
            for part in case.parts(calls[name]).values():
                run(part)
        for launch in LAUNCHES:
            if launch == "graph" and not gpu:
                raise PrecisionError("a CUDA graph needs a GPU")
            pool = torch.cuda.graph_pool_handle() if launch == "graph" else None
            ready, errors = {}, dict[str, float]()
            for key, part in case.parts(calls[name]).items():
                fp8 = key == "step" and case.precision
                with proving_fp8(case.linear, fp8, calls[name]) if fp8 else nullcontext():
                    ready[name, launch, key] = [as_graph(stage, pool) for stage in part] if pool else part
                    check(ready[name, launch, key], tensors, ERROR_LIMITS[case.compute], errors)
            rows[name, launch] |= {"ran_fp8": case.compute == "fp8", "calls_a_sample": calls[name]}
            rows[name, launch] |= {"samples": 0, "errors": errors}
            parts.update(ready)

    try:
        if gpu:
            check_memory(shape)
        tensors = Tensors(shape, torch.device("cuda" if gpu else "cpu"))
        for name in names:
            try:
                prepare(name)
            except (RuntimeError, ValueError, AssertionError) as error:
                for launch in LAUNCHES:
                    if "errors" not in rows[name, launch]:
                        rows[name, launch]["reason"] = one_line(error)
        start = time.perf_counter()
        timing.take_turns(parts, 1)  # for its length; the last to warm up
        if gpu:
            seconds = max(time.perf_counter() - start, 1e-9)
            iterations = min(iterations, max(MIN_SAMPLES, int(SECONDS_A_SHAPE / seconds)))
        for key, samples in timing.take_turns(parts, iterations).items():
            times[key] = [ms / calls[key[0]] for ms in samples]
    except RuntimeError as error:  # for want of memory: what fails here fails for all rows
        for row in rows.values():
            row.setdefault("reason", one_line(error))

    for (name, launch, part), samples in times.items():
        row, ceiling = rows[name, launch], ceilings.get(name.partition("-")[0])
        row["samples"] = len(samples)
        median, baseline = statistics.median(samples), times.get(("bf16", launch, part))
        tflops = GEMMS[part] * shape.gemm_flop / median / 1e9
        row[part] = {
            "ms_median": median,
            "ms_min": min(samples),
            "ms_max": max(samples),
            "tflops": tflops,
            "share_of_ceiling": tflops / ceiling["tflops"] if ceiling else None,
            "speed_to_bf16": statistics.median(baseline) / median if baseline else None,
        }
    return list(rows.values())
