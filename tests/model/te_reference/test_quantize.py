"""Conversion back from FP8, and products; test_te_recorded.py has quantization and scales, by Transformer Engine."""

import math

import pytest
import torch

from model.te_reference.quantize import (
    amax,
    dequantize,
    quantize_blocks,
    values_of,
)

INF, NAN = math.inf, math.nan
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_values_are_those_of_the_conversion(dtype):
    """All 256 bytes to the bit, NaN too, in the memory layout that it would have: sums over it keep their order."""
    data = torch.arange(256, dtype=torch.uint8).view(dtype).repeat(3).view(32, 24)
    for layout in (data, data.t(), data[:, ::2], data.view(4, 8, 24), data[:0], data[3]):
        found, expected = values_of(layout), layout.float()
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
        assert found.stride() == expected.stride()


def test_amax_passes_over_nan_only():
    for values, largest in (([NAN, -4.0, 3.0], 4), ([NAN, NAN], 0), ([NAN, -INF], INF), ([], 0)):
        assert amax(torch.tensor(values)) == largest


@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128)])
def test_dequantize_recovers_values_on_the_grid_in_every_layout(block):
    x = torch.randint(-8, 9, (200, 136)).float() * 0.25
    data, scale_inv = quantize_blocks(x, block, E4M3)
    assert torch.equal(dequantize(data, scale_inv), x)
    assert torch.equal(dequantize(data.t(), scale_inv.t()), x.t())
