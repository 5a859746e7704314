#!/usr/bin/env python3
"""Microtest: one Linear, forward and backward, in fp32, bf16 and FP8 with each recipe.

    python test_fp8/test_fp8.py [--shapes 8x2048x2048:512 ...] [--recipes delayed current block]
                                [--iterations N] [--output FILE.json]

fp32 and bf16 are torch.nn.Linear, the baseline that FP8 has to beat; FP8 is te.Linear on bf16 parameters, whose
quantization of input, weight and gradient is part of every iteration. An iteration is one forward and one backward
with both gradients (input and weight), 6 x rows x in x out FLOP (Kaplan et al. 2020, arXiv:2001.08361, section 2.1),
the time from the first launch to the end of the last kernel. The precisions take turns, so that a clock that drifts
meets all of them alike; the figure is the median. On a machine without a GPU, FP8 is the CPU reference: it shows that
everything runs and what it computes, and no speed can be read from it.
"""

import argparse
import json
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from torch import nn

from model.precision import (
    FP8_FEATURE_MULTIPLE,
    FP8_ROW_MULTIPLE,
    RECIPES,
    Precision,
    PrecisionConfig,
    PrecisionError,
)

# The shapes of HARE's microbenchmark.
HARE_SHAPES = [
    "8x2048x2048:512",
    "8x2048x2048:5632",
    "8x2048x2048:2048",
    "8x2048x2048:32",
    "1x1024x1024:1024",
]
# A CPU gets this fraction of their rows, to be through in a minute.
CPU_ROWS_FRACTION = 32


class Shape(NamedTuple):
    """A Linear from `inputs` to `outputs` features on an input of [batch, rows, inputs]."""

    batch: int
    rows: int
    inputs: int
    outputs: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.rows}x{self.inputs}:{self.outputs}"

    @property
    def flop(self) -> int:
        """Floating point operations of one forward and backward."""
        return 6 * self.batch * self.rows * self.inputs * self.outputs

    def why_not_fp8(self) -> str | None:
        """What keeps FP8 GEMMs from this shape, None if nothing does."""
        if self.batch * self.rows % FP8_ROW_MULTIPLE:
            return f"batch x rows is {self.batch * self.rows}, not a multiple of {FP8_ROW_MULTIPLE}"
        for name, size in (("in", self.inputs), ("out", self.outputs)):
            if size % FP8_FEATURE_MULTIPLE:
                return f"{name} is {size}, not a multiple of {FP8_FEATURE_MULTIPLE}"
        return None


class Case(NamedTuple):
    """A precision ready to be timed: `step` is one forward and backward, `output` the result of a forward."""

    step: Callable[[], None]
    output: Callable[[], torch.Tensor]
    ran_fp8: Callable[[], bool]


def parse_shape(text: str) -> Shape:
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)(?:->|:)(\d+)", text)
    if match is None or not all(int(n) for n in match.groups()):
        raise argparse.ArgumentTypeError(
            f"{text!r}: a shape is BATCHxROWSxIN:OUT, all positive, for instance {HARE_SHAPES[0]}"
        )
    return Shape(*(int(n) for n in match.groups()))


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: a positive whole number is expected")
    return int(text)


def make_case(shape: Shape, name: str, weight: torch.Tensor, x: torch.Tensor, gradient: torch.Tensor) -> Case:
    """The precision `name` ("fp32", "bf16" or "fp8-RECIPE") on float32 `weight` [out, in], `x` [batch, rows, in] and
    `gradient` [batch, rows, out].

    Raises PrecisionError: FP8 that this machine or this shape cannot run.
    """
    compute, _, recipe = name.partition("-")
    precision = Precision(PrecisionConfig(compute=compute, recipe=recipe or "delayed", bf16_modules=[]))
    if precision.fp8:
        if reason := shape.why_not_fp8():
            raise PrecisionError(reason)
        linear = precision.te.Linear(
            shape.inputs, shape.outputs, bias=False, params_dtype=precision.dtype, device=precision.device
        )
    else:
        linear = nn.Linear(
            shape.inputs, shape.outputs, bias=False, dtype=precision.dtype, device=precision.device
        )
    with torch.no_grad():
        linear.weight.copy_(weight)
    x = x.to(precision.dtype, copy=True).requires_grad_()
    gradient = gradient.to(precision.dtype)

    def forward() -> torch.Tensor:
        with precision.autocast():
            return linear(x)

    def step() -> None:
        x.grad = linear.weight.grad = None
        forward().backward(gradient)

    return Case(step, lambda: forward().detach().float(), lambda: bool(getattr(linear, "fp8", False)))


