"""The quantization functions against values worked out here from the definition of the formats."""

import math

import numpy as np
import pytest
import torch

from model.te_reference.quantize import (
    FLOAT32_MAX,
    QuantizedMatrix,
    amax,
    dequantize,
    fp8_matmul,
    quantize_blocks,
    quantize_current,
    quantize_per_tensor,
    scale_from_amax,
    update_delayed_scaling,
    values_of,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INF, NAN = math.inf, math.nan


def grid(dtype):
    """All finite non-negative values of a format, ascending; the index is the byte."""
    exponent_bits, mantissa_bits, bias, largest = (4, 3, 7, 448.0) if dtype == E4M3 else (5, 2, 15, 57344.0)
    values = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            fraction = mantissa / 2**mantissa_bits
            values.append(
                2.0 ** (exponent - bias) * (1 + fraction) if exponent else 2.0 ** (1 - bias) * fraction
            )
    return np.array([value for value in values if value <= largest])


def nearest_even_bytes(values, dtype):
    """Bytes of float64 values rounded to the nearest grid point, ties to the even byte, saturated."""
    points = grid(dtype)
    magnitudes = np.minimum(np.abs(values), points[-1])
    above = np.clip(np.searchsorted(points, magnitudes), 1, len(points) - 1)
    to_below, to_above = magnitudes - points[above - 1], points[above] - magnitudes
    tie = np.where((above % 2) == 0, above, above - 1)
    chosen = np.where(to_below == to_above, tie, np.where(to_below < to_above, above - 1, above))
    return (chosen + 128 * np.signbit(values)).astype(np.uint8)


def as_bytes(data):
    return data.view(torch.uint8).numpy()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_cast_rounds_to_nearest_even_and_saturates(dtype):
    points = grid(dtype)
    midpoints = (points[1:] + points[:-1]) / 2
    random = np.random.default_rng(0).normal(size=2000) * np.exp2(
        np.random.default_rng(1).integers(-20, 18, 2000)
    )
    values = np.concatenate([points, midpoints, random, [1e30, 500.0, 60000.0, INF]])
    values = np.concatenate([values, -values]).astype(np.float32)
    quantized = quantize_per_tensor(torch.from_numpy(values), torch.tensor(1.0), dtype)
    np.testing.assert_array_equal(
        as_bytes(quantized.rows), nearest_even_bytes(values.astype(np.float64), dtype)
    )


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_nan_loses_its_sign_and_zero_keeps_it(dtype):
    x = torch.tensor([NAN, -NAN, 0.0, -0.0]).copysign(torch.tensor([1.0, -1.0, 1.0, -1.0]))
    expected = [0x7F, 0x7F, 0x00, 0x80]
    assert as_bytes(quantize_per_tensor(x, torch.tensor(3.0), dtype).rows).tolist() == expected
    rows, _ = quantize_blocks(x[None], (1, 128), dtype)
    assert as_bytes(rows).tolist() == [expected]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_values_are_those_of_the_conversion(dtype):
    """All 256 bytes to the bit, NaN too, in the memory layout that it would have: sums over it keep their order."""
    data = torch.arange(256, dtype=torch.uint8).view(dtype).repeat(3).view(32, 24)
    for layout in (data, data.t(), data[:, ::2], data.view(4, 8, 24), data[:0], data[3]):
        found, expected = values_of(layout), layout.float()
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
        assert found.stride() == expected.stride()


def test_per_tensor_multiplies_in_float32_and_returns_the_inverse_scale():
    x = torch.tensor([[1.0, -3.5], [0.3, 100.0]], dtype=torch.bfloat16)
    scale = torch.tensor(448.0 / 3.0)
    quantized = quantize_per_tensor(x, scale, E4M3)
    product = (x.float().numpy() * scale.numpy()).astype(np.float64)
    np.testing.assert_array_equal(as_bytes(quantized.rows), nearest_even_bytes(product, E4M3))
    assert quantized.rows_scale_inv == torch.tensor(1.0) / scale
    assert quantized.columns is quantized.rows


def test_amax_passes_over_nan_only():
    assert amax(torch.tensor([1.0, -4.0, 3.0], dtype=torch.bfloat16)) == 4
    assert amax(torch.tensor([NAN, -4.0, NAN])) == 4
    assert amax(torch.tensor([NAN, NAN])) == 0
    assert amax(torch.tensor([NAN, -INF])) == INF
    assert amax(torch.empty(0, 16)) == 0
    assert amax(torch.tensor([1.0])).dtype == torch.float32


@pytest.mark.parametrize(
    ("value", "options", "expected"),
    [
        (2.0, {}, 224.0),
        (3.0, {}, np.float32(448) / np.float32(3)),
        (3.0, {"power_2_scale": True}, 128.0),
        (3.5, {"power_2_scale": True}, 128.0),
        (np.nextafter(np.float32(3.5), np.float32(4)), {"power_2_scale": True}, 64.0),
        (0.0, {}, 1.0),
        (INF, {"power_2_scale": True}, 1.0),
        (NAN, {}, 1.0),
        (0.0, {"amax_epsilon": 0.5}, 896.0),
        (0.25, {"amax_epsilon": 0.5}, 896.0),
        (1.0, {"amax_epsilon": 0.5}, 448.0),
        (1e-38, {}, FLOAT32_MAX),
        (1e-45, {}, FLOAT32_MAX),
        (1e-38, {"power_2_scale": True}, 2.0**127),
        (1e-38, {"value_for_inf": torch.finfo(torch.bfloat16).max}, torch.finfo(torch.bfloat16).max),
    ],
)
def test_scale_from_amax(value, options, expected):
    scale = scale_from_amax(torch.tensor(value, dtype=torch.float32), 448.0, **options)
    assert scale.item() == float(np.float32(expected))


def test_current_scaling_maps_the_amax_to_the_largest_value():
    x = torch.tensor([[0.1, -7.0], [3.0, NAN]])
    quantized = quantize_current(x, E5M2)
    assert quantized.rows_scale_inv == 1 / (torch.tensor(57344.0) / 7)
    assert quantized.rows.float()[0, 1] == -57344
    assert quantized.rows.float()[1, 1].isnan()
    assert quantize_current(torch.zeros(2, 2), E4M3).rows_scale_inv == 1


def test_current_scaling_of_infinity_keeps_scale_one_and_saturates():
    quantized = quantize_current(torch.tensor([[INF, 2.0], [-INF, 1.0]]), E4M3)
    assert quantized.rows_scale_inv == 1
    assert quantized.rows.float().tolist() == [[448, 2], [-448, 1]]


@pytest.mark.parametrize("power_2_scale", [True, False])
@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128)])
@pytest.mark.parametrize("shape", [(256, 128), (96, 208), (136, 16)])
def test_blocks_have_the_scale_of_their_own_amax(block, shape, power_2_scale):
    generator = np.random.default_rng(2)
    x = (generator.normal(size=shape) * np.exp2(generator.integers(-8, 9, shape))).astype(np.float32)
    data, scale_inv = quantize_blocks(torch.from_numpy(x), block, E4M3, power_2_scale=power_2_scale)
    assert data.shape == shape
    assert scale_inv.shape == (math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1]))
    for i in range(scale_inv.shape[0]):
        for j in range(scale_inv.shape[1]):
            place = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scale = np.float32(448) / np.abs(x[place]).max()
            if power_2_scale:
                scale = np.float32(2.0 ** math.floor(math.log2(scale)))
            assert scale_inv[i, j].item() == np.float32(1) / scale
            expected = nearest_even_bytes((x[place] * scale).astype(np.float64), E4M3)
            np.testing.assert_array_equal(as_bytes(data)[place], expected)


