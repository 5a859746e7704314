"""Load Transformer Engine if there is a GPU, otherwise the CPU reference implementation.

`load` returns the same namespace of modules for both backends, so that model code is written once. Only this file,
te_patches.py and checks/quantize_hooks.py import transformer_engine.

Before an update of Transformer Engine, check these three files, FLASH_ATTENTION_4 below, the saved activations in
train/planning/memory.py, and the CPU reference (record its test cases again: docs/reference.md).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch

from model.errors import UserError
from model.fp8 import te_patches
from model.fp8.hardware import architecture, emulates_block_scaling
from model.variants import ATTENTION_BACKENDS, FLASH_HEAD_DIMS

MODULES = (
    "Linear",
    "LayerNormLinear",
    "LayerNormMLP",
    "RMSNorm",
    "DotProductAttention",
    "autocast",
)
HOPPER = 9  # major compute capability


class BackendError(UserError, RuntimeError):
    """An error raised when a required backend or package is missing, or the GPU does not support a feature."""

    code = "backend"


def load(name: str = "auto") -> SimpleNamespace:
    """Load a backend and return its modules.

    Args:
        name: "transformer_engine", "reference" (the CPU reference implementation), or "auto", which chooses the
            reference implementation only without a CUDA device.

    Returns: a namespace with MODULES, rotary embeddings, recipes and the following. Functions from model/fused are None
    in the reference implementation.
        checkpoint: recomputes activations, or None in the reference implementation, which keeps them.
        cross_entropy, embedding, rotate, split_and_rotate, swiglu: functions from model/fused.
        add_residual: adds the input and the output of a block that begins with LayerNormLinear or LayerNormMLP.
        fused_swiglu: name of the LayerNormMLP activation whose kernels cast to FP8, or "swiglu" in the reference
            implementation.
        packed_swiglu: name of the LayerNormMLP activation for gradient_checkpointing "mlp", "swiglu" in the reference
            implementation, or None if this GPU or Transformer Engine does not support it.
        linear: computes x @ W.T in the dtype of x and W.
        fp8_gradients: computes both gradients of a linear layer in FP8 (see te_reference/gemm.py).
        cast_weight: `cast_weight(x, scale)` quantizes a 1-D tensor to e4m3 with a float32 scale, and returns the bytes,
            uint8.
        read_weights: `read_weights(module, readers)` makes a module with FP8 GEMMs take its quantized weights from
            `readers`, which has a function for each GEMM. The function gets the weight, and returns its codes, float8
            in the shape of the weight, with the inverse scale, a float32 scalar. If it returns None, the module
            quantizes the weight itself.
        fp8_cross_entropy: the loss in model/head.py, or None in the reference implementation. `forward(logits [M, V],
            labels [M])`, for M tokens and V vocabulary entries, returns (mean loss, statistics). `gradient(logits,
            statistics, upstream)` returns a gradient for `fp8_gradients` that equals the one from `cross_entropy` bit
            for bit.

    Raises BackendError if Transformer Engine cannot run, although it was requested or there is a CUDA device.
    """
    if name == "auto":
        name = "transformer_engine" if torch.cuda.is_available() else "reference"
    return _load_transformer_engine() if name == "transformer_engine" else _load_reference()


@lru_cache
def _load_reference() -> SimpleNamespace:
    reference: Any = importlib.import_module("model.te_reference")
    return SimpleNamespace(
        name="reference",
        version=f"CPU reference of {reference.REFERENCE_OF}",
        **{n: getattr(reference, n) for n in MODULES},
        RotaryPositionEmbedding=reference.RotaryPositionEmbedding,
        apply_rotary_pos_emb=reference.apply_rotary_pos_emb,
        checkpoint=None,
        split_and_rotate=None,
        rotate=None,
        embedding=None,
        cross_entropy=None,
        add_residual=torch.add,
        fused_swiglu="swiglu",
        packed_swiglu="swiglu",
        swiglu=None,
        linear=reference.linear_in_float32,
        read_weights=reference.read_weights,
        cast_weight=reference.cast_weight,
        fp8_gradients=reference.fp8_gradients,
        fp8_cross_entropy=None,
        recipe=reference.recipe,
    )


@lru_cache
def _load_transformer_engine() -> SimpleNamespace:
    if not torch.cuda.is_available():
        raise BackendError(
            "Transformer Engine needs a CUDA device, but none is available; set precision.backend to auto or reference",
            code="no_gpu",
        )
    _prefer_bundled_cudnn()
    try:
        te: Any = importlib.import_module("transformer_engine.pytorch")
        rope: Any = importlib.import_module("transformer_engine.pytorch.attention.rope")
        recipe: Any = importlib.import_module("transformer_engine.common.recipe")
    except (ImportError, OSError) as error:
        raise BackendError(
            f"a CUDA device is available, but transformer_engine cannot be imported ({error}). Run pip "
            "install -r requirements-gpu.txt, or set precision.backend to reference, which is slow",
            code="not_installed",
        ) from error
    return SimpleNamespace(
        name="transformer_engine",
        version=f"Transformer Engine {importlib.import_module('transformer_engine').__version__}",
        **{n: getattr(te, n) for n in MODULES},
        RotaryPositionEmbedding=rope.RotaryPositionEmbedding,
        apply_rotary_pos_emb=rope.apply_rotary_pos_emb,
        checkpoint=te.checkpoint,
        # these import Triton, which torch installs only with CUDA
        split_and_rotate=importlib.import_module("model.fused.qkv_rope").split_and_rotate,
        rotate=importlib.import_module("model.fused.qkv_rope").rotate,
        embedding=importlib.import_module("model.fused.embedding").embedding,
        swiglu=importlib.import_module("model.fused.swiglu").swiglu,
        cross_entropy=importlib.import_module("model.fused.cross_entropy").cross_entropy,
        **te_patches.apply(),
        **_head_products(),
        recipe=recipe,
    )


def _head_products() -> dict[str, Any]:
    """Return the functions `linear`, `fp8_gradients` and `fp8_cross_entropy` for the namespace that `load` returns."""
    kernels: Any = importlib.import_module("transformer_engine_torch")
    tensors: Any = importlib.import_module("transformer_engine.pytorch.tensor.float8_blockwise_tensor")
    general_gemm: Any = importlib.import_module("transformer_engine.pytorch.cpp_extensions").general_gemm

    power_2_scales = emulates_block_scaling(torch.cuda.get_device_capability())

    def quantizer(block_dimensions: int) -> Any:
        return tensors.Float8BlockQuantizer(
            kernels.DType.kFloat8E4M3, rowwise=False, columnwise=True, block_scaling_dim=block_dimensions
        )

    def gradient_quantizer() -> Any:
        made = quantizer(1)
        made.set_usage(rowwise=True)
        # te_reference/gemm.py explains why scales are not powers of two; MXFP8 emulation would drop their mantissa
        made.force_pow_2_scales = power_2_scales
        return made

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return general_gemm(weight, x, layout="TN", out_dtype=x.dtype)[0]

    def gradients(
        gradient: Any, x: torch.Tensor, weight: torch.Tensor, into: Any, note: Any = lambda *_: None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        def cast(operand: int, matrix: torch.Tensor, by: Any) -> Any:
            note(operand, matrix, made := by(matrix))
            return made

        grad = gradient
        if not isinstance(gradient, tensors.Float8BlockwiseQTensor):
            grad = cast(2, gradient.contiguous(), gradient_quantizer())
        of_x = general_gemm(cast(1, weight, quantizer(2)), grad, layout="NN", out_dtype=x.dtype, grad=True)[0]
        where = {"out_dtype": weight.dtype}
        if into is not None:
            where = {"out_dtype": into.dtype, "out": into, "accumulate": True}
        of_weight = general_gemm(cast(0, x, quantizer(1)), grad, layout="NT", grad=True, **where)[0]
        return of_x, (of_weight if into is None else None)

    cross_entropy = _fp8_cross_entropy(gradient_quantizer)
    return {"linear": linear, "fp8_gradients": gradients, "fp8_cross_entropy": cross_entropy}


def _fp8_cross_entropy(quantizer: Callable[[], Any]) -> SimpleNamespace:
    fused: Any = importlib.import_module("model.fused.cross_entropy")

    def gradient(logits: torch.Tensor, statistics: Any, upstream: torch.Tensor) -> Any:
        made_by = quantizer()
        out = made_by.make_empty(logits.shape, dtype=logits.dtype, device=logits.device)
        by_rows, by_columns = (
            (getattr(out, f"_{way}_data"), getattr(out, f"_{way}_scale_inv"))
            for way in ("rowwise", "columnwise")
        )
        powers = made_by.force_pow_2_scales
        fused.gradient_in_fp8(logits, statistics, upstream, *by_rows, *by_columns, power_2_scales=powers)
        return out

    return SimpleNamespace(forward=fused.loss_and_statistics, gradient=gradient)


def _prefer_bundled_cudnn() -> None:
    """Make Transformer Engine (TE) load the cuDNN that torch bundles, unless the user has set CUDNN_HOME.

    TE checks CUDNN_HOME first, and prefers the system's cuDNN to torch's cuDNN. Two versions in one process cause a
    failed import or slow, unfused attention. `cudnn_versions` reports the loaded versions.
    """
    try:
        home = list(importlib.import_module("nvidia.cudnn").__path__)[0]
    except ImportError:
        return  # torch and TE both use the system's cuDNN
    os.environ.setdefault("CUDNN_HOME", home)


# Names of the functions in transformer_engine.pytorch.quantization that check whether the GPU supports a recipe.
AVAILABILITY = {
    "delayed": "is_fp8_available",
    "current": "is_fp8_available",
    "block": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}


def recipe_problem(recipe: str) -> str:
    """Return the reason why Transformer Engine cannot run `recipe` on the current GPU, or "" if it can."""
    quantization: Any = importlib.import_module("transformer_engine.pytorch.quantization")
    available, reason = getattr(quantization, AVAILABILITY[recipe])(return_reason=True)
    return "" if available else reason


def describe_gpu() -> str:
    """Return a log line with the current GPU, its FP8 recipes, and the features that are disabled on this GPU."""
    capability = torch.cuda.get_device_capability()
    found = architecture(capability)
    recipes = [recipe for recipe in AVAILABILITY if not recipe_problem(recipe)]
    untested = [recipe for recipe in recipes if recipe not in found.measured]
    return (
        f"GPU: {torch.cuda.get_device_name()} ({found.name}, compute capability {capability[0]}.{capability[1]}), "
        + (f"FP8 recipes {', '.join(recipes)}" if recipes else "no FP8 support, only bf16")
        + (f"; not tested on this GPU: {', '.join(untested)}" if untested else "")
        + (f"; disabled on this GPU: {', '.join(found.disabled)}" if found.disabled else "")
    )


def require_fp8(te: SimpleNamespace, recipe: str, instead: str = "") -> None:
    """Raise BackendError unless the backend `te` supports FP8 training with `recipe`.

    precision.check_fp8_gpu checks whether the GPU supports FP8.

    Args:
        instead: advice for the error message. By default, the message names the available recipes.
    """
    if te.name != "reference" and (reason := recipe_problem(recipe)):
        others = [other for other in AVAILABILITY if not recipe_problem(other)]
        instead = instead or (f"use {' or '.join(others)}" if others else "set precision.compute to bf16")
        message = f"recipe {recipe} is not available on {torch.cuda.get_device_name()}: {reason.rstrip('.')}; {instead}"
        raise BackendError(message, code="recipe_not_available")


@contextmanager
def isolated_fp8_state(te: SimpleNamespace) -> Iterator[None]:
    """Use a separate FP8 state for the models created inside this context manager.

    The previous state of the process is restored on exit. With the CPU reference implementation, which keeps no
    references to released models, this context has no effect. See also `release_models`.
    """
    if te.name == "reference":
        yield
        return
    quantization: Any = importlib.import_module("transformer_engine.pytorch.quantization")
    manager = quantization.FP8GlobalStateManager
    before = manager.quantization_state
    manager.reset()
    try:
        yield
    finally:
        manager.quantization_state = before


def cudnn_versions() -> tuple[int, int]:
    """Return the cuDNN versions loaded by Transformer Engine and by torch, in cuDNN's encoding (91900 is 9.19.0)."""
    extension: Any = importlib.import_module("transformer_engine_torch")
    return int(extension.get_cudnn_version()), int(torch.backends.cudnn.version() or 0)


