"""The numeric check: no false alarm, and every injected fault of a kernel is found."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from model.checks.numerics import KERNELS, choose_kernels
from model.checks.startup import StartupCheckError
from model.config import CONFIGS, load_config, make_config
from model.decoder import MistralBase
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from model.te_layer import split_and_rotate
from model.te_reference import gemm as reference_gemm
from model.variants import SpeedConfig
from tests.conftest import numbers
from tests.model.test_head import double_gradient_of_parts, use_torch_cross_entropy

RECIPES = ("delayed", "current", "block")
VARIANTS = ("te_linear", "te_layer")
_SCALED = {"rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
LLAMA3 = {**_SCALED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {**_SCALED, "rope_type": "yarn"}


def precision_of(recipe: str) -> Precision:
    if recipe in ("bf16", "fp16", "fp32"):
        return Precision(PrecisionConfig(compute=recipe))
    return Precision(replace(PrecisionConfig(compute="fp8"), recipe=recipe))


def disabled(variant: str, recipe: str, batch_size: int = 2, config: Any = None, **options: Any) -> set[str]:
    """Return the optional kernels that the check disables for the tiny model or `config`."""
    speed, lines = choose_kernels(
        config or load_config("tiny"), variant, precision_of(recipe), SpeedConfig(), batch_size, 64, **options
    )
    assert lines
    return {name for name in KERNELS if not getattr(speed, name)}


@pytest.mark.parametrize("kind", ["mistral", "qwen3"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("recipe", [*RECIPES, "bf16", "fp16", "fp32"])
def test_right_results_pass(variant: str, recipe: str, kind: str) -> None:
    config = make_config(load_config("tiny").to_dict() | {"model_type": kind})
    before = torch.get_rng_state()
    assert disabled(variant, recipe, config=config, document_mask=recipe == "current") == set()
    assert torch.equal(before, torch.get_rng_state())


def test_modules_in_bf16_stay_in_bf16() -> None:
    config = load_config("tiny")
    config.intermediate_size = 388  # does not fit FP8
    section = replace(
        precision_of("delayed").config, bf16_modules=["lm_head", "model.layers.*.layernorm_mlp"]
    )
    speed, (line,) = choose_kernels(config, "te_layer", Precision(section), SpeedConfig(), 2, 64)
    assert speed == SpeedConfig() and len(numbers(line)) >= 4
    section = replace(section, bf16_modules=[f"model.layers.{n}.layernorm_mlp" for n in range(4)])
    assert choose_kernels(config, "te_layer", Precision(section), SpeedConfig(), 2, 64)[0] == SpeedConfig()


# ---------------------------------------------------------------- faults of FP8 GEMMs


def drop_mantissa(scale_inv: torch.Tensor) -> torch.Tensor:
    return (scale_inv.view(torch.int32) & -0x00800000).view(torch.float32)


FAULTS: dict[str, Callable[..., Any]] = {
    "scale applied twice": lambda data, scale_inv: (data, 2 * scale_inv),
    "10 % too short": lambda data, scale_inv: (data, 0.9 * scale_inv),
    "10 % too long": lambda data, scale_inv: (data, 1.1 * scale_inv),
    "mantissa dropped": lambda data, scale_inv: (data, drop_mantissa(scale_inv)),
    "transposed bytes": lambda data, scale_inv: (data.flatten().view(data.shape[::-1]).t(), scale_inv),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize("recipe", ["delayed", pytest.param("current", marks=pytest.mark.slow)])
def test_a_fault_in_each_gemm_is_found(
    fault: str, layout: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = reference_gemm.fp8_matmul

    def wrong(left: Any, other: Any, dtype: Any, **options: Any) -> torch.Tensor:
        return right(FAULTS[fault](*left) if options["layout"] == layout else left, other, dtype, **options)

    monkeypatch.setattr(reference_gemm, "fp8_matmul", wrong)
    with pytest.raises(StartupCheckError) as error:
        disabled("te_layer", recipe)
    assert error.value.code == "wrong_numbers"


@pytest.mark.parametrize("tied", [False, True])
def test_a_fault_in_later_parts_of_the_head_is_found(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    use_torch_cross_entropy(monkeypatch)
    config = load_config("tiny")
    config.tie_word_embeddings = tied
    assert disabled("te_layer", "delayed", batch_size=256, config=config) == set()

    double_gradient_of_parts(monkeypatch)
    assert disabled("te_layer", "delayed", batch_size=256, config=config) == {"fused_cross_entropy"}
    assert disabled("te_layer", "delayed", batch_size=2, config=config) == set()  # one part


@pytest.mark.parametrize("tied", [False, True])
def test_a_fault_of_main_grad_is_found(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    te, config = precision_of("delayed").te, load_config("tiny")
    config.tie_word_embeddings = tied
    right = te.fp8_gradients

    def shrinks(gradient: Any, x: Any, weight: Any, into: Any, *others: Any) -> Any:
        of_x, of_weight = right(gradient, x, weight, into, *others)
        if into is not None and into is getattr(weight, "main_grad", None):
            into *= 0.5
        return of_x, of_weight

    monkeypatch.setattr(te, "fp8_gradients", shrinks)
    assert disabled("te_layer", "delayed", config=config) == {"main_grad"}


@pytest.mark.parametrize("rope", [LLAMA3, YARN], ids=["llama3", "yarn"])
def test_wrong_rope_scaling_is_found(rope: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("tiny")
    config.rope_parameters = rope
    assert disabled("te_layer", "bf16", config=config) == set()
    monkeypatch.setattr("model.config.rope_parameters", lambda _: rope | {"rope_type": "default"})
    with pytest.raises(StartupCheckError):
        disabled("te_layer", "bf16", config=config)


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_across_documents_is_found(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disabled(variant, "bf16", document_mask=True) == set()
    forward = MistralBase.forward
    monkeypatch.setattr(
        MistralBase, "forward", lambda *given, documents, **options: forward(*given, **options)
    )
    with pytest.raises(StartupCheckError):
        disabled(variant, "bf16", document_mask=True)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_outdated_weight_copy_is_found(variant: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All passes use the FP8 weights of the first one."""
    forward = MistralBase.forward

    def stale(self: Any, *arguments: Any, is_first_microbatch: bool | None = None, **options: Any) -> Any:
        first = is_first_microbatch and not hasattr(self, "was_called")
        self.was_called = True
        return forward(self, *arguments, is_first_microbatch=first, **options)

    monkeypatch.setattr(MistralBase, "forward", stale)
    with pytest.raises(StartupCheckError):
        disabled(variant, recipe)


