"""The phases of precision.schedule. Each phase has the keys of the section "precision" that it changes.

    [{"until_step": 500, "compute": "bf16"}, {"until_share": 0.9}, {"compute": "bf16"}]

The phase of a step depends only on the steps and tokens before it, so a resume needs no state. A run without a schedule
has one phase.
"""

from __future__ import annotations

import json
from dataclasses import replace

from model.fp8.recipes import ENDS, PrecisionConfig, PrecisionStage, end_step, is_over, stage_of
from model.variants import variant_problems
from train.config.arguments import TrainingArguments


def phase_at(args: TrainingArguments, step: int, tokens: int) -> int:
    """Return the index of the phase that contains the next step after `step` steps and `tokens` tokens."""
    return stage_of(args.precision.schedule or [{}], args.max_steps, step, tokens)


def precisions_of(section: PrecisionConfig) -> list[PrecisionConfig]:
    """Return the "precision" section of each phase, with `schedule` removed."""
    sections = []
    for phase in section.schedule or [{}]:
        own = _own_keys(phase)
        out = replace(section, schedule=None, **own)
        if (
            out.compute == "fp8" and out.recipe != section.recipe
        ):  # reset keys that the other recipe does not read
            out = replace(section.with_recipe(out.recipe), schedule=None, **own)
        sections.append(out)
    return sections


def arguments_of_phase(args: TrainingArguments, number: int) -> TrainingArguments:
    """Return the arguments with the precision of a phase."""
    return replace(args, precision=precisions_of(args.precision)[number])


def phase_shares(args: TrainingArguments, max_steps: int) -> list[float]:
    """Return the share of each phase in a run of `max_steps` steps; 0 for a phase that the run does not reach.

    Args:
        args: The resolved arguments.
        max_steps: The number of steps of the run.
    """
    begin, shares = 0, []
    for phase in (args.precision.schedule or [{}])[:-1]:
        end = min(max(begin, _end_step(phase, args, max_steps)), max_steps)
        shares.append((end - begin) / max_steps)
        begin = end
    return [*shares, (max_steps - begin) / max_steps]


def describe_phase(section: PrecisionConfig, number: int) -> str:
    """Return "phase 2 of 3 of precision.schedule ({...})", with the keys of the phase."""
    phases = section.schedule or [{}]
    own = _own_keys(phases[number])
    how = json.dumps(own) if own else "no changes"
    return f"phase {number + 1} of {len(phases)} of precision.schedule ({how})"


def _own_keys(phase: PrecisionStage) -> PrecisionStage:
    return {key: value for key, value in phase.items() if key not in ENDS}


def _end_step(
    phase: PrecisionStage, args: TrainingArguments, max_steps: int, step: int = 0, tokens: int = 0
) -> int:
    """Return the number of steps of the run after which a phase that has an end is over.

    Args:
        phase: The phase.
        args: The resolved arguments. All later steps have their number of tokens.
        max_steps: The number of steps of the run.
        step, tokens: The position of the run.
    """
    if "until_tokens" in phase:
        return step + -(-(phase["until_tokens"] - tokens) // (args.train_batch_size_tokens or 1))
    return end_step(phase, max_steps)


# ---------------------------------------------------------------- checks


def phase_problems(args: TrainingArguments) -> list[str]:
    """Return the problems of the individual phases, one line per problem."""
    section, found = args.precision, []
    sections = precisions_of(section)
    if args.save_strategy == "no" and any(
        s.on_trouble == "escalate" and s.compute == "fp8" for s in sections
    ):
        found.append(
            "precision.on_trouble, save_strategy: a fallback continues from a checkpoint; set save_strategy to steps, "
            "or on_trouble to warn"
        )
    if not (phases := section.schedule):
        return found
    for number, phase in enumerate(phases):
        given, name = [key for key in ENDS if key in phase], _name(number, len(phases))
        if number == len(phases) - 1 and given:
            found.append(f"{name}: the last phase ends with the run; remove its {' and '.join(given)}")
        elif number < len(phases) - 1 and len(given) != 1:
            has = f"has {' and '.join(given)}" if given else "has no end"
            found.append(f"{name}: this phase {has}; each phase but the last needs one of {', '.join(ENDS)}")
    if section.auto:
        found.append(
            "precision.auto, precision.schedule: auto chooses one precision for the whole run; remove one of them"
        )
    if args.save_strategy == "no" and len(phases) > 1:
        found.append(
            "precision.schedule, save_strategy: each phase continues from a checkpoint; set save_strategy to steps, or "
            "remove the schedule"
        )
    computes = {section.compute, *(own.compute for own in sections)}
    if len(computes) > 1 and not computes <= {"fp8", "bf16"}:
        found.append(
            f"precision.schedule: compute is {' and '.join(sorted(computes))}; a schedule can only combine "
            "fp8 and bf16, which store weights and optimizer state in the same type"
        )

    def problems(own: PrecisionConfig) -> list[str]:
        return own.problems() + variant_problems(args.model.variant, own, args.model.compile)

    known = problems(section)
    for number, own in enumerate(sections):
        wrong = (problem for problem in problems(replace(own, auto=False)) if problem not in known)
        found += [f"{_name(number, len(phases))}: {problem}" for problem in wrong]
    return found


def _name(number: int, count: int) -> str:
    return f"precision.schedule[{number}] (phase {number + 1} of {count})"


def phase_end_problems(args: TrainingArguments, step: int | None = None, tokens: int = 0) -> list[str]:
    """Return the problems with the ends of the phases of resolved arguments, one line per problem.

    Args:
        args: The resolved arguments.
        step, tokens: The position of the run. Phases that are over are not checked. If `step` is None, the position is
            not known yet, and ends by tokens are not checked, since earlier steps may have had other sizes.
    """
    phases, begin, found = args.precision.schedule or [], step or 0, []
    for number, phase in enumerate(phases[:-1]):
        is_open = step is None and "until_tokens" in phase
        if is_open or (step and is_over(phase, args.max_steps, step, tokens)):
            continue
        (key,) = (key for key in ENDS if key in phase)
        end = _end_step(phase, args, args.max_steps, step or 0, tokens)
        given = f"{_name(number, len(phases))}: {key} {phase[key]} is step {end}, and"
        if end >= args.max_steps:
            found.append(
                f"{given} max_steps is {args.max_steps}; end the phase earlier, or remove the phases after it"
            )
        elif end <= begin:
            found.append(f"{given} the phase begins after step {begin}; each phase needs at least one step")
        begin = max(begin, end)
    return found
