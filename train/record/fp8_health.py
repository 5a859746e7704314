"""Health of FP8 as a run leaves it to read: in a line of metrics.jsonl, in trackers, and as the picture health.png.

    "fp8_health": {"model.layers.*.mlp.down_proj": {"input": {"underflow": [1e-05, ...], ...}, "weight": ..., ...}, ...}

A list has one value for each layer, `*` in the name, in order; null where a layer has none, as one that
precision.bf16_modules keeps out of FP8, or where it is not a number. What the statistics are: model/fp8/health.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.files import drawing
from train.record.history import History, is_number

if TYPE_CHECKING:
    from model.fp8.health import HealthCheck

FP8_HEALTH = "fp8_health"
DIGITS = 4  # that are kept of a value
# How a panel of health.png shows a statistic: title, smallest and largest value, by its logarithm or not.
PANELS = {
    "underflow": ("becomes 0", 1e-5, 1.0, True),
    "saturated": ("saturates", 1e-7, 1e-1, True),
    "range": ("amax x scale / largest value", 1e-3, 1e1, True),
    "error": ("relative error", 0.02, 0.1, False),
    "kurtosis": ("kurtosis", 1.0, 1e4, True),
}
OPERANDS = ("input", "weight", "gradient")


def health_record(check: HealthCheck, layers: int) -> dict[str, Any]:
    """What `check` saw of a model of so many layers, over all ranks; every rank calls it. Waits for the GPU."""
    import torch.distributed as dist

    from model.fp8.health import STATISTICS, SUMS, statistics

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
                if what != "kurtosis" or value == value:  # of one operand alone
                    column = of_operand.setdefault(what, [None] * (layers if "*" in kind else 1))
                    column[layer] = float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return found


def split(name: str) -> tuple[str, int]:
    """("model.layers.*.mlp.fc1", 7) of "model.layers.7.mlp.fc1"; layer 0 of a name without one."""
    match = re.search(r"\.(\d+)\.", name)
    return (
        (name, 0) if match is None else (name[: match.start(1)] + "*" + name[match.end(1) :], int(match[1]))
    )


def values(health: Any) -> Iterator[tuple[str, str, str, list[float | None]]]:
    """(kind of GEMM, operand, statistic, a value a layer) of what a line has; what is none of these is passed over."""
    for kind, operands in health.items() if isinstance(health, dict) else ():
        for operand in OPERANDS:
            of_operand = operands.get(operand) if isinstance(operands, dict) else None
            for what in PANELS:
                column = of_operand.get(what) if isinstance(of_operand, dict) else None
                if isinstance(column, list):
                    yield kind, operand, what, column


def scalars(health: Any) -> dict[str, float]:
    """For trackers: fp8_health/<statistic>/<operand>/<kind of GEMM>, the largest value of all layers."""
    found = {}
    for kind, operand, what, column in values(health):
        if numbers := [value for value in column if value is not None and is_number(value)]:
            found[f"{FP8_HEALTH}/{what}/{operand}/{kind}"] = max(numbers)
    return found


def draw_health(history: History, path: Path) -> bool:
    """health.png of a run: GEMMs against steps, a panel for each statistic and operand. False, and nothing is drawn,
    where no line of the run has any. Raises OSError: it cannot be written."""
    records = [record for record in history.records if any(values(record.get(FP8_HEALTH)))]
    if not records:
        return False
    steps = [record["step"] for record in records]
    # panel -> kind of GEMM -> layer -> values
    found: dict[tuple[str, str], dict[str, dict[int, list[float]]]] = {}
    for index, record in enumerate(records):
        for kind, operand, what, column in values(record[FP8_HEALTH]):
            rows = found.setdefault((what, operand), {}).setdefault(kind, {})
            for layer, value in enumerate(column):
                row = rows.setdefault(layer, [math.nan] * len(records))
                if value is not None and is_number(value):
                    row[index] = value
    shown = [what for what in PANELS if any(panel[0] == what for panel in found)]
    most = max(sum(map(len, kinds.values())) for kinds in found.values())
    figsize = (15, len(shown) * min(2.0 + 0.03 * most, 5.0))
    with drawing(path, len(shown), len(OPERANDS), figsize=figsize) as (figure, axes):
        figure.suptitle("FP8: operands of the GEMMs, layers from top to bottom, against steps")
        for axis_row, what in zip(axes, shown, strict=True):
            for axis, operand in zip(axis_row, OPERANDS, strict=True):
                kinds = found.get((what, operand), {})
                if any(kinds.values()):
                    _draw_panel(figure, axis, what, kinds, steps)
                    axis.set_title(f"{operand}: {PANELS[what][0]}", fontsize="small")
                    if operand != OPERANDS[0]:
                        axis.set_yticklabels([])
                else:
                    axis.set_axis_off()
    return True


def _draw_panel(
    figure: Any, axis: Any, what: str, kinds: dict[str, dict[int, list[float]]], steps: list[int]
) -> None:
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    _, low, high, logarithm = PANELS[what]
    table = [rows[layer] for rows in kinds.values() for layer in sorted(rows)]
    norm = (LogNorm if logarithm else Normalize)(low, high, clip=True)
    shown = [[value if math.isnan(value) else max(value, low) for value in row] for row in table]
    image = axis.imshow(shown, aspect="auto", interpolation="nearest", norm=norm, cmap="viridis")
    begins = [0]
    for rows in kinds.values():
        begins.append(begins[-1] + len(rows))
    for begin in begins[1:-1]:
        axis.axhline(begin - 0.5, color="white", linewidth=0.8)
    names = [kind.rpartition("*.")[2] for kind in kinds]
    axis.set_yticks([(a + b - 1) / 2 for a, b in pairwise(begins)], names, fontsize=7)
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    axis.xaxis.set_major_formatter(
        FuncFormatter(lambda x, _: f"{steps[int(x)]:,}" if 0 <= x < len(steps) else "")
    )
    figure.colorbar(image, ax=axis)
