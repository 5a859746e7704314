"""What quantizes the operands of GEMMs, in Transformer Engine and in its reference: seen while it does.

Of Transformer Engine these are the kernels that cast, alone or after a norm or an activation; what they do stays as it
is. Its own library for this, nvdlfw-inspect, changes what runs: with it on, norms and SwiGLU write bf16 and kernels of
their own cast that, which with delayed scaling are other numbers; and what it does each step is Python, which a
replayed CUDA graph does not run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from model.fp8.modules import matrices
from model.te_reference.quantize import BLOCK


@dataclass(frozen=True)
class Source:
    """The matrix [M, N] that was quantized, or what a kernel was given that casts what it computes in float32.

    kind and parts: "matrix", (x [M, N],); "norm", (x [M, N], inverse rms [M] float32, weight [N]); "swiglu",
    (x [M, 2 N],), gate and up side by side; "swiglu_gradient", (x [M, N], gradient of silu(gate) * up [M, N / 2]);
    "loss_gradient", (logits [M, N], labels [M], and of model/fused/cross_entropy.py statistics float32 [M, 2], number
    of labels that count, upstream gradient).
    rounded: what was computed was rounded to the type of x before it was cast.
    """

    kind: str
    parts: tuple[torch.Tensor, ...]
    rounded: bool = False


QuantizationNote = Callable[[tuple[Any, ...], Source, torch.Tensor, torch.Tensor], None]
_notes: list[QuantizationNote] = []  # of the blocks that we are in


@contextmanager
def noted_quantizations(te: SimpleNamespace, note: QuantizationNote) -> Iterator[None]:
    """A block that calls `note` for each operand that `te` quantizes, with

    slots: what identifies the operand, any of which may be among those of `quantizer_slots`. source: what was
    quantized, [M, N]. codes: float8 [M, N]. scale_inv: float32, one or one a tile ([M, N / 128], [M / 128, N / 128]).

    A kernel that norms or activates and casts in one rounds to the type of the activations between the two with all
    recipes but delayed. Codes and scales are always those that are multiplied.
    """
    _notes.append(note)
    try:
        with (_of_the_reference if te.name == "reference" else _of_transformer_engine)(note):
            yield
    finally:
        _notes.pop()


def note_operand(module: Any, operand: int, source: Source, made: Any) -> None:
    """Tell who looks of an operand, numbered as in `quantizer_slots`, that `module` casts itself, with no quantizer
    that is seen. made: (codes, scale_inv), or Transformer Engine's tensor with block scaling; one that has columns
    alone is shown as the transpose of `source`, a "matrix"."""
    if not _notes:
        return
    if not isinstance(made, tuple):
        if made._rowwise_data is None:
            source = Source(source.kind, tuple(part.t() for part in source.parts))
        made = _blocks(made)
    _notes[-1](((id(module), operand),), source, *made)


@contextmanager
def _of_the_reference(note: QuantizationNote) -> Iterator[None]:
    base: Any = importlib.import_module("model.te_reference.base")
    call = base.Quantizer.__call__

    def noted(self: Any, x: torch.Tensor, **options: Any) -> Any:
        made = call(self, x, **options)
        codes, scale_inv = made.rows, made.rows_scale_inv
        if codes is None:
            codes, scale_inv = made.columns, made.columns_scale_inv
        note(((id(self.state), self.column),), Source("matrix", (x.detach(),)), codes, scale_inv)
        return made

    base.Quantizer.__call__ = noted
    try:
        yield
    finally:
        base.Quantizer.__call__ = call


@contextmanager
def _of_transformer_engine(note: QuantizationNote) -> Iterator[None]:
    tensors: Any = importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor")
    before = [
        (module, name, getattr(module, name))
        for module in map(importlib.import_module, _KERNELS)
        for name in _CASTING
        if hasattr(module, name)
    ]

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

    for module, name, kernel in before:
        setattr(module, name, casting(name, kernel))
    try:
        yield
    finally:
        for module, name, kernel in before:
            setattr(module, name, kernel)


def _matrix(x: torch.Tensor) -> torch.Tensor:
    return x.detach().reshape(-1, x.shape[-1])


def _of_quantize(arguments: Any, result: Any) -> Any:
    """(tensor, quantizer, made before or None, ...). A cached weight has a quantizer of its own: its memory tells."""
    tensor, quantizer, *made = arguments
    made = made[0] if made and made[0] is not None else result
    return quantizer, ("weight", tensor.data_ptr()), "matrix", (_matrix(tensor),), made


def _of_bias_gradient(arguments: Any, result: Any) -> Any:
    """(tensor, quantizer) -> (gradient of a bias, quantized)."""
    return _of_quantize(arguments, result[1])


def _of_rms_norm(arguments: Any, result: Any) -> Any:
    """(x, weight, eps, out, quantizer, ...) -> (quantized, mean, inverse rms [M])."""
    x, weight, quantizer = arguments[0], arguments[1].detach(), arguments[4]
    if quantizer is None:
        return None
    return quantizer, None, "norm", (_matrix(x), result[2].detach().view(-1), weight), result[0]


def _of_swiglu(arguments: Any, result: Any) -> Any:
    """(x [M, 2 F], quantizer) -> quantized [M, F]."""
    x, quantizer = arguments[:2]
    return None if quantizer is None else (quantizer, None, "swiglu", (_matrix(x),), result)


def _of_swiglu_gradient(arguments: Any, result: Any) -> Any:
    """(gradient [M, F], x [M, 2 F], quantizer) -> quantized [M, 2 F]."""
    gradient, x, quantizer = arguments[:3]
    if quantizer is None:
        return None
    return quantizer, None, "swiglu_gradient", (_matrix(x), _matrix(gradient)), result


# Where callers take them from: Transformer Engine's, their copies, from which module/_common.py takes its own, and the
# project's.
_KERNELS = (
    "transformer_engine_torch",
    "transformer_engine.pytorch.cpp_extensions",
    "model.fused.swiglu_fp8",
)
# Kernels that make FP8 operands -> (quantizer, mark of a weight, Source.kind, Source.parts, made), None where one made
# none.
_CASTING: dict[str, Callable[[Any, Any], Any]] = {
    "quantize": _of_quantize,
    "bgrad_quantize": _of_bias_gradient,
    "rmsnorm_fwd": _of_rms_norm,
    "swiglu": _of_swiglu,
    "dswiglu": _of_swiglu_gradient,
}


def _operand(made: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(codes, scale_inv), as `noted_quantizations` has them, of Transformer Engine's FP8 tensor; None of another."""
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
    """(codes, scale_inv) of Transformer Engine's tensor with block scaling; of one without rows its columns, which are
    kept as the rows of the transpose [N, M]."""
    dtypes: Any = importlib.import_module("transformer_engine.pytorch.constants").TE_DType_To_Torch
    way = "columnwise" if made._rowwise_data is None else "rowwise"
    data, scale_inv = getattr(made, f"_{way}_data"), getattr(made, f"_{way}_scale_inv")
    codes = data.reshape(-1, data.shape[-1]).view(dtypes[made._fp8_dtype])
    rows, tiles = codes.shape[0], -(-codes.shape[1] // BLOCK)
    # padded to multiples of 4; those of tiles of one row lie the other way round
    return codes, scale_inv[:, :tiles] if made._is_2D_scaled else scale_inv.t()[:rows, :tiles]


def quantizer_slots(te: SimpleNamespace, module: Any) -> dict[Any, tuple[int, int]]:
    """What identifies the operands of `module` -> (number of the GEMM; 0 input, 1 weight, 2 gradient of the output).
    They come into being with its first FP8 forward."""
    if getattr(module, "fp8_gradients", False):  # which tells of them itself
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
        if te.name != "reference" and weight.numel():
            slots["weight", weight.data_ptr()] = gemm, 1
    return slots
