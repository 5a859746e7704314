"""Check that DeepSpeed reduces gradients correctly: compare what the optimizer receives with a plain all-reduce of what
autograd computes, over all micro-batches of a step and all ranks.

Releases of DeepSpeed have dropped the last micro-batch or divided twice, and nothing in training notices. The check
compares a sample of the elements of each parameter on the data of the first step, and ends before the optimizer's step.
Afterwards the run is, bit for bit, what it was.
"""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from model.fp8.precision import Precision
from model.fp8.state import fp8_state, reset_fp8_state, snapshot_fp8_state
from train.checkpoint.files import RunState
from train.checkpoint.load import set_random_state
from train.checkpoint.reshard import WEIGHT, pieces_of_master
from train.checkpoint.save import rank_state
from train.config.arguments import TrainingArguments
from train.data.order import next_position
from train.data.stream import Batch, MicroBatches, SampleStream
from train.engine import zero
from train.engine.step import MicroStep
from train.preflight.check import PreflightError
from train.preflight.machine import out_of_memory

logger = logging.getLogger(__name__)
SAMPLE = 2**26  # elements: 256 MiB
FLOAT32_ERROR = 1e-6  # of sums in another order
TINY = 1e-30
# A GEMM that adds into a buffer and a replayed graph round differently, and quantize again.
OTHER_KERNELS = 0.1
WORST = 3  # parameters to name
ADVICE = "Do not train like this. Try another ZeRO stage, gradient_accumulation_steps 1 or another version of DeepSpeed"
FUSED_ADVICE = "Set speed.main_grad and speed.cuda_graphs to false, and report it"


@dataclass(frozen=True)
class Sample:
    """Every `stride`-th element of each flattened parameter. places: (first, count) in the sample, by name."""

    stride: int
    places: dict[str, tuple[int, int]]
    length: int

    @classmethod
    def of(cls, engine: Any) -> Sample:
        sizes = {zero.name_of(engine, p): zero.shape_of(p).numel() for p in trained(engine)}
        stride = math.ceil(sum(sizes.values()) / SAMPLE) | 1  # odd, to visit all columns of a matrix
        places, length = {}, 0
        for name, size in sizes.items():
            places[name] = (length, math.ceil(size / stride))
            length += places[name][1]
        return cls(stride, places, length)


def trained(engine: Any) -> list[nn.Parameter]:
    return [parameter for parameter in engine.module.parameters() if parameter.requires_grad]


@dataclass(frozen=True)
class Comparison:
    """The reduced gradient against the plain one. error and allowed are relative."""

    problems: list[str]
    error: float
    allowed: float


