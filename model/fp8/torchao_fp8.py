"""FP8 by torchao: transformers' own model with its nn.Linear swapped for torchao's, and moments of an optimizer in its
8 bits. Nothing else imports torchao.

Both recipes scale by the tensor at hand and so keep no state: "tensorwise" has one scale a tensor (e4m3; gradients
e5m2), "rowwise" one a row or column of each GEMM's operand (all e4m3, powers of two as scales). Where there is no CUDA
device torchao emulates them: operands are rounded to FP8 and multiplied in float32.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version as installed_version
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from model import install_command
from model.fp8.machine import leave_out
from model.fp8.recipes import STATE_BLOCK
from model.fp8.te_backend import BackendError

# What the wheels of torchao 0.17 are built for (torchao/__init__.py).
MIN_TORCH = (2, 11)


# transformers imports torchao wherever it is installed, and torchao then warns of each of its CUDA libraries that the
# machine cannot load (float8 training uses none of them), and torch of how torchao registers two enums.
leave_out("torchao", "Failed to load")
leave_out("torch.utils._pytree", "<enum ")


@lru_cache
def _torchao() -> SimpleNamespace:
    """What is used of torchao. Raises BackendError: it is not there."""
    try:
        float8: Any = importlib.import_module("torchao.float8")
    except (ImportError, OSError) as error:
        raise BackendError(
            f"torchao cannot be imported ({error}). Install it with {install_command('torchao')}, or choose another "
            "model.variant",
            code="not_installed",
        ) from error
    return SimpleNamespace(
        config=float8.Float8LinearConfig,
        convert=float8.convert_to_float8_training,
        tensor=float8.Float8TrainingTensor,
    )


def version(emulated: bool) -> str:
    """For the log: "torchao 0.17.0", and whether it only emulates."""
    return f"torchao {installed_version('torchao')}" + (" (emulated)" if emulated else "")


def require() -> None:
    """Raises BackendError: there is no torchao, or torch is too old for it."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < MIN_TORCH:
        raise BackendError(
            f"torchao needs torch {MIN_TORCH[0]}.{MIN_TORCH[1]} or newer, and this is {torch.__version__}; update "
            'torch, or set precision.compute to "bf16" with model.variant hf',
            code="old_torch",
        )
    _torchao()


def linear_config(recipe: str, emulated: bool) -> Any:
    """torchao's Float8LinearConfig of `recipe`."""
    return dataclasses.replace(_torchao().config.from_recipe_name(recipe), emulate=emulated)


def convert(model: nn.Module, names: Collection[str], config: Any) -> None:
    """Swap the nn.Linear modules `names` of `model` for FP8 ones that hold the same parameters."""
    _torchao().convert(model, module_filter_fn=lambda _, name: name in names, config=config)


class _NotedGemms(TorchDispatchMode):
    """Calls `note` at each FP8 GEMM: aten._scaled_mm, or, emulated, aten.mm of two of torchao's FP8 tensors."""

    def __init__(self, emulated: bool, note: Callable[[], None]) -> None:
        super().__init__()
        self.emulated, self.note = emulated, note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fp8_operands = any(issubclass(t, _torchao().tensor) for t in types)
        mm, scaled_mm = torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default
        if func is scaled_mm or (self.emulated and fp8_operands and func is mm):
            self.note()
        if fp8_operands:
            return NotImplemented  # torchao's tensors do it, by operations that pass here again
        return func(*args, **(kwargs or {}))


@contextmanager
def noted_gemms(emulated: bool, note: Callable[[], None]) -> Iterator[None]:
    """A block that runs without torch.compile, since compiled code would pass the mode by, and calls `note` at each
    GEMM with FP8 operands."""
    with torch.compiler.set_stance("force_eager"), _NotedGemms(emulated, note):
        yield


# ---------------------------------------------------------------- moments in 8 bits

STATE_DTYPES = {"int8": torch.uint8, "fp8": torch.float8_e4m3fn}


@lru_cache
def _quantization() -> SimpleNamespace:
    """What torchao's low-bit optimizers quantize with. Raises BackendError: it is not there."""
    try:
        of_int8: Any = importlib.import_module("torchao.optim.quant_utils")
        of_fp8: Any = importlib.import_module("torchao.optim.subclass_fp8")
    except (ImportError, OSError) as error:
        raise BackendError(
            f"torchao cannot be imported ({error}). Install it with {install_command('torchao')}, or set "
            "precision.optimizer_states to bf16_remainder",
            code="not_installed",
        ) from error
    return SimpleNamespace(
        numbers=of_int8.create_dynamic_map,
        scaled=of_int8.scale_tensor,
        dequantized=of_int8.dequant_with_qmap,
        fp8=of_fp8.quantize_fp8,
    )


@lru_cache
def _numbers(signed: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The 256 numbers that a byte stands for times its block's largest (Dettmers et al., arXiv:2110.02861), and what
    lies in the middle between them."""
    numbers = torch.tensor(_quantization().numbers(signed=signed), dtype=torch.float32)
    return numbers.to(device), ((numbers[1:] + numbers[:-1]) / 2).to(device)


def quantize_state(
    values: torch.Tensor, dtype: torch.dtype, signed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of `dtype` (STATE_DTYPES) and a float32 scale for each STATE_BLOCK of float32 `values`, 1-D, a multiple of
    it long.

    What is not signed, a second moment, does not become 0: where the first moment is not 0, AdamW's step would be as
    long as that divided by epsilon.
    """
    ao = _quantization()
    if dtype == torch.uint8:
        scaled, scale = ao.scaled(values, STATE_BLOCK)
        codes = torch.bucketize(scaled, _numbers(signed, values.device)[1], out_int32=True, right=True)
        return (codes if signed else codes.clamp_(min=1)).to(dtype), scale
    if not signed:
        info, blocks = torch.finfo(dtype), values.view(-1, STATE_BLOCK)
        least = info.smallest_normal * info.eps / info.max  # of the largest of a block
        values = blocks.clamp(min=blocks.amax(1, keepdim=True) * least).view(-1)
    return ao.fp8(values, STATE_BLOCK)


def dequantize_state(codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> torch.Tensor:
    """Float32 of what `quantize_state` returns."""
    if codes.dtype == torch.uint8:
        return _quantization().dequantized(codes, _numbers(signed, codes.device)[0], scale)
    return (codes.float().view(-1, STATE_BLOCK) * scale.view(-1, 1)).view(-1)
