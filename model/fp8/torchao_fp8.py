"""Interface to torchao: FP8 Linear modules for transformers' model, and 8-bit optimizer moments.

No other file imports torchao.

Both recipes compute scales from the current tensor, so they have no state. "tensorwise" has one scale per tensor (e4m3,
and e5m2 for gradients). "rowwise" has one power-of-two scale per row or column of each GEMM operand (e4m3). Without a
CUDA device, torchao emulates FP8: operands are rounded to FP8 and multiplied in float32.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version as installed_version
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from model import install_command
from model.fp8.machine import drop_log_messages
from model.fp8.recipes import STATE_BLOCK
from model.fp8.te_backend import BackendError

# transformers imports torchao if it is installed. torchao then warns about each of its CUDA libraries that cannot be
# loaded (float8 training uses none of them), and torch warns about how torchao registers two enums.
drop_log_messages("torchao", "Failed to load")
drop_log_messages("torch.utils._pytree", "<enum ")


@lru_cache
def _torchao(module: str = "float8") -> Any:
    """Import a torchao module by name.

    Raises BackendError if torchao cannot be imported.
    """
    try:
        return importlib.import_module(f".{module}", "torchao")
    except (ImportError, OSError) as error:
        raise BackendError(
            f"torchao cannot be imported ({error}). Install it with {install_command('torchao')}, or choose "
            "another model.variant or precision.optimizer_states",
            code="not_installed",
        ) from error


def version(emulated: bool) -> str:
    """Return the name and version of torchao for the log, with "(emulated)" if FP8 is emulated."""
    return f"torchao {installed_version('torchao')}" + (" (emulated)" if emulated else "")


def require() -> None:
    """Raise BackendError if torchao is not installed."""
    _torchao()


def linear_config(recipe: str, emulated: bool) -> Any:
    """Return torchao's Float8LinearConfig for an FP8 recipe."""
    return dataclasses.replace(_torchao().Float8LinearConfig.from_recipe_name(recipe), emulate=emulated)


def convert(model: nn.Module, names: Collection[str], config: Any) -> None:
    """Replace the nn.Linear modules `names` in `model` with FP8 modules that have the same parameters."""
    _torchao().convert_to_float8_training(
        model, module_filter_fn=lambda _, name: name in names, config=config
    )


class _InterceptGemms(TorchDispatchMode):
    """Torch dispatch mode that calls `note` for each FP8 GEMM.

    These GEMMs are aten._scaled_mm or, with emulation, aten.mm of two torchao FP8 tensors.
    """

    def __init__(self, emulated: bool, note: Callable[[], None]) -> None:
        super().__init__()
        self.emulated, self.note = emulated, note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fp8_operands = any(issubclass(t, _torchao().Float8TrainingTensor) for t in types)
        mm, scaled_mm = torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default
        if func is scaled_mm or (self.emulated and fp8_operands and func is mm):
            self.note()
        if fp8_operands:
            return NotImplemented  # torchao's tensors run it as operations that are dispatched here again
        return func(*args, **(kwargs or {}))


@contextmanager
def intercept_gemms(emulated: bool, note: Callable[[], None]) -> Iterator[None]:
    """Call `note` for each GEMM with FP8 operands that torchao runs inside this context manager.

    torch.compile is disabled inside the context, because a dispatch mode does not see compiled code.
    """
    with torch.compiler.set_stance("force_eager"), _InterceptGemms(emulated, note):
        yield


# ---------------------------------------------------------------- moments in 8 bits

QUANTIZATION = "optim.quant_utils"
STATE_DTYPES = {"int8": torch.uint8, "fp8": torch.float8_e4m3fn}


@lru_cache
def _numbers(signed: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 256 values of an 8-bit code, relative to the block's largest value, and the midpoints between them.

    Source: Dettmers et al., arXiv:2110.02861.
    """
    numbers = torch.tensor(_torchao(QUANTIZATION).create_dynamic_map(signed=signed), dtype=torch.float32)
    return numbers.to(device), ((numbers[1:] + numbers[:-1]) / 2).to(device)


def quantize_state(
    values: torch.Tensor, dtype: torch.dtype, signed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a float32 optimizer moment to 8 bits. Returns the codes, and one float32 scale per STATE_BLOCK elements.

    Unsigned values (second moments) are never rounded to 0. Otherwise, AdamW would divide a nonzero first moment by
    epsilon and take a huge step.

    Args:
        values: float32, 1-D. The length must be a multiple of STATE_BLOCK.
        dtype: dtype of the codes, from STATE_DTYPES.
        signed: whether values can be negative (first moments).
    """
    if dtype == torch.uint8:
        scaled, scale = _torchao(QUANTIZATION).scale_tensor(values, STATE_BLOCK)
        codes = torch.bucketize(scaled, _numbers(signed, values.device)[1], out_int32=True, right=True)
        return (codes if signed else codes.clamp_(min=1)).to(dtype), scale
    if not signed:
        info, blocks = torch.finfo(dtype), values.view(-1, STATE_BLOCK)
        least = info.smallest_normal * info.eps / info.max  # relative to the largest value of a block
        values = blocks.clamp(min=blocks.amax(1, keepdim=True) * least).view(-1)
    return _torchao("optim.subclass_fp8").quantize_fp8(values, STATE_BLOCK)


def dequantize_state(codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> torch.Tensor:
    """Convert the result of `quantize_state` back to float32 values."""
    if codes.dtype == torch.uint8:
        numbers = _numbers(signed, codes.device)[0]
        return _torchao(QUANTIZATION).dequant_with_qmap(codes, numbers, scale)
    return (codes.float().view(-1, STATE_BLOCK) * scale.view(-1, 1)).view(-1)