def timed_ms(step: Callable[[], None]) -> float:
    """Milliseconds of one step: by CUDA events on a GPU, else by the clock."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e3
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    step()
    after.record()
    after.synchronize()
    return before.elapsed_time(after)


def measure_shape(shape: Shape, names: list[str], iterations: int, warmup: int) -> list[dict[str, Any]]:
    """One result a precision, in the order of `names`; what cannot run has a "reason" instead of figures."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    weight = torch.randn(shape.outputs, shape.inputs, device=device) * 0.02
    x = torch.randn(shape.batch, shape.rows, shape.inputs, device=device)
    gradient = torch.randn(shape.batch, shape.rows, shape.outputs, device=device) * 1e-3
    exact = x @ weight.T

    cases: dict[str, Case] = {}
    reasons: dict[str, str] = {}
    for name in names:
        try:
            case = make_case(shape, name, weight, x, gradient)
            for _ in range(warmup):
                case.step()
            if name.startswith("fp8") and not case.ran_fp8():
                raise PrecisionError("the module ran, but not in FP8")
            cases[name] = case
        except (PrecisionError, RuntimeError, ValueError, AssertionError) as error:
            reasons[name] = str(error).strip().splitlines()[0]

    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(iterations):
        for name, case in cases.items():
            times[name].append(timed_ms(case.step))

    medians = {name: statistics.median(values) for name, values in times.items()}
    results = []
    for name in names:
        result: dict[str, Any] = {"shape": str(shape), **shape._asdict(), "precision": name}
        if name in cases:
            difference = cases[name].output() - exact
            result |= {
                "ms_median": medians[name],
                "ms_min": min(times[name]),
                "ms_max": max(times[name]),
                "tflops": shape.flop / medians[name] / 1e9,
                "speed_to_bf16": medians["bf16"] / medians[name],
                "output_error": (difference.norm() / exact.norm()).item(),
                "ran_fp8": cases[name].ran_fp8(),
            }
        else:
            result["reason"] = reasons[name]
        results.append(result)
    return results


def print_table(results: list[dict[str, Any]]) -> None:
    header = f"{'shape':<20} {'precision':<12} {'ms':>10} {'TFLOP/s':>9} {'x bf16':>7} {'error':>9}  FP8"
    print(f"{header}\n{'-' * len(header)}")
    for r in results:
        start = f"{r['shape']:<20} {r['precision']:<12}"
        if "reason" in r:
            print(f"{start} not run: {r['reason']}")
        else:
            speed = f"{r['ms_median']:>10.4f} {r['tflops']:>9.3f} {r['speed_to_bf16']:>7.2f}"
            print(f"{start} {speed} {r['output_error']:>9.1e}  {'yes' if r['ran_fp8'] else 'no'}")


def cpu_model() -> str:
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def describe(backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(machine, versions); nothing that names a host, a user or a path."""
    machine: dict[str, Any] = {"cpu": cpu_model(), "torch_threads": torch.get_num_threads()}
    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "fp8": backend}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
        machine["fp32_matmul_precision"] = torch.get_float32_matmul_precision()
        versions |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    return machine, versions


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument(
        "--shapes", nargs="+", type=parse_shape, metavar="BATCHxROWSxIN:OUT", help="default: HARE's"
    )
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), help="FP8 recipes")
    parser.add_argument("--iterations", type=positive, help="default: 200, without a GPU 3")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON too")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    gpu = torch.cuda.is_available()
    iterations, warmup = arguments.iterations or (200 if gpu else 3), 20 if gpu else 1
    shapes = arguments.shapes or [parse_shape(text) for text in HARE_SHAPES]
    if not gpu and not arguments.shapes:
        shapes = [shape._replace(rows=shape.rows // CPU_ROWS_FRACTION) for shape in shapes]
    try:
        backend = Precision(PrecisionConfig(compute="fp8")).te.version
    except PrecisionError as error:
        backend = f"none: {error}"
    machine, versions = describe(backend)
    print(f"{machine.get('gpu', machine['cpu'])}, torch {versions['torch']}, FP8 by {backend}")
    if not gpu:
        print(
            "No GPU: FP8 is the CPU reference, right in its results and slow; these times say nothing about FP8."
        )
        if not arguments.shapes:
            print(f"HARE's shapes with 1/{CPU_ROWS_FRACTION} of their rows; --shapes gives others.")
    print(
        f"median of {iterations} forward + backward after {warmup} to warm up; error: of the output, to fp32\n"
    )

    names = ["fp32", "bf16", *(f"fp8-{recipe}" for recipe in arguments.recipes)]
    results = [r for shape in shapes for r in measure_shape(shape, names, iterations, warmup)]
    print_table(results)
    if arguments.output:
        options = [
            "--shapes",
            *map(str, shapes),
            "--recipes",
            *arguments.recipes,
            "--iterations",
            str(iterations),
        ]
        report = {
            "command": shlex.join(["python", "test_fp8/test_fp8.py", *options]),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "machine": machine,
            "versions": versions,
            "warmup_iterations": warmup,
            "iterations": iterations,
            "results": results,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if not any(r.get("ran_fp8") for r in results):
        print("error: nothing ran in FP8; the reasons are in the table", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
