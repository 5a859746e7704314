"""Resolve precision.schedule, which divides a run into phases with different precision settings.

    [{"until_step": 500, "compute": "bf16"}, {"until_share": 0.9}, {"compute": "bf16"}]

Each phase lists the keys of the section "precision" that it changes. The phase of a step depends only on the number of
steps and tokens before the step, so checkpoints need not store it. A run without a schedule has one phase.
"""

from __future__ import annotations

import json
from dataclasses import replace

from model.fp8.recipes import (
    PHASE_ENDS,
    PrecisionConfig,
    PrecisionPhase,
)
from model.variants import variant_problems
from train.config.arguments import TrainingArguments


def phase_at(args: TrainingArguments, step: int, tokens: int) -> int:
    """Return the index of the precision.schedule phase for the next step, given the completed steps and tokens."""
    phases = args.precision.schedule or [{}]
    ends = (_end_step(phase, args, args.max_steps, step, tokens) for phase in phases[:-1])
    return next((number for number, end in enumerate(ends) if step < end), len(phases) - 1)


def phase_precisions(section: PrecisionConfig) -> list[PrecisionConfig]:
    """Return one "precision" section per phase of the schedule.

    The returned sections do not contain the key `schedule`.
    """
    sections = []
    for phase in section.schedule or [{}]:
        own = {key: value for key, value in phase.items() if key not in PHASE_ENDS}
        out = replace(section, schedule=None, **own)
        # reset keys that the phase's recipe does not read
        if out.compute == "fp8" and out.recipe != section.recipe:
            out = replace(section.with_recipe(out.recipe), schedule=None, **own)
        sections.append(out)
    return sections


def phase_arguments(args: TrainingArguments, number: int) -> TrainingArguments:
    """Return the training arguments for one phase of precision.schedule, given its index."""
    return replace(args, precision=phase_precisions(args.precision)[number])


def phase_shares(args: TrainingArguments, max_steps: int) -> list[float]:
    """Return the fraction of the steps that each phase of precision.schedule covers.

    Args:
        args: The resolved arguments.
        max_steps: The number of steps in the run. Phases that would start after the last step have the fraction 0.
    """
    begin, shares = 0, []
    for phase in (args.precision.schedule or [{}])[:-1]:
        end = min(max(begin, _end_step(phase, args, max_steps)), max_steps)
        shares.append((end - begin) / max_steps)
        begin = end
    return [*shares, (max_steps - begin) / max_steps]


def describe_phase(section: PrecisionConfig, number: int) -> str:
    """Describe a phase of precision.schedule in words, for example "phase 2 of 3 of precision.schedule ({...})"."""
    phases = section.schedule or [{}]
    own = {key: value for key, value in phases[number].items() if key not in PHASE_ENDS}
    return f"phase {number + 1} of {len(phases)} of precision.schedule ({json.dumps(own)})"


def _end_step(
    phase: PrecisionPhase, args: TrainingArguments, max_steps: int, step: int = 0, tokens: int = 0
) -> int:
    """Return the step at which a phase of precision.schedule ends. For a completed phase, return at most `step`.

    Args:
        phase: Any phase except the last one, which has no end.
        args: The resolved arguments. They determine the number of tokens in each later step.
        max_steps: The number of steps in the run.
        step, tokens: The number of steps and tokens that the run has completed.
    """
    if "until_tokens" in phase:
        return step + -(-(phase["until_tokens"] - tokens) // (args.train_batch_size_tokens or 1))
    return phase.get("until_step", round(phase.get("until_share", 1.0) * max_steps))


# ---------------------------------------------------------------- checks


def phase_problems(args: TrainingArguments) -> list[str]:
    """Return the problems found in precision.schedule and in each of its phases, one line per problem."""
    section, phases = args.precision, args.precision.schedule or []
    sections = phase_precisions(section)
    computes = {section.compute, *(own.compute for own in sections)}
    falls_back = any(own.on_trouble == "escalate" and own.compute == "fp8" for own in sections)
    saves = args.save_strategy != "no"
    rules: list[tuple[object, str]] = [  # (whether the combination is refused, the problem)
        (
            falls_back and not saves,
            "precision.on_trouble escalate, save_strategy no: a fallback continues from a checkpoint; set "
            "save_strategy to steps, or set on_trouble to warn",
        ),
        (
            phases and section.auto,
            "precision.auto true, precision.schedule: auto chooses one precision for the whole run; remove one of the "
            "two keys",
        ),
        (
            len(phases) > 1 and not saves,
            "precision.schedule, save_strategy no: each phase continues from a checkpoint; set save_strategy to steps, "
            "or remove the schedule",
        ),
        (
            len(computes) > 1 and not computes <= {"fp8", "bf16"},
            f"precision.schedule: compute is {' and '.join(sorted(computes))}; a schedule can only combine fp8 and "
            "bf16, which store weights and optimizer state in the same type",
        ),
    ]
    found = [problem for is_refused, problem in rules if is_refused]

    def problems(own: PrecisionConfig) -> list[str]:
        return own.problems() + variant_problems(args.model.variant, own, args.model.compile)

    known = problems(section)
    for number, phase in enumerate(phases):
        name, ends = _name(number, len(phases)), [key for key in PHASE_ENDS if key in phase]
        if len(ends) != (number < len(phases) - 1):
            found.append(
                f"{name}: the phase has {' and '.join(ends) or 'no end'}. Set exactly one of "
                f"{', '.join(PHASE_ENDS)} in each phase except the last, which ends with the run"
            )
        own = replace(sections[number], auto=False)
        found += [f"{name}: {problem}" for problem in problems(own) if problem not in known]
    return found


def _name(number: int, count: int) -> str:
    return f"precision.schedule[{number}] (phase {number + 1} of {count})"


def phase_end_problems(args: TrainingArguments, step: int | None = None, tokens: int = 0) -> list[str]:
    """Return an error message for each phase of precision.schedule that would contain no steps.

    Args:
        args: The resolved arguments.
        step, tokens: The number of steps and tokens that the run has completed. Completed phases are not checked. If
            `step` is None, these numbers are not known yet, and phases with until_tokens are not checked, because
            earlier steps may have had a different number of tokens.
    """
    phases, begin, found = args.precision.schedule or [], step or 0, []
    for number, phase in enumerate(phases[:-1]):
        end = _end_step(phase, args, args.max_steps, step or 0, tokens)
        is_open = step is None and "until_tokens" in phase
        if is_open or (step and step >= end):
            continue
        (key,) = (key for key in PHASE_ENDS if key in phase)
        if not begin < end < args.max_steps:
            found.append(
                f"{_name(number, len(phases))}: {key} {phase[key]} ends the phase at step {end}, but the phase "
                f"must end after it starts (step {begin}) and before max_steps ({args.max_steps}); change {key}"
            )
        begin = max(begin, end)
    return found
