"""Intercept the quantization of GEMM operands in Transformer Engine and in its CPU reference implementation.

In Transformer Engine, this module wraps the kernels that cast tensors to FP8, including the kernels that fuse the cast
with a norm or activation. The kernels compute the same results as before. Transformer Engine's own library for this
purpose, nvdlfw-inspect, changes the computation: norms and SwiGLU then write bf16 and separate kernels cast the result,
which changes the numbers with delayed scaling. In addition, its per-step Python code does not run in a replayed CUDA
graph.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from model.checks import pushed
from model.fp8.modules import matrices
from model.fp8.te_backend import replaced
from model.te_reference.quantize import BLOCK


@dataclass(frozen=True)
class Source:
    """The matrix [M, N] that was quantized, or the inputs of the kernel that computed this matrix in float32 and
    quantized it.

    Attributes:
        kind: kind of source, which determines `parts`.
        parts: tensors for each kind:
            "matrix": (x [M, N],).
            "norm": (x [M, N], inverse RMS float32 [M], weight [N]).
            "swiglu": (x [M, 2 N],), gate and up side by side.
            "swiglu_gradient": (x [M, N], gradient of silu(gate) * up [M, N / 2]).
            "loss_gradient": (logits [M, N], labels [M], then from model/fused/cross_entropy.py: statistics float32 [M,
            2], number of labels that are not ignored, upstream gradient).
        rounded: whether the result was rounded to the dtype of x before the cast.
    """

    kind: str
    parts: tuple[torch.Tensor, ...]
    rounded: bool = False


QuantizationCallback = Callable[[tuple[Any, ...], Source, torch.Tensor, torch.Tensor], None]
_notes: list[QuantizationCallback] = []  # callbacks of the open contexts, innermost last


@contextmanager
def intercept_quantizations(te: SimpleNamespace, note: QuantizationCallback) -> Iterator[None]:
    """Call `note(slots, source, codes, scale_inv)` for each operand that `te` quantizes inside this context manager.

    Arguments of `note`, for an operand with M rows and N columns:
        slots: identifiers of the operand; look up each one in `quantizer_slots`.
        source: the tensor that was quantized.
        codes: float8 [M, N].
        scale_inv: float32, one for the tensor or one per tile ([M, N / 128] or [M / 128, N / 128]).

    Kernels that fuse a norm or activation with the cast round to the activation dtype before the cast, except with
    delayed scaling. Codes and scales are always the ones that the GEMM uses.
    """
    intercept = _intercept_reference if te.name == "reference" else _intercept_transformer_engine
    with pushed(_notes, note), intercept(note):
        yield


def report_operand(module: Any, operand: int, source: Source, made: Any) -> None:
    """Pass an operand of `module` to the active callback. Call this for operands that no intercepted kernel quantizes.

    Args:
        operand: operand number (0 input, 1 weight, 2 output gradient), plus 3 for the second GEMM of the module.
        source: the tensor that was quantized.
        made: the quantized operand: (codes, scale_inv), or a Transformer Engine tensor with block scaling. If the
            tensor has only columnwise data, the transpose of `source` is reported, and `source` must be a "matrix".
    """
    if not _notes:
        return
    if not isinstance(made, tuple):
        if made._rowwise_data is None:
            source = Source(source.kind, tuple(part.t() for part in source.parts))
        made = _blocks(made)
    _notes[-1](((id(module), operand),), source, *made)


def _intercept_reference(note: QuantizationCallback) -> AbstractContextManager[None]:
    base: Any = importlib.import_module("model.te_reference.base")
    call = base.Quantizer.__call__

    def intercepted(self: Any, x: torch.Tensor, **options: Any) -> Any:
        made = call(self, x, **options)
        note(((id(self.state), self.column),), Source("matrix", (x.detach(),)), *(made.rows or made.columns))
        return made

    return replaced(base.Quantizer, "__call__", intercepted)


@contextmanager
def _intercept_transformer_engine(note: QuantizationCallback) -> Iterator[None]:
    tensors: Any = importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor")
    modules = [importlib.import_module(name) for name in _KERNELS]

    def casting(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def launched(*arguments: Any, **options: Any) -> Any:
            result = kernel(*arguments, **options)
            taken = _CASTING[name](arguments, result)
            if taken is not None:
                quantizer, weight, kind, parts, made = taken
                rounded = kind != "matrix" and not isinstance(quantizer, tensors.Float8Quantizer)
                if (operand := _operand(made)) is not None:
                    note((id(quantizer), weight), Source(kind, parts, rounded), *operand)
            return result

        return launched

    with ExitStack() as stack:
        for module, name in itertools.product(modules, _CASTING):
            if hasattr(module, name):
                stack.enter_context(replaced(module, name, casting(name, getattr(module, name))))
        yield


def _matrix(x: torch.Tensor) -> torch.Tensor:
    return x.detach().reshape(-1, x.shape[-1])


def _parse_quantize(arguments: Any, result: Any) -> Any:
    """Parse a call to quantize(tensor, quantizer, optional output, ...) -> output, as described at `_CASTING`.

    A cached weight has its own quantizer, so the address of the quantizer identifies the weight.
    """
    tensor, quantizer, *made = arguments
    made = made[0] if made and made[0] is not None else result
    return quantizer, ("weight", tensor.data_ptr()), "matrix", (_matrix(tensor),), made


def _parse_bias_gradient(arguments: Any, result: Any) -> Any:
    """Parse a call to bgrad_quantize(tensor, quantizer) -> (bias gradient, quantized), as described at `_CASTING`."""
    return _parse_quantize(arguments, result[1])


def _parse_rms_norm(arguments: Any, result: Any) -> Any:
    """Parse a call to rmsnorm_fwd, as described at `_CASTING`.

    The signature is rmsnorm_fwd(x, weight, eps, out, quantizer, ...) -> (quantized, mean, inverse RMS [M]).
    """
    x, weight, quantizer = arguments[0], arguments[1].detach(), arguments[4]
    if quantizer is None:
        return None
    return quantizer, None, "norm", (_matrix(x), result[2].detach().view(-1), weight), result[0]


def _parse_swiglu(arguments: Any, result: Any) -> Any:
    """Parse a call to swiglu(x [M, 2 F], quantizer) -> quantized [M, F], as described at `_CASTING`.

    M is the number of rows and F the number of features.
    """
    x, quantizer = arguments[:2]
    return None if quantizer is None else (quantizer, None, "swiglu", (_matrix(x),), result)


def _parse_swiglu_gradient(arguments: Any, result: Any) -> Any:
    """Parse a call to dswiglu(gradient [M, F], x [M, 2 F], quantizer) -> quantized [M, 2 F].

    The result is described at `_CASTING`. x can also be packed (model/fused/swiglu_fp8.py).
    """
    gradient, x, quantizer = arguments[:3]
    if quantizer is None:
        return None
    F = gradient.shape[-1]
    if x.shape[-1] != 2 * F:
        x = importlib.import_module("model.fused.swiglu_fp8").unpack(x, F, gradient.dtype)
    return quantizer, None, "swiglu_gradient", (_matrix(x), _matrix(gradient)), result


# Modules through which callers reach the kernels: Transformer Engine's extension, its re-exports (module/_common.py
# imports these), and this project's kernels.
_KERNELS = (
    "transformer_engine_torch",
    "transformer_engine.pytorch.cpp_extensions",
    "model.fused.swiglu_fp8",
)
# For each kernel that creates FP8 operands, a function that parses the arguments and the result of a call. It returns
# (quantizer, weight key, Source.kind, Source.parts, quantized tensor), or None if the call created no FP8 operand.
_CASTING: dict[str, Callable[[Any, Any], Any]] = {
    "quantize": _parse_quantize,
    "bgrad_quantize": _parse_bias_gradient,
    "rmsnorm_fwd": _parse_rms_norm,
    "swiglu": _parse_swiglu,
    "dswiglu": _parse_swiglu_gradient,
}


def _operand(made: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return (codes, scale_inv) of a Transformer Engine FP8 tensor, or None for other tensors.

    The layout is described in `intercept_quantizations`.
    """
    storage: Any = importlib.import_module("transformer_engine.pytorch.tensor.storage")
    dtypes: Any = importlib.import_module("transformer_engine.pytorch.constants").TE_DType_To_Torch
    if isinstance(made, storage.Float8TensorStorage):
        data = made._data
        if data is None:  # [N, ..., M]
            data = made._transpose.flatten(1).t()
        return data.reshape(-1, data.shape[-1]).view(dtypes[made._fp8_dtype]), made._scale_inv.reshape(())
    if isinstance(made, storage.Float8BlockwiseQTensorStorage) and made._rowwise_data is not None:
        return _blocks(made)
    return None


