"""Fixtures of the tests of model/."""

from __future__ import annotations

import pytest
import torch

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU form of this test runs there")


@pytest.fixture(params=[pytest.param("cpu", marks=NO_GPU), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where a model runs: once on a CPU, once on a GPU."""
    return request.param
