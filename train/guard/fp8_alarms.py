"""Alarms of FP8: an operand of a GEMM whose health (precision.health_steps) is beyond what FP8 bears.

    underflow   so many elements became 0 that the GEMM multiplies another tensor: a few large values took the scale, or
                the scale is still that of larger values
    saturated   so many were clamped, or the largest by so much (range), that the scale is older than what came
    error       the tensor has lost two bits of its mantissa

Healthy runs of 200 steps of a small model on the CPU reference, with each recipe and at a high learning rate, came to
0.2 % underflow of inputs and 7.5 % of gradients, 2 % saturation, a range of 1.4, an error of 0.062 and, of a gradient,
once 0.22; all of these with delayed scaling. Runs of 1,000 steps of 125 M parameters on an H200, with the same loss in
the end, came to 0.2 % underflow of inputs; of a gradient to 18 % with current scaling and, for some hundred steps whose
scale was that of the first ones, to 40 % with delayed. That one's error was 0.031, of which rounding alone is 0.0265:
what became 0 held less than 2 % of its norm. A look at each of the 250 steps of train_config_tiny with the default
history of 16: one has an alarm, step 35, in which gradients of three modules are up to 5.3 times what their scales
allow (an error of 0.53) and in none after it; a range above 2.4 no other has.

An alarm is told when it begins and when it is over, and counted; metrics.jsonl and checkpoints have it. It costs
nothing beside the look, whose numbers it takes. What is done about it: escalation.py.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from train.record.fp8_health import values

logger = logging.getLogger(__name__)
# Above which there is an alarm, by statistic and operand ("": all others).
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
OVER = 0.5  # of the limit; an alarm is over when all is below
RECENT = 3  # looks; what one of the last so many has found too is found again
NAMED = 4  # operands, of those that a look finds
WORDS = {
    "underflow": "{:.1%} of its elements became 0",
    "saturated": "{:.1%} of its elements were clamped",
    "range": "its largest value is {:.3g} times what its scale allows",
    "error": "its relative error is {:.3g}",
}
STALE = "the scale is older than what came; precision.recipe current scales each tensor by itself"
LARGER = "the scale is that of larger values; precision.recipe current scales each tensor by itself"
OUTLIERS = (
    "a few large values took the scale; precision.recipe block has one for each 128, {module} in bf16_modules "
    "has none"
)
OF_A_BLOCK = "a few large values took the scales of their 128; {module} in precision.bf16_modules has none"
OF_THE_HEAD = (
    "a few large values took a scale; fp8_head_gradients false, with lm_head in bf16_modules, needs none"
)
# A `range` below which the scale could be so many times larger.
FAR_BELOW = 0.25


class FP8Alarms:
    """Judges each look at FP8's health; the same on every rank."""

    def __init__(self) -> None:
        self.load_state_dict({})

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "count": self.count,
            "active": [[*key, step] for key, step in self.active.items()],
            "looks": self.looks,
            "found": [[*key, look] for key, look in self._found.items()],
            "look_again": self.look_again,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """What `state_dict` gave; {} of a run that begins."""
        self.count: int = saved.get("count", 0)  # of the run
        # (GEMM, operand) -> the step that it began at
        self.active: dict[tuple[str, str], int] = {
            (gemm, operand): step for gemm, operand, step in saved.get("active", [])
        }
        self.looks: int = saved.get("looks", 0)  # that were judged
        # (GEMM, operand) -> the look that found it above a limit last, of the RECENT ones
        self._found: dict[tuple[str, str], int] = {
            (gemm, operand): look for gemm, operand, look in saved.get("found", [])
        }
        self.again = set[tuple[str, str]]()  # above a limit at the last look, and at a recent one before it
        # at the last look alone: what is over in the next step needs no change
        self.look_again: bool = saved.get("look_again", False)

    def judge(
        self,
        step: int,
        health: dict[str, Any],
        not_fp8: Collection[tuple[str, str]] = (),
        blocks: Collection[str] = (),
    ) -> dict[str, Any]:
        """`health`: of health_record; `not_fp8`: operands of its GEMMs that are in high precision; `blocks`: its GEMMs
        with a scale for each 128 elements. Logs alarms that begin and those that are over. For
        metrics.jsonl, "fp8_alarms": those that began, those that are over, how many there are, and how many there have
        been in the run; {} where all is well and was."""
        began: list[dict[str, Any]] = []
        over: list[dict[str, Any]] = []
        told: list[tuple[float, str]] = []
        before, operands = len(self.active), by_operand(health)
        self.looks += 1
        self._found = {key: look for key, look in self._found.items() if look >= self.looks - RECENT}
        self.again, self.look_again = set(), False
        for (gemm, operand), found in operands.items():
            parts = {what: value / limit_of(what, operand) for what, value in found.items()}
            worst, key = max(parts.values()), (gemm, operand)
            if worst > 1:
                if key in self._found:
                    self.again.add(key)
                else:
                    self.look_again = True
                self._found[key] = self.looks
            if key not in self.active and worst > 1:
                self.active[key] = step
                above = {what: value for what, value in found.items() if parts[what] > 1}
                began.append({"gemm": gemm, "operand": operand, "found": above})
                told.append((worst, _told(gemm, operand, above, found.get("range"), gemm in blocks)))
            elif key in self.active and worst < OVER:
                over.append({"gemm": gemm, "operand": operand, "since": self.active.pop(key)})
        # bf16_modules may name a GEMM since; one whose operand alone is not finite is another matter
        of_fp8 = {gemm for gemm, _ in operands}
        for gemm, operand in [key for key in self.active if key[0] not in of_fp8 or key in not_fp8]:
            over.append({"gemm": gemm, "operand": operand, "since": self.active.pop((gemm, operand))})
        self.count += len(began)
        for _, line in sorted(told, reverse=True)[:NAMED]:
            logger.info(f"step {step}: {line}")
        if len(told) > NAMED:
            logger.info(f"step {step}: FP8 alarms of {len(told) - NAMED} more operands, see metrics.jsonl")
        if over:
            names = [f"{entry['gemm']} ({entry['operand']})" for entry in over]
            more = f", ... ({len(names)} in all)" if len(names) > NAMED else ""
            logger.info(f"step {step}: FP8 alarm over: {', '.join(names[:NAMED])}{more}")
        counts = {"active": len(self.active), "count": self.count}
        return {"fp8_alarms": {"began": began, "over": over, **counts}} if before or began else {}

    def end(self, step: int, found: dict[str, Any]) -> dict[str, Any]:
        """No look follows: no module runs FP8 any more, and all alarms are over. `found`, what
        `judge` has given as "fp8_alarms" of this look, with these."""
        over = found["over"] + self.judge(step, {})["fp8_alarms"]["over"]
        logger.info(
            f"step {step}: no module runs FP8 any more; precision.compute bf16 is the same and needs no looks"
        )
        return {"fp8_alarms": {**found, "over": over, "active": 0}}


def limit_of(what: str, operand: str) -> float:
    """Above which there is an alarm."""
    return LIMITS.get((what, operand)) or LIMITS[what, ""]


def by_operand(health: dict[str, Any]) -> dict[tuple[str, str], dict[str, float]]:
    """(GEMM, operand) -> statistic -> value."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for kind, operand, what, column in values(health):
        for layer, value in enumerate(column):
            if value is not None and what in WORDS:
                found.setdefault((kind.replace("*", str(layer)), operand), {})[what] = value
    return found


def _told(gemm: str, operand: str, above: dict[str, float], fraction: float | None, block: bool) -> str:
    how = ", ".join(WORDS[what].format(value) for what, value in above.items())
    module = gemm.removesuffix(".fc1").removesuffix(".fc2")  # of a LayerNormMLP's two
    why = OF_THE_HEAD if gemm == "lm_head" else (OF_A_BLOCK if block else OUTLIERS).format(module=module)
    if fraction is not None and fraction > 1.1:
        why = STALE
    elif fraction is not None and fraction < FAR_BELOW:
        why = LARGER
    return f"FP8 alarm: {gemm}, {operand}: {how}. It seems that {why}"
