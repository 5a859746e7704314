"""model/fp8/recipes.py and model/variants.py: which keys a recipe reads, what states take, what goes with what."""

from __future__ import annotations

from typing import Any

import pytest

from model.fp8.precision import first_key
from model.fp8.recipes import RECIPES, PrecisionConfig
from model.variants import compiles

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
            assert list(map(first_key, problems)) == [f"precision.{key}"]
            other = PrecisionConfig(recipe=readers.split()[0], **{key: value}).with_recipe(recipe)
            assert (other.recipe, getattr(other, key)) == (recipe, getattr(PrecisionConfig(), key))
    # without FP8 nobody reads it, and nobody minds
    assert PrecisionConfig(compute="bf16", recipe="rowwise", **{key: value}).problems() == []


@pytest.mark.parametrize(
    ("keys", "bytes_"),
    [
        ({}, 12),
        ({"compute": "bf16"}, 12),
        ({"compute": "fp32"}, 8),
        ({"optimizer_states": "bf16_remainder"}, 2 + 2 * 2),
        ({"optimizer_states": "bf16_remainder", "optimizer_moments": "fp32"}, 2 + 2 * 4),
        ({"optimizer_states": "int8"}, 2 + 2 * (1 + 4 / 256)),
        ({"optimizer_states": "fp8"}, 2 + 2 * (1 + 4 / 256)),
    ],
)
def test_what_a_parameters_states_take(keys: dict, bytes_: float) -> None:
    assert PrecisionConfig(**keys).optimizer_bytes == bytes_


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"compute": "fp32", "optimizer_states": "int8"}, "optimizer_states"),
        ({"compute": "fp16", "gradient_communication": "bf16"}, "gradient_communication"),
        ({"optimizer_moments": "fp32"}, "optimizer_moments"),
        ({"optimizer_states": "int8", "optimizer_moments": "fp32"}, "optimizer_moments"),
        ({"auto": True, "compute": "bf16"}, "auto"),
        ({"auto": True, "recipe": "rowwise"}, "auto"),
        ({"on_trouble": "escalate", "health_steps": 0}, "on_trouble"),
        ({"recipe": "tensorwise", "health_steps": 5}, "health_steps"),
        ({"compute": "fp32", "gradient_communication": "fp32"}, None),
        ({"compute": "bf16", "optimizer_states": "fp8", "gradient_communication": "bf16"}, None),
        ({"optimizer_states": "bf16_remainder", "optimizer_moments": "fp32"}, None),
        ({"recipe": "rowwise", "backend": "auto"}, None),
        ({"recipe": "tensorwise", "health_steps": 0, "fp8_head_gradients": False}, None),
        ({"auto": True, "recipe": "block"}, None),
        ({"on_trouble": "escalate", "health_steps": 1}, None),
    ],
)
def test_what_goes_together(keys: dict, key: str | None) -> None:
    problems = PrecisionConfig(**keys).problems()
    assert list(map(first_key, problems)) == ([f"precision.{key}"] if key else [])


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
