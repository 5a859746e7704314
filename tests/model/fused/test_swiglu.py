"""SwiGLU: model/fused/swiglu.py against torch, and Transformer Engine's, whose gradient is cast by its kernel."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from model.fp8 import te_backend
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from model.te_reference.recipe import DelayedScaling, Float8CurrentScaling
from tests.model.triton_stand_in import use_stand_in


def check_swiglu(kernel: Callable[..., torch.Tensor], shape: tuple[int, ...]) -> None:
    device = Precision(PrecisionConfig()).device
    torch.manual_seed(0)
    gate, up, dy = (torch.randn(shape, device=device, dtype=torch.bfloat16) * 3 for _ in range(3))
    # none is contiguous: another order of dimensions, a part of each row, each second value
    parts = gate.mT.contiguous().mT, torch.cat([up, dy], -1)[..., : shape[-1]]
    leaves, strided = [t.detach().requires_grad_() for t in parts], dy.repeat_interleave(2, -1)[..., ::2]
    exact = [t.float().requires_grad_() for t in (gate, up)]
    out, wide = kernel(*leaves), nn.functional.silu(exact[0]) * exact[1]
    results = [out, *torch.autograd.grad(out, leaves, strided)]
    for ours, theirs in zip(results, [wide, *torch.autograd.grad(wide, exact, dy.float())], strict=True):
        assert ours.shape == theirs.shape
        # float32 up to the order of its roundings, then one to bf16
        torch.testing.assert_close(ours.float(), theirs, rtol=2**-8, atol=1e-6)


SHAPES = [(2, 33, 80), (1, 1024), (4, 257)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu_equals_torch(shape: tuple[int, ...]) -> None:
    check_swiglu(te_backend.load().swiglu, shape)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU form of this test runs there")
@pytest.mark.parametrize("shape", SHAPES)
def test_the_arithmetic_of_swiglu(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    use_stand_in(monkeypatch)
    kernel = importlib.import_module("model.fused.swiglu").swiglu
    monkeypatch.delitem(sys.modules, "model.fused.swiglu")
    check_swiglu(kernel, shape)


@pytest.mark.gpu
def test_the_gradient_of_swiglu_is_cast_once() -> None:
    """The fused cast is nearer to float32 than the way over bf16, and both copies of the gradient are the same."""
    te_backend.load()  # registers the activation
    kernels = importlib.import_module("transformer_engine_torch")
    tensors = importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor")
    table = importlib.import_module(
        "transformer_engine.pytorch.module.layernorm_mlp"
    )._get_act_func_supported_list
    recipe = Precision(PrecisionConfig(recipe="delayed")).recipe
    cast = table(recipe)[te_backend.FUSED_SWIGLU][2]

    torch.manual_seed(0)
    x = torch.randn(96, 2 * 80, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(96, 80, device="cuda", dtype=torch.bfloat16)

    def quantizer() -> object:
        scale, amax = torch.full((1,), 2000.0, device="cuda"), torch.zeros(1, device="cuda")
        return tensors.Float8Quantizer(scale, amax, kernels.DType.kFloat8E5M2)

    a, b = (t.float().requires_grad_() for t in x.chunk(2, dim=1))
    exact = torch.cat(torch.autograd.grad(nn.functional.silu(a) * b, (a, b), dy.float()), dim=1)
    once_quantizer, twice_quantizer = quantizer(), quantizer()
    _, once = cast(dy, x, once_quantizer)
    _, twice = kernels.bgrad_quantize(kernels.dswiglu(dy, x, None), twice_quantizer)
    once.update_usage(columnwise_usage=True)
    assert torch.equal(once._data.t(), once._transpose)
    errors = [float((made.dequantize().float() - exact).norm() / exact.norm()) for made in (once, twice)]
    assert errors[0] <= errors[1] * 1.001 <= 0.1
    assert float(once_quantizer.amax) == pytest.approx(float(exact.abs().max()), rel=1e-3)


def test_fused_swiglu_is_one_more_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for TE's private table and kernels: its own ways stay, the cast is there for delayed scaling only,
    and a TE without the table keeps its own SwiGLU."""
    table = {"swiglu": ("forward", "backward", None), "gelu": ("f", "b", "c")}
    name = "transformer_engine.pytorch.module.layernorm_mlp"
    module = SimpleNamespace(_get_act_func_supported_list=lambda recipe=None: dict(table))
    kernels = SimpleNamespace(dswiglu=lambda dy, x, quantizer: ("cast", dy, x, quantizer))
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", kernels)
    monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    assert te_backend._register_fused_swiglu() == "swiglu"
    monkeypatch.setitem(sys.modules, name, module)
    fused = te_backend._register_fused_swiglu()
    assert fused == te_backend.FUSED_SWIGLU
    for recipe, casts in ((None, False), (DelayedScaling(), True), (Float8CurrentScaling(), False)):
        found = module._get_act_func_supported_list(recipe)
        assert {key: found[key] for key in table} == table
        forward, backward, cast = found[fused]
        assert (forward, backward, cast is not None) == ("forward", "backward", casts)
    cast = module._get_act_func_supported_list(DelayedScaling())[fused][2]
    usage: dict[str, bool] = {}
    quantizer = SimpleNamespace(set_usage=usage.update)
    assert cast("dy", "x", quantizer) == (None, ("cast", "dy", "x", quantizer))
    assert usage == {"columnwise": False}
