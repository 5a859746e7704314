"""FP8 quantization that matches Transformer Engine 2.20.2's kernels, using float32 operations on any device.

An FP8 tensor is `q = cast(clamp(x * scale))`. Its values are `q * scale_inv`, with `scale_inv = 1 / scale`. Casts round
to nearest even. Values beyond the format's largest finite value (448 for e4m3, 57344 for e5m2), including infinities,
saturate. NaN becomes the byte 0x7F. The amax of a tensor or tile is its largest magnitude, ignoring NaN.

Transformer Engine's "columnwise" data is quantized in tiles along the columns. Here, this data keeps the orientation of
its source and is not transposed.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
# On a CPU a table lookup takes a fifth of the time of torch's FP8 conversion, which is a third of a training step.
VALUES = {dtype: torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float() for dtype in FP8_MAX}
NAN_BYTE = 0x7F
"""The NaN that the hardware writes in both formats."""
FLOAT32_MAX = torch.finfo(torch.float32).max
BLOCK = 128
"""Side of a tile in block scaling."""
MX_BLOCK = 32
"""Values that share a scale in MXFP8."""


def scaled_cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute cast(clamp(x * scale)) from float32 to FP8. NaN becomes the byte 0x7F.

    torch's own cast to e5m2 returns inf where the hardware saturates. It also keeps the sign of NaN, which the hardware
    drops.
    """
    limit = FP8_MAX[dtype]
    scaled = (x.float() * scale).clamp_(-limit, limit)
    data = scaled.to(dtype)
    if scaled.sum().isnan():  # never true for finite numbers; takes a tenth of the time of isnan().any()
        data.view(torch.uint8).masked_fill_(scaled.isnan(), NAN_BYTE)
    return data


def _is_transposed(data: Tensor) -> bool:
    return data.dim() == 2 and not data.is_contiguous() and data.t().is_contiguous()


def fp8_values(data: Tensor) -> Tensor:
    """Convert an FP8 tensor to float32 with the same memory layout."""
    if _is_transposed(data):
        return fp8_values(data.t()).t()
    if not (data.is_cpu and data.is_contiguous()):
        return data.float()
    return VALUES[data.dtype].index_select(0, data.view(torch.uint8).flatten().int()).view(data.shape)


def amax(x: Tensor) -> Tensor:
    """Return the largest magnitude in `x` as a float32 scalar. NaN is ignored, and an empty tensor gives 0."""
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    low, high = torch.aminmax(x.detach())
    result = torch.maximum(high, -low).float()
    if result.isnan():
        return torch.nan_to_num(x.detach().abs().float(), nan=0.0, posinf=math.inf).amax()
    return result


def scale_from_amax(
    amax: Tensor,
    fp8_max: float,
    *,
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
    value_for_inf: float = FLOAT32_MAX,
) -> Tensor:
    """Compute the scales for current and block scaling in float32 from the largest magnitude (amax) of each tensor or
    tile.

    Matches compute_scale_from_amax in Transformer Engine's recipe_common.cuh. The scale is `fp8_max / max(amax,
    amax_epsilon)`. It is 1 if the amax is 0, inf or NaN, and `value_for_inf` if the quotient overflows. `power_2_scale`
    drops the mantissa, which rounds the scale down to a power of two.
    """
    amax = torch.where(amax < amax_epsilon, torch.full_like(amax, amax_epsilon), amax)
    scale = torch.full_like(amax, fp8_max) / amax
    scale = torch.where(scale.isinf(), torch.full_like(scale, value_for_inf), scale)
    if power_2_scale:
        scale = (scale.view(torch.int32) & -0x00800000).view(torch.float32)
    return torch.where(amax.isfinite() & (amax != 0), scale, torch.ones_like(scale))


def update_delayed_scaling(
    amax_history: Tensor,
    scale: Tensor,
    latest_amax: Tensor,
    fp8_max: float,
    *,
    margin: int = 0,
    amax_compute_algo: str = "max",
) -> tuple[Tensor, Tensor]:
    """Update the amax histories and scales of many tensors after one step of delayed scaling.

    Matches kernel_bulk in Transformer Engine's delayed_scaling.cu. An amax is the largest magnitude of a tensor. A
    tensor whose latest amax is 0 was not used, so its history and scale do not change. For other tensors, the history
    rolls by one row, the latest amax becomes the last row, and row 0 is cleared. The maximum includes the row that
    leaves the history and ignores NaN. The new scale is `fp8_max * 2**-margin / amax`, capped at the largest float32.
    If this amax is 0, inf or NaN, the scale does not change.

    Args:
        amax_history: float32 [L, n] for history length L and n tensors. Row 0 is the amax of the current step.
        scale: float32 [n].
        latest_amax: float32 [n], the amax of the current step.

    Returns: the new (amax_history, scale).
    """
    latest = torch.where(latest_amax != 0, latest_amax, amax_history[0])
    used = latest != 0
    rolled = torch.roll(amax_history, -1, 0)
    rolled[-1] = latest
    if amax_compute_algo == "most_recent":
        chosen = latest
    else:
        chosen = torch.nan_to_num(rolled, nan=0.0, posinf=math.inf, neginf=-math.inf).amax(0)
        chosen = torch.where(used, chosen, torch.zeros_like(chosen))
    rolled[0] = 0
    history = torch.where(used, rolled, amax_history)
    new_scale = torch.full_like(scale, fp8_max * 2.0**-margin) / chosen
    new_scale = torch.where(chosen.isfinite() & (chosen > 0), new_scale, scale)
    return history, new_scale.clamp(max=FLOAT32_MAX)