@contextmanager
def intercept_gemms(te: SimpleNamespace, note: Callable[[], None]) -> Iterator[None]:
    """Call `note` for each GEMM with two FP8 operands that `te` runs inside this context manager, forward and backward.

    All GEMMs in Transformer Engine call one function, whose first and third arguments are the operands.
    """
    if te.name == "reference":
        module: Any = importlib.import_module("model.te_reference.quantize")
        name, is_fp8 = "accumulate", lambda operand: operand.dtype in module.FP8_MAX
    else:
        module, name = importlib.import_module("transformer_engine_torch"), "generic_gemm"
        storage: Any = importlib.import_module("transformer_engine.pytorch.tensor.storage")
        kinds = (
            storage.Float8TensorStorage,
            storage.Float8BlockwiseQTensorStorage,
            storage.MXFP8TensorStorage,
        )
        is_fp8 = lambda operand: isinstance(operand, kinds)  # noqa: E731
    gemm = getattr(module, name)

    def intercepted(*arguments: Any, **options: Any) -> Any:
        if is_fp8(arguments[0]) and is_fp8(arguments[2]):
            note()
        return gemm(*arguments, **options)

    with replaced(module, name, intercepted):
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set the attribute `name` of `owner` to `value` inside this context manager."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def single_forward(te: SimpleNamespace) -> AbstractContextManager[None]:
    """Return the context manager for the forward pass of a module whose backward pass does not use FP8.

    The context makes activation recomputation (gradient_checkpointing) work. With recomputation, Linear in Transformer
    Engine 2.20.2 also quantizes its weight by columns in the first forward pass but not in the second, although a
    backward pass without FP8 does not use the columns. The second forward pass therefore saves fewer tensors, and the
    backward pass, which looks up saved tensors by position, fails. This context hides the recomputation from Linear.
    Only delayed scaling needs to know about recomputation.
    """
    if te.name == "reference":
        return nullcontext()
    distributed = importlib.import_module("transformer_engine.pytorch.distributed")
    return replaced(distributed, "_IN_ACTIVATION_RECOMPUTE_REGION", False)


