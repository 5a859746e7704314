"""Linear: y = x W^T with FP8 operands in the forward GEMM and in both gradients' GEMMs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.te_reference.base import (
    GRAD_OUTPUT,
    INPUT,
    WEIGHT,
    FP8Call,
    FP8Module,
    check_features,
    check_fp8_shapes,
    check_supported,
    make_weight,
)
from model.te_reference.quantize import QuantizedMatrix, fp8_matmul
from model.te_reference.state import update_scales

Operand = Sequence[Tensor | None]
"""FP8 data and its inverse scales; None where no GEMM is going to use them."""


def forward_gemm(call: FP8Call, x: QuantizedMatrix, weight: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """[M, K] x [N, K] -> [M, N]."""
    left, right = (x.rows, x.rows_scale_inv), (weight.rows, weight.rows_scale_inv)
    return fp8_matmul(left, right, dtype, layout="nt", fast=call.accumulates_fast("fprop"))


def input_gradient_gemm(call: FP8Call, grad: QuantizedMatrix, weight: Operand, dtype: torch.dtype) -> Tensor:
    """[M, N] x [N, K] -> [M, K]; `weight` as `saved_weight` gives it."""
    left = grad.rows, grad.rows_scale_inv
    return fp8_matmul(left, weight, dtype, layout="nn", fast=call.accumulates_fast("dgrad"))


def weight_gradient_gemm(call: FP8Call, grad: QuantizedMatrix, x: Operand, dtype: torch.dtype) -> Tensor:
    """[M, N] x [M, K] -> [N, K]; `x` as `saved_input` gives it."""
    left = grad.columns, grad.columns_scale_inv
    return fp8_matmul(left, x, dtype, layout="tn", fast=call.accumulates_fast("wgrad"))


def saved_input(x: QuantizedMatrix) -> Operand:
    """What the weight's gradient needs of the input: its data for a contraction over the rows."""
    return x.columns, x.columns_scale_inv


def saved_weight(weight: QuantizedMatrix) -> Operand:
    """What the input's gradient needs of the weight: its data for a contraction over the outputs."""
    return weight.columns, weight.columns_scale_inv


class _LinearFP8(torch.autograd.Function):
    """(x [M, K], W [N, K]) -> x W^T [M, N]; the operands are saved in FP8, the high-precision ones are not."""

    @staticmethod
    def forward(
        ctx: Any, inp: Tensor, weight: Tensor, call: FP8Call, weight_fp8: QuantizedMatrix, dtype: torch.dtype
    ) -> Tensor:
        needs_weight_gradient = ctx.needs_input_grad[1]
        x = call.quantizer(INPUT)(inp, columnwise=needs_weight_gradient)
        ctx.save_for_backward(*saved_input(x), *saved_weight(weight_fp8))
        ctx.call, ctx.dtypes = call, (inp.dtype, weight.dtype)
        return forward_gemm(call, x, weight_fp8, dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        input_dtype, weight_dtype = ctx.dtypes
        *x, weight, weight_scale_inv = ctx.saved_tensors
        grad = ctx.call.grad_quantizer(GRAD_OUTPUT)(grad_output, rowwise=needs_input, columnwise=needs_weight)
        grad_input = (
            input_gradient_gemm(ctx.call, grad, (weight, weight_scale_inv), input_dtype)
            if needs_input
            else None
        )
        grad_weight = weight_gradient_gemm(ctx.call, grad, x, weight_dtype) if needs_weight else None
        if ctx.call.moves_backward_scales:
            update_scales(forward=False)
        return grad_input, grad_weight, None, None, None


class Linear(FP8Module):
    """te.Linear: y = x W^T.

    in_features, out_features: sizes; in FP8 in_features must be divisible by 16 and out_features by 8, in
    training 16.
    init_method: fills the weight, default normal(0, 0.023). bias must be False.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ):
        super().__init__(num_gemms=1)
        check_supported("Linear", bias=(bias, False))
        self.in_features, self.out_features = in_features, out_features
        self.weight = make_weight(out_features, in_features, init_method, params_dtype, device)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """[..., in_features] -> [..., out_features].

        is_first_microbatch: None quantizes the weight now; True quantizes it and keeps the copy; False uses
        the copy.
        Raises ValueError: wrong features, or in FP8 a shape that FP8 GEMMs do not take.
        """
        check_features("Linear", inp, self.in_features)
        weight = self.weight
        self.check_dtype(inp, weight)
        trains = torch.is_grad_enabled() and (inp.requires_grad or weight.requires_grad)
        call = self.prepare_fp8(trains)
        if call is None:
            return F.linear(inp, weight)
        check_fp8_shapes("Linear", inp, weight, trains=trains)
        weight_fp8 = self.quantize_weight("weight", weight, call.quantizer(WEIGHT), is_first_microbatch)
        out = _LinearFP8.apply(inp.reshape(-1, self.in_features), weight, call, weight_fp8, inp.dtype)
        return out.view(*inp.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"