# ---------------------------------------------------------------- faults of optional kernels


class _Doubled(torch.autograd.Function):
    """The identity, with a gradient twice as large."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * gradient


def double(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with a doubled gradient of its first floating-point argument."""

    def doubled(*arguments: Any, **options: Any) -> Any:
        changed = next(i for i, a in enumerate(arguments) if torch.is_tensor(a) and a.is_floating_point())
        given = [_Doubled.apply(a) if i == changed else a for i, a in enumerate(arguments)]
        return function(*given, **options)

    return doubled


def rotate(te: Any) -> Callable[..., Any]:
    return lambda x, freqs: te.apply_rotary_pos_emb(x, freqs, tensor_format="bshd", fused=True)


# name in the namespace of modules: (switch of "speed", variant, the right function in torch operations)
OPTIONAL: dict[str, tuple[str, str, Callable[[Any], Callable[..., Any]]]] = {
    "rotate": ("fused_rope", "te_linear", rotate),
    "split_and_rotate": (
        "fused_rope",
        "te_layer",
        lambda te: lambda *given: split_and_rotate(te.apply_rotary_pos_emb, *given),
    ),
    "swiglu": ("fused_swiglu", "te_linear", lambda te: lambda gate, up: F.silu(gate) * up),
    "embedding": ("fused_embedding", "te_layer", lambda te: F.embedding),
    "cross_entropy": (
        "fused_cross_entropy",
        "te_layer",
        lambda te: lambda logits, labels: F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()),
    ),
}


@pytest.mark.parametrize("name", OPTIONAL)
def test_only_the_wrong_optional_kernel_is_disabled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    te = precision_of("bf16").te
    switch, variant, make = OPTIONAL[name]
    for other, (_, _, make_other) in OPTIONAL.items():
        monkeypatch.setattr(te, other, make_other(te))
    assert disabled(variant, "bf16") == set()
    monkeypatch.setattr(te, name, double(make(te)))
    assert disabled(variant, "bf16") == {switch}


