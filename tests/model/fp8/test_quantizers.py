"""model/fp8/quantizers.py: what Transformer Engine's kernels were given and made, on stand-ins without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.fp8.quantizers import Source, noted_quantizations
from model.te_reference.quantize import quantize_blocks

TE = SimpleNamespace(name="transformer_engine")
KERNELS = ("quantize", "bgrad_quantize", "rmsnorm_fwd", "swiglu", "dswiglu")


class Float8TensorStorage:
    def __init__(self, x: Tensor, scale: float) -> None:
        self._data: Tensor | None = (x.float() * scale).to(torch.float8_e4m3fn).view(torch.uint8)
        self._transpose: Tensor | None = None
        self._scale_inv, self._fp8_dtype = torch.tensor([1 / scale]), "e4m3"


class Float8BlockwiseQTensorStorage:
    """As Transformer Engine stores it: scales padded to multiples of 4, of 1 x 128 tiles transposed."""

    def __init__(self, x: Tensor, two: bool) -> None:
        self.codes, self.scale_inv = quantize_blocks(x, (128 if two else 1, 128), torch.float8_e4m3fn)
        self._is_2D_scaled, self._fp8_dtype = two, "e4m3"
        self._rowwise_data: Tensor | None = self.codes.view(torch.uint8)
        scale_inv = self.scale_inv if two else self.scale_inv.t()
        self._rowwise_scale_inv = F.pad(scale_inv, (0, -scale_inv.shape[1] % 4), value=9.0)
        self._columnwise_data: Tensor | None = None
        self._columnwise_scale_inv: Tensor | None = None


class Float8Quantizer:
    scale = 4.0


class Float8CurrentScalingQuantizer:
    scale = 4.0


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with the kernels, which cast what they compute; one of the same with their copies."""

    def cast(x: Tensor, quantizer: Any, made: Any = None, *_: Any) -> Any:
        new = Float8TensorStorage(x, quantizer.scale)
        if made is None:
            return new
        made._data, made._scale_inv = new._data, new._scale_inv

    def rmsnorm_fwd(x: Tensor, weight: Tensor, eps: float, out: Any, quantizer: Any, *_: Any) -> list[Any]:
        inverse = torch.rsqrt(x.float().square().mean(-1) + eps)
        y = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
        return [y if quantizer is None else cast(y, quantizer), None, inverse]

    def swiglu(x: Tensor, quantizer: Any) -> Any:
        gate, up = x.float().chunk(2, -1)
        return F.silu(gate) * up if quantizer is None else cast(F.silu(gate) * up, quantizer)

    def dswiglu(gradient: Tensor, x: Tensor, quantizer: Any) -> Any:
        with torch.enable_grad():
            leaf = x.float().requires_grad_()
            gate, up = leaf.chunk(2, -1)
            (y,) = torch.autograd.grad(F.silu(gate) * up, leaf, gradient.float())
        return y if quantizer is None else cast(y, quantizer)

    own: Any = {"quantize": cast, "bgrad_quantize": lambda x, quantizer: (None, cast(x, quantizer))}
    own |= {"rmsnorm_fwd": rmsnorm_fwd, "swiglu": swiglu, "dswiglu": dswiglu}
    of_tensors = {"Float8Quantizer": Float8Quantizer} | own
    storages = (Float8TensorStorage, Float8BlockwiseQTensorStorage)
    pytorch = "transformer_engine.pytorch"
    contents = {
        "transformer_engine_torch": own,
        "model.fused.swiglu_fp8": {name: own[name] for name in ("swiglu", "dswiglu")},
        f"{pytorch}.cpp_extensions": own,
        f"{pytorch}.tensor.float8_tensor": of_tensors,
        f"{pytorch}.tensor.storage": {storage.__name__: storage for storage in storages},
        f"{pytorch}.constants": {"TE_DType_To_Torch": {"e4m3": torch.float8_e4m3fn}},
    }
    for name in ("transformer_engine", pytorch, f"{pytorch}.tensor", *contents):
        module = ModuleType(name)
        vars(module).update(contents.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    return sys.modules["transformer_engine_torch"]


def numbers(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


Note = tuple[tuple, Source, Tensor, Tensor]


def noted(call: Callable[[], Any]) -> tuple[list[Note], Any]:
    """(slots, source, codes, scale_inv) of all that is quantized in `call`, and its result."""
    found: list[Note] = []
    with noted_quantizations(TE, lambda *given: found.append(given)):
        result = call()
    return found, result


def value(kernels: Any, source: Source) -> Tensor:
    """float32 [M, N] of what a source says."""
    x, *more = source.parts
    if source.kind == "matrix":
        return x.float()
    if source.kind == "norm":
        inverse_rms, weight = more
        y = x.float() * inverse_rms[:, None] * weight.float()
    else:
        y = kernels.swiglu(x, None) if source.kind == "swiglu" else kernels.dswiglu(*more, x, None)
    return y.to(x.dtype).float() if source.rounded else y


@pytest.mark.parametrize("quantizer", [Float8Quantizer(), Float8CurrentScalingQuantizer(), None])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_source_is_what_the_kernel_cast(kernels: ModuleType, kernel: str, quantizer: Any) -> None:
    """Rounded to the type of the activations but with delayed scaling. Without a quantizer nothing is cast."""
    x, other, weight = numbers(64, 32, 1), numbers(64, 16, 2), numbers(1, 32, 3)[0] + 1
    given: dict[str, tuple] = {
        "quantize": (x.view(2, 32, 32), quantizer),
        "bgrad_quantize": (x, quantizer),
        "rmsnorm_fwd": (x.view(2, 32, 32), weight, 1e-5, None, quantizer, None, 0, False),
        "swiglu": (x, quantizer),
        "dswiglu": (other, x, quantizer),
    }
    plain = {
        "quantize": lambda: x,
        "bgrad_quantize": lambda: x,
        "rmsnorm_fwd": lambda: F.rms_norm(x.float(), (32,), weight.float(), 1e-5),
        "swiglu": lambda: kernels.swiglu(x, None),
        "dswiglu": lambda: kernels.dswiglu(other, x, None),
    }[kernel]()
    if quantizer is None:
        if not kernel.endswith("quantize"):  # these always cast
            assert noted(lambda: getattr(kernels, kernel)(*given[kernel]))[0] == []
        return
    ((slots, source, codes, scale_inv),), _ = noted(lambda: getattr(kernels, kernel)(*given[kernel]))
    assert id(quantizer) in slots
    rounds = not kernel.endswith("quantize") and type(quantizer) is not Float8Quantizer
    assert source.rounded == rounds
    expected = plain.bfloat16().float() if rounds else plain.float()
    # one step of bf16 at most, where float32 was rounded
    found = value(kernels, source)
    assert torch.allclose(found, expected, rtol=2**-7 if rounds else 1e-5, atol=1e-6)
    assert codes.shape == plain.shape and codes.dtype == torch.float8_e4m3fn and scale_inv.shape == ()
    assert torch.equal(codes.float(), (plain.float() * 4).to(codes.dtype).float()) and scale_inv == 0.25


@pytest.mark.parametrize("two", [True, False])
def test_scales_of_tiles(kernels: ModuleType, two: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = numbers(256, 384, 4)
    made = Float8BlockwiseQTensorStorage(x, two)
    monkeypatch.setattr(kernels, "quantize", lambda *_: made)
    ((_, source, codes, scale_inv),), _ = noted(lambda: kernels.quantize(x, object()))
    assert torch.equal(value(kernels, source), x.float())
    assert torch.equal(codes.float(), made.codes.float()) and torch.equal(scale_inv, made.scale_inv)
