"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight, computed in float32 and rounded once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return y [..., H] and 1 / rms [..., 1] of x [..., H], both float32."""
    x = x.float()
    inverse_rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * inverse_rms).mul_(weight.float()), inverse_rms


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, inverse_rms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight in their dtypes, computed in float32."""
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
    """Compute a differentiable RMSNorm in the dtype of x [..., H]."""
    return _RMSNorm.apply(x, weight, eps)


class RMSNorm(nn.Module):
    """te.RMSNorm over the last dimension; the output has the weight's dtype.

    Args:
        normalized_shape: size of the last dimension.
        dtype: dtype of the weight.
        device: device of the weight.
    """

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(normalized_shape, dtype=dtype, device=device))

    def forward(self, inp: Tensor) -> Tensor:
        """Compute [..., normalized_shape] -> the same shape."""
        return rms_norm(inp.to(self.weight.dtype), self.weight, self.eps)
