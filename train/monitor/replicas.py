"""Check that all ranks have the same weights as rank 0, bit by bit.

A flipped bit, a broken link or a faulty kernel on one rank changes its weights, which nothing else in training detects.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from model.errors import UserError
from model.fp8.precision import Precision
from model.fp8.state import fp8_state


class ReplicaError(UserError):
    """The weights of the ranks differ; the message names the ranks and the first differing tensor."""

    code = "replica"


def check_replicas(engine: Any, precision: Precision, step: int) -> None:
    """Check after `step` that the replicated tensors of all ranks are equal. Collective; waits for the GPU.

    Rank 0 broadcasts one tensor after the other, so the check needs memory for a copy of the largest one.

    Raises: ReplicaError, on every rank: a tensor differs."""
    world = dist.get_world_size()
    tensors = replicated_tensors(engine, precision)
    if world == 1 or not tensors:
        return
    differs = torch.stack([differs_from_rank_0(tensor) for tensor in tensors.values()])
    every = [torch.empty_like(differs) for _ in range(world)]
    dist.all_gather(every, differs)
    if problem := describe_difference([row.tolist() for row in every], list(tensors)):
        raise ReplicaError(
            f"step {step}: {problem}. The memory, the GPU or a link of a rank is probably faulty. Exclude its node, "
            "and resume from a checkpoint before this step"
        )


@torch.no_grad()
def differs_from_rank_0(tensor: torch.Tensor) -> torch.Tensor:
    """Return 1 if a bit of `tensor` differs from rank 0, otherwise 0: int32 scalar on its device. Collective."""
    bits = tensor.detach().reshape(-1).view(torch.uint8)
    reference = bits.clone()
    dist.broadcast(reference, src=0)
    return (bits != reference).any().to(torch.int32)


def replicated_tensors(engine: Any, precision: Precision) -> dict[str, torch.Tensor]:
    """Return the tensors that must have the same bits on all ranks, by name, in the order of the model.

    These are the weights, except with ZeRO 3, which partitions them, and the FP8 state, if the amaxes are reduced over
    the ranks. The first row of each history is not included, because each rank collects its own amaxes there.
    """
    found: dict[str, torch.Tensor] = {}
    if engine.zero_optimization_stage() < 3:
        found = {name: parameter.data for name, parameter in engine.module.named_parameters()}
    if precision.config.reduce_amax:
        for key, tensor in fp8_state(engine.module, precision).items():
            found[f"FP8 {key}"] = tensor if key.endswith(".scale") else tensor[1:]
    return found


def describe_difference(differs: list[list[int]], names: list[str]) -> str | None:
    """Return a message about the ranks at fault and the first differing tensor, or None if no tensor differs.

    Args:
        differs: for each rank and tensor, whether it differs from rank 0.
        names: names of the tensors.
    """
    different = [name for name, *column in zip(names, *differs, strict=True) if any(column)]
    if not different:
        return None
    ranks = [rank for rank, row in enumerate(differs) if any(row)]
    count = f"{len(different)} of {len(names)} tensors differ, first {different[0]!r}"
    if 2 * len(ranks) < len(differs):
        return f"ranks {ranks} have other weights or FP8 state than the other ranks; {count}"
    return f"rank 0 has other weights or FP8 state than ranks {ranks} of {len(differs)}; {count}"
