"""An FP8 GEMM with both gradients, optionally preceded by RMSNorm or SwiGLU (CPU reference implementation).

With delayed scaling, the output of the norm or SwiGLU is quantized from float32. With current and block scaling, this
output is rounded to the activation dtype first. The gradient of SwiGLU is always rounded to the activation dtype before
quantization.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.te_reference.base import (
    INPUT,
    WEIGHT,
    FP8Call,
    FP8Module,
    Quantizer,
    check_fp8_shapes,
    update_scales,
)
from model.te_reference.quantize import BLOCK, MX_BLOCK, QuantizedMatrix, fp8_matmul, quantize_blocks
from model.te_reference.recipe import MXFP8BlockScaling


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute RMSNorm of x [..., H] over the last dimension, y = x / sqrt(mean(x^2) + eps) * weight.

    Returns y [..., H] and 1 / rms [..., 1], both in float32.
    """
    x = x.float()
    inverse_rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * inverse_rms).mul_(weight.float()), inverse_rms


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, inverse_rms: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the RMSNorm gradients for x and weight in float32, and round them to the dtypes of x and weight."""
    grad, y = grad.float(), x.float() * inverse_rms
    grad_weight = (grad * y).flatten(0, -2).sum(0)
    grad_y = grad * weight.float()
    grad_x = (grad_y - y * (grad_y * y).mean(-1, keepdim=True)) * inverse_rms
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, inverse_rms = rms_norm_forward(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse_rms)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *rms_norm_backward(grad, *ctx.saved_tensors), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute RMSNorm over the last dimension of x, rounded once to the dtype of x. Gradients are supported."""
    return _RMSNorm.apply(x, weight, eps)


def _swiglu_forward(x: Tensor) -> Tensor:
    """Compute SwiGLU in float32: silu(first half) * second half of x [..., 2 F]. Returns [..., F], where F is the
    feature size.
    """
    gate, up = x.float().chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Compute the SwiGLU gradient for the input x [..., 2 F] (feature size F) in float32, and round it to the dtype of
    x.
    """
    gate, up = x.float().chunk(2, dim=-1)
    grad = grad.float()
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    grad_gate = (silu * (1 - sigmoid)).add_(sigmoid).mul_(grad).mul_(up)
    return torch.cat((grad_gate, silu.mul_(grad)), dim=-1).to(x.dtype)


class SwiGLU(torch.autograd.Function):
    """Autograd function for silu(first half) * second half, computed in float32 and rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _swiglu_forward(x).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return _swiglu_backward(grad, *ctx.saved_tensors)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        wide, grad_x, grad_weight = grad.float(), None, None
        if ctx.needs_input_grad[0]:
            grad_x = (wide @ weight.float()).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (wide.flatten(0, -2).t() @ x.float().flatten(0, -2)).to(weight.dtype)
        return grad_x, grad_weight


def linear_in_float32(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x @ W.T and its gradients in float32, each rounded once to the dtype of x and W.

    On CPUs without 16-bit instructions, torch computes 16-bit products much more slowly than float32 products.
    """
    return F.linear(x, weight) if x.dtype == torch.float32 else _Linear.apply(x, weight)


def _gradient_gemm(call: FP8Call, gemm: str, left: Any, right: Any, dtype: torch.dtype) -> Tensor:
    """Compute left @ right for the input gradient ("dgrad"), or left.T @ right for the weight gradient ("wgrad").

    Each operand is a pair (matrix, inverse scale). Matrices are in FP8, or unquantized for a high-precision backward
    pass.
    """
    if call.high_precision_backward:
        return (left[0] if gemm == "dgrad" else left[0].t()) @ right[0]
    layout = {"dgrad": "nn", "wgrad": "tn"}[gemm]
    return fp8_matmul(left, right, dtype, layout=layout, fast=call.accumulates_fast(gemm))


class _FP8Gemm(torch.autograd.Function):
    """Autograd function for `f(x) @ W.T` with FP8 operands, where `f` is RMSNorm, SwiGLU or the identity.

    Shapes (M rows, K input features, N output features): x is [M, K], or [M, 2 K] with SwiGLU; norm_weight is [K] or
    None; W is [N, K]. Saves f(x) and W for the backward pass in FP8, or unquantized for a high-precision backward pass.
    Also saves x unless f is the identity.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor | None,
        weight: Tensor,
        weight_fp8: QuantizedMatrix,
        call: FP8Call,
        gemm: int,
        eps: float,
        swiglu: bool,
    ) -> Tensor:
        quantizer, exact = call.quantizer(INPUT, gemm), call.high_precision_backward
        columnwise = ctx.needs_input_grad[2] and not exact
        source, inverse_rms = x, None
        if norm_weight is not None:
            y, inverse_rms = rms_norm_forward(x, norm_weight, eps)
            operand = quantizer.fused(y, x.dtype, columnwise=columnwise)
            source = y.to(x.dtype) if exact else x
        elif swiglu:
            operand = quantizer.fused(
                _swiglu_forward(x), x.dtype, columnwise=columnwise, amax_before_rounding=True
            )
        else:
            operand = quantizer(x, columnwise=columnwise)
        before = x if swiglu or norm_weight is not None else None
        # the weight gradient contracts over the rows, the input gradient over the outputs
        operands = (source, None, weight, None)
        if not exact:
            operands = (*(operand.columns or (None, None)), *(weight_fp8.columns or (None, None)))
        ctx.save_for_backward(before, norm_weight, inverse_rms, *operands)
        ctx.call, ctx.gemm, ctx.swiglu, ctx.dtype = call, gemm, swiglu, x.dtype
        fast = call.accumulates_fast("fprop")
        return fp8_matmul(operand.rows, weight_fp8.rows, x.dtype, layout="nt", fast=fast)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        before, norm_weight, inverse_rms, *operands = ctx.saved_tensors
        call, x, weight = ctx.call, operands[:2], operands[2:]
        needs_weight, needs_input = ctx.needs_input_grad[2], any(ctx.needs_input_grad[:2])
        rows: Any = (grad_output, None)
        columns = rows
        if not call.high_precision_backward:
            quantizer = Quantizer(call.backward_state, 2 * ctx.gemm, "bwd_grad")
            grad = quantizer(grad_output, rowwise=needs_input, columnwise=needs_weight)
            rows, columns = grad.rows, grad.columns
        grad_x = grad_norm = grad_weight = None
        if needs_input:
            grad_x = _gradient_gemm(call, "dgrad", rows, weight, ctx.dtype)
            if norm_weight is not None:
                grad_x, grad_norm = rms_norm_backward(grad_x, before, norm_weight, inverse_rms)
            elif ctx.swiglu:
                grad_x = _swiglu_backward(grad_x, before)
        if needs_weight:
            grad_weight = _gradient_gemm(call, "wgrad", columns, x, ctx.dtype)
        # this is the module's last backward: that of its first GEMM, or the only one needed
        if call.moves_backward_scales and (ctx.gemm == 0 or not needs_input):
            update_scales(forward=False)
        return grad_x, grad_norm, grad_weight, None, None, None, None, None