Operand = tuple[Tensor, Tensor]
"""FP8 codes and inverse scales of a GEMM operand."""


@dataclass(frozen=True)
class QuantizedMatrix:
    """An FP8 matrix [M, N] that is quantized for contractions over its columns and over its rows.

    Attributes:
        rows: codes and inverse scales for a contraction over N, or None if not needed. The codes are float8 [M, N]. The
            inverse scales are float32: [] for one scale per tensor, [M, ceil(N/128)] for 1x128 tiles, or [ceil(M/128),
            ceil(N/128)] for 128x128 tiles.
        columns: codes and inverse scales for a contraction over M, or None if not needed. These are the same tensors as
            in `rows` for per-tensor scales and 128x128 tiles. The inverse scales are [ceil(M/128), N] for 128x1 tiles.
    """

    rows: Operand | None
    columns: Operand | None


def quantize_per_tensor(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Operand:
    """Quantize a matrix with a float32 scalar `scale`, and return the FP8 codes and the inverse scale."""
    return scaled_cast(x, scale, dtype), scale.reciprocal()


def quantize_current(
    x: Tensor,
    dtype: torch.dtype,
    *,
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
    amax_of_x: Tensor | None = None,
) -> Operand:
    """Quantize a matrix with current scaling. The scale is computed from `amax_of_x` if given, otherwise from the amax
    of `x`.

    An amax is the largest magnitude of a tensor. Pass `amax_of_x` if a fused kernel computes the amax before rounding.
    """
    amax_of_x = amax(x) if amax_of_x is None else amax_of_x
    scale = scale_from_amax(amax_of_x, FP8_MAX[dtype], power_2_scale=power_2_scale, amax_epsilon=amax_epsilon)
    return quantize_per_tensor(x, scale, dtype)


def _tiles(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Reshape a matrix to [row tiles, rows per tile, column tiles, columns per tile], zero-padded to whole tiles."""
    pad_rows, pad_columns = -x.shape[0] % block[0], -x.shape[1] % block[1]
    if pad_rows or pad_columns:
        x = torch.nn.functional.pad(x, (0, pad_columns, 0, pad_rows))
    return x.reshape(x.shape[0] // block[0], block[0], x.shape[1] // block[1], block[1])


def _untile(tiles: Tensor, shape: torch.Size) -> Tensor:
    padded = tiles.reshape(tiles.shape[0] * tiles.shape[1], tiles.shape[2] * tiles.shape[3])
    return padded[: shape[0], : shape[1]].contiguous()


def quantize_blocks(
    x: Tensor,
    block: tuple[int, int],
    dtype: torch.dtype,
    *,
    power_2_scale: bool = True,
    amax_epsilon: float = 0.0,
) -> Operand:
    """Quantize a matrix [M, N] with one scale per tile of `block` = (rows, columns). Tiles at the edges may be partial.

    Returns: float8 codes [M, N] and float32 inverse scales [ceil(M/rows), ceil(N/columns)].
    """
    tiles = _tiles(x.float(), block)
    tile_amax = torch.maximum(tiles.amax((1, 3)), -tiles.amin((1, 3)))
    if tile_amax.isnan().any():
        tile_amax = torch.nan_to_num(tiles.abs(), nan=0.0, posinf=math.inf).amax((1, 3))
    scale = scale_from_amax(
        tile_amax,
        FP8_MAX[dtype],
        power_2_scale=power_2_scale,
        amax_epsilon=amax_epsilon,
        value_for_inf=torch.finfo(x.dtype).max,
    )
    data = scaled_cast(tiles, scale[:, None, :, None], dtype)
    return _untile(data, x.shape), scale.reciprocal()


def mx_exponents(amax: Tensor, fp8_max: float) -> Tensor:
    """Return the E8M0 scales of blocks as biased exponents, int32.

    Matches float_to_e8m0 in Transformer Engine's ptx.cuh.

    A scale is amax / fp8_max rounded up to a power of two, so that no value of the block saturates. The OCP MX
    specification leaves this rounding open. An amax of 0 has exponent 0, and an amax of inf has the largest exponent,
    254.
    """
    quotient = amax * torch.full_like(amax, fp8_max).reciprocal()
    mantissa, exponent = torch.frexp(quotient)  # quotient = mantissa * 2^exponent with a mantissa from 0.5 on
    rounded_up = torch.where(mantissa > 0.5, exponent, exponent - 1)
    biased = torch.where(quotient.isfinite(), rounded_up + 127, torch.full_like(exponent, 254))
    return torch.where(quotient > 0, biased, torch.zeros_like(exponent)).clamp(0, 254)


def quantize_mx(x: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Operand:
    """Quantize a matrix [M, N] with one power-of-two scale per block of (1, 32) or (32, 1) values.

    As in Transformer Engine, blocks with exponent 0 (amax below 3e-36) are multiplied by 1.

    Returns: float8 [M, N] and scale_inv, float32 [M, N/32] or [M/32, N].
    """
    tiles = _tiles(x.float(), block)
    exponents = mx_exponents(
        torch.nan_to_num(tiles.abs(), nan=0.0, posinf=math.inf).amax((1, 3)), FP8_MAX[dtype]
    )
    one = torch.ones(exponents.shape, device=x.device)
    scale = torch.where(exponents > 0, torch.ldexp(one, 127 - exponents), one)
    data = scaled_cast(tiles, scale[:, None, :, None], dtype)
    return _untile(data, x.shape), torch.ldexp(one, exponents - 127)


def dequantize(data: Tensor, scale_inv: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert an FP8 matrix [M, N] (M rows, N columns) with its inverse scales back to values in `dtype`.

    Args:
        scale_inv: inverse scales, one for the tensor or one per tile, in any layout of QuantizedMatrix.
    """
    if scale_inv.dim() == 0:
        return fp8_values(data).mul_(scale_inv).to(dtype)
    if _is_transposed(data):
        return dequantize(data.t(), scale_inv.t(), dtype).t()
    block = tuple(
        next(size for size in (1, MX_BLOCK, BLOCK) if tiles == -(-side // size))
        for tiles, side in zip(scale_inv.shape, data.shape, strict=True)
    )
    tiles = _tiles(fp8_values(data), (block[0], block[1]))
    return _untile(tiles.mul_(scale_inv[:, None, :, None]), data.shape).to(dtype)


@dataclass(frozen=True)
class Quantized:
    """An FP8 matrix [R, C] (R rows, C columns) with the values codes * scale.

    Attributes:
        codes: float8_e4m3fn [R, C].
        scale: float32, [R, 1] (one per row) or [ceil(R/128), ceil(C/128)] (one per 128 x 128 block).
    """

    codes: Tensor
    scale: Tensor

    @property
    def by_row(self) -> bool:
        return self.scale.shape == (self.codes.shape[0], 1)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the values codes * scale, multiplied in float32 and rounded once to `dtype`."""
        if self.by_row:
            return (fp8_values(self.codes) * self.scale).to(dtype)
        return dequantize(self.codes, self.scale, dtype)


def quantize_rows(weight: torch.Tensor) -> Quantized:
    """Quantize a matrix [R, C] (R rows, C columns) to FP8 with one scale per row.

    The scale is the largest magnitude in the row divided by 448 (the e4m3 maximum), or 1 for a row of zeros. float64
    input is converted to float32 first.
    """
    weight = weight.float() if weight.dtype == torch.float64 else weight
    codes, scale = quantize_blocks(weight, (1, weight.shape[1]), torch.float8_e4m3fn, power_2_scale=False)
    return Quantized(codes, scale)


def fp8_matmul(
    left: Operand | None,
    right: Operand | None,
    out_dtype: torch.dtype,
    *,
    layout: str,
    fast: bool = False,
) -> Tensor:
    """Multiply two FP8 matrices, accumulate in float32, and round once to `out_dtype`.

    FP8 products are exact in float32. Per-tensor scales multiply the result. Tile scales multiply the operands, because
    tile scales change along the contraction.

    Args:
        left, right: the operands, not None.
        layout: "nt" for left @ right.T (forward), "nn" for left @ right (input gradient), or "tn" for left.T @ right
            (weight gradient).
        fast: whether to use fast accumulation (use_split_accumulator=False in Transformer Engine).
    """
    assert left is not None and right is not None
    (a, a_scale_inv), (b, b_scale_inv) = left, right
    if layout == "tn":
        a, a_scale_inv = a.t(), a_scale_inv.t()
    if layout != "nt":
        b, b_scale_inv = b.t(), b_scale_inv.t()
    return accumulate(a, a_scale_inv, b, b_scale_inv, fast=fast).to(out_dtype)


def accumulate(a: Tensor, a_scale_inv: Tensor, b: Tensor, b_scale_inv: Tensor, *, fast: bool) -> Tensor:
    """Multiply an FP8 matrix [M, K] by the transpose of an FP8 matrix [N, K]. Returns float32 [M, N].

    `fast` has no effect here. Tests replace this function with a simulation of a Hopper GPU's tensor cores, whose
    results depend on `fast`.
    """
    if a_scale_inv.dim() == 0:
        return (fp8_values(a) @ fp8_values(b).t()).mul_(a_scale_inv * b_scale_inv)
    return dequantize(a, a_scale_inv) @ dequantize(b, b_scale_inv).t()
