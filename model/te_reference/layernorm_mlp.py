"""LayerNormMLP: RMSNorm, two GEMMs and SwiGLU between them: y = SwiGLU(RMSNorm(x) W1^T) W2^T.

SwiGLU gates with the first half of W1's outputs: silu(first) * second. In FP8 with delayed scaling the norm
and SwiGLU are quantized from float32; with current and block scaling they are rounded to the activation dtype
first. The gradient of SwiGLU is always rounded to the activation dtype before it is quantized.
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

FC2 = 3
"""Distance of the second GEMM's columns from the first's, in the forward tensors."""
GRAD_FC2 = 2
"""The same in the backward tensors."""


def swiglu_forward(x: Tensor) -> Tensor:
    """float32 silu(first half) * second half of x [..., 2 F] -> [..., F]."""
    gate, up = x.float().chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of x [..., 2 F] in its dtype, computed in float32."""
    gate, up = x.float().chunk(2, dim=-1)
    grad = grad.float()
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    grad_gate = (silu * (1 - sigmoid)).add_(sigmoid).mul_(grad).mul_(up)
    return torch.cat((grad_gate, silu.mul_(grad)), dim=-1).to(x.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return swiglu_forward(x).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return swiglu_backward(grad, *ctx.saved_tensors)


class _LayerNormMLPFP8(torch.autograd.Function):
    """(x [M, H], norm weight [H], W1 [2 F, H], W2 [H, F]) -> [M, H]."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: Tensor,
        norm_weight: Tensor,
        fc1_weight: Tensor,
        fc2_weight: Tensor,
        eps: float,
        call: FP8Call,
        weights_fp8: tuple[QuantizedMatrix, QuantizedMatrix],
        dtype: torch.dtype,
    ) -> Tensor:
        fc1_fp8, fc2_fp8 = weights_fp8
        y, inverse_rms = rms_norm_forward(inp, norm_weight, eps)
        y_fp8 = call.quantizer(INPUT).fused(y, inp.dtype, columnwise=ctx.needs_input_grad[2])
        fc1_out = forward_gemm(call, y_fp8, fc1_fp8, dtype)
        activation = swiglu_forward(fc1_out)
        activation_fp8 = call.quantizer(FC2 + INPUT).fused(
            activation, dtype, columnwise=ctx.needs_input_grad[3], amax_before_rounding=True
        )
        ctx.save_for_backward(
            inp,
            norm_weight,
            inverse_rms,
            fc1_out,
            *saved_input(y_fp8),
            *saved_weight(fc1_fp8),
            *saved_input(activation_fp8),
            *saved_weight(fc2_fp8),
        )
        ctx.call, ctx.dtype = call, dtype
        ctx.weight_dtypes = fc1_weight.dtype, fc2_weight.dtype
        return forward_gemm(call, activation_fp8, fc2_fp8, dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inp, norm_weight, inverse_rms, fc1_out, *operands = ctx.saved_tensors
        y, fc1, activation, fc2 = (operands[i : i + 2] for i in range(0, 8, 2))
        needs_norm = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        needs_fc1, needs_fc2 = ctx.needs_input_grad[2:4]
        grad_input = grad_norm = grad_fc1 = grad_fc2 = None
        grad = ctx.call.grad_quantizer(GRAD_FC2 + GRAD_OUTPUT)(grad_output, columnwise=needs_fc2)
        if needs_fc2:
            grad_fc2 = weight_gradient_gemm(ctx.call, grad, activation, ctx.weight_dtypes[1])
        if needs_norm or needs_fc1:
            grad_activation = input_gradient_gemm(ctx.call, grad, fc2, ctx.dtype)
            grad_fc1_out = swiglu_backward(grad_activation, fc1_out)
            grad = ctx.call.grad_quantizer(GRAD_OUTPUT)(
                grad_fc1_out, rowwise=needs_norm, columnwise=needs_fc1
            )
        if needs_fc1:
            grad_fc1 = weight_gradient_gemm(ctx.call, grad, y, ctx.weight_dtypes[0])
        if needs_norm:
            grad_y = input_gradient_gemm(ctx.call, grad, fc1, ctx.dtype)
            grad_input, grad_norm = rms_norm_backward(grad_y, inp, norm_weight, inverse_rms)
        if ctx.call.moves_backward_scales:
            update_scales(forward=False)
        return grad_input, grad_norm, grad_fc1, grad_fc2, None, None, None, None


class LayerNormMLP(FP8Module):
    """te.LayerNormMLP with RMSNorm and SwiGLU.

    Parameters `layer_norm_weight` [hidden_size], `fc1_weight` [2 * ffn_hidden_size, hidden_size] with the
    gate's rows first, `fc2_weight` [hidden_size, ffn_hidden_size]. bias must be False, normalization
    "RMSNorm", activation "swiglu".
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        params_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ):
        super().__init__(num_gemms=2)
        check_supported(
            "LayerNormMLP",
            bias=(bias, False),
            normalization=(normalization, "RMSNorm"),
            activation=(activation, "swiglu"),
        )
        self.hidden_size, self.ffn_hidden_size, self.eps = hidden_size, ffn_hidden_size, eps
        self.layer_norm_weight = nn.Parameter(torch.ones(hidden_size, dtype=params_dtype, device=device))
        self.fc1_weight = make_weight(2 * ffn_hidden_size, hidden_size, init_method, params_dtype, device)
        self.fc2_weight = make_weight(
            hidden_size, ffn_hidden_size, output_layer_init_method, params_dtype, device
        )

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """[..., hidden_size] -> the same shape; see Linear.forward."""
        check_features("LayerNormMLP", inp, self.hidden_size)
        norm_weight, fc1, fc2 = self.layer_norm_weight, self.fc1_weight, self.fc2_weight
        wanted = any(tensor.requires_grad for tensor in (inp, norm_weight, fc1, fc2))
        trains = torch.is_grad_enabled() and wanted
        self.check_dtype(inp, fc1)
        call = self.prepare_fp8(trains)
        if call is None:
            hidden = F.linear(rms_norm(inp, norm_weight, self.eps), fc1)
            return F.linear(_SwiGLU.apply(hidden), fc2)
        check_fp8_shapes("LayerNormMLP", inp, fc1, trains=trains)
        check_fp8_shapes("LayerNormMLP", inp, fc2, trains=trains)
        weights_fp8 = (
            self.quantize_weight("fc1_weight", fc1, call.quantizer(WEIGHT), is_first_microbatch),
            self.quantize_weight("fc2_weight", fc2, call.quantizer(FC2 + WEIGHT), is_first_microbatch),
        )
        rows = inp.reshape(-1, self.hidden_size)
        out = _LayerNormMLPFP8.apply(rows, norm_weight, fc1, fc2, self.eps, call, weights_fp8, inp.dtype)
        return out.view(inp.shape)

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, eps={self.eps}"
