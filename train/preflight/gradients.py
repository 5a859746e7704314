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

logger = logging.getLogger(__name__)
SAMPLE = 2**26  # elements: 256 MiB
FLOAT32_ERROR = 1e-6  # of sums in another order
# A GEMM that adds into a buffer and a replayed graph round differently, and quantize again.
OTHER_KERNELS = 0.1
ADVICE = "Do not train like this. Try another ZeRO stage, gradient_accumulation_steps 1 or another version of DeepSpeed"
FUSED_ADVICE = "Set speed.main_grad and speed.cuda_graphs to false, and report it"

# A sample of the gradients in float32, by name of the parameter.
Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Comparison:
    """The reduced gradients against the plain ones.

    problem: what is wrong, or "". error: the largest relative difference of a parameter. allowed: its limit.
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
    """Compare the gradients of the next step of the run. Collective.

    Raises PreflightError: the optimizer would receive other gradients than those of the micro-batches, or GPU memory
    ran out, on this rank alone.
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
    except torch.OutOfMemoryError as error:
        text = (
            f"preflight: GPU memory ran out on rank {rank} ({socket.gethostname()}) in the check of the gradients, "
            "which needs more than a step. Use a smaller per_device_train_batch_size, or skip the check: --preflight "
            "false"
        )
        raise PreflightError([MemoryError(text)]) from error
    if not mine:
        logger.warning(
            "preflight: the gradients of the first step are not finite, so they are not compared; the run "
            "will skip that step"
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
) -> list[Comparison]:
    """Compute the gradients of a step and compare them. Collective. Changes FP8 state.

    Args:
        batches: this rank's micro-batches of the step.

    Returns:
        [] if the gradients are not finite, on all ranks. Otherwise a comparison, and a second one with fused gradient
        accumulation and CUDA graphs if the run uses them.
    """
    plain, allowed = empty_sample(engine), allowed_error(engine, len(batches))
    fp8 = snapshot_fp8_state(engine.module, precision)
    with (
        adding_local_gradients(engine, plain) as weight,
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
        restore_fp8(engine, precision, fp8)
        reduced = take_step(engine, micro_step, batches)
        if reduced is None:
            return []
        found.append(compare(engine, *reduced, plain, max_grad_norm, max(allowed, OTHER_KERNELS)))
    return found


def trained(engine: Any) -> list[nn.Parameter]:
    return [parameter for parameter in engine.module.parameters() if parameter.requires_grad]


def sample_stride(engine: Any) -> int:
    """Every how many elements of a flattened parameter one is compared. Odd, to visit all columns of a matrix."""
    return math.ceil(sum(zero.shape_of(p).numel() for p in trained(engine)) / SAMPLE) | 1


def empty_sample(engine: Any) -> Gradients:
    """Return zeros for the compared elements of each parameter."""
    stride, shapes = (
        sample_stride(engine),
        {zero.name_of(engine, p): zero.shape_of(p) for p in trained(engine)},
    )
    return {
        name: torch.zeros(math.ceil(shape.numel() / stride), device=engine.device)
        for name, shape in shapes.items()
    }


def allowed_error(engine: Any, micro_batches: int) -> float:
    """The rounding of each addition, over micro-batches and ranks, in the coarsest of the types."""
    types = {engine.communication_data_type, *(p.dtype for p in trained(engine))}
    rounding = max(torch.finfo(dtype).eps / 2 for dtype in types)
    return 3 * max(rounding, FLOAT32_ERROR) * math.sqrt(micro_batches + dist.get_world_size())


@contextmanager
def adding_local_gradients(engine: Any, totals: Gradients) -> Iterator[torch.Tensor]:
    """Add the gradients of this rank's micro-batches to `totals`, by hooks that run before DeepSpeed's.

    DeepSpeed's factor (accumulation, loss scale) is divided out. Yields the weight of a micro-batch, to be set before
    it runs.
    """
    stride = sample_stride(engine)
    weight, factor = (torch.ones((), device=engine.device) for _ in range(2))

    def read_factor(module: nn.Module, inputs: Any, output: Any) -> None:
        output.loss.register_hook(lambda gradient: factor.copy_(gradient.detach()) and None)

    def add(total: torch.Tensor, gradient: torch.Tensor) -> None:
        mine = gradient.detach().reshape(-1)[::stride].float()
        total += mine * torch.where(factor == 0, 0.0, weight / factor)

    hooks = [engine.module.register_forward_hook(read_factor)]
    hooks += [p.register_hook(partial(add, totals[zero.name_of(engine, p)])) for p in trained(engine)]
    yield weight
    for hook in hooks:
        hook.remove()


def take_step(
    engine: Any, micro_step: MicroStep, batches: list[Batch], weight: torch.Tensor | None = None
) -> tuple[Gradients, float] | None:
    """Take a step up to the optimizer. Collective.

    Args:
        weight: of `adding_local_gradients`.

    Returns:
        the sample of the gradient that the optimizer receives, and the norm of the whole; None if DeepSpeed skips the
        step.
    """
    reduced, stride = empty_sample(engine), sample_stride(engine)
    squares: list[torch.Tensor] = []

    def take(master: zero.Master, gradient: torch.Tensor) -> None:
        squares.append(torch.zeros((), device=engine.device, dtype=torch.float64))
        for name, piece in pieces_of_master(engine, master, {WEIGHT: gradient.reshape(-1)}):
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
    if engine.zero_optimization_stage():  # each rank has a part
        for part in (square, *reduced.values()):
            dist.all_reduce(part)
    return reduced, math.sqrt(square)


def compare(
    engine: Any, reduced: Gradients, norm: float, plain: Gradients, max_grad_norm: float, allowed: float
) -> Comparison:
    """Compare the reduced gradient with the plain one.

    Args:
        reduced, norm: of `take_step`.
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
            f"the reduced gradient is {factor:.4g} times the plain one, and that of {worst} differs by "
            f"{errors[worst]:.2g} (relative; allowed is {allowed:.2g})"
        )
    elif reported is not None and not math.isclose(
        norm / clipping, float(reported), rel_tol=max(0.01, allowed)
    ):
        problem = f"the norm of the gradients is {norm / clipping:.5g}, DeepSpeed uses {float(reported):.5g}"
    return Comparison(problem, errors[worst], allowed)
