"""Whether the ranks still have the same weights: one integer a tensor, exchanged and compared.

A flipped bit, a broken link or a wrong kernel on one rank makes its weights others, and nothing in training notices.
Here each tensor that should be equal everywhere is summed up on the device, one pass over the memory, and only the
integers travel.
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

ROW = 2**18  # elements that the multipliers repeat after; rows have multipliers of their own
ROWS = 64  # at a time: 64 MiB of products
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes an element
GOLDEN = 0x9E3779B1  # an odd number near 2**32 / 1.618: its multiples are spread evenly (Knuth, TAOCP 3, 6.4)


class ReplicaError(UserError):
    """The ranks have different weights; the message names the ranks and the first tensor."""

    code = "replica"


@torch.no_grad()
def checksum(tensor: torch.Tensor, multipliers: torch.Tensor) -> torch.Tensor:
    """int64 scalar of the bits of `tensor`, on its device, without waiting for it.

    multipliers: of `make_multipliers`. Sum of element * multiplier, all multipliers odd: a single flipped bit b of an
    element changes its product by an odd multiple of 2**b, which modulo 2**32 is never 0, and the sum with it; two
    elements that change places change it too, since multipliers depend on the place.
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
            # products are int32 and wrap; their sum is int64
            sums = (rows[start : start + ROWS] * multipliers).sum(1)
            places = torch.arange(start, start + len(sums), device=tensor.device) * 2 + 1
            total += (sums * places).sum()
    if whole < bits.numel():
        rest = bits[whole:]
        total += (rest * multipliers[: len(rest)]).sum() * (2 * (whole // ROW) + 1)
    return total


def make_multipliers(device: Any) -> torch.Tensor:
    """int32 [ROW], all odd and different."""
    values = (torch.arange(ROW, dtype=torch.int64) * 2 * GOLDEN + 1) & 0xFFFFFFFF
    return values.to(torch.int32).to(device)  # wraps


def replicated_tensors(engine: Any, precision: Precision) -> dict[str, torch.Tensor]:
    """What must have the same bits on all ranks, by name, in the order of the model.

    ZeRO 0 to 2: the weights; at ZeRO 0 also the optimizer's float32 weights and moments, which at 1 and 2 are spread
    over the ranks, as at ZeRO 3 everything is. FP8 state where the amaxes are reduced over the ranks, without the
    first row of a history, in which a rank gathers its own amax.
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
    """Float32 weights and moments of an optimizer that no ZeRO partitions, named after the weights."""
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
    """What `check_replicas` compares, for the log."""
    if dist.get_world_size() == 1:
        return "not applicable, there is one rank"
    stage = engine.zero_optimization_stage()
    parts = {0: ["weights and optimizer state"], 3: []}.get(stage, ["weights"])
    if precision.has_state and precision.config.reduce_amax:
        parts.append("FP8 scales and histories")
    if stage == 3:
        parts.append("weights not applicable: ZeRO 3 keeps each once")
    return "; ".join(parts)


def check_replicas(engine: Any, precision: Precision, step: int) -> None:
    """Every rank calls it, after `step`. Raises ReplicaError, on every rank: a tensor differs. Waits for the GPU."""
    world = dist.get_world_size()
    if world == 1 or not (tensors := replicated_tensors(engine, precision)):
        return
    multipliers = make_multipliers(engine.device)
    mine = torch.stack([checksum(tensor, multipliers) for tensor in tensors.values()])
    every = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(every, mine)
    if problem := difference([row.tolist() for row in every], list(tensors)):
        raise ReplicaError(
            f"step {step}: {problem}. The memory, the GPU or the links of a rank are not to be trusted: leave its "
            "node out, and go on from the last checkpoint that was saved before"
        )


def difference(checksums: list[list[int]], names: list[str]) -> str | None:
    """Which ranks differ from the majority and where first; None if none does.

    checksums: of each rank, a number for each of `names`.
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
            f"ranks {ranks} do not have the same weights or FP8 state, and there is no majority that could tell which "
            f"of them is wrong; {first}"
        )
    odd = [rank for rank, row in enumerate(checksums) if tuple(row) != most]
    plural = f"ranks {odd} differ" if len(odd) > 1 else f"rank {odd[0]} differs"
    return f"{plural} from the other {count} in weights or FP8 state; {first}"
