"""All precisions of one Linear side by side: prepared, checked against float32, then timed in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch

from model.fp8.precision import PrecisionError
from test_fp8.common import timing
from test_fp8.common.report import Result
from test_fp8.linear.cases import ERROR_LIMITS, Case, Part, Tensors, as_graphs
from test_fp8.linear.shapes import GEMMS, LAUNCHES, PARTS, Shape

# fp32 runs at some 50 TFLOP/s: steps of more than this would take most of the time of a sweep.
FP32_LIMIT_FLOP = 2e12
# A sample on a GPU is so many calls that forward + backward is about this many FLOP, 3 ms in bf16 and 5 in fp32,
# against which the first launch is little; at most MAX_CALLS calls.
SAMPLE_FLOP, FP32_SAMPLE_FLOP, MAX_CALLS = 2e12, 2.5e11, 32
# Samples of a shape stop after this time, if there are enough for a median.
SECONDS_A_SHAPE, MIN_SAMPLES = 1.5, 5
# Part of the free memory that a shape may take by estimate.
MEMORY_FRACTION = 0.9


def calls_a_sample(shape: Shape, name: str) -> int:
    if not torch.cuda.is_available():
        return 1
    sample = FP32_SAMPLE_FLOP if name == "fp32" else SAMPLE_FLOP
    return max(1, min(MAX_CALLS, round(sample / (GEMMS["step"] * shape.gemm_flop))))


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def checked(part: Part, tensors: Tensors, limit: float, errors: dict[str, float]) -> Part:
    """`part`, after a run whose errors went into `errors`. Raises ValueError: an error above `limit`."""
    if part.before:
        part.before()
    results = part.work()
    for name, error in tensors.errors(results).items():
        if not error <= limit:
            raise ValueError(
                f"wrong: {name} is off by {error:.1e} relative to float32, allowed are {limit:.0e}"
            )
        errors[name] = max(error, errors.get(name, 0.0))
    results.clear()  # a graph would keep them
    return part


class ShapeBench:
    """All rows of a shape: the `parts` of those that run, `errors` and `reasons` by (precision, launch), `cases` by
    precision."""

    def __init__(self, shape: Shape, names: list[str], warmup: int, cached_weight: bool):
        self.shape = shape
        self.calls = {name: calls_a_sample(shape, name) for name in names}
        self.parts: dict[tuple[str, str], dict[str, Part]] = {}
        self.errors: dict[tuple[str, str], dict[str, float]] = {}
        self.reasons: dict[tuple[str, str], str] = {}
        self.cases: dict[str, Case] = {}
        gpu = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        wanted = [name for name in names if not self._refuse(name, gpu)]
        if not wanted or (gpu and self._refuse_memory(wanted)):
            return
        try:
            tensors = Tensors.random(shape, device)
        except RuntimeError as error:  # out of memory
            self._give_up(wanted, LAUNCHES, first_line(error))
            return
        for name in wanted:
            self._prepare(name, tensors, warmup, cached_weight, gpu)

    def _give_up(self, names: Iterable[str], launches: Iterable[str], reason: str) -> None:
        self.reasons |= {(name, launch): reason for name in names for launch in launches}

    def _refuse(self, name: str, gpu: bool) -> bool:
        reason = self.shape.why_not_fp8() if name.startswith("fp8") else None
        if gpu and name == "fp32" and GEMMS["step"] * self.shape.gemm_flop > FP32_LIMIT_FLOP:
            reason = f"fp32 is measured up to {FP32_LIMIT_FLOP / 1e12:.0f} TFLOP a step, it takes too long"
        if reason:
            self._give_up([name], LAUNCHES, reason)
        return reason is not None

    def _refuse_memory(self, names: list[str]) -> bool:
        needed = self.shape.memory_bytes({name: self.calls[name] for name in names}) / 2**30
        free = torch.cuda.mem_get_info()[0] / 2**30
        if needed > MEMORY_FRACTION * free:
            reason = f"needs about {needed:.0f} GiB, and {free:.0f} GiB of GPU memory are free"
            self._give_up(names, LAUNCHES, reason)
        return needed > MEMORY_FRACTION * free

    def _prepare(self, name: str, tensors: Tensors, warmup: int, cached_weight: bool, gpu: bool) -> None:
        launch = "eager"
        try:
            case = Case(self.shape, name, tensors, cached_weight)
            parts = case.parts(self.calls[name])
            for _ in range(warmup):
                for part in parts.values():
                    if part.before:
                        part.before()
                    part.work()
            if name.startswith("fp8") and not case.ran_fp8:
                raise PrecisionError("the module ran, but not in FP8")
            limit = ERROR_LIMITS[case.compute]
            for launch in LAUNCHES:
                errors: dict[str, float] = {}
                if launch == "graph":
                    if not gpu:
                        raise PrecisionError("a CUDA graph needs a GPU")
                    pool = torch.cuda.graph_pool_handle()
                    ready = {k: checked(as_graphs(p, pool), tensors, limit, errors) for k, p in parts.items()}
                else:
                    ready = {k: checked(p, tensors, limit, errors) for k, p in parts.items()}
                self.parts[name, launch], self.errors[name, launch] = ready, errors
                self.cases[name] = case
        except (PrecisionError, RuntimeError, ValueError, AssertionError) as error:
            self._give_up([name], LAUNCHES[LAUNCHES.index(launch) :], first_line(error))

    def measure(self, iterations: int) -> dict[tuple[str, str, str], list[float]]:
        """Milliseconds of one call by (precision, launch, part), `iterations` samples, or fewer if they take long. What
        fails as late as here, for want of memory, fails for all rows."""
        parts = {(*row, name): part for row, parts in self.parts.items() for name, part in parts.items()}
        steps = {key: part.work for key, part in parts.items()}
        before = {key: part.before for key, part in parts.items() if part.before}
        try:
            start = time.perf_counter()
            timing.take_turns(steps, 1, before)  # for its length; the last to warm up
            seconds = time.perf_counter() - start
            if torch.cuda.is_available():
                iterations = min(iterations, max(MIN_SAMPLES, int(SECONDS_A_SHAPE / max(seconds, 1e-9))))
            times = timing.take_turns(steps, iterations, before)
        except RuntimeError as error:
            self.reasons |= dict.fromkeys(self.parts, first_line(error))
            self.parts.clear()
            return {}
        return {key: [ms / self.calls[key[0]] for ms in samples] for key, samples in times.items()}


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
    bench = ShapeBench(shape, names, warmup, cached_weight)
    times = bench.measure(iterations)
    medians = {key: statistics.median(samples) for key, samples in times.items()}
    results = []
    for name in names:
        for launch in LAUNCHES:
            row: Result = {"what": what, "shape": str(shape), **shape._asdict()}
            row |= {"precision": name, "launch": launch}
            results.append(row)
            if (name, launch) not in bench.parts:
                row["reason"] = bench.reasons[name, launch]
                continue
            row |= {"ran_fp8": bench.cases[name].ran_fp8, "calls_a_sample": bench.calls[name]}
            row["samples"] = len(times[name, launch, "step"])
            row["errors"] = bench.errors[name, launch]
            ceiling = ceilings.get(name.partition("-")[0])
            for part in PARTS:
                median, samples = medians[name, launch, part], times[name, launch, part]
                baseline = medians.get(("bf16", launch, part))
                tflops = GEMMS[part] * shape.gemm_flop / median / 1e9
                row[part] = {
                    "ms_median": median,
                    "ms_min": min(samples),
                    "ms_max": max(samples),
                    "tflops": tflops,
                    "share_of_ceiling": tflops / ceiling["tflops"] if ceiling else None,
                    "speed_to_bf16": baseline / median if baseline else None,
                }
    return results
