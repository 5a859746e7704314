"""Triton's language on a CPU, as far as the kernels of model/ use it: a kernel is a Python function, called once a
program; a pointer is a tensor with an offset."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
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


class Number(int):
    """Of a program along one axis."""

    def to(self, dtype: Any) -> int:
        return self


def _load(pointer: Pointer, mask: Any = True, other: float = 0.0) -> torch.Tensor:
    place, mask = torch.broadcast_tensors(torch.as_tensor(pointer.offset), torch.as_tensor(mask))
    values = pointer.tensor.flatten()[place.where(mask, torch.zeros_like(place))]
    return torch.where(mask, values, torch.full_like(values, other))


def _store(pointer: Pointer, values: torch.Tensor, mask: Any = True) -> None:
    place, mask = torch.broadcast_tensors(torch.as_tensor(pointer.offset), torch.as_tensor(mask))
    assert values.dtype == pointer.tensor.dtype
    pointer.tensor.view(-1)[place[mask]] = values.expand(mask.shape)[mask]


def _arange(first: int, end: int) -> torch.Tensor:
    assert (end - first).bit_count() == 1, "Triton has blocks of powers of two alone"
    return torch.arange(first, end)


def _where(condition: Any, a: Any, b: Any) -> torch.Tensor:
    return torch.where(torch.as_tensor(condition), a, b)


def _maximum(a: Any, b: Any) -> torch.Tensor:
    return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))


def _exp(x: Any) -> torch.Tensor:
    return torch.exp(torch.as_tensor(x))


def _cast(value: torch.Tensor, dtype: torch.dtype, bitcast: bool) -> torch.Tensor:
    assert bitcast
    return value.view(dtype)


def _atomic_max(pointer: Pointer, value: torch.Tensor, sem: str) -> None:
    _store(pointer, torch.maximum(_load(pointer), value))


def _div_rn(a: Any, b: Any) -> torch.Tensor:
    return torch.as_tensor(a) / b


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


class Kernel:
    """@triton.jit"""

    program: tuple[int, ...] = ()

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int, **constants: Any) -> None:
            tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
            assert all(t.is_contiguous() for t in tensors)  # a kernel sees no strides
            for Kernel.program in product(*map(range, grid)):
                self.function(
                    *(Pointer(a) if isinstance(a, torch.Tensor) else a for a in arguments), **constants
                )

        return launch


def use_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that are imported from now on find the stand-in in the place of Triton."""
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    vars(language).update(
        constexpr=int, int32=torch.int32, int64=torch.int64, uint8=torch.uint8, float32=torch.float32,
        float8e4nv=torch.float8_e4m3fn, float8e5=torch.float8_e5m2, atomic_max=_atomic_max, div_rn=_div_rn,
        program_id=lambda axis: Number(Kernel.program[axis]), arange=_arange,
        cos=torch.cos, sin=torch.sin, exp=_exp, abs=torch.abs, sigmoid=torch.sigmoid, where=_where,
        log=torch.log, max=torch.amax, sum=torch.sum, maximum=_maximum, trans=torch.t, cast=_cast, load=_load,
        store=_store, zeros=torch.zeros, cdiv=_cdiv,
    )  # fmt: skip
    vars(triton).update(
        jit=Kernel, language=language, next_power_of_2=lambda n: 1 << (n - 1).bit_length(), cdiv=_cdiv
    )
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", language)
