"""The mixture as it is configured, weights of the sources that may change by stage -> `Mixture`.

null                                          by tokens
{"web": 0.7, "code": 0.3}                     the same in the whole run
[{"until_tokens": 10^10, "weights": {...}},   by stage; the last one has no end, and a source that a stage
 {"weights": {...}}]                          does not name gives nothing in it, but for what it owes (order.Mixture)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from train.data.format import DataError
from train.data.order import Mixture


@dataclass(frozen=True, kw_only=True)
class MixtureStage:
    """One stage. Its first sample is the first one at or beyond the `until_tokens` of the stage before.

    `until_tokens` counts the tokens of the run: samples * sequence length. It is None in the last stage and only there.
    """

    weights: dict[str, float]
    until_tokens: int | None = None


Weights = Mapping[str, float] | Sequence[MixtureStage]


def weight_problems(weights: Weights, names: Sequence[str]) -> list[str]:
    """Why these weights cannot mix the sources called `names`: a line a problem, each with the stage and the source."""
    if not (stages := _stages(weights)):
        return ["data.weights has no stage; give at least one, or null to mix by tokens"]
    problems = []
    for index, stage in enumerate(stages):
        what = "data.weights"
        if not isinstance(weights, Mapping):
            what += f"[{index}] (stage {index + 1} of {len(stages)})"
        problems += [f"{what}: {problem}" for problem in _stage_problems(stage, names)]
        before = stages[index - 1].until_tokens if index else 0
        if index == len(stages) - 1:
            if stage.until_tokens is not None:
                problems.append(f"{what}: the last stage runs to the end; remove its until_tokens")
        elif stage.until_tokens is None:
            problems.append(f"{what}: until_tokens is missing; only the last stage runs to the end")
        elif before is not None and stage.until_tokens <= before:
            problems.append(
                f"{what}: until_tokens is {stage.until_tokens}; it must be above {before}, where the stage begins"
            )
    given = {name for stage in stages for name, weight in stage.weights.items() if weight > 0}
    problems += [
        f"data.weights: the source {name!r} has no weight above 0; give it one, or remove the source"
        for name in names
        if name not in given
    ]
    return problems


def _stages(weights: Weights) -> list[MixtureStage]:
    return [MixtureStage(weights=dict(weights))] if isinstance(weights, Mapping) else list(weights)


def _stage_problems(stage: MixtureStage, names: Sequence[str]) -> list[str]:
    listed = ", ".join(sorted(names)) or "nothing"
    unknown = [name for name in stage.weights if name not in names]
    problems = [f"there is no source {name!r}; data.sources has {listed}" for name in unknown]
    for name, weight in stage.weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            problems.append(f"the weight of {name!r} is {weight}; it must be 0 or positive")
    if not any(weight > 0 for weight in stage.weights.values()):
        problems.append("no source has a weight above 0")
    return problems


def mix(weights: Weights, names: Sequence[str], seq_length: int) -> Mixture:
    """The mixture of the sources called `names`, in this order, with samples of seq_length tokens, by weights without
    `weight_problems`.

    Raises:
        DataError: a weight that is too small, or a stage without a sample.
    """
    stages = _stages(weights)
    starts = [0] + [-(-(stage.until_tokens or 0) // seq_length) for stage in stages[:-1]]
    for index, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
        if start == stop:
            raise DataError(
                f"data.weights[{index}] (stage {index + 1} of {len(stages)}): no sample of {seq_length} tokens begins "
                f"between its start and until_tokens {stages[index].until_tokens}; make it longer, or remove it",
                code="stage_without_sample",
                key=f"data.weights[{index}]",
            )
    shares = [[stage.weights.get(name, 0) for name in names] for stage in stages]
    try:
        return Mixture(shares[0], later=list(zip(starts[1:], shares[1:], strict=True)))
    except ValueError as error:
        raise DataError(f"data.weights: {error}", code="weight_too_small", key="data.weights") from error
