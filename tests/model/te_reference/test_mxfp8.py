"""MXFP8 of the CPU reference against the OCP Microscaling specification in float64, written independently."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from model import te_reference as te
from model.fp8.precision import Precision, PrecisionError
from model.fp8.recipes import PrecisionConfig
from model.serving import TrainedFP8
from model.te_reference.quantize import dequantize, quantize_mx
from tests.conftest import refused, small_config

# exponent bits, mantissa bits, bias, largest number (OCP MX v1.0, table 1 of the element formats)
FORMATS = {torch.float8_e4m3fn: (4, 3, 7, 448.0), torch.float8_e5m2: (5, 2, 15, 57344.0)}


def values_of_format(dtype: torch.dtype) -> np.ndarray:
    """The finite magnitudes of the codes 0, 1, 2, ... in increasing order."""
    _, mantissa_bits, bias, largest = FORMATS[dtype]
    values = []
    for code in range(128):
        exponent, mantissa = code >> mantissa_bits, code % 2**mantissa_bits
        fraction = mantissa / 2**mantissa_bits
        values.append(
            2.0 ** (1 - bias) * fraction if exponent == 0 else 2.0 ** (exponent - bias) * (1 + fraction)
        )
    return np.array([value for value in values if value <= largest])


def quantize_block(x: np.ndarray, dtype: torch.dtype) -> tuple[list[int], int]:
    """Codes and biased exponent of up to 32 float32 numbers.

    The scale is the smallest power of two that is at least amax / largest, where Transformer Engine computes the
    quotient as a product in float32. Elements are rounded to the nearest value, ties to the even code.
    """
    magnitudes, largest = values_of_format(dtype), FORMATS[dtype][3]
    finite = np.abs(x[~np.isnan(x)])
    quotient = float(np.float32(finite.max(initial=0)) * (np.float32(1) / np.float32(largest)))
    exponent = 0
    while exponent < 254 and quotient > 2.0 ** (exponent - 127):
        exponent += 1
    codes = []
    for number in x.astype(np.float64):
        if math.isnan(number):
            codes.append(0x7F)
            continue
        scaled = abs(number) / (2.0 ** (exponent - 127) if exponent else 1.0)
        distance = np.abs(magnitudes - min(scaled, largest))
        nearest = np.flatnonzero(distance == distance.min())
        code = int(next((n for n in nearest if n % 2 == 0), nearest[0]))
        codes.append(code | (0x80 if math.copysign(1, number) < 0 else 0))
    return codes, exponent


def check(x: torch.Tensor, dtype: torch.dtype) -> None:
    """Rows and columns of `x`, bit for bit."""
    for transposed, block in ((False, (1, 32)), (True, (32, 1))):
        codes, scale_inv = quantize_mx(x, block, dtype)
        rows, of_codes, of_scales = (t.t() if transposed else t for t in (x, codes, scale_inv))
        for row in range(rows.shape[0]):
            for start in range(0, rows.shape[1], 32):
                expected, exponent = quantize_block(rows[row, start : start + 32].float().numpy(), dtype)
                found = of_codes[row, start : start + 32].contiguous().view(torch.uint8).tolist()
                assert found == expected
                assert float(of_scales[row, start // 32]) == 2.0 ** (exponent - 127)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", FORMATS)
def test_codes_and_scales_are_those_of_the_specification(
    seed: int, source: torch.dtype, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-60, 60, (32, 2), generator=generator).repeat_interleave(32, 1)
    check((torch.randn(32, 64, generator=generator) * 2.0**exponents).to(source), dtype)


@pytest.mark.parametrize("dtype", FORMATS)
def test_edges(dtype: torch.dtype) -> None:
    """Blocks at the limits of a power of two, ties, zeros, NaN, and the smallest and largest numbers."""
    magnitudes, largest = values_of_format(dtype), FORMATS[dtype][3]
    ties = torch.tensor((magnitudes[1:] + magnitudes[:-1]) / 2)
    x = torch.zeros(32, 32)
    x[0, 0], x[1, 0], x[2, 0] = largest, largest * (1 + 2**-20), largest / 2 * (1 - 2**-20)
    x[3, :8], x[4, :8] = largest, -1e-38
    x[5, 0], x[6, :2] = torch.finfo(torch.float32).max, torch.tensor([math.nan, 3.0])
    for row, part in enumerate(ties.split(31)[:8]):
        x[8 + row, 0] = largest
        x[8 + row, 1 : 1 + len(part)] = part
    check(x, dtype)


def exact(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    return dequantize(*quantize_mx(x, block, torch.float8_e4m3fn)).double()


def test_a_linear_contracts_over_blocks_of_32() -> None:
    """Forward, input gradient and weight gradient each quantize both operands along the contraction."""
    generator = torch.Generator().manual_seed(0)
    linear = te.Linear(64, 96, bias=False, params_dtype=torch.float32)
    x = torch.randn(32, 64, generator=generator, requires_grad=True)
    gradient = torch.randn(32, 96, generator=generator)
    with te.autocast(enabled=True, recipe=te.recipe.MXFP8BlockScaling()):
        out = linear(x)
    out.backward(gradient)
    rows, columns, weight = (1, 32), (32, 1), linear.weight.detach()
    torch.testing.assert_close(
        out.double(), exact(x.detach(), rows) @ exact(weight, rows).t(), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        x.grad.double(), exact(gradient, rows) @ exact(weight, columns), rtol=1e-5, atol=1e-5
    )
    expected = exact(gradient, columns).t() @ exact(x.detach(), columns)
    torch.testing.assert_close(linear.weight.grad.double(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError), te.autocast(enabled=True, recipe=te.recipe.MXFP8BlockScaling()):
        linear(x[:16])


def test_sizes_and_exports_that_mxfp8_lacks_are_refused() -> None:
    config = PrecisionConfig(recipe="mxfp8")
    assert not Precision(config).has_state
    with refused(PrecisionError, code="no_stored_format"):
        TrainedFP8(small_config(), "te_layer", config)
