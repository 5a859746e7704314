"""Does DeepSpeed reduce the gradients right? Those that the optimizer is given, against a plain all-reduce of those
that autograd hands to the parameters, over all micro-batches of a step and all ranks.

Releases of DeepSpeed have left out the last micro-batch, or divided by too much; nothing in training notices. Compared
is a sample of the elements, which fits in memory for each micro-batch by itself: so that one that is missing among
hundreds is found and named, where the norm of the sum says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from model.config import GIB
from model.fp8.precision import Precision
from model.fp8.state import snapshot_fp8_state
from train.checkpoint.reshard import WEIGHT, pieces_of_master
from train.data.stream import Batch
from train.engine import zero
from train.engine.step import MicroStep
from train.preflight.as_before import put_back_fp8

SAMPLE = 2**26  # elements of all micro-batches of a rank: 256 MiB
# Of a share of a micro-batch in the sum, between 0 (it is not there) and 1, as in the plain one, or 2 (twice).
WRONG_SHARE = 0.25
# Of float32, whose sums depend on their order.
FLOAT32_ERROR = 1e-6
# Where a GEMM adds into a buffer or a graph is replayed, gradients are rounded otherwise, and quantized again.
OTHER_KERNELS = 0.1
WORST = 3  # parameters that are named


@dataclass(frozen=True)
class Sample:
    """Every `stride`-th element of each flattened parameter: `places` has (first, count) in the sample, by name."""

    stride: int
    places: dict[str, tuple[int, int]]
    length: int

    @classmethod
    def of(cls, engine: Any, micro_batches: int) -> Sample:
        sizes = {zero.name_of(engine, p): zero.shape_of(p).numel() for p in trained(engine)}
        # odd, so that it goes through all columns of a matrix
        stride = math.ceil(sum(sizes.values()) * micro_batches / SAMPLE) | 1
        places, length = {}, 0
        for name, size in sizes.items():
            places[name] = (length, math.ceil(size / stride))
            length += places[name][1]
        return cls(stride, places, length)


def trained(engine: Any) -> list[nn.Parameter]:
    return [parameter for parameter in engine.module.parameters() if parameter.requires_grad]


@dataclass(frozen=True)
class Reduced:
    """What the optimizer was given in a step. values: the sample of it, 1-D float32. norm: of all of it; reported_norm:
    before clipping, as DeepSpeed has it."""

    values: torch.Tensor
    norm: float
    reported_norm: float | None


@dataclass(frozen=True)
class Comparison:
    """Of one rank. factor: of the reduced gradient to the plain one. shares: of this rank's micro-batches that are not
    in it once, by index. worst: parameters, with their relative error. allowed: relative error."""

    factor: float
    shares: dict[int, float]
    worst: list[tuple[str, float]]
    off: int  # parameters that are off
    error: float
    allowed: float
    norms: tuple[float, float] | None  # as the optimizer was given it, as DeepSpeed said; where they differ


def compare_gradients(
    engine: Any, micro_step: MicroStep, precision: Precision, batches: list[Batch], max_grad_norm: float
) -> tuple[list[Comparison], int] | None:
    """A step with `batches`, this rank's of the step, with a learning rate of 0; every rank calls it. One comparison,
    or two where GEMMs add into buffers or graphs are replayed: then first without these. And the bytes that the (last)
    step took of a GPU at its peak. None, on every rank: gradients are not finite, and DeepSpeed skipped the step.
    Moments and FP8 state are others afterwards."""
    sample = Sample.of(engine, len(batches))
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    fp8 = snapshot_fp8_state(engine.module, precision)
    allowed = allowed_error(engine, len(batches))
    found = []
    try:
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        with (
            local_gradients(engine, sample, len(batches)) as rows,
            nullcontext() if micro_step.plain else micro_step.through_autograd(),
        ):
            reduced = take_step(engine, micro_step, batches, sample, rows)
            if reduced is None:
                return None
            peak = peak_without(rows, reduced.values)
        rows /= len(batches) * dist.get_world_size()
        plain, scales = of_all_ranks(rows, sample)
        compare = partial(_compare, rows, plain, scales, sample, max_grad_norm)
        found.append(compare(reduced, allowed))
        if not micro_step.plain:
            put_back_fp8(engine, precision, fp8)
            reduced = take_step(engine, micro_step, batches, sample)
            if reduced is None:
                return None
            peak = peak_without(rows, plain, reduced.values)
            found.append(compare(reduced, max(allowed, OTHER_KERNELS)))
    finally:
        for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    return found, peak


def peak_without(*tensors: torch.Tensor) -> int:
    """Bytes on the GPU since the last call of `take_step`; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() - sum(t.nbytes for t in tensors) if tensors[0].is_cuda else 0