def test_two_wrong_kernels_are_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    te = precision_of("bf16").te
    monkeypatch.setattr(te, "embedding", double(F.embedding))
    monkeypatch.setattr(te, "rotate", double(rotate(te)))
    assert disabled("te_linear", "delayed") == {"fused_embedding", "fused_rope"}


# ---------------------------------------------------------------- on a GPU


def change(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, fault: Callable[[list[Any], Any], Any]
) -> None:
    """Call `fault(arguments, result)` after each call of a function of `module`."""
    function = getattr(module, name)

    def changed(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        fault([*arguments], result)
        return result

    monkeypatch.setattr(module, name, changed)


# (switch that is disabled, variant, module of model/fused, function, fault)
KERNEL_FAULTS = {
    "cross entropy, scale of rows": (
        "fused_cross_entropy",
        "te_layer",
        "cross_entropy",
        "gradient_in_fp8",
        lambda a, _: a[4].mul_(2),
    ),
    "cross entropy, scale of columns": (
        "fused_cross_entropy",
        "te_layer",
        "cross_entropy",
        "gradient_in_fp8",
        lambda a, _: a[6].mul_(2),
    ),
    "cross entropy, mantissa": (
        "fused_cross_entropy",
        "te_layer",
        "cross_entropy",
        "gradient_in_fp8",
        lambda a, _: a[6].copy_(drop_mantissa(a[6])),
    ),
    "cross entropy, transposed": (
        "fused_cross_entropy",
        "te_layer",
        "cross_entropy",
        "gradient_in_fp8",
        lambda a, _: a[5].copy_(a[3].reshape(a[5].shape)),
    ),
    "cross entropy in bf16": (
        "fused_cross_entropy",
        "te_linear",
        "cross_entropy",
        "gradient_in_place",
        lambda a, r: r.mul_(2),
    ),
    "SwiGLU, forward scale": (
        "fused_swiglu",
        "te_layer",
        "swiglu_fp8",
        "swiglu",
        lambda a, r: r._scale_inv.mul_(2),
    ),
    "SwiGLU, backward scale": (
        "fused_swiglu",
        "te_layer",
        "swiglu_fp8",
        "dswiglu",
        lambda a, r: r._scale_inv.mul_(2),
    ),
    "SwiGLU, mantissa": (
        "fused_swiglu",
        "te_layer",
        "swiglu_fp8",
        "dswiglu",
        lambda a, r: r._scale_inv.copy_(drop_mantissa(r._scale_inv * 1.9)),
    ),
    "SwiGLU, transposed": (
        "fused_swiglu",
        "te_layer",
        "swiglu_fp8",
        "dswiglu",
        lambda a, r: r._transpose.copy_(r._data.reshape(r._transpose.shape)),
    ),
    "embedding": ("fused_embedding", "te_linear", "embedding", "sum_by_row", lambda a, r: r.mul_(2)),
    "rotation": ("fused_rope", "te_linear", "qkv_rope", "_launch_rotate", lambda a, r: r.mul_(2)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("fault", KERNEL_FAULTS)
def test_a_fault_in_each_kernel_is_found_on_a_gpu(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    switch, variant, module, function, change_result = KERNEL_FAULTS[fault]
    recipe = "bf16" if fault == "cross entropy in bf16" else "delayed"
    assert disabled(variant, recipe) == set()
    change(monkeypatch, importlib.import_module(f"model.fused.{module}"), function, change_result)
    assert disabled(variant, recipe) == {switch}


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_fault_of_fp8_gemms_is_found_on_a_gpu(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("transformer_engine.pytorch")  # registers transformer_engine_torch
    change(
        monkeypatch,
        importlib.import_module("transformer_engine_torch"),
        "generic_gemm",
        lambda _, result: result[0].mul_(2),
    )
    with pytest.raises(StartupCheckError):
        disabled("te_layer", recipe)


@pytest.mark.gpu
@pytest.mark.parametrize("config", sorted(path.stem for path in CONFIGS.glob("*.json")))
def test_shipped_models_pass_on_gpu(config: str) -> None:
    sections = [precision_of(recipe).config for recipe in (*RECIPES, "bf16")]
    sections.append(replace(sections[0], fp8_format="hybrid"))
    for variant in VARIANTS:
        for section in sections:
            speed, _ = choose_kernels(
                load_config(config), variant, Precision(section), SpeedConfig(), 16, 2048
            )
            assert speed == SpeedConfig(), section