def test_blocks_of_zeros_infinities_nan_and_tiny_values():
    x = torch.zeros(4, 128)
    x[1, 5], x[1, 6] = INF, 2.0
    x[2, 7], x[2, 8] = NAN, 3.5
    x[3, 9] = 1e-38
    data, scale_inv = quantize_blocks(x, (1, 128), E4M3)
    assert scale_inv[:, 0].tolist() == [1, 1, 2.0**-7, 2.0**-127]
    assert data[0].float().abs().sum() == 0
    assert data[1, 5:7].float().tolist() == [448, 2]
    assert data[2, 7].float().isnan() and data[2, 8].float() == 448
    assert data[3, 9].float() == 1.75


def test_a_scale_that_overflows_takes_the_largest_value_of_the_input_type():
    x = torch.full((1, 128), 1e-38, dtype=torch.bfloat16)
    _, scale_inv = quantize_blocks(x, (1, 128), E4M3, power_2_scale=False)
    assert scale_inv.item() == (1 / torch.tensor(torch.finfo(torch.bfloat16).max)).item()


def test_what_is_transposed_has_the_same_values():
    x = torch.randn(40, 300)
    for block in ((1, 128), (128, 1), (128, 128)):
        data, scale_inv = quantize_blocks(x, block, E4M3)
        before = data.clone()
        assert torch.equal(dequantize(data.t(), scale_inv.t()), dequantize(data, scale_inv).t())
        assert torch.equal(data.view(torch.uint8), before.view(torch.uint8))


