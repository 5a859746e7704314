"""model/fp8/recipes.py and model/variants.py: which keys a recipe reads, what states take, what goes with what."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from model.fp8.recipes import RECIPES, PrecisionConfig
from model.variants import compiles, why_no_graphs

# key -> (another value than the default, the recipes that read it)
KNOBS: dict[str, tuple[Any, str]] = {
    "fp8_format": ("hybrid", "delayed current block"),
    "health_steps": (5, "delayed current block"),
    "margin": (1, "delayed"),
    "amax_history_len": (4, "delayed"),
    "amax_compute_algo": ("most_recent", "delayed"),
    "calibration_passes": (0, "delayed"),
    "reduce_amax": (False, "delayed"),
    "power_2_scales": (True, "current block"),
    "amax_epsilon": (0.1, "current block"),
    "fast_accumulation_wgrad": (True, "delayed current"),
}


@pytest.mark.parametrize("key", KNOBS)
def test_a_key_that_a_recipe_does_not_read_is_refused_and_left_out_of_its_stage(key: str) -> None:
    value, readers = KNOBS[key]
    for recipe in RECIPES:
        problems = PrecisionConfig(recipe=recipe, **{key: value}).problems()
        if recipe in readers.split():
            assert problems == []
            assert getattr(PrecisionConfig(recipe=recipe, **{key: value}).with_recipe(recipe), key) == value
        else:
            names = readers.replace(" ", " and ")
            assert problems == [
                f"precision.{key}: only the recipe {names} reads it, and the recipe is {recipe}; remove it"
            ]
            other = PrecisionConfig(recipe=readers.split()[0], **{key: value}).with_recipe(recipe)
            assert (other.recipe, getattr(other, key)) == (recipe, getattr(PrecisionConfig(), key))
    # without FP8 nobody reads it, and nobody minds
    assert PrecisionConfig(compute="bf16", recipe="rowwise", **{key: value}).problems() == []


def test_another_recipe_keeps_what_both_read() -> None:
    given = PrecisionConfig(recipe="current", fp8_format="hybrid", amax_epsilon=0.5, bf16_modules=["a"])
    given = dataclasses.replace(given, fast_accumulation_wgrad=True, power_2_scales=True)
    assert given.with_recipe("block") == dataclasses.replace(
        given, recipe="block", fast_accumulation_wgrad=False
    )
    assert given.with_recipe("delayed") == PrecisionConfig(
        recipe="delayed", fp8_format="hybrid", fast_accumulation_wgrad=True, bf16_modules=["a"]
    )


@pytest.mark.parametrize(
    ("keys", "bytes_", "said"),
    [
        ({}, 12, None),
        ({"compute": "bf16"}, 12, None),
        ({"compute": "fp32"}, 8, None),
        ({"optimizer_states": "bf16_remainder"}, 2 + 2 * 2, "moments in bf16: 6 bytes a parameter instead of 12"),
        (
            {"optimizer_states": "bf16_remainder", "optimizer_moments": "fp32"},
            2 + 2 * 4,
            "moments in fp32: 10 bytes a parameter instead of 12",
        ),
        ({"optimizer_states": "int8"}, 2 + 2 * (1 + 4 / 256), "moments in int8: 4.03 bytes a parameter instead of 12"),
        ({"optimizer_states": "fp8"}, 2 + 2 * (1 + 4 / 256), "moments in fp8: 4.03 bytes a parameter instead of 12"),
    ],
)  # fmt: skip
def test_what_a_parameters_states_take(keys: dict, bytes_: float, said: str | None) -> None:
    config = PrecisionConfig(**keys)
    assert config.optimizer_bytes == bytes_
    states = f"optimizer states: float32 weights as bf16 and 16 bits more, {said}" if said else None
    assert config.described_states() == states
    travel = "gradients are reduced in bf16"
    both = dataclasses.replace(config, gradient_communication="bf16").described_states()
    assert both == (f"{states}; {travel}" if states else travel)


@pytest.mark.parametrize(
    ("recipe", "variant", "above"),
    [
        ("delayed", "te_linear", "to current, block, bf16_backward, bf16. The run saves"),
        ("current", "te_linear", "to block, bf16_backward, bf16. The run"),
        ("block", "te_layer", "to bf16_backward, bf16; layernorm_mlp has no bf16_backward in Transformer Engine. The"),
    ],
)  # fmt: skip
def test_the_log_says_where_a_module_in_trouble_may_go(recipe: str, variant: str, above: str) -> None:
    config = PrecisionConfig(recipe=recipe, on_trouble="escalate", health_steps=5)
    said = config.described_levels(variant, 100)
    assert said is not None and f"a module in trouble at two of four looks goes a level up, {above}" in said
    for change in ({"on_trouble": "warn"}, {"compute": "bf16"}):
        assert dataclasses.replace(config, **change).described_levels(variant, 100) is None
    assert config.described_levels(variant, 5) == said
    told = config.described_levels(variant, 4)
    assert told is not None and told.endswith(
        "in step 5 (precision.health_steps), and the run has max_steps 4"
    )
    (problem,) = dataclasses.replace(config, health_steps=0).problems()
    assert problem.startswith(
        "precision.on_trouble escalate: without looks at FP8's operands no trouble is seen"
    )


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (
            {"compute": "fp32", "optimizer_states": "int8"},
            "optimizer_states int8: it is made of bf16 weights, and with compute fp32",
        ),
        (
            {"compute": "fp16", "gradient_communication": "bf16"},
            "gradient_communication bf16: compute fp16 has gradients that bf16",
        ),
        ({"optimizer_moments": "fp32"}, "optimizer_moments: only optimizer_states bf16_remainder reads it"),
        (
            {"optimizer_states": "int8", "optimizer_moments": "fp32"},
            "optimizer_moments: only optimizer_states bf16_remainder reads it, and optimizer_states is int8",
        ),
        (
            {"auto": True, "compute": "bf16"},
            "auto: it finds out .* compute bf16 with recipe delayed is given",
        ),
        (
            {"auto": True, "recipe": "rowwise"},
            "auto: it finds out .*delayed or current or block; compute fp8 with recipe row",
        ),
    ],
)
def test_what_does_not_go_together(keys: dict, problem: str) -> None:
    (found,) = PrecisionConfig(**keys).problems()
    assert re.match(f"precision.{problem}", found)


@pytest.mark.parametrize(
    "keys",
    [
        {"compute": "fp32", "gradient_communication": "fp32"},
        {"compute": "bf16", "optimizer_states": "fp8", "gradient_communication": "bf16"},
        {"optimizer_states": "bf16_remainder", "optimizer_moments": "fp32"},
        {"recipe": "rowwise", "backend": "auto"},
        {"auto": True, "recipe": "block"},
        {"on_trouble": "escalate", "health_steps": 1},
    ],
)
def test_what_goes_together(keys: dict) -> None:
    assert PrecisionConfig(**keys).problems() == []


@pytest.mark.parametrize(
    ("variant", "backend", "asked", "compiled"),
    [
        ("hf", "reference", None, False),
        ("hf", "reference", True, True),
        ("torchao", "reference", None, False),
        ("torchao", "reference", True, True),
        ("torchao", "transformer_engine", None, True),
        ("torchao", "transformer_engine", False, False),
        ("te_layer", "transformer_engine", None, False),
    ],
)
def test_what_is_compiled_unless_the_user_says_otherwise(
    variant: str, backend: Any, asked: bool | None, compiled: bool
) -> None:
    """torchao where a GPU runs it: there FP8 without torch.compile is slower than bf16."""
    assert compiles(variant, PrecisionConfig(recipe="rowwise", backend=backend), asked) == compiled


def test_why_there_are_no_graphs() -> None:
    for variant in ("te_linear", "te_layer"):
        for stage in (0, 1, 2):
            assert why_no_graphs(variant, zero_stage=stage) is None
        for keys, words in (
            ({"gradient_checkpointing": True}, "recomputation reads the random generator's state"),
            ({"zero_stage": 3}, "ZeRO 3 moves the weights"),
            ({"emulated": True}, "a CUDA graph needs a GPU"),
        ):
            assert words in (why_no_graphs(variant, **keys) or "")
    for variant in ("hf", "torchao"):
        assert "CUDA graphs are for te_linear and te_layer" in (why_no_graphs(variant) or "")