def fp8_gemm(
    module: FP8Module,
    call: FP8Call,
    x: Tensor,
    weight: Tensor,
    is_first_microbatch: bool | None,
    *,
    gemm: int = 0,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    swiglu: bool = False,
) -> Tensor:
    """Compute `f(x) @ W.T` with FP8 operands, where `f` is RMSNorm, SwiGLU or the identity.

    RMSNorm is applied if `norm_weight` is given. The input is [..., K], or [..., 2 K] with `swiglu`; the output is
    [..., N] (K input features, N output features). The operands are quantized with the FP8 state of `module` for its
    GEMM with index `gemm`.

    Raises ValueError if FP8 GEMMs do not support the shapes.
    """
    multiple = MX_BLOCK if isinstance(call.forward_state.recipe, MXFP8BlockScaling) else 16
    check_fp8_shapes(type(module).__name__, x, weight, trains=call.trains, multiple=multiple)
    weight_fp8 = module.quantize_weight(gemm, weight, call.quantizer(WEIGHT, gemm), is_first_microbatch)
    rows = x.reshape(-1, x.shape[-1])
    out = _FP8Gemm.apply(rows, norm_weight, weight, weight_fp8, call, gemm, eps, swiglu)
    return out.view(*x.shape[:-1], -1)


def fp8_gradients(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    into: Tensor | None,
    note: Callable[[int, Tensor, Any], None] = lambda *_: None,
) -> tuple[Tensor, Tensor | None]:
    """Compute both gradients of x @ W.T as FP8 GEMMs, in e4m3 with block scaling.

    The scales of `gradient` are not powers of two. In a loss gradient, each row contains the label's entry, which early
    in training is nearly the same for all tokens: -1 / (number of tokens). Power-of-two scales would round all these
    entries in the same direction by up to 6 %, depending on that number. With an exact scale, the largest entry in a
    block is not rounded at all.

    Args:
        gradient: gradient of the output, [M, N] (M rows, N output features, K input features).
        x: [M, K].
        weight: [N, K].
        into: float32 [N, K] buffer to which the weight gradient is added. None returns the weight gradient instead.
        note: callback for each quantized operand: note(operand, matrix, quantized), where operand is 0 for x, 1 for
            weight and 2 for gradient.

    Returns: the gradient of x, and the gradient of the weight or None.
    """
    e4m3, row, column, tile = torch.float8_e4m3fn, (1, BLOCK), (BLOCK, 1), (BLOCK, BLOCK)
    of_rows, of_columns = (quantize_blocks(gradient, b, e4m3, power_2_scale=False) for b in (row, column))
    weight_fp8, x_fp8 = quantize_blocks(weight, tile, e4m3), quantize_blocks(x, column, e4m3)
    for operand, (matrix, made) in enumerate(((x, x_fp8), (weight, weight_fp8), (gradient, of_rows))):
        note(operand, matrix, made)
    of_x = fp8_matmul(of_rows, weight_fp8, x.dtype, layout="nn", fast=False)
    dtype = weight.dtype if into is None else into.dtype
    of_weight = fp8_matmul(of_columns, x_fp8, dtype, layout="tn", fast=False)
    if into is not None:
        into += of_weight
    return of_x, (of_weight if into is None else None)