def check_gradients(
    args: TrainingArguments,
    engine: Any,
    micro_step: MicroStep,
    precision: Precision,
    stream: SampleStream,
    state: RunState,
) -> None:
    """Compare the gradients of the next step of the run. Collective.

    Raises PreflightError: the optimizer would receive other gradients than those of the micro-batches, or memory ran
    out, on this rank alone.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    size, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps or 1
    first = next_position(state.consumed_samples, size * accumulation * world, state.skipped_samples)
    reader = MicroBatches(stream, size, rank, world)
    batches = [reader.get(first, index) for index in range(accumulation)]
    reader.close()
    engine.train()
    try:
        with unchanged(engine, precision):
            mine = compare_gradients(engine, micro_step, precision, batches, args.max_grad_norm)
    except Exception as error:
        if not (line := out_of_memory(error)):
            raise
        raise PreflightError(
            [
                MemoryError(
                    f"preflight: memory ran out on rank {rank} ({socket.gethostname()}) while the gradients of a step "
                    f"were checked: {line}\nThe check needs more memory than a step of the run. Use a smaller "
                    "per_device_train_batch_size, or start without the checks of the ranks: --preflight false"
                )
            ]
        ) from error
    if mine is None:
        logger.warning(
            "preflight: the gradients of the first step are not finite, so they are not compared; the run "
            "will skip that step"
        )
        return
    every: list[Any] = [None] * world
    dist.all_gather_object(every, (f"rank {rank} ({socket.gethostname()})", mine))
    stage = engine.zero_optimization_stage()
    what = f"{accumulation} micro-batches x {world} ranks at ZeRO {stage}"
    for kind in range(len(mine)):
        how = ", with speed.main_grad and speed.cuda_graphs" if kind else ""
        found = [(where, comparisons[kind]) for where, comparisons in every]
        if wrong := [f"{where}: {text}" for where, comparison in found for text in comparison.problems]:
            title = f"preflight: DeepSpeed reduces the gradients of {what}{how} incorrectly:"
            raise PreflightError([ValueError("\n  ".join([title, *wrong, FUSED_ADVICE if kind else ADVICE]))])
        largest = max(comparison.error for _, comparison in found)
        logger.info(
            f"preflight: gradients of {what}{how} match a plain all-reduce within {largest:.1e} "
            f"(allowed {mine[kind].allowed:.1e})"
        )


@contextmanager
def unchanged(engine: Any, precision: Precision) -> Iterator[None]:
    """Restore random generators and FP8 state afterwards, in place."""
    random_state, fp8 = rank_state(engine.module, precision), snapshot_fp8_state(engine.module, precision)
    yield
    restore_fp8(engine, precision, fp8)
    set_random_state(random_state)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()  # the check needs more memory than the run


def restore_fp8(engine: Any, precision: Precision, saved: dict[str, torch.Tensor]) -> None:
    """Put back `saved` of snapshot_fp8_state in place. Modules that had not run by then get their initial state."""
    reset_fp8_state(engine.module, precision)
    for key, tensor in fp8_state(engine.module, precision).items():
        if key in saved:
            tensor.copy_(saved[key])


def compare_gradients(
    engine: Any, micro_step: MicroStep, precision: Precision, batches: list[Batch], max_grad_norm: float
) -> list[Comparison] | None:
    """Compute the gradients of a step and compare them. Collective. Changes FP8 state.

    Args:
        batches: this rank's micro-batches of the step.

    Returns:
        None if the gradients are not finite, on all ranks. Otherwise a comparison, and a second one with fused
        gradient accumulation and CUDA graphs if the run uses them.
    """
    sample, world = Sample.of(engine), dist.get_world_size()
    fp8 = snapshot_fp8_state(engine.module, precision)
    allowed = allowed_error(engine, len(batches))
    with (
        LocalGradients(engine, sample) as local,
        nullcontext() if micro_step.plain else micro_step.through_autograd(),
    ):
        reduced = take_step(engine, micro_step, batches, sample, local)
    if reduced is None:
        return None
    plain = local.sum / (len(batches) * world)
    squares = plain.square()
    dist.all_reduce(plain)
    dist.all_reduce(squares)
    found = [compare(engine, sample, reduced, plain, squares, max_grad_norm, allowed)]
    if not micro_step.plain:
        restore_fp8(engine, precision, fp8)
        reduced = take_step(engine, micro_step, batches, sample)
        if reduced is None:
            return None
        limit = max(allowed, OTHER_KERNELS)
        found.append(compare(engine, sample, reduced, plain, squares, max_grad_norm, limit))
    return found


def allowed_error(engine: Any, micro_batches: int) -> float:
    """The rounding of each addition, over micro-batches and ranks, in the coarsest of the types."""
    types = {engine.communication_data_type, *(p.dtype for p in trained(engine))}
    rounding = max(torch.finfo(dtype).eps / 2 for dtype in types)
    return 3 * max(rounding, FLOAT32_ERROR) * math.sqrt(micro_batches + dist.get_world_size())


class LocalGradients:
    """Sums a sample of the gradients of this rank's micro-batches in float32, by hooks that run before DeepSpeed's.

    DeepSpeed's factor (accumulation, loss scale) is divided out. Set `weight` before each micro-batch.
    """

    def __init__(self, engine: Any, sample: Sample):
        self.engine, self.sample = engine, sample
        self.sum = torch.zeros(sample.length, device=engine.device)
        self.weight = torch.ones((), device=engine.device)
        self.factor = torch.ones((), device=engine.device)

    def __enter__(self) -> LocalGradients:
        self.hooks = [self.engine.module.register_forward_hook(self._after_forward)]
        for parameter in trained(self.engine):
            add = partial(self._add, *self.sample.places[zero.name_of(self.engine, parameter)])
            self.hooks.append(parameter.register_hook(add))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        output.loss.register_hook(lambda gradient: self.factor.copy_(gradient.detach()) and None)

    def _add(self, first: int, count: int, gradient: torch.Tensor) -> None:
        mine = gradient.detach().reshape(-1)[:: self.sample.stride].float()
        scale = torch.where(self.factor == 0, 0.0, self.weight / self.factor)
        self.sum[first : first + count] += mine * scale


def take_step(
    engine: Any,
    micro_step: MicroStep,
    batches: list[Batch],
    sample: Sample,
    local: LocalGradients | None = None,
) -> torch.Tensor | None:
    """Take a step up to the optimizer; return the sample of the gradient that it receives, with its norm as the last
    element, or None if DeepSpeed skips the step."""
    values = torch.zeros(sample.length + 1, device=engine.device, dtype=torch.float64)
    steps = 0

    def take(master: zero.Master, gradient: torch.Tensor) -> None:
        nonlocal steps
        steps += 1
        for name, piece in pieces_of_master(engine, master, {WEIGHT: gradient.reshape(-1)}):
            own = piece.tensors[WEIGHT][:].float()
            values[-1] += own.norm().double().square()
            first = -(-piece.start // sample.stride)
            mine = own[first * sample.stride - piece.start :: sample.stride]
            place = sample.places[name][0] + first
            values[place : place + len(mine)] = mine.double()

    with zero.without_optimizer_step(engine, take):
        for index, batch in enumerate(batches):
            if local is not None and batch.documents is not None:
                local.weight.copy_(batch.labelled())
            micro_step(batch.to(engine.device), index)
    if not steps:
        return None
    if engine.zero_optimization_stage():  # each rank has a part
        dist.all_reduce(values)
    values[-1].sqrt_()
    return values.float()


def compare(
    engine: Any,
    sample: Sample,
    reduced: torch.Tensor,
    plain: torch.Tensor,
    squares: torch.Tensor,
    max_grad_norm: float,
    allowed: float,
) -> Comparison:
    """Compare the reduced gradient with the plain one.

    Args:
        reduced: of `take_step`.
        squares: of the ranks' own gradients, summed. Where they cancel, rounding goes by their size.
    """
    reported = engine.get_global_grad_norm()
    clipped = (
        min(1.0, max_grad_norm / (float(reported) + 1e-6)) if max_grad_norm and reported is not None else 1.0
    )
    values, problems = reduced[:-1] / clipped, []
    factor = float(values @ plain) / float(plain @ plain)
    errors = {}
    for name, (first, count) in sample.places.items():
        part = slice(first, first + count)
        scale = max(float(plain[part].norm()), float(squares[part].sum().sqrt()), TINY)
        errors[name] = float((values[part] - plain[part]).norm()) / scale
    worst = sorted(errors, key=lambda name: -errors[name])[:WORST]
    if not abs(factor - 1) <= allowed:
        problems.append(f"the reduced gradient is {factor:.4g} times the plain one")
    elif not errors[worst[0]] <= allowed:
        named = ", ".join(f"{name} by {errors[name]:.3g}" for name in worst)
        problems.append(
            f"reduced gradients differ from the plain ones (relative): {named}; allowed is {allowed:.2g}"
        )
    if reported is not None and not math.isclose(
        float(reduced[-1]), clipped * float(reported), rel_tol=max(0.01, allowed)
    ):
        problems.append(
            f"the norm of the gradients is {float(reduced[-1]) / clipped:.5g}, DeepSpeed uses {float(reported):.5g}"
        )
    error = float((values - plain).norm()) / max(float(squares.sum().sqrt()), float(plain.norm()), TINY)
    return Comparison(problems, error, allowed)
