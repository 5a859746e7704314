"""LayerNormLinear: RMSNorm and Linear in one module; in FP8 the norm's output goes to the GEMM without a
detour.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
from model.te_reference.linear import (
    forward_gemm,
    input_gradient_gemm,
    saved_input,
    saved_weight,
    weight_gradient_gemm,
)
from model.te_reference.norm import rms_norm, rms_norm_backward, rms_norm_forward
from model.te_reference.quantize import QuantizedMatrix
from model.te_reference.state import update_scales


class _LayerNormLinearFP8(torch.autograd.Function):
    """(x [M, K], norm weight [K], W [N, K]) -> RMSNorm(x) W^T [M, N]."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: Tensor,
        norm_weight: Tensor,
        weight: Tensor,
        eps: float,
        call: FP8Call,
        weight_fp8: QuantizedMatrix,
        dtype: torch.dtype,
    ) -> Tensor:
        y, inverse_rms = rms_norm_forward(inp, norm_weight, eps)
        y_fp8 = call.quantizer(INPUT).fused(y, inp.dtype, columnwise=ctx.needs_input_grad[2])
        ctx.save_for_backward(inp, norm_weight, inverse_rms, *saved_input(y_fp8), *saved_weight(weight_fp8))
        ctx.call, ctx.dtype, ctx.weight_dtype = call, dtype, weight.dtype
        return forward_gemm(call, y_fp8, weight_fp8, dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inp, norm_weight, inverse_rms, y, y_scale_inv, weight, weight_scale_inv = ctx.saved_tensors
        needs_norm = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        needs_weight = ctx.needs_input_grad[2]
        grad = ctx.call.grad_quantizer(GRAD_OUTPUT)(grad_output, rowwise=needs_norm, columnwise=needs_weight)
        grad_input = grad_norm = grad_weight = None
        if needs_norm:
            grad_y = input_gradient_gemm(ctx.call, grad, (weight, weight_scale_inv), ctx.dtype)
            grad_input, grad_norm = rms_norm_backward(grad_y, inp, norm_weight, inverse_rms)
        if needs_weight:
            grad_weight = weight_gradient_gemm(ctx.call, grad, (y, y_scale_inv), ctx.weight_dtype)
        if ctx.call.moves_backward_scales:
            update_scales(forward=False)
        return grad_input, grad_norm, grad_weight, None, None, None, None


class LayerNormLinear(FP8Module):
    """te.LayerNormLinear with RMSNorm: y = RMSNorm(x) W^T.

    Parameters `layer_norm_weight` and `weight`. Arguments as for Linear; normalization must be "RMSNorm".
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        params_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ):
        super().__init__(num_gemms=1)
        check_supported("LayerNormLinear", bias=(bias, False), normalization=(normalization, "RMSNorm"))
        self.in_features, self.out_features, self.eps = in_features, out_features, eps
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features, dtype=params_dtype, device=device))
        self.weight = make_weight(out_features, in_features, init_method, params_dtype, device)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """[..., in_features] -> [..., out_features]; see Linear.forward."""
        check_features("LayerNormLinear", inp, self.in_features)
        weight, norm_weight = self.weight, self.layer_norm_weight
        self.check_dtype(inp, weight)
        wanted = inp.requires_grad or weight.requires_grad or norm_weight.requires_grad
        trains = torch.is_grad_enabled() and wanted
        call = self.prepare_fp8(trains)
        if call is None:
            return F.linear(rms_norm(inp, norm_weight, self.eps), weight)
        check_fp8_shapes("LayerNormLinear", inp, weight, trains=trains)
        weight_fp8 = self.quantize_weight("weight", weight, call.quantizer(WEIGHT), is_first_microbatch)
        rows = inp.reshape(-1, self.in_features)
        out = _LayerNormLinearFP8.apply(rows, norm_weight, weight, self.eps, call, weight_fp8, inp.dtype)
        return out.view(*inp.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, eps={self.eps}"
