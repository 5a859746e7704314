"""Alarms and fallbacks: what follows when the FP8 health check finds an operand of a GEMM beyond what FP8 bears.

An alarm begins when a statistic exceeds its limit, and is over when all statistics are below half of it:

    underflow   elements became 0, so that the GEMM multiplies another tensor: a few large values took the scale, or
                the scale is still that of larger values
    saturated   elements were clamped, or the largest one by so much (range) that the scale is older than the tensor
    error       the tensor has lost two bits of its mantissa

Alarms are logged, counted, and saved with the run. With precision.on_trouble escalate they lead to fallbacks:

    delayed -> current -> block -> bf16_backward (block scaling, gradients computed in bf16) -> bf16

Gradients may jump for one step. So an operand that one check finds above its limit is checked again in the next step,
and its module falls back if two of four checks in a row find the operand. A module falls back by one recipe at a check
and does not return. A LayerNormMLP, whose backward Transformer Engine has in FP8 only, falls back from block to bf16;
so does an lm_head whose gradients alone are FP8 products. The statistics are reduced over all ranks, so every rank
decides the same. A fallback ends the Trainer: it saves, and the next one is built from that checkpoint, whose state
has all fallbacks of the run.

The limits: healthy runs of 200 steps of a small model on the CPU reference, with each recipe and at a high learning
rate, reach 0.2 % underflow of inputs and 7.5 % of gradients, 2 % saturation, a range of 1.4, an error of 0.062 and,
of a gradient, once 0.22; all of these with delayed scaling. Runs of 1,000 steps of 125 M parameters on an H200, with
the same final loss, reach 0.2 % underflow of inputs; of a gradient 18 % with current scaling and, for some hundred
steps with the scale of the first ones, 40 % with delayed. The error of that gradient was 0.031, of which rounding
alone is 0.0265: what became 0 held less than 2 % of its norm. Of 250 steps of train_config_tiny with the default
history of 16, one has an alarm: step 35, in which gradients of three modules are up to 5.3 times what their scales
allow (an error of 0.53) and in none after it; no other range is above 2.4.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from torch import nn

from model.fp8.modules import gemm_modules
from model.fp8.precision import Precision
from train.record.fp8_health import values

logger = logging.getLogger(__name__)

Operand = tuple[str, str]  # name of the GEMM, input | weight | gradient

# Limits by statistic and operand ("": all others).
LIMITS = {
    ("underflow", ""): 0.05,
    # most elements of a gradient are far below its largest, and count for little
    ("underflow", "gradient"): 0.6,
    ("saturated", ""): 0.05,
    # the largest is cut to a quarter
    ("range", ""): 4.0,
    # of rounding alone: e4m3 0.026; e5m2, which has a bit less and does for gradients (arXiv 2209.05433), 0.053
    ("error", ""): 0.106,
    # of a few tokens, whose largest value is clamped, it may be large once
    ("error", "gradient"): 0.4,
}
OVER = 0.5  # of the limit: an alarm is over when all statistics are below
RECENT = 3  # checks: an operand that was found in one of the last three and is found again falls back
NAMED = 4  # operands or modules that the log names at a check; metrics.jsonl has all
WORDS = {
    "underflow": "{:.1%} of its elements became 0",
    "saturated": "{:.1%} of its elements were clamped",
    "range": "its largest value is {:.3g} times what its scale allows",
    "error": "its relative error is {:.3g}",
}
# A `range` below or above which the scale is probably that of larger or smaller values.
SCALE_TOO_SMALL, SCALE_TOO_LARGE = 0.25, 1.1


class FP8Alarms:
    """Judges the statistics of each FP8 health check; the same on every rank."""

    def __init__(self) -> None:
        self.load_state_dict({})

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "count": self.count,
            "active": [[*key, step] for key, step in self.active.items()],
            "looks": self.checks,
            "found": [[*key, check] for key, check in self._found.items()],
            "look_again": self.check_again,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load what `state_dict` returned; {} for a new run."""
        self.count: int = saved.get("count", 0)  # alarms of the run
        # operand -> step at which its alarm began
        self.active: dict[Operand, int] = {
            (gemm, operand): step for gemm, operand, step in saved.get("active", [])
        }
        self.checks: int = saved.get("looks", 0)
        # operand -> the last check that found it above a limit, of the RECENT ones
        self._found: dict[Operand, int] = {
            (gemm, operand): check for gemm, operand, check in saved.get("found", [])
        }
        self.repeated = set[Operand]()  # above a limit at the last check and at a recent one before it
        # above a limit at the last check only: what is below in the next step needs no fallback
        self.check_again: bool = saved.get("look_again", False)

    def judge(
        self,
        step: int,
        health: dict[str, Any],
        not_fp8: Collection[Operand] = (),
        blocks: Collection[str] = (),
    ) -> dict[str, Any]:
        """Judge one check, and log alarms that begin and end.

        Args:
            health: of health_record; {} ends all alarms.
            not_fp8: operands of its GEMMs that are in high precision.
            blocks: GEMMs with a scale for each 128 elements.

        Returns:
            For metrics.jsonl, "fp8_alarms": alarms that began and are over, how many are active, and how many the run
            had; {} if there are none and were none.
        """
        operands, had_alarms = by_operand(health), bool(self.active)
        excess = {
            key: max(value / limit_of(what, key[1]) for what, value in found.items())
            for key, found in operands.items()
        }
        self._compare_with_recent_checks({key for key, ratio in excess.items() if ratio > 1})
        began: dict[Operand, dict[str, float]] = {}
        for key, ratio in excess.items():
            if ratio > 1 and key not in self.active:
                began[key] = {w: value for w, value in operands[key].items() if value > limit_of(w, key[1])}
        # a GEMM may be in bf16 since; if only one of its operands is missing, that is not finite, which ends nothing
        gemms = {gemm for gemm, _ in operands}
        ended = {
            key: since
            for key, since in self.active.items()
            if key[0] not in gemms or key in not_fp8 or excess.get(key, 1.0) < OVER
        }
        self.active = {key: since for key, since in self.active.items() if key not in ended}
        self.active |= dict.fromkeys(began, step)
        self.count += len(began)
        for gemm, operand in sorted(began, key=lambda key: -excess[key])[:NAMED]:
            cause = _likely_cause(gemm, operands[gemm, operand].get("range"), gemm in blocks)
            what = ", ".join(WORDS[w].format(value) for w, value in began[gemm, operand].items())
            logger.info(f"step {step}: FP8 alarm: {gemm}, {operand}: {what}. Likely cause: {cause}")
        if len(began) > NAMED:
            logger.info(f"step {step}: FP8 alarms of {len(began) - NAMED} more operands, see metrics.jsonl")
        if ended:
            names = ", ".join(f"{gemm} ({operand})" for gemm, operand in [*ended][:NAMED])
            more = f", ... ({len(ended)} in all)" if len(ended) > NAMED else ""
            logger.info(f"step {step}: FP8 alarm over: {names}{more}")
        if not (had_alarms or began):
            return {}
        record = {
            "began": [{"gemm": gemm, "operand": operand, "found": f} for (gemm, operand), f in began.items()],
            "over": [{"gemm": gemm, "operand": operand, "since": s} for (gemm, operand), s in ended.items()],
        }
        return {"fp8_alarms": {**record, "active": len(self.active), "count": self.count}}

    def _compare_with_recent_checks(self, above: set[Operand]) -> None:
        self.checks += 1
        recent = {key: check for key, check in self._found.items() if check >= self.checks - RECENT}
        self.repeated = above & recent.keys()
        self.check_again = bool(above - recent.keys())
        self._found = recent | dict.fromkeys(above, self.checks)


