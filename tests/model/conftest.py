"""Fixtures and helpers of the tests of model/."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from model.build import build_model
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from model.te_reference import gemm, quantize
from tests.conftest import random_ids, small_config

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU form of this test runs there")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
BEYOND = {E4M3: 464.0, E5M2: 61440.0}  # numbers above it are no rounding of the largest


@pytest.fixture(params=[pytest.param("cpu", marks=NO_GPU), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where a model runs: once on a CPU, once on a GPU."""
    return request.param


def relative(a: Tensor, b: Tensor) -> float:
    """Return the relative error |a - b| / |b| in the Frobenius norm."""
    a, b = a.detach().float(), b.detach().float()
    return float((a - b).norm() / b.norm())


def backward(model: nn.Module, seed: int = 0, **arguments: object) -> Tensor:
    """Run a forward and backward pass on 2 x 64 random tokens, and return the detached loss.

    Args:
        arguments: further arguments of the model.
    """
    ids = random_ids(model.config, 2, 65, seed).to(next(model.parameters()).device)
    loss = model(ids[:, :-1].contiguous(), labels=ids[:, 1:].contiguous(), **arguments).loss
    loss.backward()
    return loss.detach()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of all parameters by name."""
    return {name: p.grad for name, p in model.named_parameters()}


def model_of(
    variant: str = "te_layer",
    precision: dict[str, Any] | None = None,
    fallbacks: dict[str, str] | None = None,
    sizes: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[nn.Module, Precision]:
    """Return a small model in training mode, on the reference unless `precision` says otherwise.

    sizes: changes of `small_config`. options: of `build_model`.
    """
    resolved = Precision(
        PrecisionConfig(**{"backend": "reference", **(precision or {})}), fallbacks=fallbacks
    )
    return build_model(small_config(**(sizes or {})), variant, resolved, **options).train(), resolved


def without_fp8(monkeypatch: pytest.MonkeyPatch, *layouts: str) -> None:
    """The reference's GEMMs of these layouts ("nt" forward, "nn" and "tn" gradients of input and weight) in bf16, as
    Transformer Engine computes gradients where backward_override is set."""
    fp8 = gemm.fp8_matmul

    def matmul(left, right, dtype, *, layout, fast):  # type: ignore[no-untyped-def]
        if layout not in layouts:
            return fp8(left, right, dtype, layout=layout, fast=fast)
        a, b = (quantize.dequantize(*operand, torch.bfloat16) for operand in (left, right))
        return ((a.t() if layout[0] == "t" else a) @ (b.t() if layout[1] == "t" else b)).to(dtype)

    monkeypatch.setattr(gemm, "fp8_matmul", matmul)
