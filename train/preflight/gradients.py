"""Check that DeepSpeed reduces gradients correctly.

The check computes the gradients of the next step. It compares the gradients that the optimizer receives with a plain
all-reduce of autograd's gradients, over all micro-batches of the step and all ranks. Some releases of DeepSpeed have
dropped the last micro-batch or divided the gradients twice. Without this check, such errors remain unnoticed.

Only a sample of the elements in each parameter is compared. The optimizer takes no step, and the state of the run is
bit-identical before and after the check.
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
from train.engine.process_group import all_gather
from train.engine.step import MicroStep
from train.preflight.check import PreflightError

logger = logging.getLogger(__name__)
SAMPLE = 2**26  # compared elements over all parameters, which take 256 MiB in float32
FLOAT32_ERROR = 1e-6  # relative error between float32 sums in different orders
# Allowed relative error with fused accumulation and CUDA graphs, which round differently and quantize again.
OTHER_KERNELS = 0.1
ADVICE = "Try another ZeRO stage, gradient_accumulation_steps 1, or another version of DeepSpeed"
FUSED_ADVICE = "Set speed.main_grad and speed.cuda_graphs to false, and report this error"

# Maps each parameter name to a float32 sample of its gradient.
Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Comparison:
    """The result of comparing DeepSpeed's reduced gradients with gradients from a plain all-reduce.

    Attributes:
        problem: Description of the difference, or "" if it is within the limit.
        error: Largest relative error of the gradient over all parameters.
        allowed: Largest allowed relative error.
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
    """Check that DeepSpeed reduces the gradients of the next step correctly, and log the result.

    Collective: all ranks must call this function.

    Raises:
        PreflightError: On all ranks, if the optimizer would receive wrong gradients; on a single rank, if this rank
            runs out of GPU memory.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    size, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps or 1
    first = next_position(state.consumed_samples, size * accumulation * world, state.skipped_samples)
    reader = MicroBatches(stream, size, rank, world)
    batches = [reader.get(first, index) for index in range(accumulation)]
    reader.close()
    engine.train()
    random_state, fp8 = rank_state(engine.module, precision), snapshot_fp8_state(engine.module, precision)
    try:
        mine = compare_gradients(engine, micro_step, precision, batches, args.max_grad_norm)
    except torch.OutOfMemoryError as error:
        text = (
            f"preflight: GPU memory ran out on rank {rank} ({socket.gethostname()}) during the gradient check, "
            "which needs more memory than a training step. Use a smaller per_device_train_batch_size, or skip the "
            "preflight checks with --preflight false"
        )
        raise PreflightError([MemoryError(text)]) from error
    restore_fp8_state(engine, precision, fp8)
    set_random_state(random_state)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()  # the check needs more memory than the run
    if not mine:
        logger.warning(
            "preflight: the gradients of the next step are not finite and cannot be compared. Training will skip "
            "this step"
        )
        return
    what = f"{accumulation} micro-batches x {world} ranks at ZeRO {engine.zero_optimization_stage()}"
    for comparisons, advice in zip(zip(*all_gather(mine), strict=True), (ADVICE, FUSED_ADVICE), strict=False):
        how = " with speed.main_grad and speed.cuda_graphs" if advice == FUSED_ADVICE else ""
        worst = max(comparisons, key=lambda each: (bool(each.problem), each.error))
        if worst.problem:
            text = f"preflight: DeepSpeed reduces the gradients of {what}{how} incorrectly: {worst.problem}. {advice}"
            raise PreflightError([ValueError(text)])
        logger.info(
            f"preflight: the gradients of {what}{how} match a plain all-reduce with a relative error of "
            f"{worst.error:.1e} (allowed: {worst.allowed:.1e})"
        )


def restore_fp8_state(engine: Any, precision: Precision, saved: dict[str, torch.Tensor]) -> None:
    """Restore the FP8 state of a model in place.

    Modules without an entry in the saved state are reset to their initial state.

    Args:
        engine: The DeepSpeed engine.
        precision: The precision of the model.
        saved: The result of `snapshot_fp8_state`.
    """
    reset_fp8_state(engine.module, precision)
    for key, tensor in fp8_state(engine.module, precision).items():
        if key in saved:
            tensor.copy_(saved[key])


def compare_gradients(
    engine: Any, micro_step: MicroStep, precision: Precision, batches: list[Batch], max_grad_norm: float
) -> list[Comparison]:
    """Compare DeepSpeed's gradients for one step with gradients from a plain all-reduce.

    Collective: all ranks must call this function. The call changes the FP8 state.

    Args:
        engine: The DeepSpeed engine.
        micro_step: The forward and backward pass of a micro-batch.
        precision: The precision of the model.
        batches: This rank's micro-batches for the step.
        max_grad_norm: The gradient norm at which the run clips, or 0 for no clipping.

    Returns:
        One comparison of a forward and backward pass without fused gradient accumulation and CUDA graphs. If the run
        uses these, there is a second comparison with them. On all ranks, the list is empty if the gradients are not
        finite.
    """
    plain, allowed = empty_sample(engine), allowed_error(engine, len(batches))
    fp8 = snapshot_fp8_state(engine.module, precision)
    with (
        accumulate_local_gradients(engine, plain) as weight,
        nullcontext() if micro_step.plain else micro_step.disable_main_grads(),
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
    """Return the trainable parameters of a DeepSpeed engine's model."""
    return [parameter for parameter in engine.module.parameters() if parameter.requires_grad]


