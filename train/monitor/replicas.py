"""Check that all ranks have the same weights, by comparing one checksum per tensor.

A flipped bit, a broken link or a faulty kernel on one rank changes its weights, which nothing else in training detects.
Each tensor that should be equal on all ranks is summed on the device in one pass. Only the sums, integers, are
exchanged.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from model.errors import UserError
from model.fp8.precision import Precision
from model.fp8.state import fp8_state
from train.engine import zero

ROW = 2**18  # elements per row; every row uses the same multipliers, and each row has another factor
ROWS = 64  # rows at a time: 64 MiB of products
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes per element
GOLDEN = 0x9E3779B1  # odd number near 2**32 / 1.618, whose multiples are evenly spread (Knuth, TAOCP 3, 6.4)


class ReplicaError(UserError):
    """The weights of the ranks differ; the message names the ranks and the first differing tensor."""

    code = "replica"


@torch.no_grad()
def checksum(tensor: torch.Tensor, multipliers: torch.Tensor) -> torch.Tensor:
    """Return a checksum of the bits of `tensor`, an int64 scalar on its device, without waiting for the device.

    The checksum is the sum of element * multiplier. All multipliers are odd, so a flipped bit b of an element changes
    its product by an odd multiple of 2**b, which is never 0 modulo 2**32. Swapped elements change the sum too, because
    the multipliers depend on the position.

    Args:
        multipliers: int32 [ROW], from `make_multipliers`.
    """
    flat = tensor.detach().reshape(-1)
    if flat.element_size() == 8:
        flat = flat.view(torch.int32)
    bits = flat.view(INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    whole = bits.numel() // ROW * ROW
    if whole:
        rows = bits[:whole].view(-1, ROW)
        for start in range(0, len(rows), ROWS):
            # products are int32 and wrap around; their sum is int64
            sums = (rows[start : start + ROWS] * multipliers).sum(1)
            places = torch.arange(start, start + len(sums), device=tensor.device) * 2 + 1
            total += (sums * places).sum()
    if whole < bits.numel():
        rest = bits[whole:]
        total += (rest * multipliers[: len(rest)]).sum() * (2 * (whole // ROW) + 1)
    return total


def make_multipliers(device: Any) -> torch.Tensor:
    """Return the multipliers for `checksum`: int32 [ROW], all odd and different."""
    values = (torch.arange(ROW, dtype=torch.int64) * 2 * GOLDEN + 1) & 0xFFFFFFFF
    return values.to(torch.int32).to(device)  # wraps around


def replicated_tensors(engine: Any, precision: Precision) -> dict[str, torch.Tensor]:
    """Return the tensors that must have the same bits on all ranks, by name, in the order of the model.

    With ZeRO 0 to 2 these are the weights. With ZeRO 0 they include the optimizer's float32 weights and moments, which
    ZeRO 1 and 2 partition over the ranks; ZeRO 3 partitions everything. FP8 state is included if the amaxes are reduced
    over the ranks, without the first row of each history, where each rank collects its own amaxes.
    """
    found: dict[str, torch.Tensor] = {}
    stage = engine.zero_optimization_stage()
    if stage < 3:
        found |= {name: parameter.data for name, parameter in engine.module.named_parameters()}
    if stage == 0:
        found |= optimizer_tensors(engine)
    if precision.config.reduce_amax:
        for key, tensor in fp8_state(engine.module, precision).items():
            found[f"FP8 {key}"] = tensor if key.endswith(".scale") else tensor[1:]
    return found


def optimizer_tensors(engine: Any) -> dict[str, torch.Tensor]:
    """Return the float32 weights and moments of an optimizer without ZeRO, named after the weights."""
    every_state = zero.base_optimizer(engine).state
    found: dict[str, torch.Tensor] = {}
    for master in zero.masters(engine):
        (weight,) = master.parameters
        name = f"optimizer {zero.name_of(engine, weight)}"
        if master.tensor is not weight:
            found[name] = master.tensor.data
        state = every_state.get(master.tensor, {})  # empty before the first step
        found |= {f"{name} {key}": state[key] for key in master.moments if key in state}
    return found


def scope(engine: Any, precision: Precision) -> str:
    """Return a description of what `check_replicas` compares, for the log."""
    if dist.get_world_size() == 1:
        return "not applicable with one rank"
    stage = engine.zero_optimization_stage()
    parts = {0: ["weights and optimizer state"], 3: []}.get(stage, ["weights"])
    if precision.has_state and precision.config.reduce_amax:
        parts.append("FP8 scales and histories")
    if stage == 3:
        parts.append("weights not applicable (ZeRO 3 has no copies)")
    return "; ".join(parts)


def check_replicas(engine: Any, precision: Precision, step: int) -> None:
    """Check after `step` that the replicated tensors of all ranks are equal. Collective; waits for the GPU.

    Raises: ReplicaError, on every rank: a tensor differs."""
    world = dist.get_world_size()
    if world == 1 or not (tensors := replicated_tensors(engine, precision)):
        return
    multipliers = make_multipliers(engine.device)
    mine = torch.stack([checksum(tensor, multipliers) for tensor in tensors.values()])
    every = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(every, mine)
    if problem := difference([row.tolist() for row in every], list(tensors)):
        raise ReplicaError(
            f"step {step}: {problem}. The memory, the GPU or a link of a rank is probably faulty. Exclude its node, "
            "and resume from a checkpoint before this step"
        )


def difference(checksums: list[list[int]], names: list[str]) -> str | None:
    """Return a message about the ranks that differ from the majority and the first differing tensor, or None.

    Args:
        checksums: for each rank, one number per tensor.
        names: names of the tensors.
    """
    columns = list(zip(*checksums, strict=True))
    different = [index for index, column in enumerate(columns) if len(set(column)) > 1]
    if not different:
        return None
    first = f"{names[different[0]]!r} is the first of {len(different)} tensors that differ, of {len(names)}"
    most, count = Counter(map(tuple, checksums)).most_common(1)[0]
    if 2 * count <= len(checksums):
        ranks = list(range(len(checksums)))
        return (
            f"ranks {ranks} do not have the same weights or FP8 state, and there is no majority that shows which "
            f"of them is wrong; {first}"
        )
    odd = [rank for rank, row in enumerate(checksums) if tuple(row) != most]
    plural = f"ranks {odd} differ" if len(odd) > 1 else f"rank {odd[0]} differs"
    return f"{plural} from the other {count} in weights or FP8 state; {first}"
