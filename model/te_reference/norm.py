"""RMSNorm, y = x / sqrt(mean(x^2) + eps) * weight, computed in float32 and rounded once (CPU reference
implementation).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute RMSNorm of x [..., H] over the last dimension. Returns y [..., H] and 1 / rms [..., 1], both in
    float32.
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
    """Compute RMSNorm over the last dimension of x, in the dtype of x. Gradients are supported."""
    return _RMSNorm.apply(x, weight, eps)


class RMSNorm(nn.Module):
    """CPU version of te.RMSNorm: normalizes the last dimension. The output has the dtype of the weight.

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
        """Apply RMSNorm to the last dimension. The shape does not change."""
        return rms_norm(inp.to(self.weight.dtype), self.weight, self.eps)
