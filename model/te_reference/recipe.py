"""FP8 recipes with the names, fields and defaults of transformer_engine.common.recipe (version 2.20.2).

Hopper GPUs support three recipes. DelayedScaling uses one scale per tensor, computed from the largest magnitudes
(amaxes) in earlier steps. Float8CurrentScaling uses one scale per tensor, computed from the tensor itself.
Float8BlockScaling uses one scale per 1x128 tile for activations and gradients, and per 128x128 tile for weights.
MXFP8BlockScaling needs a Blackwell GPU.

As in Transformer Engine, the quantization parameters of current and block scaling (`fp8_quant_fwd_inp`,
`fp8_quant_fwd_weight`, `fp8_quant_bwd_grad`) are attributes to assign, not constructor arguments. In contrast to
Transformer Engine, an unknown constructor argument is an error.
"""

import os
from dataclasses import dataclass, field
from enum import Enum

import torch


class Format(Enum):
    """FP8 number formats: e4m3 for all tensors (E4M3), or e4m3 with e5m2 for gradients (HYBRID)."""

    E4M3 = "e4m3"
    HYBRID = "hybrid"

    def dtype(self, forward: bool) -> torch.dtype:
        """Return the torch dtype for tensors quantized in the forward pass (inputs, weights) or the backward pass
        (gradients).
        """
        return torch.float8_e4m3fn if forward or self is Format.E4M3 else torch.float8_e5m2


@dataclass(frozen=True)
class MMParams:
    """Matrix multiplication options. They are ignored on a CPU, where products are always accumulated in float32."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """Quantization options for one kind of tensor.

    Attributes:
        power_2_scale: whether to round the scale down to a power of two.
        amax_epsilon: lower bound for the largest magnitude (amax) from which the scale is computed.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0


class Recipe:
    """Base class for FP8 recipes. As in Transformer Engine, `delayed` returns whether a recipe uses delayed scaling."""

    fp8_format: Format

    @classmethod
    def delayed(cls) -> bool:
        return issubclass(cls, DelayedScaling)


@dataclass
class DelayedScaling(Recipe):
    """FP8 recipe with one scale per tensor, computed from the largest or latest amax in the last `amax_history_len`
    steps.

    An amax is the largest magnitude of a tensor. The scale is `fp8_max * 2**-margin / amax`. The CPU reference does not
    reduce amaxes over ranks, so `reduce_amax` has no effect.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = False


_CURRENT_POWER_2 = os.getenv("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "0") == "1"
_BLOCK_POWER_2 = os.getenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0") != "1"


@dataclass
class Float8CurrentScaling(Recipe):
    """FP8 recipe with one scale per tensor, computed from the largest magnitude of the tensor itself.

    Attributes:
        backward_override: None, or "high_precision" to compute gradients from unquantized operands.
    """

    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp: QParams = field(init=False, default=QParams(_CURRENT_POWER_2))
    fp8_quant_fwd_weight: QParams = field(init=False, default=QParams(_CURRENT_POWER_2))
    fp8_quant_bwd_grad: QParams = field(init=False, default=QParams(_CURRENT_POWER_2))
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    backward_override: str | None = None


@dataclass
class MXFP8BlockScaling(Recipe):
    """FP8 recipe with one power-of-two scale per 32 values along the contraction dimension.

    The scale is computed from the largest magnitude of the 32 values. Blackwell and newer GPUs support this recipe.

    Attributes:
        backward_override: as in Float8CurrentScaling.
    """

    fp8_format: Format = Format.E4M3
    backward_override: str | None = None


@dataclass
class Float8BlockScaling(Recipe):
    """FP8 recipe with one scale per 1x128 tile (activations, gradients) or 128x128 tile (weights).

    Attributes:
        backward_override: None, or "high_precision" to compute gradients from unquantized operands.
    """

    fp8_format: Format = Format.E4M3
    fp8_quant_fwd_inp: QParams = field(init=False, default=QParams(_BLOCK_POWER_2))
    fp8_quant_fwd_weight: QParams = field(init=False, default=QParams(_BLOCK_POWER_2))
    fp8_quant_bwd_grad: QParams = field(init=False, default=QParams(_BLOCK_POWER_2))
    fp8_gemm_fprop: MMParams = MMParams()
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    backward_override: str | None = None
