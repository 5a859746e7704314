"""precision.on_trouble escalate: a module with an alarm goes a level up and stays there.

    delayed -> current -> block -> bf16_backward (block scaling, gradients computed in bf16) -> bf16

Gradients may jump for one step. What a look (precision.health_steps) finds is looked at again in the next step, and a
module goes up by an operand that two of four looks in a row find in trouble. One level at a look, however many of its
operands are: the next look shows whether that was enough. A LayerNormMLP, whose backward Transformer Engine has in FP8
alone, goes from block to bf16; so does an lm_head whose gradients alone are FP8 products.

Statistics are those of all ranks, so that each rank decides the same. Nothing changes within a model that runs: the
loop saves, and train.py builds model and engine anew from that checkpoint, whose state has all changes of the run. A
resume does no other thing, on whatever number of ranks.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from model.fp8.health import modules_with_operands
from model.fp8.modules import gemm_modules
from model.fp8.precision import Precision
from train.guard.fp8_alarms import FP8Alarms, by_operand, limit_of

logger = logging.getLogger(__name__)
NAMED = 8  # modules, of those that a look takes up


def escalations(
    step: int,
    health: dict[str, Any],
    alarms: FP8Alarms,
    model: nn.Module,
    precision: Precision,
) -> list[dict[str, Any]]:
    """What a look (`health`: of health_record), which `alarms` judged, takes a level up, worst first: "step", "module",
    "from", "to", and of what is furthest above its limit "gemm", "operand", "statistic", "value", "threshold"."""
    if precision.config.on_trouble != "escalate":
        return []
    modules, worst = gemm_modules(model, precision), dict[str, tuple[float, dict[str, Any]]]()
    for (gemm, operand), found in by_operand(health).items():
        if (gemm, operand) not in alarms.again:
            continue
        name = gemm if gemm in modules else gemm.rpartition(".")[0]  # of a LayerNormMLP's two
        for what, value in found.items():
            limit = limit_of(what, operand)
            if value > max(limit, worst.get(name, (1.0,))[0] * limit):
                seen = {
                    "gemm": gemm,
                    "operand": operand,
                    "statistic": what,
                    "value": value,
                    "threshold": limit,
                }
                worst[name] = value / limit, seen
    if alarms.look_again:
        logger.info(
            f"step {step}: precision.on_trouble: what is in trouble in the next step, too, goes a level up"
        )
    taken = []
    for name, (_, seen) in sorted(worst.items(), key=lambda item: -item[1][0]):
        level, above = precision.one_up(name, modules[name])
        taken.append({"step": step, "module": name, "from": level, "to": above, **seen})
    for change in taken[:NAMED]:
        logger.info(f"step {step}: precision.on_trouble: {told(change)}")
    if len(taken) > NAMED:
        logger.info(
            f"step {step}: precision.on_trouble: {len(taken) - NAMED} more modules, see metrics.jsonl"
        )
    return taken


def take_all_out(changes: list[dict[str, Any]], model: nn.Module, precision: Precision) -> bool:
    """Whether no module runs FP8 after these `escalations`."""
    out = {change["module"] for change in changes if change["to"] == "bf16"}
    return out.issuperset(modules_with_operands(model, precision))


def told(change: dict[str, Any]) -> str:
    """One of `escalations`, in words."""
    return (
        f"{change['module']} goes from {change['from']} to {change['to']}: {change['statistic']} of the "
        f"{change['operand']} of {change['gemm']} is {change['value']:.3g}, the limit {change['threshold']:g}"
    )
