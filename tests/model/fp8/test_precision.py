"""FP8 is really on, or the run does not start."""

from __future__ import annotations

import itertools
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from fp8_inference_demo import engine
from model.autotune import measure
from model.autotune.task import Task
from model.build import build_model
from model.config import load_config
from model.fp8 import te_backend
from model.fp8.gemms import count_gemms
from model.fp8.modules import FP8Report
from model.fp8.precision import Precision, PrecisionError
from model.fp8.recipes import PrecisionConfig
from model.fp8.state import fp8_state, load_fp8_state, snapshot_fp8_state
from model.proof import ProofError, attention_errors, prove
from model.te_reference.state import running
from tests.conftest import random_ids, small_config

RECIPES = ["delayed", "current", "block"]


@pytest.fixture(params=["reference", pytest.param("transformer_engine", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> str:
    """Tests that take it run on the CPU reference and, where there is a GPU, on Transformer Engine."""
    return request.param


def precision_of(backend: str = "reference", **keys: object) -> Precision:
    return Precision(PrecisionConfig(backend=backend, **keys))


def step(model: torch.nn.Module, seed: int = 0) -> float:
    ids = random_ids(model.config, 2, 65, seed).to(model.lm_head.weight.device)
    out = model(ids[:, :-1], labels=ids[:, 1:])
    out.loss.backward()
    return float(out.loss.detach())


@pytest.mark.parametrize("variant,modules", [("te_linear", 2 * 7), ("te_layer", 2 * 3)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_planned_module_runs_fp8(backend: str, variant: str, modules: int, recipe: str) -> None:
    precision = precision_of(backend, recipe=recipe)
    model = build_model(small_config(), variant, precision)
    with count_gemms(model, precision) as gemms:
        step(model)
    assert not gemms.problem()
    assert len(gemms.ran) == modules
    # te_layer's MLP is one module with two GEMMs
    assert gemms.forward.total() == (14 if variant == "te_linear" else 8)
    assert gemms.backward == 2 * (gemms.forward.total() + 1)  # and lm_head's gradients
    (why,) = gemms.report.kept.items()
    assert why[0] == "lm_head" and why[1].startswith("precision.bf16_modules has 'lm_head'; its two")


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_change_the_numbers_a_little(backend: str, recipe: str) -> None:
    """FP8 differs from bf16 (it is on) but not by much (it is right)."""
    losses = {}
    for compute in ("fp8", "bf16"):
        model = build_model(
            small_config(), "te_layer", precision_of(backend, compute=compute, recipe=recipe), seed=1
        )
        step(model)  # delayed scaling learns its scales
        model.zero_grad()
        losses[compute] = step(model)
    assert losses["fp8"] != losses["bf16"]
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=5e-3)


def test_knobs_reach_the_recipe() -> None:
    r = precision_of(margin=2, amax_history_len=16, amax_compute_algo="most_recent", reduce_amax=False).recipe
    assert (r.margin, r.amax_history_len, r.amax_compute_algo, r.reduce_amax) == (2, 16, "most_recent", False)
    r = precision_of(recipe="current", power_2_scales=True, amax_epsilon=1e-3, fp8_format="e4m3").recipe
    assert r.fp8_quant_bwd_grad.power_2_scale and r.fp8_quant_fwd_weight.amax_epsilon == 1e-3
    assert r.fp8_format.name == "E4M3"
    assert not precision_of(recipe="block", power_2_scales=False).recipe.fp8_quant_fwd_inp.power_2_scale
    assert precision_of(recipe="block").recipe.fp8_quant_fwd_inp.power_2_scale
    r = precision_of(fast_accumulation_wgrad=True).recipe
    assert not r.fp8_gemm_wgrad.use_split_accumulator


@pytest.mark.parametrize("fp8_format", ["e4m3", "hybrid"])
@pytest.mark.parametrize("recipe", ["current", "block"])
def test_knobs_reach_each_kind_of_tensor(recipe: str, fp8_format: str) -> None:
    for power_2, epsilon in itertools.product((None, True, False), (0.0, 0.25)):
        keys = dict(recipe=recipe, power_2_scales=power_2, amax_epsilon=epsilon, fp8_format=fp8_format)
        r = precision_of(**keys).recipe
        wanted = ((recipe == "block") if power_2 is None else power_2, epsilon)
        for kind in ("fwd_inp", "fwd_weight", "bwd_grad"):
            options = getattr(r, f"fp8_quant_{kind}")
            assert (options.power_2_scale, options.amax_epsilon) == wanted
        assert r.fp8_format.value == fp8_format and r.backward_override is None
        assert r.fp8_gemm_wgrad.use_split_accumulator


def test_levels_above_the_recipe_have_what_theirs_reads_of_the_section() -> None:
    """And the default of what the recipe of the run does not have."""
    keys = dict(fp8_format="hybrid", margin=3, amax_history_len=8, fast_accumulation_wgrad=True)
    precision = precision_of(recipe="delayed", **keys)
    made = {
        level: precision.make_recipe(level)
        for level in ("delayed", "current", "block", "bf16_backward", "bf16")
    }
    assert made.pop("bf16") is None
    assert {type(r).__name__ for r in made.values()} == {
        "DelayedScaling",
        "Float8CurrentScaling",
        "Float8BlockScaling",
    }
    assert (made["delayed"].margin, made["delayed"].amax_history_len) == (3, 8)
    assert {r.fp8_format.value for r in made.values()} == {"hybrid"}
    overrides = {level: getattr(r, "backward_override", None) for level, r in made.items()}
    assert overrides == {"delayed": None, "current": None, "block": None, "bf16_backward": "high_precision"}
    fast = [level for level, r in made.items() if not te_fast(r)]
    assert fast == ["block", "bf16_backward"]
    assert (
        made["block"].fp8_quant_fwd_inp.power_2_scale and not made["current"].fp8_quant_fwd_inp.power_2_scale
    )


def te_fast(recipe: Any) -> bool:
    """Whether weight gradients are accumulated fast."""
    return not getattr(
        recipe, "fp8_gemm_wgrad", SimpleNamespace(use_split_accumulator=True)
    ).use_split_accumulator


@pytest.mark.parametrize(
    "keys,message",
    [
        (dict(compute="fp4"), "'fp8', 'bf16', 'fp16' or 'fp32'"),
        (dict(recipe="mxfp8"), "'delayed', 'current', 'block', 'tensorwise' or 'rowwise'"),
        (dict(recipe="block", margin=1), "precision.margin: only the recipe delayed reads it"),
        (dict(amax_epsilon=0.1), "precision.amax_epsilon: only the recipe current and block reads it"),
        (dict(amax_history_len=0), "greater than or equal to 1"),
    ],
)
def test_bad_sections_are_named(keys: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):  # pydantic's, or PrecisionError
        precision_of(**keys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_fp8_without_hardware_is_an_error() -> None:
    with pytest.raises(PrecisionError, match="needs a CUDA device and there is none"):
        Precision(PrecisionConfig(backend="transformer_engine"))
    assert Precision(PrecisionConfig()).te.name == "reference"


@pytest.mark.parametrize("module", ["lm_head", "model.layers.0.mlp.up_proj"])
def test_a_module_that_fails_leaves_no_autocast_behind(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """As where memory runs out in it: the scales of later passes would never move."""
    precision = precision_of(amax_history_len=4)
    model = build_model(small_config(), "te_linear", precision)

    def out_of_memory(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(model.get_submodule(module), "forward", out_of_memory)
        with count_gemms(model, precision) as gemms, pytest.raises(RuntimeError, match="out of memory"):
            step(model)
        assert gemms._module is None, "what comes next is not of this module"
    assert (running.depth, running.enabled) == (0, False)
    step(model)
    assert any((t != 1).any() for key, t in fp8_state(model, precision).items() if key.endswith("fwd.scale"))


@pytest.mark.parametrize(
    ("capability", "allowed"),
    [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), False), ((12, 0), False)],
)
def test_fp8_runs_on_compute_capability_9_alone(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], allowed: bool
) -> None:
    """Whatever asks for it: a training by each package, precision.auto, the demo. bf16 and the CPU reference run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X")
    monkeypatch.setattr(te_backend, "_load_transformer_engine", te_backend._load_reference)
    monkeypatch.setattr(engine, "load_config", Mock(side_effect=FileNotFoundError))
    monkeypatch.setattr(measure, "undisturbed", Mock(side_effect=FileNotFoundError))
    task = Task(small_config(), "te_linear", PrecisionConfig(auto=True), 1, 16)
    for recipe in (*RECIPES, "tensorwise", "rowwise"):
        with nullcontext() if allowed else pytest.raises(PrecisionError, match=r"NVIDIA X has \d+\.\d"):
            Precision(PrecisionConfig(recipe=recipe))
    for begin in (lambda: engine.Engine.load(Path(), "fp8"), lambda: measure.autotune(task, print)):
        with pytest.raises(FileNotFoundError if allowed else PrecisionError):
            begin()
    with pytest.raises(FileNotFoundError):
        engine.Engine.load(Path(), "bf16")
    Precision(PrecisionConfig(compute="bf16"))
    Precision(PrecisionConfig(backend="reference"))


@pytest.mark.parametrize("variant", ["te_linear", "te_layer"])
def test_patterns_keep_modules_out(backend: str, variant: str) -> None:
    precision = precision_of(backend, bf16_modules=["lm_head", "model.layers.0"])
    model = build_model(small_config(), variant, precision)
    with count_gemms(model, precision) as gemms:
        step(model)
    assert gemms.ran and all(name.startswith("model.layers.1.") for name in gemms.ran)
    assert not gemms.problem()
    assert any("model.layers.0" in why for why in gemms.report.kept.values())


def test_the_log_names_up_to_four_modules_of_a_kind() -> None:
    names = [f"layer.{index}" for index in range(5)]
    levels = dict.fromkeys(names[:4], "current")
    report = FP8Report(names, {**dict.fromkeys(names, "one reason"), "lm_head": "another"}, levels)
    assert report.lines("delayed", 3) == [
        "FP8: 3 of 11 GEMM modules ran FP8 (delayed scaling)",
        "  current scaling, by precision.on_trouble: layer.0, layer.1, layer.2, layer.3",
        "  not FP8: layer.0, layer.1, layer.2, layer.3, ... (5 in all): one reason",
        "  not FP8: lm_head: another",
    ]
    assert FP8Report([], {"a": "it is bf16"}, {}).lines(None, 0)[0] == "FP8: 0 of 1 GEMM modules ran FP8"


def test_lm_head_can_run_fp8(backend: str) -> None:
    precision = precision_of(backend, bf16_modules=[])
    model = build_model(small_config(), "te_layer", precision)
    with count_gemms(model, precision) as gemms:
        step(model)
    assert "lm_head" in gemms.ran


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(PrecisionError, match=r"'layers\.7\.\*' matches no module; names are like"):
        build_model(small_config(), "te_linear", precision_of(bf16_modules=["lm_head", "layers.7.*"]))


def test_no_module_left_is_an_error() -> None:
    with pytest.raises(PrecisionError, match="leaves no module to run FP8"):
        build_model(small_config(), "te_linear", precision_of(bf16_modules=["*"]))


def test_dimensions_are_checked_before_the_first_step() -> None:
    """All that do not fit are named at once, in words that precision.bf16_modules takes."""
    config = small_config(intermediate_size=200)
    with pytest.raises(PrecisionError) as error:
        build_model(config, "te_linear", precision_of())
    sizes = {"gate_proj": "(200, 128)", "up_proj": "(200, 128)", "down_proj": "(128, 200)"}
    weights = ", ".join(f"model.layers.*.mlp.{name}.weight {size}" for name, size in sizes.items())
    names = [f"model.layers.*.mlp.{name}" for name in sizes]
    assert str(error.value) == (
        f"{weights}: an FP8 GEMM needs dimensions divisible by 16; change the model's sizes or add "
        f"{json.dumps(names)[1:-1]} to precision.bf16_modules"
    )
    build_model(config, "te_linear", precision_of(bf16_modules=["lm_head", *names]))
    build_model(config, "te_linear", precision_of(compute="bf16"))
    build_model(config, "te_linear", precision_of(bf16_modules=["lm_head", "*.mlp"]))


def test_hf_has_no_fp8() -> None:
    with pytest.raises(PrecisionError, match="variant hf runs no FP8"):
        build_model(small_config(), "hf", precision_of())
    with pytest.raises(ValueError, match="model.variant: 'te' is not one of"):
        build_model(small_config(), "te", precision_of())


def test_fp8_state_survives_the_way_out_and_in(backend: str) -> None:
    precision = precision_of(backend, amax_history_len=4)
    model = build_model(small_config(), "te_layer", precision)
    for seed in range(3):
        step(model, seed)
    saved = snapshot_fp8_state(model, precision)
    assert {t.dtype for t in saved.values()} == {torch.float32}
    scales = torch.cat([t for key, t in saved.items() if key.endswith("scale")])
    assert (scales != 1).any()
    other = build_model(small_config(), "te_layer", precision)
    load_fp8_state(other, precision, saved)
    again = fp8_state(other, precision)
    assert again.keys() == saved.keys() and all(torch.equal(again[k], saved[k]) for k in saved)
    model.zero_grad()
    assert step(other, 5) == step(model, 5)
    key = "model.layers.1.layernorm_mlp.scaling_bwd.amax_history"
    kept = saved.pop(key)
    with pytest.raises(PrecisionError, match=f"saved FP8 state lacks 1 tensors, such as {key}"):
        load_fp8_state(other, precision, saved)
    saved |= {key: kept, "model.layers.9.mlp.scaling_fwd.scale": torch.ones(3)}
    with pytest.raises(PrecisionError, match="model.layers.9.mlp"):
        load_fp8_state(other, precision, saved)


def test_the_scales_that_te_keeps_of_an_attention_are_left_out(backend: str) -> None:
    """A checkpoint of Transformer Engine is read by the reference, as an export does."""
    precision = precision_of(backend, amax_history_len=4)
    model = build_model(small_config(), "te_layer", precision)
    step(model)
    attention: Any = model.get_submodule("model.layers.0.self_attention")
    attention.core_attention.fp8_meta = attention.proj.fp8_meta
    saved = snapshot_fp8_state(model, precision)
    assert not [key for key in saved if "core_attention" in key]
    saved["model.layers.0.self_attention.core_attention.scaling_fwd.scale"] = torch.ones(3)
    load_fp8_state(build_model(small_config(), "te_layer", precision), precision, saved)


def test_fp8_state_that_is_none_is_named(backend: str) -> None:
    """Of a model that has not run, whose state is allocated by what is saved."""
    precision = precision_of(backend)
    model = build_model(small_config(), "te_layer", precision)
    module = "model.layers.0.layernorm_mlp"
    for saved, says in {
        f"{module}.scaling_fwd.amax_history": rf"lacks {module}\.scaling_fwd\.scale",
        f"{module}.scaling.scale": "is neither a scale nor an amax_history",
        f"{module}.scaling_fwd.margin": "is neither a scale nor an amax_history",
        "scale": "names '', which this model does not have",
    }.items():
        with pytest.raises(PrecisionError, match=f"saved FP8 state .*{says}"):
            load_fp8_state(model, precision, {saved: torch.ones(1024, 6)})


def test_stateless_recipes_have_no_state(backend: str) -> None:
    precision = precision_of(backend, recipe="current")
    model = build_model(small_config(), "te_layer", precision)
    step(model)
    assert fp8_state(model, precision) == {}


@pytest.mark.parametrize("variant", ["te_linear", "te_layer"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputation_changes_nothing(backend: str, variant: str, recipe: str) -> None:
    precision = precision_of(backend, recipe=recipe)
    results = []
    for checkpointing in (False, True):
        model = build_model(small_config(), variant, precision, gradient_checkpointing=checkpointing)
        losses = [step(model, seed) for seed in range(3)]
        grads = [p.grad.clone() for p in model.parameters()]
        results.append((losses, grads, snapshot_fp8_state(model, precision)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))
    assert all(torch.equal(results[0][2][key], results[1][2][key]) for key in results[0][2])


@pytest.mark.parametrize("variant", ["hf", "te_linear", "te_layer"])
def test_the_proof_leaves_no_trace(backend: str, variant: str) -> None:
    keys = dict(compute="bf16") if variant == "hf" else {}
    precision = precision_of(backend, **keys)
    model = build_model(small_config(sliding_window=40), variant, precision)
    fresh = build_model(small_config(sliding_window=40), variant, precision)
    lines = prove(model, precision)
    assert any("FP8" in line for line in lines) and any("attention" in line for line in lines)
    assert all(p.grad is None for p in model.parameters())
    assert [step(model, s) for s in range(2)] == [step(fresh, s) for s in range(2)]


def test_the_proof_finds_a_module_that_does_not_run_fp8() -> None:
    precision = precision_of()
    model = build_model(small_config(), "te_linear", precision)
    linear = model.model.layers[0].mlp.up_proj

    def without_fp8(*args: object, **kwargs: object) -> torch.Tensor:
        with precision.te.autocast(enabled=False):
            return type(linear).forward(linear, *args, **kwargs)

    linear.forward = without_fp8
    with pytest.raises(ProofError, match=r"1 modules did not run.*model\.layers\.0\.mlp\.up_proj"):
        prove(model, precision)


def test_the_proof_finds_a_wrong_attention(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that is off by one token is enough."""
    precision = precision_of(backend)
    model = build_model(small_config(sliding_window=40), "te_linear", precision)
    assert max(attention_errors(model.config, precision)) < 1e-2
    right = precision.te.DotProductAttention

    def wrong(*args: object, window_size: tuple[int, int], **kwargs: object) -> torch.nn.Module:
        return right(*args, window_size=(window_size[0] + 1, 0), **kwargs)

    monkeypatch.setattr(precision.te, "DotProductAttention", wrong)
    with pytest.raises(ProofError, match="differs from SDPA"):
        prove(model, precision)


def test_unknown_configs_are_named() -> None:
    with pytest.raises(ValueError, match="'hare_9b' is neither a file.*hare_0.4b, hare_1.1b"):
        load_config("hare_9b")
