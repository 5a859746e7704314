"""Check that all ranks have the same weights as rank 0, bit by bit.

A flipped bit, a faulty link or a faulty kernel can change the weights of one rank. No other check detects this.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from model.errors import UserError
from model.fp8.precision import Precision
from model.fp8.state import fp8_state


class ReplicaError(UserError):
    """An error raised if weights or FP8 state differ between ranks.

    The message names the ranks and the first tensor that differs.
    """

    code = "replica"


def check_replicas(engine: Any, precision: Precision, step: int) -> None:
    """Check that the weights and the FP8 state are bit-identical on all ranks.

    Collective: all ranks must call this function. The call waits for the GPU.

    Rank 0 broadcasts one tensor at a time, so the check needs memory for a copy of the largest tensor.

    Args:
        step: The last completed step, for the error message.

    Raises:
        ReplicaError: A tensor differs. Raised on every rank.
    """
    world = dist.get_world_size()
    tensors = replicated_tensors(engine, precision)
    if world == 1 or not tensors:
        return
    differs = torch.stack([differs_from_rank_0(tensor) for tensor in tensors.values()])
    every = [torch.empty_like(differs) for _ in range(world)]
    dist.all_gather(every, differs)
    if problem := describe_difference([row.tolist() for row in every], list(tensors)):
        raise ReplicaError(
            f"step {step}: {problem}. A GPU, its memory or a network link is probably faulty. Exclude the "
            "node of the rank that differs, and resume from a checkpoint saved before this step"
        )


@torch.no_grad()
def differs_from_rank_0(tensor: torch.Tensor) -> torch.Tensor:
    """Compare a tensor bit by bit with the same tensor on rank 0.

    Collective: all ranks must call this function.

    Returns:
        An int32 scalar on the device of the tensor. It is 1 if a bit differs, otherwise 0.
    """
    bits = tensor.detach().reshape(-1).view(torch.uint8)
    reference = bits.clone()
    dist.broadcast(reference, src=0)
    return (bits != reference).any().to(torch.int32)


def replicated_tensors(engine: Any, precision: Precision) -> dict[str, torch.Tensor]:
    """Return the tensors that must be bit-identical on all ranks, by name, in the order of the model.

    The weights are included, except with ZeRO 3, which partitions them. The FP8 state is included if amaxes are reduced
    over all ranks. The first row of each amax history is excluded, because each rank collects its own amaxes there.
    """
    found: dict[str, torch.Tensor] = {}
    if engine.zero_optimization_stage() < 3:
        found = {name: parameter.data for name, parameter in engine.module.named_parameters()}
    if precision.config.reduce_amax:
        for key, tensor in fp8_state(engine.module, precision).items():
            found[f"FP8 {key}"] = tensor if key.endswith(".scale") else tensor[1:]
    return found


def describe_difference(differs: list[list[int]], names: list[str]) -> str | None:
    """Describe which ranks differ, and name the first tensor that differs. Return None if no tensor differs.

    Args:
        differs: For each rank and each tensor, whether the tensor differs from the tensor on rank 0.
        names: Names of the tensors.
    """
    different = [name for name, *column in zip(names, *differs, strict=True) if any(column)]
    if not different:
        return None
    ranks = [rank for rank, row in enumerate(differs) if any(row)]
    count = f"{len(different)} of {len(names)} tensors differ, such as {different[0]!r}"
    if 2 * len(ranks) < len(differs):
        return f"ranks {ranks} have different weights or FP8 state than the other ranks; {count}"
    return f"rank 0 has different weights or FP8 state than ranks {ranks} of {len(differs)}; {count}"
