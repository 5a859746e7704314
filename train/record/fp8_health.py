"""Format of the FP8 health samples in metrics.jsonl and in trackers, and the limits of their statistics.

    "fp8_health": {"model.layers.*.mlp.down_proj": {"input": {"underflow": [1e-05, ...], ...}, "weight": ..., ...}, ...}

Each list has one value per layer. In the module name, `*` replaces the layer index. A value is null if it is not
finite, or if the layer has no value, for example because the layer is in precision.bf16_modules. model/checks/health.py
defines the statistics.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from model.fp8.recipes import OPERANDS, STATISTICS

if TYPE_CHECKING:
    from model.checks.health import HealthCheck

FP8_HEALTH = "fp8_health"
DIGITS = 4  # significant digits of a recorded value
# Limits of the alarms by statistic and operand. The limits for gradients are higher: most elements of a gradient are
# far below the largest element and contribute little, and with few tokens, a single clamped value may cause a large
# error. At a range of 4, the largest value is clamped to a quarter. Rounding alone causes an error of 0.026 for e4m3,
# and of 0.053 for e5m2, which has one mantissa bit less (arXiv 2209.05433).
LIMITS = {
    **{("underflow", operand): limit for operand, limit in zip(OPERANDS, (0.05, 0.05, 0.6), strict=True)},
    **{("saturated", operand): 0.05 for operand in OPERANDS},
    **{("range", operand): 4.0 for operand in OPERANDS},
    **{("error", operand): limit for operand, limit in zip(OPERANDS, (0.106, 0.106, 0.4), strict=True)},
}


def health_record(check: HealthCheck, layers: int) -> dict[str, Any]:
    """Reduce the statistics of an FP8 health check over all ranks, and return them in the format of metrics.jsonl.

    Collective: all ranks must call this function. The function synchronizes the GPU.

    Args:
        check: The FP8 health check of this rank.
        layers: The number of layers in the model.
    """
    import torch.distributed as dist

    from model.checks.health import SUMS, statistics

    totals = check.totals().clone()
    sums, largest = totals[..., : len(SUMS)].contiguous(), totals[..., len(SUMS) :].contiguous()
    dist.all_reduce(sums)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    totals[..., : len(SUMS)], totals[..., len(SUMS) :] = sums, largest
    found: dict[str, Any] = {}
    for name, of_gemm in zip(check.gemms, statistics(totals).tolist(), strict=True):
        kind, layer = split(name)
        for operand, values in zip(OPERANDS, of_gemm, strict=True):
            of_operand = found.setdefault(kind, {}).setdefault(operand, {})
            for what, value in zip(STATISTICS, values, strict=True):
                if what != "kurtosis" or value == value:  # kurtosis is not measured for all operands
                    column = of_operand.setdefault(what, [None] * (layers if "*" in kind else 1))
                    column[layer] = float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return found


def split(name: str) -> tuple[str, int]:
    """Split a module name into a pattern and a layer index.

    For example, "model.layers.7.mlp.fc1" becomes ("model.layers.*.mlp.fc1", 7). If the name contains no layer index,
    the index is 0.
    """
    match = re.search(r"\.(\d+)\.", name)
    return (
        (name, 0) if match is None else (name[: match.start(1)] + "*" + name[match.end(1) :], int(match[1]))
    )


def values(health: dict[str, Any]) -> Iterator[tuple[str, str, str, list[float | None]]]:
    """Yield (GEMM name pattern, operand, statistic, values by layer) for each statistic in an FP8 health sample."""
    for kind, operands in health.items():
        for operand, found in operands.items():
            for statistic, column in found.items():
                yield kind, operand, statistic, column


def scalars(health: dict[str, Any]) -> dict[str, float]:
    """Return the largest value of each FP8 health statistic over all layers, for trackers such as TensorBoard.

    The keys have the form fp8_health/<statistic>/<operand>/<GEMM name pattern>.
    """
    largest = {}
    for kind, operand, statistic, column in values(health):
        if numbers := [value for value in column if value is not None]:
            largest[f"{FP8_HEALTH}/{statistic}/{operand}/{kind}"] = max(numbers)
    return largest