def sample_stride(engine: Any) -> int:
    """Return the stride at which the gradient check samples the elements of a flattened parameter.

    The stride is odd, so that the sampled elements cover all columns of a matrix.
    """
    return math.ceil(sum(zero.full_shape(p).numel() for p in trained_parameters(engine)) / SAMPLE) | 1


def empty_sample(engine: Any) -> Gradients:
    """Return a tensor of zeros for each parameter, with one element per sampled gradient element.

    The keys are the parameter names.
    """
    stride, shapes = (
        sample_stride(engine),
        {zero.parameter_name(engine, p): zero.full_shape(p) for p in trained_parameters(engine)},
    )
    return {
        name: torch.zeros(math.ceil(shape.numel() / stride), device=engine.device)
        for name, shape in shapes.items()
    }


def allowed_error(engine: Any, micro_batches: int) -> float:
    """Return the largest allowed relative error of a reduced gradient.

    The limit is three times the expected error of a sum over micro-batches and ranks, in which each addition is rounded
    to the least precise data type involved.
    """
    types = {engine.communication_data_type, *(p.dtype for p in trained_parameters(engine))}
    rounding = max(torch.finfo(dtype).eps / 2 for dtype in types)
    return 3 * max(rounding, FLOAT32_ERROR) * math.sqrt(micro_batches + dist.get_world_size())


@contextmanager
def accumulate_local_gradients(engine: Any, totals: Gradients) -> Iterator[torch.Tensor]:
    """Add the gradients of this rank's micro-batches to `totals` within the `with` block.

    Hooks that run before DeepSpeed's hooks read the gradients, and divide them by the factor with which DeepSpeed
    scales the loss for gradient accumulation and fp16.

    Args:
        engine: The DeepSpeed engine.
        totals: The sums of the gradients, which are modified.

    Yields:
        A scalar tensor with the weight of the micro-batch. The caller sets this weight before each micro-batch.
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
    """Run a training step without the optimizer update.

    Collective: all ranks must call this function.

    Args:
        engine: The DeepSpeed engine.
        micro_step: The forward and backward pass of a micro-batch.
        batches: This rank's micro-batches for the step.
        weight: The tensor that `accumulate_local_gradients` yields.

    Returns:
        A sample of the gradients that the optimizer receives, and the norm of all gradients. None if DeepSpeed skips
        the step.
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

    with zero.intercept_optimizer_step(engine, take):
        for index, batch in enumerate(batches):
            if weight is not None and batch.documents is not None:
                weight.copy_(batch.labelled())
            micro_step(batch.to(engine.device), index)
    if not squares:
        return None
    square = torch.stack(squares).sum()
    if engine.zero_optimization_stage():  # each rank has only a part of the gradients
        for part in (square, *reduced.values()):
            dist.all_reduce(part)
    return reduced, math.sqrt(square)


def compare(
    engine: Any, reduced: Gradients, norm: float, plain: Gradients, max_grad_norm: float, allowed: float
) -> Comparison:
    """Compare DeepSpeed's reduced gradients with gradients from a plain all-reduce.

    Args:
        engine: The DeepSpeed engine.
        reduced, norm: The result of `take_step`.
        plain: The all-reduced sample of autograd's gradients.
        max_grad_norm: The gradient norm at which the run clips, or 0 for no clipping.
        allowed: The largest allowed relative error.
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
            f"the reduced gradient is {factor:.4g} times as large as after a plain all-reduce, and the gradient of "
            f"{worst} has a relative error of {errors[worst]:.2g} (allowed: {allowed:.2g})"
        )
    elif reported is not None and not math.isclose(
        norm / clipping, float(reported), rel_tol=max(0.01, allowed)
    ):
        problem = f"the gradient norm is {norm / clipping:.5g}, but DeepSpeed reports {float(reported):.5g}"
    return Comparison(problem, errors[worst], allowed)
