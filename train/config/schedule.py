"""precision.schedule: stages of a run, each with keys of the section "precision" that it has otherwise.

[{"until_step": 500, "compute": "bf16"}, {"until_share": 0.9}, {"compute": "bf16"}]

Which stage a step belongs to is a pure function of the steps and tokens before it, so that resuming needs no state.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from model.fp8.recipes import ENDS, PrecisionConfig, PrecisionStage, end_step, is_over, stage_of
from model.variants import variant_problems

if TYPE_CHECKING:
    from train.config.arguments import TrainingArguments


def stage_at(args: TrainingArguments, step: int, tokens: int) -> int:
    """The number, from 0, of the stage of the step after so many steps and tokens."""
    return stage_of(args.precision.schedule or [{}], args.max_steps, step, tokens)


def precision_of(section: PrecisionConfig, number: int) -> PrecisionConfig:
    """The section as it is in one stage, without a schedule. What another recipe does not read is left out."""
    stages = section.schedule or [{}]
    own = {key: value for key, value in stages[number].items() if key not in ENDS}
    out = replace(section, schedule=None, **own)
    if out.compute == "fp8" and out.recipe != section.recipe:
        out = replace(section.with_recipe(out.recipe), schedule=None, **own)
    return out


def precisions_of(section: PrecisionConfig) -> list[PrecisionConfig]:
    """The section as it is in each stage; without a schedule there is one."""
    return [precision_of(section, number) for number in range(len(section.schedule or [{}]))]


def escalates(section: PrecisionConfig) -> bool:
    """Whether modules may go a level up in one of its stages."""
    return any(own.on_trouble == "escalate" and own.compute == "fp8" for own in precisions_of(section))


def at_stage(args: TrainingArguments, number: int) -> TrainingArguments:
    """The arguments as they are in one stage."""
    return replace(args, precision=precision_of(args.precision, number))


def stage_shares(args: TrainingArguments, max_steps: int) -> list[float]:
    """Of the steps of a run of so many, by stage; 0 of a stage that it does not come to. `args`: resolved."""
    stages, begin, shares = args.precision.schedule or [{}], 0, []
    for stage in stages[:-1]:
        end = min(max(begin, _end_step(stage, args, max_steps)), max_steps)
        shares.append((end - begin) / max_steps)
        begin = end
    return [*shares, (max_steps - begin) / max_steps]


def _end_step(
    stage: PrecisionStage, args: TrainingArguments, max_steps: int, step: int = 0, tokens: int = 0
) -> int:
    """After how many steps a stage that is not the last is over, of a run of resolved arguments that has come to so
    many steps and tokens: with steps of as many tokens as today's from there on."""
    if "until_tokens" in stage:
        return step + -(-(stage["until_tokens"] - tokens) // (args.train_batch_size_tokens or 1))
    return end_step(stage, max_steps)


def stage_text(section: PrecisionConfig, number: int) -> str:
    """ "stage 2 of 3 of precision.schedule ({...})", with what is its own."""
    return text_of(section.schedule or [{}], number)


def text_of(stages: list[PrecisionStage], number: int) -> str:
    """The same of a schedule."""
    own = {key: value for key, value in stages[number].items() if key not in ENDS}
    how = json.dumps(own) if own else "as the section says"
    return f"stage {number + 1} of {len(stages)} of precision.schedule ({how})"


# ---------------------------------------------------------------- what is wrong with one


def stage_problems(args: TrainingArguments) -> list[str]:
    """What is wrong with the stages, of which a run without a schedule has one, each by itself, a line a problem."""
    section, found = args.precision, []
    if escalates(section) and args.save_strategy == "no":
        found.append(
            "precision.on_trouble, save_strategy: when a module goes a level up the run goes on from a checkpoint; set "
            "save_strategy to steps, or on_trouble to warn"
        )
    if not (stages := section.schedule):
        return found
    for number, stage in enumerate(stages):
        found += _end_problems(stage, number, len(stages))
    if section.auto:
        found.append(
            "precision.auto, precision.schedule: auto chooses one precision for the whole run; remove one of them"
        )
    if args.save_strategy == "no" and len(stages) > 1:
        found.append(
            "precision.schedule, save_strategy: at a change of the precision the run goes on from a checkpoint; set "
            "save_strategy to steps, or remove the schedule"
        )
    each = [replace(own, auto=False) for own in precisions_of(section)]
    computes = {section.compute, *(own.compute for own in each)}
    if len(computes) > 1 and not computes <= {"fp8", "bf16"}:
        found.append(
            f"precision.schedule: compute is {' and '.join(sorted(computes))}; only fp8 and bf16 keep weights and "
            "optimizer state in the same type"
        )

    def problems(own: PrecisionConfig) -> list[str]:
        return own.problems() + variant_problems(args.model.variant, own, args.model.compile)

    known = problems(section)
    for number, own in enumerate(each):
        wrong = (problem for problem in problems(own) if problem not in known)
        found += [f"{_name(number, len(stages))}: {problem}" for problem in wrong]
    return found


def _name(number: int, count: int) -> str:
    return f"precision.schedule[{number}] (stage {number + 1} of {count})"


def _end_problems(stage: PrecisionStage, number: int, count: int) -> Iterator[str]:
    given, name = [key for key in ENDS if key in stage], _name(number, count)
    if number == count - 1 and given:
        yield f"{name}: the last stage runs to the end of the run; remove its {' and '.join(given)}"
    elif number < count - 1 and len(given) != 1:
        has = f"has {' and '.join(given)}" if given else "has no end"
        yield f"{name}: it {has}; give one of {', '.join(ENDS)}, as each stage but the last has"


def order_problems(args: TrainingArguments, step: int | None = None, tokens: int = 0) -> list[str]:
    """What is wrong with the ends of the stages of resolved arguments, a line a problem, in a run that has come to so
    many steps and tokens: a stage that is over is as it was. Where that is not known yet (None), an end by tokens is
    not judged: steps of a resumed run may have had other sizes."""
    stages, begin, found = args.precision.schedule or [], step or 0, []
    for number, stage in enumerate(stages[:-1]):
        is_open = step is None and "until_tokens" in stage
        if is_open or (step and is_over(stage, args.max_steps, step, tokens)):
            continue
        name, (key,) = _name(number, len(stages)), [key for key in ENDS if key in stage]
        end = _end_step(stage, args, args.max_steps, step or 0, tokens)
        if end >= args.max_steps:
            found.append(
                f"{name}: {key} {stage[key]} is step {end}, and the run has max_steps {args.max_steps}; let it end "
                "earlier, or remove the stages after it"
            )
        elif end <= begin:
            found.append(
                f"{name}: {key} {stage[key]} is step {end}, and the stage begins after step {begin}; stages follow "
                "each other, each of at least one step"
            )
        begin = max(begin, end)
    return found