def more_than_a_step_gib(engine: Any, micro_step: MicroStep, micro_batches: int) -> float:
    """What `compare_gradients` keeps at most beside a step: its samples and, where the steps of the run leave none, a
    gradient of each weight in the weight's type."""
    sample = Sample.of(engine, micro_batches)
    kept = 4 * sample.length * (micro_batches + 2)  # of each micro-batch, their sum, and what was reduced
    if not micro_step.plain:
        kept += sum(p.element_size() * zero.shape_of(p).numel() for p in trained(engine))
    return kept / GIB


def allowed_error(engine: Any, micro_batches: int) -> float:
    """By the rounding of each addition, over micro-batches and ranks, in the coarsest of the types."""
    types = {engine.communication_data_type, *(p.dtype for p in trained(engine))}
    rounding = max(torch.finfo(dtype).eps / 2 for dtype in types)
    return 3 * max(rounding, FLOAT32_ERROR) * math.sqrt(micro_batches + dist.get_world_size())


@contextmanager
def local_gradients(engine: Any, sample: Sample, micro_batches: int) -> Iterator[torch.Tensor]:
    """[micro_batches, sample] float32, on the device: of the loss of each micro-batch of this rank, as the model
    returned it, by hooks that come before DeepSpeed's. Its own factor (accumulation, loss scale) is divided out."""
    rows = torch.zeros(micro_batches, sample.length, device=engine.device)
    factor = torch.ones((), device=engine.device)
    current = -1

    def begins(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal current
        current += 1
        output.loss.register_hook(note_factor)

    def note_factor(gradient: torch.Tensor) -> None:
        """In the backward this comes before all parameters."""
        factor.copy_(gradient.detach())

    def add(first: int, count: int, gradient: torch.Tensor) -> None:
        mine = gradient.detach().reshape(-1)[:: sample.stride].float()
        rows[current, first : first + count] += torch.where(factor == 0, 0.0, mine / factor)

    hooks = [engine.module.register_forward_hook(begins)]
    for parameter in trained(engine):
        hooks.append(parameter.register_hook(partial(add, *sample.places[zero.name_of(engine, parameter)])))
    try:
        yield rows
    finally:
        for hook in hooks:
            hook.remove()


def take_step(
    engine: Any, micro_step: MicroStep, batches: list[Batch], sample: Sample, rows: torch.Tensor | None = None
) -> Reduced | None:
    """What the optimizer is given in it, None if it is skipped. rows: are weighted by documents here, as
    MicroStep's losses."""
    values = torch.zeros(sample.length, device=engine.device)
    square = torch.zeros((), dtype=torch.float64, device=engine.device)
    steps = 0

    def take(master: zero.Master, gradient: torch.Tensor) -> None:
        nonlocal steps
        steps += 1
        for name, piece in pieces_of_master(engine, master, {WEIGHT: gradient.reshape(-1)}):
            own = piece.tensors[WEIGHT][:].float()
            square.add_(own.double().square().sum() if len(own) < 2**20 else own.norm().double().square())
            first = -(-piece.start // sample.stride)
            mine = own[first * sample.stride - piece.start :: sample.stride]
            place = sample.places[name][0] + first
            values[place : place + len(mine)] = mine

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with zero.watching_gradients(engine, take):
        for index, batch in enumerate(batches):
            micro_step(batch.to(engine.device), index)
            if rows is not None and batch.documents is not None:
                rows[index] *= batch.labelled().to(rows)
    if not steps:
        return None
    if engine.zero_optimization_stage():  # each rank has a part
        dist.all_reduce(values)
        dist.all_reduce(square)
    norm = engine.get_global_grad_norm()
    return Reduced(values, math.sqrt(float(square)), None if norm is None else float(norm))


def of_all_ranks(rows: torch.Tensor, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """(the plain sum over micro-batches and ranks; for each parameter the size that its rounding errors go by)."""
    plain = rows.sum(0)
    squares = torch.stack([rows[:, first : first + n].square().sum() for first, n in sample.places.values()])
    dist.all_reduce(plain)
    dist.all_reduce(squares)
    own = torch.stack([plain[first : first + n].norm() for first, n in sample.places.values()])
    return plain, torch.maximum(own, squares.sqrt())


def _compare(
    rows: torch.Tensor,
    plain: torch.Tensor,
    scales: torch.Tensor,
    sample: Sample,
    max_grad_norm: float,
    reduced: Reduced,
    allowed: float,
) -> Comparison:
    clipped, reported = 1.0, reduced.reported_norm
    if max_grad_norm and reported is not None:
        clipped = min(1.0, max_grad_norm / (reported + 1e-6))
    values, size = reduced.values / clipped, float(plain @ plain)
    factor = float(values @ plain) / size
    different = values - plain
    errors = torch.stack([different[first : first + n].norm() for first, n in sample.places.values()])
    errors = (errors / scales.clamp(min=torch.finfo(torch.float32).tiny)).nan_to_num(nan=math.inf)
    order = errors.argsort(descending=True).tolist()
    names = list(sample.places)
    norms = None
    if reported is not None and not math.isclose(
        reduced.norm, clipped * reported, rel_tol=max(0.01, allowed)
    ):
        norms = reduced.norm / clipped, reported
    return Comparison(
        factor=factor,
        shares=wrong_shares(rows, plain, values - factor * plain),
        worst=[(names[i], float(errors[i])) for i in order[:WORST]],
        off=int((errors > allowed).sum()),
        error=float(different.norm()) / max(float(scales.norm()), 1e-30),
        allowed=allowed,
        norms=norms,
    )


def wrong_shares(rows: torch.Tensor, plain: torch.Tensor, error: torch.Tensor) -> dict[int, float]:
    """By index, the share of this rank's micro-batches in the reduced gradient, where it is not about 1.

    error: what is left of the reduced gradient when its part along `plain` is taken away. A micro-batch that is missing
    is in it with the opposite sign, while rounding is along none of them.
    """
    found, size, length = {}, plain @ plain, math.sqrt(len(plain))
    for index, row in enumerate(rows):
        own = row - (row @ plain) / size * plain
        square = own @ own
        if not square > 1e-4 * (row @ row):
            continue  # nothing of its own, by which it could be told: the only one, or like all others
        share = float(error @ own / square)
        if abs(share) > max(WRONG_SHARE, 10 * float(error.norm() / square.sqrt()) / length):
            found[index] = 1 + share
    return found


def problems(comparisons: list[Comparison], where: list[str], micro_batches: int) -> list[str]:
    """What is wrong, of one comparison of each rank; `where`: each rank in words. [] if nothing is."""
    shares = {(rank, index): x for rank, its in enumerate(comparisons) for index, x in its.shares.items()}
    most = max((abs(share - 1) for share in shares.values()), default=0.0)
    found = [
        f"micro-batch {index + 1} of {micro_batches} of {where[rank]} is {round(share, 2) or 0.0:.2f} times in the "
        "reduced gradient, not once"
        for (rank, index), share in shares.items()
        if abs(share - 1) > most / 2  # others are only like it
    ]
    for rank, its in enumerate(comparisons):
        of_rank = "" if its == comparisons[0] and rank == 0 else f" on {where[rank]}"
        told = []
        if found:
            pass
        elif not abs(its.factor - 1) <= its.allowed:
            told.append(f"the reduced gradient is {its.factor:.4g} times the plain one{of_rank}")
        elif its.off:
            worst = ", ".join(f"{name} by {100 * error:.3g} %" for name, error in its.worst[: its.off])
            told.append(
                f"the reduced gradients of {its.off} parameters differ from the plain ones{of_rank}, {worst} "
                f"(allowed {100 * its.allowed:.2g} %)"
            )
        if its.norms:
            told.append(
                f"the gradients' norm is {its.norms[0]:.5g} and DeepSpeed, which clips by it, has {its.norms[1]:.5g}"
            )
        found += [text for text in told if text not in found]
    return found
