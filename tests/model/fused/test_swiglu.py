"""model/fused/swiglu.py and swiglu_fp8.py against torch and float64; the latter in Transformer Engine's module."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from model.fp8 import te_backend
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(2, 33, 80), (1, 1024), (4, 257)])
def test_swiglu_equals_torch(fused: Callable, device: str, shape: tuple[int, ...]) -> None:
    kernel = fused("swiglu").swiglu
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


def check_fp8_swiglu(
    swiglu: Callable[..., Any], dswiglu: Callable[..., Any], quantizer: Callable[[float], Any], M: int, F: int
) -> None:
    """Against float64: each value within half a step of FP8, the neighbour's code in a thousandth at most (float32's
    rounding); the transposed bytes are those of the rows; largest value and inverse scale as they have to be."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    x, above = (torch.randn(2, M, w, generator=generator).bfloat16().to(device) for w in (2 * F, F))
    leaf = x.double().requires_grad_()
    gate, up = leaf.chunk(2, -1)
    y = nn.functional.silu(gate) * up
    exact = (y.detach(), torch.autograd.grad(y, leaf, above.double())[0])
    for call, expected, turned in ((swiglu, exact[0], False), (dswiglu, exact[1], True)):
        largest = float(expected.abs().max())
        maker = quantizer(400.0 / largest)
        made = call(x, maker) if call is swiglu else call(above, x, maker)
        dtype = torch.float8_e4m3fn if maker.dtype.name == "kFloat8E4M3" else torch.float8_e5m2
        codes = made._data.view(dtype)
        assert codes.shape == expected.shape
        assert made._scale_inv.item() == (1 / maker.scale).item()
        assert maker.amax.item() == pytest.approx(largest, rel=1e-6)
        scaled = expected * maker.scale.double()
        step, smallest = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
        assert bool(
            ((codes.double() - scaled).abs() <= scaled.abs().clamp(min=smallest) * step * 0.501).all()
        )
        others = int((codes.float() != scaled.float().to(dtype).float()).sum())
        assert others <= max(1, codes.numel() // 1000)
        if turned:
            assert not made._transpose_invalid
            assert torch.equal(made._transpose.flatten(1), made._data.flatten(0, 1).t())
        else:
            assert made._transpose is None


FP8_SWIGLU = [(16, 80), (4, 16), (36, 48), (136, 1040)]


def te_kernels() -> Any:
    te_backend.load()  # makes it importable
    return importlib.import_module("transformer_engine_torch")


def of_format(name: str, scale: float) -> Any:
    """Transformer Engine's quantizer of delayed scaling."""
    kernels = te_kernels()
    tensors = importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor")
    scales, amax = torch.full((1,), scale, device="cuda"), torch.zeros(1, device="cuda")
    return tensors.Float8Quantizer(scales, amax, getattr(kernels.DType, f"kFloat8{name}"))


def delayed_swiglu() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward with cast, from where LayerNormMLP takes them."""
    te_backend.load()  # registers the activation
    module = importlib.import_module("transformer_engine.pytorch.module.layernorm_mlp")
    forward, _, cast = module._get_act_func_supported_list(Precision(PrecisionConfig()).recipe)[
        te_backend.FUSED_SWIGLU
    ]
    return forward, lambda above, x, quantizer: cast(above, x, quantizer)[1]


@pytest.mark.parametrize("name", ["E4M3", "E5M2"])
@pytest.mark.parametrize(("M", "F"), [*FP8_SWIGLU, (4096, 5632)])
def test_swiglu_in_fp8_is_exact_on_the_gpu(M: int, F: int, name: str) -> None:
    check_fp8_swiglu(*delayed_swiglu(), partial(of_format, name), M, F)


@pytest.mark.parametrize("name", ["E4M3", "E5M2"])
def test_swiglu_in_fp8_saturates_as_transformer_engines_kernels(name: str) -> None:
    """Beyond the largest value that one, both ways; NaN stays NaN and is no largest value; infinities as theirs."""
    kernels = te_kernels()
    swiglu, dswiglu = delayed_swiglu()
    torch.manual_seed(0)
    x = torch.randn(272, 2 * 208, device="cuda").bfloat16()
    above = torch.randn(272, 208, device="cuda").bfloat16()
    x[3, 7], x[5, 300], above[9, 11] = float("nan"), float("inf"), float("-inf")
    dtype, largest = (torch.float8_e4m3fn, 448.0) if name == "E4M3" else (torch.float8_e5m2, 57344.0)
    for ours, theirs, arguments in ((swiglu, kernels.swiglu, (x,)), (dswiglu, kernels.dswiglu, (above, x))):
        quantizers = [of_format(name, largest) for _ in range(2)]
        made, wanted = ours(*arguments, quantizers[0]), theirs(*arguments, quantizers[1])
        codes, others = (t._data.view(dtype).float() for t in (made, wanted))
        assert int((codes.abs() == largest).sum()) > codes.numel() // 50
        assert torch.equal(codes.isnan(), others.isnan()) and 0 < int(codes.isnan().sum()) < 10
        same = codes.nan_to_num() == others.nan_to_num()
        assert float(same.float().mean()) > 0.999
        counts = [int((t.abs() == largest).sum()) for t in (codes, others)]
        assert abs(counts[0] - counts[1]) <= codes.numel() // 1000
        assert quantizers[0].amax.item() == quantizers[1].amax.item() == float("inf")
    assert torch.equal(made._transpose, made._data.t())


def test_the_gradient_of_swiglu_is_cast_once() -> None:
    """The fused cast is nearer to float32 than the way over bf16."""
    kernels = te_kernels()
    torch.manual_seed(0)
    x = torch.randn(96, 2 * 80, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(96, 80, device="cuda", dtype=torch.bfloat16)
    a, b = (t.float().requires_grad_() for t in x.chunk(2, dim=1))
    exact = torch.cat(torch.autograd.grad(nn.functional.silu(a) * b, (a, b), dy.float()), dim=1)
    once = delayed_swiglu()[1](dy, x, of_format("E5M2", 2000.0))
    _, twice = kernels.bgrad_quantize(kernels.dswiglu(dy, x, None), of_format("E5M2", 2000.0))
    errors = [float((made.dequantize().float() - exact).norm() / exact.norm()) for made in (once, twice)]
    assert errors[0] <= errors[1] * 1.001 <= 0.1


@pytest.mark.parametrize("name", ["E4M3", "E5M2"])
def test_wrong_kernels_are_found_before_they_are_used(
    fused: Callable, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = fused("swiglu_fp8")
    dswiglu = module.dswiglu
    assert module.works(of_format(name, 16.0))

    def miscompiled(above: torch.Tensor, x: torch.Tensor, quantizer: Any) -> Any:
        made = dswiglu(above, x, quantizer)
        made._transpose[-1, -1] ^= 1
        return made

    monkeypatch.setattr(module, "dswiglu", miscompiled)
    assert not module.works(of_format(name, 16.0))
