"""FP8 recipes with the names, fields and defaults of transformer_engine.common.recipe (2.20.2).

Three recipes run on Hopper: DelayedScaling (one scale per tensor, from the amaxes of earlier steps),
Float8CurrentScaling (one scale per tensor, from the tensor itself) and Float8BlockScaling (one scale per
1x128 tile of an activation or gradient and per 128x128 tile of a weight).

As in Transformer Engine the quantization parameters of the last two (`fp8_quant_fwd_inp`,
`fp8_quant_fwd_weight`, `fp8_quant_bwd_grad`) are attributes to assign, not constructor arguments. Unlike
there, an unknown constructor argument is an error.
"""

import os
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch


class _FormatMax(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    """FP8 number format of the forward and the backward tensors; the value holds their largest magnitudes."""

    E4M3 = _FormatMax(448.0, 448.0)
    HYBRID = _FormatMax(448.0, 57344.0)

    def dtype(self, forward: bool) -> torch.dtype:
        """torch dtype of the tensors that the forward (inputs, weights) or the backward (gradients)
        quantizes.
        """
        return torch.float8_e4m3fn if forward or self is Format.E4M3 else torch.float8_e5m2


@dataclass(frozen=True)
class MMParams:
    """Matrix multiplication options, which make no difference to float32 sums."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """Quantization options of one kind of tensor.

    power_2_scale: round the scale down to a power of two.
    amax_epsilon: smallest amax that the scale is computed from.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0


class Recipe:
    """Base class; `delayed` tells a kind as in Transformer Engine."""

    fp8_format: Format

    @classmethod
    def delayed(cls) -> bool:
        return issubclass(cls, DelayedScaling)

    def _check(self) -> None:
        unsupported: dict[str, Any] = {"fp8_dpa": False, "fp8_mha": False, "backward_override": None}
        for name, only in unsupported.items():
            if getattr(self, name) != only:
                raise ValueError(
                    f"{type(self).__name__}({name}={getattr(self, name)!r}): the CPU reference supports only "
                    f"{only!r}."
                )
        if not isinstance(self.fp8_format, Format):
            raise ValueError(f"fp8_format must be Format.HYBRID or Format.E4M3, not {self.fp8_format!r}.")


@dataclass
class DelayedScaling(Recipe):
    """Scale of each tensor from the largest (or latest) amax of the last `amax_history_len` steps.

    The scale is `fp8_max * 2**-margin / amax`. With `reduce_amax` the amaxes are maximized over the ranks
    first.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    scaling_factor_compute_algo: None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: None = None

    def __post_init__(self) -> None:
        self._check()
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(
                "amax_compute_algo must be 'max' or 'most_recent' in the CPU reference, not "
                f"{self.amax_compute_algo!r}."
            )
        if self.scaling_factor_compute_algo is not None:
            raise ValueError("scaling_factor_compute_algo: the CPU reference supports only None.")
        if self.amax_history_len < 1:
            raise ValueError(f"amax_history_len must be at least 1, not {self.amax_history_len}.")


_CURRENT_POWER_2 = os.getenv("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "0") == "1"
_BLOCK_POWER_2 = os.getenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0") != "1"


@dataclass
class Float8CurrentScaling(Recipe):
    """Scale of each tensor from its own amax."""

    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp: QParams = field(init=False, default=QParams(_CURRENT_POWER_2))
    fp8_quant_fwd_weight: QParams = field(init=False, default=QParams(_CURRENT_POWER_2))
    fp8_quant_bwd_grad: QParams = field(init=False, default=QParams(_CURRENT_POWER_2))
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: None = None

    def __post_init__(self) -> None:
        self._check()


@dataclass
class Float8BlockScaling(Recipe):
    """Scale of each 1x128 tile (activations, gradients) or 128x128 tile (weights) from its own amax."""

    fp8_format: Format = Format.E4M3
    fp8_quant_fwd_inp: QParams = field(init=False, default=QParams(_BLOCK_POWER_2))
    fp8_quant_fwd_weight: QParams = field(init=False, default=QParams(_BLOCK_POWER_2))
    fp8_quant_bwd_grad: QParams = field(init=False, default=QParams(_BLOCK_POWER_2))
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams()
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: None = None

    def __post_init__(self) -> None:
        self._check()
        dims = (self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim)
        if any(dim not in (1, 2) for dim in dims) or dims.count(2) > 1:
            raise ValueError(
                f"x, w and grad_block_scaling_dim must be 1 or 2 and at most one of them 2, not {dims}."
            )
        for name in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
            if not getattr(self, name).use_split_accumulator:
                raise ValueError(f"Float8BlockScaling({name}=...) needs use_split_accumulator=True.")
