"""One FP8 GEMM of a module with both of its gradients, and what comes before it: RMSNorm, SwiGLU or nothing.

With delayed scaling the norm and SwiGLU are quantized from float32; with current and block scaling they are rounded to
the activation dtype first. The gradient of SwiGLU is always rounded to the activation dtype before it is quantized.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.te_reference.base import INPUT, WEIGHT, FP8Call, FP8Module, check_fp8_shapes
from model.te_reference.norm import rms_norm_backward, rms_norm_forward
from model.te_reference.quantize import BLOCK, QuantizedMatrix, fp8_matmul, quantize_blocks
from model.te_reference.state import update_scales


def _swiglu_forward(x: Tensor) -> Tensor:
    """float32 silu(first half) * second half of x [..., 2 F] -> [..., F]."""
    gate, up = x.float().chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of x [..., 2 F] in its dtype, computed in float32."""
    gate, up = x.float().chunk(2, dim=-1)
    grad = grad.float()
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    grad_gate = (silu * (1 - sigmoid)).add_(sigmoid).mul_(grad).mul_(up)
    return torch.cat((grad_gate, silu.mul_(grad)), dim=-1).to(x.dtype)


class SwiGLU(torch.autograd.Function):
    """silu(first half) * second half, rounded once."""

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
    """x W^T and its gradients in float32, each rounded once to the dtype of x and W. Many CPUs have no instructions for
    16 bits, and torch is then fifteen times slower in these."""
    return F.linear(x, weight) if x.dtype == torch.float32 else _Linear.apply(x, weight)


def _gradient_gemm(call: FP8Call, gemm: str, left: Any, right: Any, dtype: torch.dtype) -> Tensor:
    """left right ("dgrad") or left^T right ("wgrad"), of (matrix, inverse scale) in FP8, or as they were."""
    if call.high_precision_backward:
        return (left[0] if gemm == "dgrad" else left[0].t()) @ right[0]
    layout = {"dgrad": "nn", "wgrad": "tn"}[gemm]
    return fp8_matmul(left, right, dtype, layout=layout, fast=call.accumulates_fast(gemm))


class _FP8Gemm(torch.autograd.Function):
    """(x [M, K], or [M, 2 K] before SwiGLU; norm weight [K] or None; W [N, K]) -> f(x) W^T [M, N]; f(x) and W are saved
    in FP8, or for a backward in high precision as they were, x only where f is not nothing."""

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
        # the gradient of the weight contracts over the rows, that of the input over the outputs
        operands = (source, None, weight, None)
        if not exact:
            operands = (
                operand.columns,
                operand.columns_scale_inv,
                weight_fp8.columns,
                weight_fp8.columns_scale_inv,
            )
        ctx.save_for_backward(before, norm_weight, inverse_rms, *operands)
        ctx.call, ctx.gemm, ctx.swiglu, ctx.dtype = call, gemm, swiglu, x.dtype
        left, right = (operand.rows, operand.rows_scale_inv), (weight_fp8.rows, weight_fp8.rows_scale_inv)
        return fp8_matmul(left, right, x.dtype, layout="nt", fast=call.accumulates_fast("fprop"))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        before, norm_weight, inverse_rms, *operands = ctx.saved_tensors
        call, x, weight = ctx.call, operands[:2], operands[2:]
        needs_weight, needs_input = ctx.needs_input_grad[2], any(ctx.needs_input_grad[:2])
        rows = columns = grad_output, None
        if not call.high_precision_backward:
            grad = call.grad_quantizer(ctx.gemm)(grad_output, rowwise=needs_input, columnwise=needs_weight)
            rows, columns = (grad.rows, grad.rows_scale_inv), (grad.columns, grad.columns_scale_inv)
        grad_x = grad_norm = grad_weight = None
        if needs_input:
            grad_x = _gradient_gemm(call, "dgrad", rows, weight, ctx.dtype)
            if norm_weight is not None:
                grad_x, grad_norm = rms_norm_backward(grad_x, before, norm_weight, inverse_rms)
            elif ctx.swiglu:
                grad_x = _swiglu_backward(grad_x, before)
        if needs_weight:
            grad_weight = _gradient_gemm(call, "wgrad", columns, x, ctx.dtype)
        # the last backward of the module: that of its first GEMM, or the only one that is needed
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
    """f(x) W^T, [..., K] -> [..., N], as GEMM number `gemm` of `module`; f is RMSNorm where there is a norm_weight,
    SwiGLU ([..., 2 K]), or nothing. Raises ValueError: a shape that FP8 GEMMs do not take."""
    check_fp8_shapes(type(module).__name__, x, weight, trains=call.trains)
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
    """Both gradients of x [M, K] W^T, W [N, K], from `gradient` [M, N], as FP8 products: e4m3 with block scaling.

    Scales of the gradient are no powers of two. That of a loss has the label's entry in each row, which early in a
    training is nearly the same for all tokens, -1 / how many: with powers of two all would be rounded alike, up to 6 %
    off, by what that number is. With its own scale the largest entry of a block is not rounded at all.

    Returns the gradient of x, and that of W, which is None where it is added to `into`, float32 [N, K]. note: called
    with what is cast here, (0 of x, 1 of W, 2 of the gradient; the matrix; what became of it).
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