_ATTENTION_MODULE = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
# Environment variables before the first choice (None: unset); "auto" restores them.
_attention_environment: dict[str, str | None] = {}


def choose_attention_backend(name: str) -> None:
    """Select Transformer Engine's attention backend for subsequent forward passes.

    Args:
        name: "fused" (cuDNN), "flash" (FlashAttention), "unfused", or "auto" (Transformer Engine's choice, with the
            environment variables set by the user).
    """
    for variable in ATTENTION_BACKENDS["fused"]:
        before = _attention_environment.setdefault(variable, os.environ.get(variable))
        if before is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = before
    os.environ.update(ATTENTION_BACKENDS[name])
    attention: Any = sys.modules.get(_ATTENTION_MODULE)
    if attention is not None:
        # TE keeps its choice while shapes stay the same, and reads the environment only when it chooses
        chosen = attention._attention_backends
        chosen.update(dict.fromkeys(chosen), backend_selection_requires_update=True)


FLASH_PACKAGES = ("flash-attn-4", "flash-attn-3", "flash-attn")


def document_backends() -> tuple[str, ...]:
    """Return the attention backends that support document masks on this GPU, in order of preference.

    Unfused attention is excluded, because it pads each document to the length of the longest document. FlashAttention
    comes first, because its work grows with the number of tokens. cuDNN launches its kernels for each document as if
    the document contained all tokens of the batch. cuDNN's deterministic backward needs a workspace of about 128 bytes
    for each document, head and pair of positions, which Transformer Engine refuses at any relevant size. cuDNN is
    therefore excluded if kernels must be deterministic.
    """
    flash = any(package_version(package) for package in FLASH_PACKAGES)
    deterministic = (
        torch.are_deterministic_algorithms_enabled()
        or os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0"
    )
    return (*(("flash",) if flash else ()), *(() if deterministic else ("fused",)))


