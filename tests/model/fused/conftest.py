"""Fixtures of the tests of the Triton kernels, which need a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def device() -> str:
    return "cuda"


@pytest.fixture
def fused() -> Callable[[str], Any]:
    """fused(name): the module model.fused.name."""
    return lambda name: importlib.import_module(f"model.fused.{name}")
