"""What each GPU architecture runs, switches off or refuses, with a simulated compute capability."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model.fp8 import te_backend
from model.fp8.hardware import (
    ARCHITECTURES,
    BLACKWELL_RECIPES,
    emulates_block_scaling,
    fp8_gpu_problem,
    recipe_warning,
    uses_head_gradients,
)
from model.fp8.precision import Precision, PrecisionError, resolve_head_gradients
from model.fp8.recipes import RECIPES, PrecisionConfig
from scripts.tables import ROOT, table
from tests.conftest import refused
from train.config.load import build_arguments
from train.preflight.check import device_problems

Capability = tuple[int, int]
TE = ("delayed", "current", "block")
CASES: dict[Capability, tuple[str, ...]] = {
    (7, 5): (),
    (8, 0): (),
    (8, 6): (),
    (8, 9): TE[:2],
    (9, 0): TE,
    (10, 0): (*TE, "mxfp8"),
    (10, 3): (*TE, "mxfp8"),
    (12, 0): TE,
}
every_gpu = pytest.mark.parametrize("capability", CASES)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, capability: Capability) -> Capability:
    """A machine with this GPU, where Transformer Engine 2.20.2 answers what its sources say."""

    def available(supported: bool) -> Any:
        return lambda return_reason: (supported, "" if supported else "Not on this GPU.")

    quantization = SimpleNamespace(
        is_fp8_available=available(capability >= (8, 9)),
        is_fp8_block_scaling_available=available(capability >= (9, 0)),
        is_mxfp8_available=available((10, 0) <= capability < (12, 0)),
    )
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.quantization", quantization)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA X")
    te = SimpleNamespace(**{**vars(te_backend._load_reference()), "name": "transformer_engine"})
    monkeypatch.setattr(te_backend, "_load_transformer_engine", lambda: te)
    return capability


@every_gpu
@pytest.mark.parametrize("recipe", [name for name, recipe in RECIPES.items() if recipe.package == "te"])
def test_a_recipe_runs_or_is_refused(gpu: Capability, recipe: str) -> None:
    """At startup by Transformer Engine, in the preflight check by the table, with the same result."""
    arguments = build_arguments(
        {
            "model": {"config": "tiny"},
            "data": {"sources": {"text": "data"}},
            "output_dir": "run",
            "precision": {"recipe": recipe},
            "max_steps": 1,
        }
    )
    found = [error.key for error in device_problems(arguments, None, 1, 1, gpu)]
    if recipe in CASES[gpu]:
        Precision(PrecisionConfig(recipe=recipe))
        assert found == []
        return
    with refused(PrecisionError, code="recipe_not_available" if CASES[gpu] else "gpu_without_fp8") as error:
        Precision(PrecisionConfig(recipe=recipe))
    assert found == ["precision.recipe"]
    assert all(name in str(error.value) for name in CASES[gpu] or ("bf16",))
    Precision(PrecisionConfig(compute="bf16"))
    Precision(PrecisionConfig(recipe=recipe, backend="reference"))


@every_gpu
def test_head_gradients_follow_the_gpu_unless_they_are_configured(gpu: Capability) -> None:
    config = PrecisionConfig(recipe="delayed")
    is_used = gpu in ((9, 0), (10, 0), (10, 3))
    assert uses_head_gradients(gpu) == is_used
    assert resolve_head_gradients(config).fp8_head_gradients == is_used
    if "delayed" in CASES[gpu]:
        assert Precision(config).head_gradients == is_used
    for value in (True, False):
        assert resolve_head_gradients(PrecisionConfig(fp8_head_gradients=value)).fp8_head_gradients == value


@every_gpu
def test_recipe_reported_not_to_converge_warns(capability: Capability) -> None:
    """Block scaling on compute capability 12; not the default recipe."""
    warned = {recipe for recipe in BLACKWELL_RECIPES if recipe_warning(capability, recipe)}
    assert warned == ({"block"} if capability[0] == 12 else set())
    assert PrecisionConfig().recipe not in warned


@every_gpu
def test_the_log_names_recipes_and_what_is_off(gpu: Capability) -> None:
    line = te_backend.describe_gpu()
    assert f"{gpu[0]}.{gpu[1]}" in line and "NVIDIA X" in line
    assert all((recipe in line) == (recipe in CASES[gpu]) for recipe in BLACKWELL_RECIPES)
    assert ("bf16" in line) == (not CASES[gpu])
    assert ("not tested" in line) == (bool(CASES[gpu]) and gpu[0] != 9)
    assert ("fp8_head_gradients" in line) == (gpu in ((8, 9), (12, 0))) and ("fused_swiglu" in line) == (
        gpu[0] == 10
    )
    assert emulates_block_scaling(gpu) == (gpu >= (10, 0))


def test_the_table_is_in_the_documentation() -> None:
    page, rows = (ROOT / "docs/hardware.md").read_text(), []
    for capability, found in ARCHITECTURES.items():
        recipes = ", ".join(found.recipes) or "none"
        untested = " (not tested)" if found.recipes != found.measured else ""
        gpu = f"{found.name} {capability[0]}.{capability[1]}: {found.gpus}"
        rows.append([gpu, recipes + untested, ", ".join(found.disabled) or "-"])
        assert [r for r in BLACKWELL_RECIPES if not fp8_gpu_problem("", capability, r)] == list(found.recipes)
    assert table(("GPU", "FP8 recipes", "disabled"), rows) in page
