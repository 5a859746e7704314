"""RMSNorm, and the FP8 modules with GEMMs: Linear, RMSNorm + Linear, and RMSNorm + SwiGLU MLP (CPU reference
implementation).

The forward GEMM y = x @ W.T and both gradient GEMMs have FP8 operands. The result of a norm or activation is quantized
directly for the following GEMM.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.te_reference.base import FP8Module, check_supported, make_weight
from model.te_reference.gemm import SwiGLU, fp8_gemm, linear_in_float32, rms_norm


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


class Linear(FP8Module):
    """CPU version of te.Linear: y = x @ W.T.

    Args:
        in_features: must be divisible by 16 in FP8.
        out_features: must be divisible by 8 in FP8, or by 16 in training.
        bias: must be False.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ):
        super().__init__(num_gemms=1)
        check_supported("Linear", bias=(bias, False))
        self.in_features, self.out_features = in_features, out_features
        self.weight = make_weight(out_features, in_features, params_dtype, device)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Apply the linear layer: [..., in_features] -> [..., out_features].

        Args:
            is_first_microbatch: None quantizes the weight. True also caches the FP8 weight, and False uses the cached
                weight.

        Raises ValueError if FP8 GEMMs do not support the shapes.
        """
        call = self.prepare_fp8(inp)
        if call is None:
            return linear_in_float32(inp, self.weight)
        return fp8_gemm(self, call, inp, self.weight, is_first_microbatch)


class LayerNormLinear(FP8Module):
    """CPU version of te.LayerNormLinear with RMSNorm: y = RMSNorm(x) @ W.T.

    The parameters are `layer_norm_weight` and `weight`. Arguments are the same as for Linear; normalization must be
    "RMSNorm".
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: str = "LayerNorm",
        params_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ):
        super().__init__(num_gemms=1)
        check_supported("LayerNormLinear", bias=(bias, False), normalization=(normalization, "RMSNorm"))
        self.in_features, self.out_features, self.eps = in_features, out_features, eps
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features, dtype=params_dtype, device=device))
        self.weight = make_weight(out_features, in_features, params_dtype, device)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Apply RMSNorm and the linear layer: [..., in_features] -> [..., out_features]. See Linear.forward."""
        weight, norm_weight, eps = self.weight, self.layer_norm_weight, self.eps
        call = self.prepare_fp8(inp)
        if call is None:
            return linear_in_float32(rms_norm(inp, norm_weight, eps), weight)
        return fp8_gemm(self, call, inp, weight, is_first_microbatch, norm_weight=norm_weight, eps=eps)


class LayerNormMLP(FP8Module):
    """CPU version of te.LayerNormMLP with RMSNorm and SwiGLU.

    The parameters are `layer_norm_weight` [hidden_size], `fc1_weight` [2 * ffn_hidden_size, hidden_size] with the gate
    rows first, and `fc2_weight` [hidden_size, ffn_hidden_size]. Only bias=False, normalization="RMSNorm" and
    activation="swiglu" are supported.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
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
        self.fc1_weight = make_weight(2 * ffn_hidden_size, hidden_size, params_dtype, device)
        self.fc2_weight = make_weight(hidden_size, ffn_hidden_size, params_dtype, device)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Apply RMSNorm and the SwiGLU MLP: [..., hidden_size] -> [..., hidden_size]. See Linear.forward."""
        norm_weight, fc1, fc2, eps = self.layer_norm_weight, self.fc1_weight, self.fc2_weight, self.eps
        call = self.prepare_fp8(inp)
        if call is not None and call.high_precision_backward:
            raise ValueError(
                "As in Transformer Engine, LayerNormMLP does not support recipes with backward_override; use "
                "another recipe, or run this module under autocast(enabled=False)."
            )
        if call is None:
            return linear_in_float32(
                SwiGLU.apply(linear_in_float32(rms_norm(inp, norm_weight, eps), fc1)), fc2
            )
        hidden = fp8_gemm(self, call, inp, fc1, is_first_microbatch, norm_weight=norm_weight, eps=eps)
        return fp8_gemm(self, call, hidden, fc2, is_first_microbatch, gemm=1, swiglu=True)
