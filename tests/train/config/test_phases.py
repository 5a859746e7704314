"""train/config/schedule.py: the phase of a step, the precision of a phase, and schedules that are refused."""

from typing import Any

import pytest

from tests.conftest import numbers, refused
from tests.train.config.test_load import arguments
from train.config.arguments import ConfigurationError, TrainingArguments
from train.config.load import resolve_arguments
from train.config.schedule import phase_at, phase_end_problems, phase_precisions, phase_shares


def resolved(schedule: Any, **changes: Any) -> TrainingArguments:
    """A run of six steps of 256 tokens."""
    sizes = {"max_steps": 6, "max_seq_length": 64, "per_device_train_batch_size": 4}
    return resolve_arguments(arguments(precision__schedule=schedule, **(sizes | changes)), 1)


THREE = [{"until_tokens": 500}, {"until_share": 0.7}, {"recipe": "current"}]


def test_phase_at() -> None:
    args = resolved(THREE)
    assert [phase_at(args, n, 256 * n) for n in range(7)] == [0, 0, 1, 1, 2, 2, 2]
    assert phase_at(args, 1, 500) == 1 and phase_at(args, 1, 499) == 0  # steps before had other sizes
    assert phase_at(resolved(None), 3, 700) == 0


@pytest.mark.parametrize(("steps", "expected"), [(6, [2, 2, 2]), (3, [2, 0, 1]), (1, [1, 0, 0])])
def test_phase_shares(steps: int, expected: list[int]) -> None:
    assert phase_shares(resolved(THREE), steps) == pytest.approx([count / steps for count in expected])


def test_phase_keys_override_the_section() -> None:
    """A key of the section that the recipe of a phase does not read is no error in the phase."""
    section = {"precision__margin": 2, "precision__fast_accumulation_wgrad": True}
    schedule = [{"until_step": 2, "margin": 0}, {"until_step": 4, "recipe": "block", "amax_epsilon": 1.0}]
    found = phase_precisions(resolved([*schedule, {}], **section).precision)
    assert [(p.recipe, p.margin, p.amax_epsilon, p.fast_accumulation_wgrad) for p in found] == [
        ("delayed", 0, 0.0, True),
        ("block", 0, 1.0, False),
        ("delayed", 2, 0.0, True),
    ]
    assert all(p.schedule is None for p in found)


@pytest.mark.parametrize(
    ("schedule", "at", "problem"),
    [
        ([{"until_share": 0.5}, {"until_tokens": 700}, {}], (0, 0), (1, [700, 3, 3])),
        ([{"until_tokens": 10**9}, {}], (0, 0), (0, [10**9, 3906250, 6])),
        # the first two steps had half as many tokens: five of today's remain
        ([{"until_tokens": 1300}, {}], (2, 256), (0, [1300, 7, 6])),
        ([{"until_tokens": 1280}, {}], (2, 512), None),
        # the phase is over, whenever it would end today
        ([{"until_tokens": 1600}, {}], (4, 2048), None),
        ([{"until_tokens": 700}, {"until_step": 3}, {}], (4, 1024), None),
        ([{"until_step": 1}, {"until_tokens": 700}, {"until_step": 4}, {}], (1, 64), (2, [4, 4, 4])),
    ],
)
def test_until_tokens_is_checked(
    schedule: Any, at: tuple[int, int], problem: tuple[int, list[int]] | None
) -> None:
    found = phase_end_problems(resolved(schedule), *at)
    assert len(found) == (problem is not None)
    for line in found:
        assert problem and line.startswith(f"precision.schedule[{problem[0]}] ")
        assert {*problem[1]} <= {*numbers(line)}


@pytest.mark.parametrize(
    ("schedule", "changes", "key"),
    [
        ([{"until_step": 2}, {"until_step": 2, "recipe": "current"}, {}], {}, "schedule[1]"),
        ([{"until_step": 6}, {}], {}, "schedule[0]"),
        ([{"until_share": 0.01}, {}], {}, "schedule[0]"),
        ([{"compute": "bf16"}, {}], {}, "schedule[0]"),
        ([{"until_step": 2, "until_share": 0.5}, {}], {}, "schedule[0]"),
        ([{"until_step": 2}, {"until_step": 4}], {}, "schedule[1]"),
        ([{"until_step": 2, "recipe": "block", "margin": 1}, {}], {}, "schedule[0]"),
        ([{"until_step": 2, "recipe": "rowwise"}, {}], {}, "schedule[0]"),
        ([{"until_step": 2, "compute": "fp32"}, {}], {}, "schedule"),
        ([{"until_step": 2}, {}], {"save_strategy": "no"}, "schedule"),
        ([{"until_step": 2}, {}], {"precision__auto": True}, "auto"),
        ([{"until_step": 2, "recipee": "block"}, {}], {}, "schedule[0].recipee"),
        ([{"until_step": 2, "backend": "auto"}, {}], {}, "schedule[0].backend"),
        ([{"until_step": 2, "margin": -1}, {}], {}, "schedule[0].margin"),
        ([{"until_share": 1.0}, {}], {}, "schedule[0].until_share"),
        ([], {}, "schedule"),
    ],
)
def test_invalid_schedule_raises(schedule: Any, changes: dict, key: str) -> None:
    with refused(ConfigurationError, key=f"precision.{key}"):
        resolved(schedule, **changes)


def test_rules_apply_to_each_phase() -> None:
    """FP8's batch sizes, and checkpoints for fallbacks."""
    bf16 = {"until_step": 2, "compute": "bf16"}
    odd = {"max_seq_length": 33, "per_device_train_batch_size": 2, "precision__compute": "bf16"}
    resolved([bf16, {}], **odd)
    with refused(ConfigurationError, key="per_device_train_batch_size"):
        resolved([bf16, {"compute": "fp8"}], **odd)
    fallback = {"on_trouble": "escalate", "health_steps": 1}
    with refused(ConfigurationError, key="precision.on_trouble"):
        resolved([bf16, fallback], save_strategy="no")
