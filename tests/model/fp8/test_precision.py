"""The precision section: which keys go together, and FP8 that is really on, or the run does not start."""

from __future__ import annotations

import itertools
import json
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from model.build import build_model
from model.checks.gemm_counts import count_gemms
from model.checks.startup import check_startup
from model.fp8 import recipes
from model.fp8.modules import gemm_modules
from model.fp8.precision import Precision, PrecisionError, first_key
from model.fp8.recipes import PrecisionConfig
from model.fp8.state import fp8_state, load_fp8_state, snapshot_fp8_state
from model.fp8.te_patches import quantize_weights_again
from model.variants import compiles
from tests.conftest import random_ids, refused, small_config
from tests.model.conftest import backward, model_of

RECIPES = ["delayed", "current", "block"]


@pytest.fixture(params=["reference", pytest.param("transformer_engine", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> str:
    """Tests that take it run on the CPU reference and, where there is a GPU, on Transformer Engine."""
    return request.param


def precision_of(backend: str = "reference", **keys: object) -> Precision:
    return Precision(PrecisionConfig(backend=backend, **keys))


@pytest.mark.parametrize("variant,modules", [("te_linear", 2 * 7), ("te_layer", 2 * 3)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_planned_module_runs_fp8(backend: str, variant: str, modules: int, recipe: str) -> None:
    model, precision = model_of(variant, {"backend": backend, "recipe": recipe})
    with count_gemms(model, precision) as gemms:
        backward(model)
    assert not gemms.problem()
    assert len(gemms.ran) == modules
    # te_layer's MLP is one module with two GEMMs
    assert gemms.forward.total() == (14 if variant == "te_linear" else 8)
    assert gemms.backward == 2 * (gemms.forward.total() + 1)  # and lm_head's gradients
    assert gemms.report.kept.keys() == {"lm_head"}


@pytest.mark.parametrize("fp8_format", ["e4m3", "hybrid"])
@pytest.mark.parametrize("recipe", ["current", "block"])
def test_recipe_keys_apply_to_each_tensor(recipe: str, fp8_format: str) -> None:
    for power_2, epsilon in itertools.product((None, True, False), (0.0, 0.25)):
        keys = dict(recipe=recipe, power_2_scales=power_2, amax_epsilon=epsilon, fp8_format=fp8_format)
        r = precision_of(**keys).recipe
        wanted = ((recipe == "block") if power_2 is None else power_2, epsilon)
        for kind in ("fwd_inp", "fwd_weight", "bwd_grad"):
            options = getattr(r, f"fp8_quant_{kind}")
            assert (options.power_2_scale, options.amax_epsilon) == wanted
        assert r.fp8_format.value == fp8_format and r.backward_override is None
        assert r.fp8_gemm_wgrad.use_split_accumulator
    r = precision_of(margin=2, amax_history_len=16, amax_compute_algo="most_recent").recipe
    assert (r.margin, r.amax_history_len, r.amax_compute_algo, r.reduce_amax) == (2, 16, "most_recent", False)


@pytest.mark.parametrize(
    ("variant", "keys", "compile", "key"),
    [
        ("te_layer", dict(recipe="block", margin=1), None, "precision.margin"),
        ("te_layer", dict(amax_epsilon=0.1), None, "precision.amax_epsilon"),
        ("te_layer", dict(recipe="rowwise"), None, "model.variant"),
        ("te_linear", dict(recipe="current"), True, "model.compile"),
        ("hf", {}, None, "model.variant"),
        ("hf", dict(recipe="rowwise"), None, "model.variant"),
        ("torchao", dict(recipe="delayed"), None, "model.variant"),
        ("torchao", dict(compute="bf16"), None, "model.variant"),
        ("torchao", dict(compute="fp32"), None, "model.variant"),
        ("torchao", dict(recipe="tensorwise", margin=1), None, "precision.margin"),
        ("torchao", dict(recipe="tensorwise", fp8_format="hybrid"), None, "precision.fp8_format"),
        (
            "torchao",
            dict(recipe="tensorwise", backend="transformer_engine"),
            None,
            "precision.backend",
        ),
    ],
)
def test_incompatible_keys_raise(variant: str, keys: dict, compile: bool | None, key: str) -> None:
    with refused(PrecisionError, code="combination", key=key):
        build_model(
            small_config(), variant, precision_of(**{"backend": "reference", **keys}), compile=compile
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_fp8_on_unsupported_gpu_raises() -> None:
    with refused(PrecisionError, code="no_gpu", key="precision.backend"):
        Precision(PrecisionConfig(backend="transformer_engine"))
    assert Precision(PrecisionConfig()).te.name == "reference"


@pytest.mark.parametrize("module", ["lm_head", "model.layers.0.mlp.up_proj"])
def test_failing_module_exits_autocast(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """As where memory runs out in it: the scales of later passes would never move."""
    model, precision = model_of("te_linear", {"amax_history_len": 4})
    with monkeypatch.context() as patch:
        patch.setattr(model.get_submodule(module), "forward", Mock(side_effect=RuntimeError))
        with count_gemms(model, precision), pytest.raises(RuntimeError):
            backward(model)
    backward(model)
    assert any((t != 1).any() for key, t in fp8_state(model, precision).items() if key.endswith("fwd.scale"))


@pytest.mark.parametrize("variant", ["te_linear", "te_layer"])
def test_bf16_modules_patterns(backend: str, variant: str) -> None:
    model, precision = model_of(variant, {"backend": backend, "bf16_modules": ["lm_head", "model.layers.0"]})
    with count_gemms(model, precision) as gemms:
        backward(model)
    assert gemms.ran and all(name.startswith("model.layers.1.") for name in gemms.ran)
    assert not gemms.problem()
    assert "lm_head" in gemms.report.kept
    model, head = model_of(variant, {"backend": backend, "bf16_modules": []})
    with count_gemms(model, head) as gemms:
        backward(model)
    assert "lm_head" in gemms.ran and not gemms.problem()


@pytest.mark.parametrize(("variant", "recipe"), [("te_linear", "delayed"), ("torchao", "tensorwise")])
def test_unsupported_feature_sizes_raise(variant: str, recipe: str) -> None:
    """All weights that do not fit are named at once, as precision.bf16_modules takes them."""
    for patterns, code in ((["lm_head", "layers.7.*"], "no_such_module"), (["*"], "no_fp8_module")):
        with refused(PrecisionError, code=code, key="precision.bf16_modules"):
            build_model(small_config(), variant, precision_of(recipe=recipe, bf16_modules=patterns))
    config = small_config(intermediate_size=200)
    names = [f"model.layers.*.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    with refused(PrecisionError, code="fp8_dimensions", key=names[0]) as error:
        build_model(config, variant, precision_of(recipe=recipe))
    assert json.dumps(names)[1:-1] in str(error.value)
    build_model(config, variant, precision_of(recipe=recipe, bf16_modules=["lm_head", *names]))
    build_model(config, variant, precision_of(recipe=recipe, bf16_modules=["lm_head", "*.mlp"]))


def test_fp8_state_round_trip(backend: str) -> None:
    model, precision = model_of(precision={"backend": backend, "amax_history_len": 4})
    for seed in range(3):
        backward(model, seed)
    saved = snapshot_fp8_state(model, precision)
    other = build_model(small_config(), "te_layer", precision)
    assert backward(other, 5) != backward(model, 5)
    load_fp8_state(other, precision, saved)
    load_fp8_state(model, precision, saved)
    assert backward(other, 5) == backward(model, 5)
    key = "model.layers.1.layernorm_mlp.scaling_bwd.amax_history"
    kept = saved.pop(key)
    with refused(PrecisionError, code="fp8_state", key=key):
        load_fp8_state(other, precision, saved)
    saved |= {key: kept, (unknown := "model.layers.9.mlp.scaling_fwd.scale"): torch.ones(3)}
    with refused(PrecisionError, code="fp8_state", key=unknown):
        load_fp8_state(other, precision, saved)


def test_attention_scales_are_not_saved(backend: str) -> None:
    """A checkpoint of Transformer Engine is read by the reference, as an export does."""
    model, precision = model_of(precision={"backend": backend, "amax_history_len": 4})
    backward(model)
    attention: Any = model.get_submodule("model.layers.0.self_attention")
    attention.core_attention.fp8_meta = attention.proj.fp8_meta
    saved = snapshot_fp8_state(model, precision)
    assert not [key for key in saved if "core_attention" in key]
    saved["model.layers.0.self_attention.core_attention.scaling_fwd.scale"] = torch.ones(3)
    load_fp8_state(build_model(small_config(), "te_layer", precision), precision, saved)


def pass_twice(model: torch.nn.Module, ids: torch.Tensor) -> tuple[float, dict[str, torch.Tensor], int]:
    """The loss, the gradients and the bytes kept for the backward pass, of the second of two passes on a GPU."""
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        before = torch.cuda.memory_allocated()
        loss = model(ids[:, :-1], labels=ids[:, 1:]).loss
        kept = torch.cuda.memory_allocated() - before
        loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}, kept


@pytest.mark.gpu
def test_packed_swiglu_saves_memory_and_changes_gradients_little() -> None:
    """The forward pass is the same. The backward pass sees SwiGLU's input in 8 bits."""
    precision = precision_of("transformer_engine")
    config = small_config(hidden_size=256, intermediate_size=1024, num_hidden_layers=4, vocab_size=512)
    ids = random_ids(config, 16, 513, 0).to("cuda")
    found = []
    for mode in (False, "mlp"):
        model = build_model(config, "te_layer", precision, gradient_checkpointing=mode).train()
        found.append(pass_twice(model, ids))
        del model
    (loss, gradients, kept), (packed_loss, packed_gradients, packed_kept) = found
    assert packed_loss == loss
    tokens, F = 16 * 512, config.intermediate_size
    assert kept - packed_kept > 4 * tokens * F * 2.8  # of 5 bytes: 4 for the input and 1 for the output
    errors = {n: float((packed_gradients[n] - g).norm() / g.norm()) for n, g in gradients.items()}
    own = "model.layers.3.layernorm_mlp.fc2_weight"  # the only GEMM operand that differs is the recomputed output
    assert 0 < errors[own] < 0.04 and max(errors.values()) < 0.15


@pytest.mark.gpu
def test_recomputation_keeps_only_the_inputs_of_the_layers() -> None:
    precision = precision_of("transformer_engine")
    config = small_config(hidden_size=256, num_hidden_layers=8, vocab_size=512)
    ids = random_ids(config, 16, 513, 0).to("cuda")
    kept = {}
    for layers in (4, 8):
        config.num_hidden_layers = layers
        model = build_model(config, "te_layer", precision, gradient_checkpointing=True).train()
        model(ids[:, :-1], labels=ids[:, 1:]).loss.backward()  # creates the FP8 copies of the weights
        model.zero_grad(set_to_none=True)
        before = torch.cuda.memory_allocated()
        loss = model(ids[:, :-1], labels=ids[:, 1:], is_first_microbatch=False).loss
        kept[layers] = torch.cuda.memory_allocated() - before
        del model, loss
    assert (kept[8] - kept[4]) / 4 < 1.25 * 16 * 512 * 256 * 2  # bytes of a layer's input


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["te_linear", "te_layer"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_quantized_again_in_the_backward_pass(variant: str, recipe: str) -> None:
    """The FP8 copies of the weights are not kept, and the results are the same while the weights are."""
    precision = precision_of("transformer_engine", recipe=recipe)
    config = small_config(hidden_size=512, intermediate_size=1024, num_hidden_layers=6)
    ids = random_ids(config, 1, 17, 0).to("cuda")
    found = []
    for again in (False, True):
        model = build_model(config, variant, precision).train()
        pass_twice(model, ids)  # sets the scales
        if again:
            quantize_weights_again(gemm_modules(model, precision).values())
        found.append(pass_twice(model, ids))
        del model
    (loss, gradients, kept), (other_loss, others, other_kept) = found
    assert other_loss == loss
    assert other_kept < kept / 2
    assert all(torch.equal(others[name], gradient) for name, gradient in gradients.items())


@pytest.mark.parametrize("variant", ["hf", "te_linear", "te_layer"])
def test_startup_check_leaves_no_state(backend: str, variant: str) -> None:
    keys = dict(compute="bf16") if variant == "hf" else {}
    precision = precision_of(backend, **keys)
    model = build_model(small_config(sliding_window=40), variant, precision)
    fresh = build_model(small_config(sliding_window=40), variant, precision)
    check_startup(model, precision)
    assert all(p.grad is None for p in model.parameters())
    assert [backward(model, s) for s in range(2)] == [backward(fresh, s) for s in range(2)]


# key -> (another value than the default, the recipes that read it)
KNOBS: dict[str, tuple[Any, str]] = {
    "fp8_format": ("hybrid", "delayed current block mxfp8"),
    "health_steps": (5, "delayed current block"),
    "margin": (1, "delayed"),
    "amax_history_len": (4, "delayed"),
    "amax_compute_algo": ("most_recent", "delayed"),
    "calibration_passes": (0, "delayed"),
    "reduce_amax": (False, "delayed"),
    "power_2_scales": (True, "current block"),
    "amax_epsilon": (0.1, "current block"),
    "fast_accumulation_wgrad": (True, "delayed current"),
    "fp8_weight_gather": (True, "delayed current"),
}


@pytest.mark.parametrize("key", KNOBS)
def test_unused_recipe_key_raises(key: str) -> None:
    value, readers = KNOBS[key]
    for recipe in recipes.RECIPES:
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
def test_optimizer_state_bytes(keys: dict, bytes_: float) -> None:
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
        ({"fp8_weight_gather": True, "reduce_amax": False}, "fp8_weight_gather"),
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
def test_compatible_keys(keys: dict, key: str | None) -> None:
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
def test_compile_default(variant: str, backend: Any, asked: bool | None, compiled: bool) -> None:
    """torchao where a GPU runs it: there FP8 without torch.compile is slower than bf16."""
    assert compiles(variant, PrecisionConfig(recipe="rowwise", backend=backend), asked) == compiled