def _blocks(made: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (codes, scale_inv) of a Transformer Engine tensor with block scaling.

    If the tensor has no row-wise data, return the column-wise data, which are stored as rows of the transpose [N, M].
    """
    dtypes: Any = importlib.import_module("transformer_engine.pytorch.constants").TE_DType_To_Torch
    way = "columnwise" if made._rowwise_data is None else "rowwise"
    data, scale_inv = getattr(made, f"_{way}_data"), getattr(made, f"_{way}_scale_inv")
    codes = data.reshape(-1, data.shape[-1]).view(dtypes[made._fp8_dtype])
    rows, tiles = codes.shape[0], -(-codes.shape[1] // BLOCK)
    # scales are padded to multiples of 4, and for tiles of one row they are stored transposed
    return codes, scale_inv[:, :tiles] if made._is_2D_scaled else scale_inv.t()[:rows, :tiles]


def quantizer_slots(te: SimpleNamespace, module: Any) -> dict[Any, tuple[int, int]]:
    """Map the operand identifiers of `module` to (GEMM number, operand), where operand is 0 for the input, 1 for the
    weight and 2 for the output gradient.

    Call this function after the module's first FP8 forward pass, which creates the quantizers.
    """
    if getattr(module, "fp8_gradients", False):  # it calls report_operand itself
        return {(id(module), operand): (0, operand) for operand in range(3)}
    slots: dict[Any, tuple[int, int]] = {}
    for gemm, weight in enumerate(matrices(module)):
        columns = {
            ("scaling_fwd", 3 * gemm): 0,
            ("scaling_fwd", 3 * gemm + 1): 1,
            ("scaling_bwd", 2 * gemm): 2,
        }
        for (direction, column), operand in columns.items():
            if te.name == "reference":
                if (state := module.fp8_meta.get(direction)) is not None:
                    slots[id(state), column] = gemm, operand
            elif (quantizers := module.quantizers.get(direction)) and column < len(quantizers):
                slots[id(quantizers[column])] = gemm, operand
        slots[id(module), 3 * gemm + 1] = gemm, 1  # report_operand
        if te.name != "reference" and weight.numel():
            slots["weight", weight.data_ptr()] = gemm, 1
    return slots
