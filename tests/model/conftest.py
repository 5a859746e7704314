"""Triton kernels in tests: on a GPU by Triton, elsewhere by the stand-in."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.model.triton_stand_in import use_stand_in

KERNELS = "qkv_rope swiglu swiglu_fp8 embedding cross_entropy operand_totals".split()
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU form of this test runs there")


@pytest.fixture(params=[pytest.param("cpu", marks=NO_GPU), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where kernels run: once on a CPU, once on a GPU."""
    return request.param


@pytest.fixture
def fused(device: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """fused(name): the module model.fused.name for `device`."""
    if device == "cpu":
        for name in KERNELS:
            monkeypatch.delitem(sys.modules, f"model.fused.{name}", raising=False)
        use_stand_in(monkeypatch)

    def load(name: str) -> Any:
        module = importlib.import_module(f"model.fused.{name}")
        if device == "cpu":
            del sys.modules[f"model.fused.{name}"]
        return module

    return load
