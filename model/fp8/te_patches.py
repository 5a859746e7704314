"""Changes to Transformer Engine (TE) 2.20.2 that make its modules faster or smaller.

They rely on private parts of TE. The numeric check at the start of a run (model/checks/numerics.py) detects wrong
results.
"""

from __future__ import annotations

import importlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

FUSED_SWIGLU, PACKED_SWIGLU = "fused_swiglu", "packed_swiglu"


def apply() -> dict[str, Any]:
    """Patch Transformer Engine, and return the members that this file adds to the namespace of te_backend.load."""
    utils: Any = importlib.import_module("transformer_engine.pytorch.utils")
    _fuse_residual_gradients()
    fused = False
    # otherwise TE allocates no transposed copies, which these patches need
    if not utils.is_non_tn_fp8_gemm_supported():
        _release_rows_of_norm()
        fused = _register_swiglu()
    return {
        "add_residual": _AddResidual.apply,
        "fused_swiglu": FUSED_SWIGLU if fused else "swiglu",
        "packed_swiglu": PACKED_SWIGLU if fused else None,
        "cast_weight": _cast_weight,
        "read_weights": _read_weights,
    }


def quantize_weights_again(modules: Iterable[Any]) -> None:
    """Make modules of TE quantize their weights again in the backward pass instead of keeping the FP8 copies.

    Use this function for ZeRO 3 with gradient_checkpointing "mlp" or precision.fp8_weight_gather. ZeRO 3 gathers the
    weights of a module for both passes and does not reuse FP8 copies. TE provides this mode for FSDP2.
    """
    for module in modules:
        module._is_fsdp2 = True


Reader = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor] | None]


def _read_weights(module: Any, readers: Sequence[Reader]) -> None:
    """Replace the quantization of the weights of a module with `readers`, in the forward and in the backward pass.

    TE creates the quantizers in the first forward pass and asks for them in every pass.
    """
    weight_quantizers = module._get_weight_quantizers

    def with_readers() -> Any:
        quantizers = weight_quantizers()
        for quantizer, read in zip(quantizers, readers, strict=True):
            if quantizer is not None:  # the module runs FP8
                quantizer.quantize = partial(_read_or_quantize, quantizer, read)
        return quantizers

    module._get_weight_quantizers = with_readers


def _read_or_quantize(quantizer: Any, read: Reader, weight: torch.Tensor, **options: Any) -> Any:
    """Return the FP8 weight from `read`, or quantize `weight` if `read` returns None."""
    stored = read(weight)
    if stored is None:
        return type(quantizer).quantize(quantizer, weight, **options)
    codes, scale_inv = stored
    storage: Any = importlib.import_module("transformer_engine.pytorch.tensor.storage").Float8TensorStorage
    return storage(
        data=codes.view(torch.uint8),
        fp8_scale_inv=scale_inv.view(1),
        fp8_dtype=quantizer.dtype,
        fake_dtype=weight.dtype,
    )