def find_fallbacks(
    step: int,
    health: dict[str, Any],
    alarms: FP8Alarms,
    model: nn.Module,
    precision: Precision,
) -> list[dict[str, Any]]:
    """Return the fallbacks that follow from a check which `alarms` judged, worst first.

    Args:
        health: of health_record.

    Returns:
        "step", "module", "from", "to", and of the statistic furthest above its limit "gemm", "operand", "statistic",
        "value", "threshold". Empty without precision.on_trouble escalate.
    """
    if precision.config.on_trouble != "escalate":
        return []
    if alarms.check_again:
        logger.info(
            f"step {step}: precision.on_trouble: a module that fails the next FP8 health check falls back"
        )
    modules, worst = gemm_modules(model, precision), dict[str, tuple[float, dict[str, Any]]]()
    operands = by_operand(health)
    for gemm, operand in [key for key in operands if key in alarms.repeated]:
        name = gemm if gemm in modules else gemm.rpartition(".")[0]  # one of a LayerNormMLP's two
        for what, value in operands[gemm, operand].items():
            limit = limit_of(what, operand)
            if value > max(limit, worst.get(name, (1.0,))[0] * limit):
                found = {"gemm": gemm, "operand": operand, "statistic": what}
                worst[name] = value / limit, {**found, "value": value, "threshold": limit}
    fallbacks = []
    for name, (_, found) in sorted(worst.items(), key=lambda item: -item[1][0]):
        level, following = precision.one_up(name, modules[name])
        fallbacks.append({"step": step, "module": name, "from": level, "to": following, **found})
    for change in fallbacks[:NAMED]:
        logger.info(
            f"step {step}: precision.on_trouble: {change['module']} falls back from {change['from']} to "
            f"{change['to']}: {change['statistic']} of the {change['operand']} of {change['gemm']} is "
            f"{change['value']:.3g}, the limit {change['threshold']:g}"
        )
    if len(fallbacks) > NAMED:
        logger.info(
            f"step {step}: precision.on_trouble: {len(fallbacks) - NAMED} more modules, see metrics.jsonl"
        )
    return fallbacks


def limit_of(statistic: str, operand: str) -> float:
    """Return the limit above which a statistic of an operand is an alarm."""
    return LIMITS.get((statistic, operand)) or LIMITS[statistic, ""]


def by_operand(health: dict[str, Any]) -> dict[Operand, dict[str, float]]:
    """Return the statistics that have limits, by operand."""
    found: dict[Operand, dict[str, float]] = {}
    for kind, operand, what, column in values(health):
        for layer, value in enumerate(column):
            if value is not None and what in WORDS:
                found.setdefault((kind.replace("*", str(layer)), operand), {})[what] = value
    return found


def _likely_cause(gemm: str, fraction: float | None, block: bool) -> str:
    """Return the likely cause of an alarm and the key that helps. fraction: `range`, how much of what its scale allows
    the tensor used."""
    if fraction is not None and not SCALE_TOO_SMALL <= fraction <= SCALE_TOO_LARGE:
        age = "is older than the tensor" if fraction > 1 else "is that of larger values"
        return f"the scale {age}; precision.recipe current scales each tensor by itself"
    if gemm == "lm_head":
        return "a few large values took a scale; set fp8_head_gradients false with lm_head in bf16_modules"
    module = gemm.removesuffix(".fc1").removesuffix(".fc2")  # of a LayerNormMLP's two
    if block:
        return f"a few large values took the scales of their 128; add {module} to precision.bf16_modules"
    return (
        "a few large values took the scale; set precision.recipe block, which has a scale for each 128 values, or "
        f"add {module} to precision.bf16_modules"
    )
