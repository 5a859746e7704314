"""FP8 alarms and fallbacks: judge the FP8 health check and decide which modules need a safer recipe.

An alarm begins when a statistic of a GEMM operand exceeds its limit. The alarm ends when all statistics of the operand
are below half of their limits. The statistics are:

    underflow   fraction of the elements that became 0. It is high if a few large values determine the scale, or if the
                scale was computed for larger values
    saturated   fraction of the elements that were clamped, because the scale is outdated
    range       largest value of the tensor, divided by the largest value that the scale allows
    error       relative error of the tensor. At the limit, the tensor has lost two bits of its mantissa

Alarms are logged, counted, and saved in checkpoints. With precision.on_trouble "escalate", alarms lead to fallbacks:

    delayed -> current -> block -> bf16_backward (block scaling, gradients computed in bf16) -> bf16

Gradients may jump for one step. Therefore, an operand above its limit is checked again in the next step. The module
falls back only if two of four consecutive checks find the operand above its limit. A module falls back by one recipe
per check and never returns to an earlier recipe. Two kinds of modules fall back from block directly to bf16: a
LayerNormMLP, because Transformer Engine supports its backward pass only in FP8, and an lm_head with a bf16 forward pass
and FP8 gradients.

The statistics are reduced over all ranks, so all ranks make the same decision. After a fallback, the Trainer saves a
checkpoint with all fallbacks of the run, and the next Trainer is built from this checkpoint.

The limits are based on these measurements:

- Healthy runs of a small model on the CPU reference implementation (200 steps, each recipe, also at a high learning
  rate) reach an underflow of 0.2 % for inputs and 7.5 % for gradients, a saturation of 2 %, a range of 1.4, and an
  error of 0.062. A single gradient reached an error of 0.22. All maxima occur with delayed scaling.
- Runs with 125 M parameters on an H200 (1,000 steps, equal final losses) reach an underflow of 0.2 % for inputs. For a
  gradient, the underflow reaches 18 % with current scaling. With delayed scaling it reaches 40 %, while the scale of
  the first steps is used for some hundred steps. The error of this gradient was 0.031; rounding alone causes
  0.0265. The elements that became 0 were less than 2 % of its norm.
- In 250 steps of model/configs/tiny.json at a learning rate of 2e-3, with the default history of 16, only step 35 has
  an alarm. Gradients of three modules are up to 5.3 times what their scales allow, with an error of 0.53. No other
  range exceeds 2.4.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn

from model.fp8.modules import gemm_modules
from model.fp8.precision import Precision
from train.record.fp8_health import LIMITS, values

logger = logging.getLogger(__name__)

Operand = tuple[str, str]  # name of the GEMM, and input | weight | gradient

END_FRACTION = 0.5  # an alarm is over when all statistics are below this fraction of their limits
# Number of previous checks. An operand above its limit in the current check and in one of these causes a fallback.
RECENT_CHECKS = 3
MAX_LISTED = 4  # maximum number of operands or modules logged per check; metrics.jsonl has all of them
# Statistic -> log text with the likely cause of a large value and a configuration key that helps.
ADVICE = "set precision.recipe to current"
OPERAND_WORDS = {
    "underflow": "{:.1%} of the elements became 0, because a few large values determine the scale; set precision."
    "recipe to block, or add the module to precision.bf16_modules (for lm_head, set precision.fp8_head_gradients to "
    "false)",
    "saturated": f"{{:.1%}} of the elements were clamped, because the scale is outdated; {ADVICE}",
    "range": "the largest value is {:.3g} times the maximum that the scale allows, because the scale is outdated; "
    f"{ADVICE}",
    "error": "the relative error is {:.3g}",
}


class FP8Alarms:
    """State of the FP8 health alarms, which is the same on every rank.

    An alarm begins when an FP8 statistic of a GEMM operand exceeds its limit.
    """

    def __init__(self) -> None:
        self.load_state_dict({})

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the alarms as JSON-serializable values."""
        return {
            "count": self.count,
            "active": [[*key, step] for key, step in self.active.items()],
            "looks": self.checks,
            "found": [[*key, check] for key, check in self._found.items()],
            "look_again": self.check_again,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned. For a new run, `saved` is {}."""
        self.count: int = saved.get("count", 0)  # number of alarms in the run
        # step at which the alarm of each operand began
        self.active: dict[Operand, int] = {
            (gemm, operand): step for gemm, operand, step in saved.get("active", [])
        }
        self.checks: int = saved.get("looks", 0)
        # for each operand that was above a limit in the RECENT_CHECKS checks: the last such check
        self._found: dict[Operand, int] = {
            (gemm, operand): check for gemm, operand, check in saved.get("found", [])
        }
        self.repeated = set[
            Operand
        ]()  # operands above a limit at the last check and at a recent check before it
        # whether an operand was above a limit in the last check only, so that the next step must be checked
        self.check_again: bool = saved.get("look_again", False)

    def judge(self, step: int, health: dict[str, Any]) -> dict[str, Any]:
        """Compare the statistics of an FP8 health check with their limits, and log the alarms that begin and end.

        Args:
            step: Step of the check.
            health: Statistics from health_record. An alarm ends if its operand has no statistics.

        Returns:
            The entry "fp8_alarms" for metrics.jsonl: alarms that began and ended, the number of active alarms, and the
            number of alarms in the run. {} if no alarm was active before or after the check.
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
        _log_first(f"step {step}: FP8 alarm ended: {gemm}, {operand}" for gemm, operand in ended)
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
    """Return the modules that must fall back to a safer recipe after an FP8 health check, worst first.

    Args:
        step: Step of the check.
        health: Statistics from health_record, which `alarms` has already judged.

    Returns:
        One dictionary per fallback, with "step", "module", and the recipes "from" and "to". "gemm", "operand",
        "statistic", "value" and "threshold" describe the statistic that is furthest above its limit. The list is empty
        unless precision.on_trouble is "escalate".
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
        f"{change['statistic']} of the {change['operand']} of {change['gemm']} is {change['value']:.3g}, but the limit "
        f"is {change['threshold']:g}"
        for change in fallbacks
    )
    return fallbacks


def by_operand(health: dict[str, Any]) -> dict[Operand, dict[str, float]]:
    """Return FP8 health statistics as {operand: {statistic: value}}. Statistics without a limit are omitted."""
    found: dict[Operand, dict[str, float]] = {}
    for kind, operand, what, column in values(health):
        for layer, value in enumerate(column):
            if value is not None and what in OPERAND_WORDS:
                found.setdefault((kind.replace("*", str(layer)), operand), {})[what] = value
    return found


def _log_first(lines: Iterable[str]) -> None:
    """Log the first MAX_LISTED lines, and the number of remaining lines."""
    lines = list(lines)
    for line in lines[:MAX_LISTED]:
        logger.info(line)
    if len(lines) > MAX_LISTED:
        logger.info(
            f"{len(lines) - MAX_LISTED} more messages of this kind are not shown; metrics.jsonl lists all of them"
        )