def _cast_weight(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Quantize a 1-D tensor to e4m3 with TE's kernel for delayed scaling. Returns the bytes, uint8."""
    dtypes: Any = importlib.import_module("transformer_engine_torch").DType
    tensors: Any = importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor")
    amax = torch.zeros_like(scale.view(1))
    quantizer = tensors.Float8Quantizer(scale.view(1), amax, dtypes.kFloat8E4M3, columnwise=False)
    quantizer.internal = True
    return quantizer(x.view(1, -1))._data.view(-1)


# Of the block whose backward pass is running: the number of the backward pass, and the gradient.
_residual_gradients: list[tuple[int, torch.Tensor]] = []


class _AddResidual(torch.autograd.Function):
    """Add the input and the output of a block that begins with an RMSNorm.

    The input's gradient is the sum of the output's gradient and the gradient from the norm. The backward kernel of the
    norm computes this sum, so this function returns no gradient for the input.
    """

    @staticmethod
    def forward(ctx: Any, block_input: torch.Tensor, block_output: torch.Tensor) -> torch.Tensor:
        return block_input + block_output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        _residual_gradients[:] = [(torch._C._current_graph_task_id(), gradient)]
        return None, gradient


def _fuse_residual_gradients() -> None:
    """Make the RMSNorm backward of LayerNormLinear and LayerNormMLP add the gradient from `_AddResidual`."""
    kernels: Any = importlib.import_module("transformer_engine_torch")
    backward = kernels.rmsnorm_bwd

    def backward_with_residual(gradient: torch.Tensor, x: torch.Tensor, *arguments: Any) -> Any:
        task, residual = _residual_gradients.pop() if _residual_gradients else (None, None)
        # a backward pass that failed leaves its gradient here
        if residual is None or task != torch._C._current_graph_task_id():
            return backward(gradient, x, *arguments)
        return kernels.rmsnorm_bwd_add(gradient, x, residual.view_as(x), *arguments)

    kernels.rmsnorm_bwd = backward_with_residual


def _save(made: Any, columns: torch.Tensor) -> None:
    """Make TE save `columns` for the backward pass instead of the row-wise and transposed data of `made`.

    made: the Float8TensorStorage that a TE module saves.
    """
    # references that outlive the call, or form a cycle, would keep the memory
    reference, held = weakref.ref(made), [columns]

    def prepare_for_saving() -> Any:
        this: Any = reference()
        del this.prepare_for_saving
        this._data, this._transpose = None, held.pop()
        return this.prepare_for_saving()

    made.prepare_for_saving = prepare_for_saving


def _release_rows_of_norm() -> None:
    """Make LayerNormMLP with delayed or current scaling release the row-wise FP8 output of its norm after the forward
    pass.

    TE keeps the row-wise output, although the backward pass uses only the transposed copy.
    """
    module: Any = importlib.import_module("transformer_engine.pytorch.module.layernorm_mlp")
    storage: Any = importlib.import_module("transformer_engine.pytorch.tensor.storage").Float8TensorStorage
    normalize = module.apply_normalization

    def normalize_and_release(*arguments: Any, **options: Any) -> Any:
        made, *statistics = normalize(*arguments, **options)
        if type(made) is storage and made._transpose is not None and not made._transpose_invalid:
            _save(made, made._transpose)
        return made, *statistics

    module.apply_normalization = normalize_and_release


def _register_swiglu() -> bool:
    """Register the SwiGLU in model/fused/swiglu_fp8.py as two activations for LayerNormMLP.

    With delayed scaling, the scale is known in advance, so the kernel that computes the gradient also casts it to FP8.
    With other recipes, TE computes the gradient in bf16, writes it, and reads it back to cast it.

    For the backward pass, FUSED_SWIGLU saves the same tensors as TE. PACKED_SWIGLU saves the input in 8 bits and
    recomputes the output. With recipes other than delayed scaling, both use TE's own SwiGLU.

    TE looks up activations by recipe in a private table of forward, backward and backward-with-cast functions. If the
    table does not exist, nothing is registered, a warning is logged, and the result is False. If the installed
    compilers miscompile the kernels, TE's own SwiGLU is used, and a warning is logged.
    """
    module: Any = importlib.import_module("transformer_engine.pytorch.module.layernorm_mlp")
    table_of = getattr(module, "_get_act_func_supported_list", None)
    if table_of is None:
        version = importlib.import_module("transformer_engine").__version__
        _warn_about_swiglu(
            f"Transformer Engine {version} does not have the table of activation functions that the fused SwiGLU "
            "kernels need"
        )
        return False
    kernels: Any = importlib.import_module("model.fused.swiglu_fp8")

    def backward_with_cast(dy: torch.Tensor, x: torch.Tensor, quantizer: Any) -> tuple[None, Any]:
        return None, kernels.dswiglu(dy, x, quantizer)  # None: no bias, so no gradient of one

    def forward_and_pack(x: torch.Tensor, quantizer: Any) -> Any:
        packed = kernels.empty_packed(x)
        made = kernels.swiglu(x, quantizer, packed)
        _save(made, packed)
        made.restore_from_saved = partial(_recompute_swiglu, weakref.ref(made), kernels, x.shape[-1] // 2)
        x.data = packed.view(x.dtype)  # TE saves x for `backward_with_cast`; this frees its own memory
        return made

    def with_fused_swiglu(recipe: Any = None) -> dict[str, Any]:
        table = table_of(recipe)
        fused = packed = table["swiglu"]
        if recipe is not None and recipe.delayed() and _swiglu_in_fp8_works():
            fused = (kernels.swiglu, fused[1], backward_with_cast)
            packed = (forward_and_pack, fused[1], backward_with_cast)
        return {**table, FUSED_SWIGLU: fused, PACKED_SWIGLU: packed}

    module._get_act_func_supported_list = with_fused_swiglu
    return True


def _recompute_swiglu(reference: Any, kernels: Any, F: int, saved: list[Any]) -> list[Any]:
    """Recompute the transposed output of SwiGLU from the packed input that `_save` saved instead of the output.

    Replaces Float8TensorStorage.restore_from_saved, which takes its own tensors from the start of `saved` and returns
    the remaining tensors.
    """
    made = reference()
    _, packed, scale_inv, *others = saved
    e4m3 = made._fp8_dtype.name.endswith("E4M3")
    made._scale_inv = scale_inv
    made._transpose = kernels.swiglu_transposed(packed, F, scale_inv, e4m3)
    made._transpose_invalid = False
    return others


@lru_cache
def _swiglu_in_fp8_works() -> bool:
    """Return whether the compiled FP8 SwiGLU kernels are correct. Some compilers transpose bytes wrongly.

    The check runs once per process, before the first FP8 pass.
    """
    kernels: Any = importlib.import_module("model.fused.swiglu_fp8")
    dtypes: Any = importlib.import_module("transformer_engine_torch").DType
    tensors: Any = importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor")
    scale, amax = torch.full((1,), 16.0, device="cuda"), torch.zeros(1, device="cuda")
    formats = (dtypes.kFloat8E4M3, dtypes.kFloat8E5M2)
    matches_reference = all(
        kernels.matches_reference(tensors.Float8Quantizer(scale, amax, dtype)) for dtype in formats
    )
    if not matches_reference:
        version = importlib.import_module("triton").__version__
        _warn_about_swiglu(f"Triton {version} miscompiles model/fused/swiglu_fp8.py")
    return matches_reference


def _warn_about_swiglu(reason: str) -> None:
    instead = (
        "Transformer Engine's slower SwiGLU is used instead. Install the versions in requirements-gpu.txt"
    )
    warnings.warn(f"{reason}. {instead}", stacklevel=3)