def package_version(package: str) -> str | None:
    """Return the version of an installed package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# The version that interprets windows as Transformer Engine 2.20.2 does.
FLASH_ATTENTION_4 = "4.0.0b29"


def fastest_attention(name: str, te: SimpleNamespace, dtype: torch.dtype, head_dim: int) -> str:
    """Return the attention backend to use for the configured backend `name`.

    For "auto", the result is "flash" if FlashAttention-4 is installed and faster (FLASH_HEAD_DIMS, on Hopper GPUs),
    unless the user selects an attention backend with environment variables. In all other cases, the result is `name`.
    If this is "auto", Transformer Engine chooses the backend.
    """
    if name != "auto" or te.name == "reference":
        return name
    users = (_attention_environment.get(v, os.environ.get(v)) for v in ATTENTION_BACKENDS["fused"])
    if dtype not in (torch.bfloat16, torch.float16) or head_dim not in FLASH_HEAD_DIMS or any(users):
        return name
    # not measured on other GPUs, where Transformer Engine may choose FlashAttention kernels that cannot be launched
    if torch.cuda.get_device_capability()[0] != HOPPER:
        return name
    return "flash" if package_version("flash-attn-4") == FLASH_ATTENTION_4 else name


def document_attention(name: str, te: SimpleNamespace, dtype: torch.dtype) -> str:
    """Return the attention backend to use with a document mask for the configured backend `name`.

    For "auto", this is the preferred available backend.

    Raises BackendError if the backend does not support document masks on this GPU, or the dtype is float32, which only
    unfused attention supports.
    """
    if te.name == "reference":
        return name
    offered = document_backends()
    if dtype not in (torch.bfloat16, torch.float16) or not offered or name not in ("auto", *offered):
        raise BackendError(
            f"data.document_mask: model.attention_backend {name} does not support document masks with "
            f"{dtype}. In 16-bit precision, this GPU supports document masks with: "
            f"{' or '.join(offered) or 'none'}. flash needs a FlashAttention package (pip install -r "
            "requirements-gpu.txt), and fused (cuDNN) needs full_determinism false. Change these settings, or set "
            "data.document_mask to false",
            key="data.document_mask",
        )
    return offered[0] if name == "auto" else name


def release_models() -> None:
    """Release the references that Transformer Engine keeps to models in this process. Do not run existing models
    afterwards.

    After each pass, Transformer Engine updates the scales of every module that ever ran with delayed scaling. Without
    this function, released models would keep their memory and slow down later models.
    """
    quantization: Any = sys.modules.get("transformer_engine.pytorch.quantization")
    if quantization is not None:
        quantization.FP8GlobalStateManager.reset()
    # TE keeps a tensor of each weight's shape for weight-gradient GEMMs that add into the main gradient
    module: Any = sys.modules.get("transformer_engine.pytorch.module.base")
    if module is not None:
        module._dummy_wgrads.clear()


NO_ATTENTION = "none yet"


def attention_backend_in_use(te: SimpleNamespace) -> str:
    """Return the attention backend that the last forward pass used.

    The result is "fused ...", "flash ...", "unfused", NO_ATTENTION before the first forward pass, or "torch SDPA" for
    the CPU reference implementation.
    """
    if te.name == "reference":
        return "torch SDPA"
    chosen = importlib.import_module(_ATTENTION_MODULE)._attention_backends
    if chosen["use_flash_attention"]:
        return f"flash ({chosen['flash_attention_backend']})"
    if chosen["use_fused_attention"]:
        return f"fused (cuDNN, {chosen['fused_attention_backend']})"
    return "unfused" if chosen["use_unfused_attention"] else NO_ATTENTION
