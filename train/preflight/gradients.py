"""Check that DeepSpeed reduces gradients correctly.

The check computes the gradients of the first step and compares the gradients that the optimizer receives with a plain
all-reduce of autograd's gradients, over all micro-batches of the step and all ranks. It is needed because releases of
DeepSpeed have dropped the last micro-batch or divided twice, which training does not notice.

The check compares a sample of the elements of each parameter, and ends before the optimizer's step. Afterwards the
state of the run is bit-identical to the state before.
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
from train.checkpoint.reshard import WEIGHT, master_pieces
from train.checkpoint.save import rank_state
from train.config.arguments import TrainingArguments
from train.data.order import next_position
from train.data.stream import Batch, MicroBatches, SampleStream
from train.engine import zero
from train.engine.step import MicroStep
from train.preflight.check import PreflightError

logger = logging.getLogger(__name__)
SAMPLE = 2**26  # elements: 256 MiB
FLOAT32_ERROR = 1e-6  # relative, between sums in different orders
# Limit with fused accumulation and CUDA graphs, which round differently and quantize again.
OTHER_KERNELS = 0.1
ADVICE = "Do not train like this. Try another ZeRO stage, gradient_accumulation_steps 1 or another version of DeepSpeed"
FUSED_ADVICE = "Set speed.main_grad and speed.cuda_graphs to false, and report this error"

# A sample of each gradient in float32, by the parameter's name.
Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Comparison:
    """The result of comparing the reduced gradients with the plain ones.

    Attributes:
        problem: description of the error, or "".
        error: the largest relative difference over the parameters.
        allowed: the limit of `error`.
    """

    problem: str
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
    """Check the gradients of the run's next step, and log the result. Collective.

    Raises:
        PreflightError: On all ranks, if the optimizer would receive wrong gradients. On a single rank, if its GPU
            memory ran out.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    size, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps or 1
    first = next_position(state.consumed_samples, size * accumulation * world, state.skipped_samples)
    reader = MicroBatches(stream, size, rank, world)
    batches = [reader.get(first, index) for index in range(accumulation)]
    reader.close()
    engine.train()
    try:
        with restore_afterwards(engine, precision):
            mine = compare_gradients(engine, micro_step, precision, batches, args.max_grad_norm)
    except torch.OutOfMemoryError as error:
        text = (
            f"preflight: GPU memory ran out on rank {rank} ({socket.gethostname()}) in the check of the gradients, "
            "which needs more memory than a step. Use a smaller per_device_train_batch_size, or skip the check with "
            "--preflight false"
        )
        raise PreflightError([MemoryError(text)]) from error
    if not mine:
        logger.warning(
            "preflight: the gradients of the first step are not finite, so they cannot be compared. The run "
            "will skip this step"
        )
        return
    every: list[Any] = [None] * world
    dist.all_gather_object(every, mine)
    what = f"{accumulation} micro-batches x {world} ranks at ZeRO {engine.zero_optimization_stage()}"
    for comparisons, advice in zip(zip(*every, strict=True), (ADVICE, FUSED_ADVICE), strict=False):
        how = ", with speed.main_grad and speed.cuda_graphs" if advice == FUSED_ADVICE else ""
        worst = max(comparisons, key=lambda each: (bool(each.problem), each.error))
        if worst.problem:
            text = f"preflight: DeepSpeed reduces the gradients of {what}{how} incorrectly: {worst.problem}. {advice}"
            raise PreflightError([ValueError(text)])
        logger.info(
            f"preflight: gradients of {what}{how} match a plain all-reduce within {worst.error:.1e} "
            f"(allowed {worst.allowed:.1e})"
        )


@contextmanager
def restore_afterwards(engine: Any, precision: Precision) -> Iterator[None]:
    """Restore the random generators and the FP8 state in place after the block."""
    random_state, fp8 = rank_state(engine.module, precision), snapshot_fp8_state(engine.module, precision)
    yield
    restore_fp8_state(engine, precision, fp8)
    set_random_state(random_state)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()  # the check needs more memory than the run


def restore_fp8_state(engine: Any, precision: Precision, saved: dict[str, torch.Tensor]) -> None:
    """Restore FP8 state in place. Modules that had no state when it was saved get their initial state.

    Args:
        saved: result of `snapshot_fp8_state`.
    """
    reset_fp8_state(engine.module, precision)
    for key, tensor in fp8_state(engine.module, precision).items():
        if key in saved:
            tensor.copy_(saved[key])


def compare_gradients(
    engine: Any, micro_step: MicroStep, precision: Precision, batches: list[Batch], max_grad_norm: float
) -> list[Comparison]:
    """Compute the gradients of a step and compare them. Collective. Changes FP8 state.

    Args:
        batches: this rank's micro-batches of the step.

    Returns:
        One comparison, and a second one with fused gradient accumulation and CUDA graphs if the run uses them. [] on
        all ranks if the gradients are not finite.
    """
    plain, allowed = empty_sample(engine), allowed_error(engine, len(batches))
    fp8 = snapshot_fp8_state(engine.module, precision)
    with (
        accumulate_local_gradients(engine, plain) as weight,
        nullcontext() if micro_step.plain else micro_step.through_autograd(),
    ):
        reduced = take_step(engine, micro_step, batches, weight)
    if reduced is None:
        return []
    for gradient in plain.values():
        gradient /= len(batches) * dist.get_world_size()
        dist.all_reduce(gradient)
    found = [compare(engine, *reduced, plain, max_grad_norm, allowed)]
    if not micro_step.plain:
        restore_fp8_state(engine, precision, fp8)
        reduced = take_step(engine, micro_step, batches)
        if reduced is None:
            return []
        found.append(compare(engine, *reduced, plain, max_grad_norm, max(allowed, OTHER_KERNELS)))
    return found


