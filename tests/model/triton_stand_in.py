"""Triton's language on a CPU, as far as the kernels of model/ use it: a kernel is a Python function, called once a
program; a pointer is a tensor with an offset."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


@dataclass
class Pointer:
    """Into a contiguous tensor; a block of them where `offset` is a tensor."""

    tensor: torch.Tensor
    offset: Any = 0

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.tensor, self.offset + offset)

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.tensor.dtype)


class Program:
    number = 0

    def to(self, dtype: Any) -> int:
        return Program.number


def _load(pointer: Pointer, mask: torch.Tensor, other: float) -> torch.Tensor:
    place, mask = torch.broadcast_tensors(torch.as_tensor(pointer.offset), mask)
    values = pointer.tensor.flatten()[place.where(mask, torch.zeros_like(place))]
    return torch.where(mask, values, torch.full_like(values, other))


def _store(pointer: Pointer, values: torch.Tensor, mask: torch.Tensor) -> None:
    place, mask = torch.broadcast_tensors(pointer.offset, mask)
    assert values.dtype == pointer.tensor.dtype
    pointer.tensor.view(-1)[place[mask]] = values.expand(mask.shape)[mask]


def _arange(first: int, end: int) -> torch.Tensor:
    assert (end - first).bit_count() == 1, "Triton has blocks of powers of two alone"
    return torch.arange(first, end)


class Kernel:
    """@triton.jit"""

    def __init__(self, function: Callable[..., None]):
        self.function = function

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int, **constants: Any) -> None:
            tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
            assert all(t.is_contiguous() for t in tensors)  # a kernel sees no strides
            for Program.number in range(*grid):
                self.function(
                    *(Pointer(a) if isinstance(a, torch.Tensor) else a for a in arguments), **constants
                )

        return launch


def use_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that are imported from now on find it in the place of Triton."""
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    vars(language).update(
        constexpr=int, int64=torch.int64, float32=torch.float32, program_id=lambda axis: Program(),
        arange=_arange, cos=torch.cos, sin=torch.sin, sigmoid=torch.sigmoid, where=torch.where,
        load=_load, store=_store,
    )  # fmt: skip
    vars(triton).update(jit=Kernel, language=language, next_power_of_2=lambda n: 1 << (n - 1).bit_length())
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    for module in ("model.fused.qkv_rope", "model.fused.swiglu"):
        monkeypatch.delitem(sys.modules, module, raising=False)
