"""Fixtures and helpers of the tests of model/."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import random_ids

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU form of this test runs there")


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