def trained_parameters(engine: Any) -> list[nn.Parameter]:
    """Return the parameters that have a gradient."""
    return [parameter for parameter in engine.module.parameters() if parameter.requires_grad]


def sample_stride(engine: Any) -> int:
    """Return the distance between compared elements of a flattened parameter.

    It is odd, so that the elements are in all columns of a matrix.
    """
    return math.ceil(sum(zero.full_shape(p).numel() for p in trained_parameters(engine)) / SAMPLE) | 1


def empty_sample(engine: Any) -> Gradients:
    """Return zeros for the compared elements of each parameter."""
    stride, shapes = (
        sample_stride(engine),
        {zero.parameter_name(engine, p): zero.full_shape(p) for p in trained_parameters(engine)},
    )
    return {
        name: torch.zeros(math.ceil(shape.numel() / stride), device=engine.device)
        for name, shape in shapes.items()
    }


def allowed_error(engine: Any, micro_batches: int) -> float:
    """Return the allowed relative error of a gradient.

    It is three times the expected error of adding over micro-batches and ranks, each addition rounded to the least
    exact type involved.
    """
    types = {engine.communication_data_type, *(p.dtype for p in trained_parameters(engine))}
    rounding = max(torch.finfo(dtype).eps / 2 for dtype in types)
    return 3 * max(rounding, FLOAT32_ERROR) * math.sqrt(micro_batches + dist.get_world_size())


@contextmanager
def accumulate_local_gradients(engine: Any, totals: Gradients) -> Iterator[torch.Tensor]:
    """Add the gradients of this rank's micro-batches to `totals` in the block, with hooks that run before DeepSpeed's.

    The hooks divide by the factor with which DeepSpeed scales the loss (accumulation, loss scale).

    Yields:
        The weight of a micro-batch, a scalar tensor. Set it before the micro-batch runs.
    """
    stride = sample_stride(engine)
    weight, factor = (torch.ones((), device=engine.device) for _ in range(2))

    def read_factor(module: nn.Module, inputs: Any, output: Any) -> None:
        output.loss.register_hook(lambda gradient: factor.copy_(gradient.detach()) and None)

    def add(total: torch.Tensor, gradient: torch.Tensor) -> None:
        mine = gradient.detach().reshape(-1)[::stride].float()
        total += mine * torch.where(factor == 0, 0.0, weight / factor)

    hooks = [engine.module.register_forward_hook(read_factor)]
    hooks += [
        p.register_hook(partial(add, totals[zero.parameter_name(engine, p)]))
        for p in trained_parameters(engine)
    ]
    yield weight
    for hook in hooks:
        hook.remove()


def take_step(
    engine: Any, micro_step: MicroStep, batches: list[Batch], weight: torch.Tensor | None = None
) -> tuple[Gradients, float] | None:
    """Take a step up to the optimizer. Collective.

    Args:
        weight: the value that `accumulate_local_gradients` yields.

    Returns:
        The sample of the gradient that the optimizer receives, and the norm of the whole gradient. None if DeepSpeed
        skips the step.
    """
    reduced, stride = empty_sample(engine), sample_stride(engine)
    squares: list[torch.Tensor] = []

    def take(master: zero.Master, gradient: torch.Tensor) -> None:
        squares.append(torch.zeros((), device=engine.device, dtype=torch.float64))
        for name, piece in master_pieces(engine, master, {WEIGHT: gradient.reshape(-1)}):
            own = piece.tensors[WEIGHT][:].float()
            squares[-1] += own.norm().double().square()
            first = -(-piece.start // stride)
            mine = own[first * stride - piece.start :: stride]
            reduced[name][first : first + len(mine)] = mine

    with zero.without_optimizer_step(engine, take):
        for index, batch in enumerate(batches):
            if weight is not None and batch.documents is not None:
                weight.copy_(batch.labelled())
            micro_step(batch.to(engine.device), index)
    if not squares:
        return None
    square = torch.stack(squares).sum()
    if engine.zero_optimization_stage():  # each rank has only a part of the gradient
        for part in (square, *reduced.values()):
            dist.all_reduce(part)
    return reduced, math.sqrt(square)


def compare(
    engine: Any, reduced: Gradients, norm: float, plain: Gradients, max_grad_norm: float, allowed: float
) -> Comparison:
    """Compare the reduced gradient with the plain one.

    Args:
        reduced, norm: the result of `take_step`.
        plain: the all-reduced sample of autograd's gradients.
        max_grad_norm: gradient clipping of the run; 0 for none.
        allowed: the largest relative error.
    """
    reported = engine.get_global_grad_norm()
    is_clipped = max_grad_norm and reported is not None
    clipping = min(1.0, max_grad_norm / (float(reported) + 1e-6)) if is_clipped else 1.0
    along, square = (
        sum(float(other[name] @ gradient) for name, gradient in plain.items()) for other in (reduced, plain)
    )
    factor = along / square / clipping
    errors = {
        name: float((reduced[name] / clipping - gradient).norm()) / (float(gradient.norm()) or 1.0)
        for name, gradient in plain.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    problem = ""
    if not (abs(factor - 1) <= allowed and errors[worst] <= allowed):
        problem = (
            f"the reduced gradient is {factor:.4g} times the plain one, and the gradient of {worst} has a relative "
            f"error of {errors[worst]:.2g} (allowed {allowed:.2g})"
        )
    elif reported is not None and not math.isclose(
        norm / clipping, float(reported), rel_tol=max(0.01, allowed)
    ):
        problem = (
            f"the norm of the gradients is {norm / clipping:.5g}, but DeepSpeed uses {float(reported):.5g}"
        )
    return Comparison(problem, errors[worst], allowed)
