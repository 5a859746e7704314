"""FP8 alarms and fallbacks: judge the FP8 health check and decide which modules need a safer recipe.

An alarm begins when a statistic of a GEMM operand exceeds its limit. It ends when all statistics of the operand are
below half of their limits:

    underflow   too many elements became 0: a few large values determine the scale, or the scale is still that of larger
                values
    saturated   too many elements were clamped; `range` is the largest value relative to what the scale allows, and a
                large one shows that the scale is outdated
    error       the tensor has lost two bits of its mantissa

Alarms are logged, counted, and saved with the run. With precision.on_trouble escalate they lead to fallbacks:

    delayed -> current -> block -> bf16_backward (block scaling, gradients computed in bf16) -> bf16

Gradients may jump for one step. So an operand above its limit is checked again in the next step, and its module falls
back only if two of four consecutive checks find the operand above the limit. A module falls back by one recipe per
check and never returns. Two cases fall back from block directly to bf16: a LayerNormMLP, whose backward Transformer
Engine supports only in FP8, and an lm_head with only its gradients in FP8. The statistics are reduced over all ranks,
so all ranks decide the same. A fallback ends the Trainer: it saves a checkpoint, whose run state has all fallbacks of
the run, and the next Trainer is built from it.

How the limits were chosen. Healthy runs of a small model on the CPU reference (200 steps, each recipe, also at a high
learning rate) reach 0.2 % underflow of inputs and 7.5 % of gradients, 2 % saturation, a range of 1.4, and an error of
0.062, once 0.22 for a gradient; all maxima are with delayed scaling. Runs of 1,000 steps of 125 M parameters on an
H200, with equal final losses, reach 0.2 % underflow of inputs. Underflow of a gradient reaches 18 % with current
scaling, and 40 % with delayed scaling during some hundred steps that use the scale of the first ones. The error of that
gradient was 0.031, of which rounding alone is 0.0265: the elements that became 0 held less than 2 % of its norm. In 250
steps of train_config_tiny with the default history of 16, only step 35 has an alarm: gradients of three modules are up
to 5.3 times what their scales allow (an error of 0.53). No other range exceeds 2.4.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn

from model.fp8.modules import gemm_modules
from model.fp8.precision import Precision
from train.record.fp8_health import OPERANDS, values

logger = logging.getLogger(__name__)

Operand = tuple[str, str]  # name of the GEMM, and input | weight | gradient

# Limits by statistic and operand. Most elements of a gradient are far below its largest, and contribute little. At a
# range of 4 the largest value is clamped to a quarter. Rounding alone gives an error of 0.026 for e4m3, and 0.053 for
# e5m2, which has one bit less (arXiv 2209.05433). With few tokens, one step with a clamped value may have a large
# error.
LIMITS = {
    **{("underflow", operand): limit for operand, limit in zip(OPERANDS, (0.05, 0.05, 0.6), strict=True)},
    **{("saturated", operand): 0.05 for operand in OPERANDS},
    **{("range", operand): 4.0 for operand in OPERANDS},
    **{("error", operand): limit for operand, limit in zip(OPERANDS, (0.106, 0.106, 0.4), strict=True)},
}
END_FRACTION = 0.5  # an alarm is over when all statistics are below this fraction of their limits
RECENT_CHECKS = 3  # previous checks: an operand above its limit now and in one of them causes a fallback
MAX_LISTED = 4  # most operands or modules named in the log per check; metrics.jsonl has all
# Statistic -> its text in the log, with the likely cause of a large value and the key that helps.
ADVICE = "set precision.recipe current"
OPERAND_WORDS = {
    "underflow": "{:.1%} of its elements became 0, because a few large values determine the scale; set precision."
    "recipe block, or add its module to precision.bf16_modules (lm_head: set fp8_head_gradients false)",
    "saturated": f"{{:.1%}} of its elements were clamped, because the scale is outdated; {ADVICE}",
    "range": f"its largest value is {{:.3g}} times what its scale allows, because the scale is outdated; {ADVICE}",
    "error": "its relative error is {:.3g}",
}


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
        self.count: int = saved.get("count", 0)  # number of alarms in the run
        # step at which the alarm of each operand began
        self.active: dict[Operand, int] = {
            (gemm, operand): step for gemm, operand, step in saved.get("active", [])
        }
        self.checks: int = saved.get("looks", 0)
        # the last check that found each operand above a limit, for the RECENT checks
        self._found: dict[Operand, int] = {
            (gemm, operand): check for gemm, operand, check in saved.get("found", [])
        }
        self.repeated = set[
            Operand
        ]()  # operands above a limit at the last check and at a recent check before it
        # whether an operand was above a limit at the last check only, so that the next step is checked too
        self.check_again: bool = saved.get("look_again", False)

    def judge(self, step: int, health: dict[str, Any]) -> dict[str, Any]:
        """Judge one FP8 health check, and log the alarms that begin and end.

        Args:
            step: step of the check.
            health: statistics from health_record. The alarm of an operand without statistics ends.

        Returns:
            The entry "fp8_alarms" for metrics.jsonl: alarms that began and ended, the number of active alarms, and the
            number of alarms in the run. {} if no alarm is or was active.
        """
        operands, had_alarms = by_operand(health), bool(self.active)
        excess = {
            key: max(value / LIMITS[what, key[1]] for what, value in found.items())
            for key, found in operands.items()
        }
        self._compare_with_recent_checks({key for key, ratio in excess.items() if ratio > 1})
        began = {
            key: {what: value for what, value in operands[key].items() if value > LIMITS[what, key[1]]}
            for key, ratio in excess.items()
            if ratio > 1 and key not in self.active
        }
        ended = {key: since for key, since in self.active.items() if excess.get(key, 0.0) < END_FRACTION}
        self.active = {key: since for key, since in self.active.items() if key not in ended}
        self.active |= dict.fromkeys(began, step)
        self.count += len(began)
        _log_first(
            f"step {step}: FP8 alarm: {key[0]}, {key[1]}: "
            + ", ".join(OPERAND_WORDS[what].format(value) for what, value in began[key].items())
            for key in sorted(began, key=lambda key: -excess[key])
        )
        _log_first(f"step {step}: FP8 alarm over: {gemm}, {operand}" for gemm, operand in ended)
        if not (had_alarms or began):
            return {}
        record = {
            "began": [{"gemm": gemm, "operand": operand, "found": f} for (gemm, operand), f in began.items()],
            "over": [{"gemm": gemm, "operand": operand, "since": s} for (gemm, operand), s in ended.items()],
        }
        return {"fp8_alarms": {**record, "active": len(self.active), "count": self.count}}

    def _compare_with_recent_checks(self, above: set[Operand]) -> None:
        self.checks += 1
        recent = {key: check for key, check in self._found.items() if check >= self.checks - RECENT_CHECKS}
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
    """Return the fallbacks after a check that `alarms` has judged, worst first.

    Args:
        step: step of the check.
        health: statistics from health_record.

    Returns:
        For each fallback "step", "module", "from" and "to", and for the statistic furthest above its limit "gemm",
        "operand", "statistic", "value" and "threshold". Empty without precision.on_trouble escalate.
    """
    if precision.config.on_trouble != "escalate":
        return []
    modules, worst = gemm_modules(model, precision), dict[str, tuple[float, dict[str, Any]]]()
    operands = by_operand(health)
    for gemm, operand in [key for key in operands if key in alarms.repeated]:
        name = gemm if gemm in modules else gemm.rpartition(".")[0]  # a LayerNormMLP has two GEMMs
        for what, value in operands[gemm, operand].items():
            limit = LIMITS[what, operand]
            if value > max(limit, worst.get(name, (1.0,))[0] * limit):
                found = {"gemm": gemm, "operand": operand, "statistic": what}
                worst[name] = value / limit, {**found, "value": value, "threshold": limit}
    fallbacks = []
    for name, (_, found) in sorted(worst.items(), key=lambda item: -item[1][0]):
        level, following = precision.next_fallback(name, modules[name])
        fallbacks.append({"step": step, "module": name, "from": level, "to": following, **found})
    _log_first(
        f"step {step}: precision.on_trouble: {change['module']} falls back from {change['from']} to {change['to']}: "
        f"{change['statistic']} of the {change['operand']} of {change['gemm']} is {change['value']:.3g}, the limit is "
        f"{change['threshold']:g}"
        for change in fallbacks
    )
    return fallbacks


def by_operand(health: dict[str, Any]) -> dict[Operand, dict[str, float]]:
    """Return the statistics that have limits, by operand."""
    found: dict[Operand, dict[str, float]] = {}
    for kind, operand, what, column in values(health):
        for layer, value in enumerate(column):
            if value is not None and what in OPERAND_WORDS:
                found.setdefault((kind.replace("*", str(layer)), operand), {})[what] = value
    return found


def _log_first(lines: Iterable[str]) -> None:
    """Log the first NAMED lines."""
    lines = list(lines)
    for line in lines[:MAX_LISTED]:
        logger.info(line)
    if len(lines) > MAX_LISTED:
        logger.info(f"... and {len(lines) - MAX_LISTED} more, see metrics.jsonl")
