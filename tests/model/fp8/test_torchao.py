"""The variant torchao: transformers' model with torchao's FP8, and torch.compile for it and for its bf16 baseline."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import MistralForCausalLM

from model.build import build_model
from model.checks.startup import StartupCheckError, backend_in_use, check_startup
from model.conversion import to_hf_state_dict
from model.fp8 import torchao_fp8
from model.fp8.precision import Precision, PrecisionError
from model.fp8.recipes import PrecisionConfig
from tests.conftest import numbers, random_ids, refused, small_config
from tests.model.conftest import relative

RECIPES = ["tensorwise", "rowwise"]
LINEARS = 7  # of a layer
UP = "model.layers.0.mlp.up_proj"


def precision_of(recipe: str = "tensorwise", backend: str = "reference", **keys: object) -> Precision:
    return Precision(PrecisionConfig(recipe=recipe, backend=backend, **keys))


def build(precision: Precision, variant: str = "torchao", **changes: object) -> nn.Module:
    keys = {key: changes.pop(key) for key in ("compile", "gradient_checkpointing") if key in changes}
    return build_model(small_config(**changes), variant, precision, seed=1, **keys)


def gradients(model: nn.Module, batch: int = 2, tokens: int = 64) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, gradients) of one random batch."""
    ids = random_ids(model.config, batch, tokens + 1).to(model.lm_head.weight.device)
    loss = model(ids[:, :-1], labels=ids[:, 1:], is_first_microbatch=True).loss
    loss.backward()
    found = {name: p.grad.float().clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return float(loss.detach()), found


def errors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[float]:
    """Relative errors in the Frobenius norm, by tensor."""
    assert a.keys() == b.keys()
    return [relative(a[name], b[name]) for name in b]


@pytest.mark.parametrize("recipe", RECIPES)
def test_logits_match_hf_within_fp8_error(recipe: str) -> None:
    loss, ours = gradients(build(precision_of(recipe)))
    true_loss, theirs = gradients(build(precision_of(compute="bf16"), "hf"))
    assert loss != true_loss and loss == pytest.approx(true_loss, rel=2e-3)
    # e4m3 keeps 4 bits and e5m2 3: several percent; a wrong transpose or scale is an error of 1
    found = errors(ours, theirs)
    assert 1e-3 < max(found) < 0.2


@pytest.mark.parametrize("tied", [False, True])
def test_parameter_names_equal_hugging_face(tied: bool) -> None:
    precision = precision_of(bf16_modules=[])
    model = build(precision, tie_word_embeddings=tied)
    assert model.state_dict().keys() == MistralForCausalLM(model.config).state_dict().keys()
    baseline = build(precision_of(compute="bf16"), "hf", tie_word_embeddings=tied)
    ours, theirs = to_hf_state_dict(model), to_hf_state_dict(baseline)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(type(p) is nn.Parameter for p in model.parameters())  # what DeepSpeed flattens
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_startup_check_detects_missing_fp8_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    class ForwardOnly(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, linear):
            ctx.save_for_backward(x, weight)
            return type(linear).forward(linear, x)

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            return gradient @ weight, gradient.flatten(0, -2).T @ x.flatten(0, -2), None

    precision = precision_of()
    model = build(precision)
    linear = model.get_submodule(UP)
    linear.forward = lambda x: ForwardOnly.apply(x, linear.weight, linear)
    with refused(StartupCheckError, code="fp8_gemms") as error:
        check_startup(model, precision)
    assert numbers(error.value) == [14, 26, 28]


def test_missing_torchao_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    torchao_fp8._torchao.cache_clear()
    with refused(PrecisionError, code="not_installed", key="precision.backend"):
        precision_of()


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_emulation_without_cuda() -> None:
    precision = precision_of(backend="auto")
    assert precision.emulated and backend_in_use(build(precision), precision).endswith("(emulated)")
    assert not build(precision).compiled and build(precision, compile=True).compiled


def scaled_mms(step: Callable[[], object]) -> int:
    """How many FP8 GEMMs `step` runs, compiled or not."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
        torch.cuda.synchronize()
    return sum(event.count for event in profiler.key_averages() if event.key == "aten::_scaled_mm")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("compile", [False, True])
def test_gpu_logits_match_hf_within_fp8_error(recipe: str, compile: bool) -> None:
    precision = precision_of(recipe, backend="auto")
    model = build(precision, compile=compile, hidden_size=512, intermediate_size=1024, head_dim=64)
    assert any("warning" in line for line in check_startup(model, precision)) != compile
    baseline = build(precision_of(compute="bf16"), "hf", hidden_size=512, intermediate_size=1024, head_dim=64)
    (loss, ours), (true_loss, theirs) = gradients(model, 4, 256), gradients(baseline, 4, 256)
    assert loss != true_loss and loss == pytest.approx(true_loss, rel=2e-3)
    assert 1e-3 < max(errors(ours, theirs)) < 0.3
    # what is trained runs FP8, not only the probe
    assert scaled_mms(lambda: gradients(model, 4, 256)) == 3 * 2 * LINEARS


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_emulation_equals_gpu(recipe: str) -> None:
    (loss, gpu), (emulated_loss, emulated) = (
        gradients(build(precision_of(recipe, backend=backend), compile=False))
        for backend in ("auto", "reference")
    )
    assert loss == pytest.approx(emulated_loss, rel=1e-3)
    # one rounding of bf16 that falls otherwise moves FP8's, and those compound through the layers
    assert max(errors(gpu, emulated)) < 0.15