def test_dequantize_recovers_values_on_the_grid_in_every_layout():
    x = torch.randint(-8, 9, (200, 136)).float() * 0.25
    for block in ((1, 128), (128, 1), (128, 128)):
        torch.testing.assert_close(dequantize(*quantize_blocks(x, block, E4M3)), x, rtol=0, atol=0)
    quantized = quantize_per_tensor(x, torch.tensor(2.0), E4M3)
    torch.testing.assert_close(dequantize(quantized.rows, quantized.rows_scale_inv), x, rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
def test_fp8_matmul_is_the_product_of_the_dequantized_matrices(layout):
    shapes = {"nt": ((32, 256), (48, 256)), "nn": ((32, 256), (256, 48)), "tn": ((256, 32), (256, 48))}[
        layout
    ]
    left, right = (torch.randn(shape) for shape in shapes)
    for quantize in (
        lambda x: _pair(quantize_current(x, E4M3)),
        lambda x: quantize_blocks(x, (1, 128), E4M3),
    ):
        a, b = quantize(left), quantize(right)
        x, y = dequantize(*a).double(), dequantize(*b).double()
        expected = (x.T if layout == "tn" else x) @ (y.T if layout == "nt" else y)
        actual = fp8_matmul(a, b, torch.float32, layout=layout)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-4)


def _pair(quantized: QuantizedMatrix):
    return quantized.rows, quantized.rows_scale_inv


def updated(history, scale, latest, **options):
    history, scale = update_delayed_scaling(
        torch.tensor(history, dtype=torch.float32).t().contiguous(),
        torch.tensor(scale, dtype=torch.float32),
        torch.tensor(latest, dtype=torch.float32),
        448.0,
        **options,
    )
    return history.t().tolist(), scale.tolist()


def test_history_rolls_and_the_leaving_row_still_counts():
    # rows, oldest first after the running one: [running, 9 (leaves now), 2, 3]
    assert updated([[4.0, 9.0, 2.0, 3.0]], [1.0], [4.0]) == ([[0, 2, 3, 4]], [448 / np.float32(9)])
    assert updated([[0.0, 2.0, 3.0, 4.0]], [1.0], [1.0])[1] == [112]


def test_most_recent_and_margin():
    history, scale = updated([[4.0, 9.0, 2.0]], [1.0], [4.0], amax_compute_algo="most_recent", margin=2)
    assert history == [[0, 2, 4]] and scale == [448 / 4 / 4]
    assert updated([[4.0, 9.0, 2.0]], [1.0], [4.0], margin=-1)[1] == [np.float32(896) / np.float32(9)]


def test_a_tensor_that_was_not_used_keeps_history_and_scale():
    assert updated([[0.0, 9.0, 2.0], [1.0, 0.0, 0.0]], [5.0, 5.0], [0.0, 1.0]) == (
        [[0, 9, 2], [0, 0, 1]],
        [5, 448],
    )


def test_infinity_keeps_the_scale_until_it_leaves_the_history():
    history, scale = updated([[INF, 1.0, 2.0]], [5.0], [INF])
    assert history == [[0, 2, INF]] and scale == [5]
    history, scale = updated([[3.0, *history[0][1:]]], scale, [3.0])
    assert history == [[0, INF, 3]] and scale == [5]
    history, scale = updated([[3.5, *history[0][1:]]], scale, [3.5])
    assert history == [[0, 3, 3.5]] and scale == [5], "the row that leaves still counts"
    assert updated([[3.5, *history[0][1:]]], scale, [3.5])[1] == [128]


def test_nan_enters_the_history_but_not_the_maximum():
    history, scale = updated([[NAN, 1.0, 2.0]], [5.0], [NAN])
    assert history[0][:2] == [0, 2] and math.isnan(history[0][2])
    assert scale == [224]
    assert updated([[NAN, 1.0, 2.0]], [5.0], [NAN], amax_compute_algo="most_recent")[1] == [5]


def test_a_tiny_amax_gives_the_largest_float32_scale():
    assert updated([[1e-38, 0.0]], [1.0], [1e-38])[1] == [FLOAT32_MAX]


def test_a_history_of_one_row():
    assert updated([[2.0]], [1.0], [2.0]) == ([[0]], [224])
    assert updated([[0.0]], [224.0], [0.0]) == ([[0]], [224])


def test_an_amax_reduced_over_ranks_replaces_the_local_one():
    assert updated([[2.0, 0.0]], [1.0], [4.0]) == ([[0, 4]], [112])
