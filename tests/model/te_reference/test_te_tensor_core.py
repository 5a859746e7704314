"""The emulated sums of a Hopper GPU's tensor cores, in cases that can be added by hand."""

import pytest
import torch

from model import te_reference as te
from model.te_reference.quantize import QuantizedMatrix, fp8_matmul, quantize_blocks, quantize_current
from model.te_reference.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MMParams
from tests.model.te_reference import tensor_core

ONE = torch.tensor(1.0)


def dot(left: list[float], right: list[float], *, fast: bool = False, dtype=torch.float8_e5m2) -> float:
    a, b = (torch.tensor([values]).to(dtype) for values in (left, right))
    return tensor_core.matmul(a, ONE, b, ONE, fast=fast).item()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_what_lies_13_bits_below_the_largest_product_is_cut_off(sign):
    kept, lost = [2.0**-13] * 31, [1.75 * 2.0**-14] * 31
    assert dot([1.0, *kept], [sign] * 32) == sign * (1 + 31 * 2.0**-13)
    assert dot([1.0, *lost], [sign] * 32) == sign


def test_the_running_sum_is_aligned_too():
    assert dot([1.0] * 32 + [2.0**-8] * 32, [1.0] * 64) == 32 + 32 * 2.0**-8
    assert dot([1.0] * 32 + [2.0**-9] * 32, [1.0] * 64) == 32
    assert dot([2.0**-9] * 32 + [1.0] * 32, [1.0] * 64) == 32 + 32 * 2.0**-9


def test_a_sum_keeps_13_bits():
    # the sum 8 has one bit less for what is below than its terms
    assert dot([4.0, 2.0**-11], [1.0] * 2) == 4 + 2.0**-11
    assert dot([4.0, 4.0, 2.0**-11], [1.0] * 3) == 8


def test_the_exponents_of_the_factors_align_a_product():
    # 1.75 * 1.75 = 3.0625 counts as 2**0, so that 2**-13 is kept beside it; 2 * 1 has the exponent 1
    assert dot([1.75, 2.0**-13, 2.0**-13], [1.75, 1.0, 1.0]) == 3.0625 + 2.0**-12
    assert dot([2.0, 2.0**-13, 2.0**-13], [1.0, 1.0, 1.0]) == 2.0


def test_split_accumulation_moves_the_sum_to_float32_every_128_products():
    left = [128.0] * 128 + [1.0] * 128
    assert dot(left, [1.0] * 256, fast=False) == 128 * 128 + 128
    assert dot(left, [1.0] * 256, fast=True) == 128 * 128


def test_zeros_and_nan():
    assert dot([0.0] * 40, [1.0] * 40) == 0
    assert dot([0.0] * 32 + [2.0**-16] * 8, [2.0**-16] * 40) == 8 * 2.0**-32
    result = dot([1.0, float("nan"), 1.0], [1.0] * 3)
    assert result != result


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize("blocks", [False, True])
def test_emulated_products_are_float32_products_within_their_precision(blocks, layout, monkeypatch):
    """All layouts, partial tiles, partial steps and several chunks."""
    monkeypatch.setattr(tensor_core, "CHUNK", 3 * tensor_core.STEP * 144)
    m, n, k = 40, 144, 272
    shapes = {"nt": ((m, k), (n, k)), "nn": ((m, k), (k, n)), "tn": ((k, m), (k, n))}[layout]

    def quantized(shape, contracts_rows):
        x = torch.randn(shape)
        if not blocks:
            return quantize_current(x, torch.float8_e4m3fn)
        data, scale_inv = quantize_blocks(x, (128, 1) if contracts_rows else (1, 128), torch.float8_e4m3fn)
        return QuantizedMatrix(data, scale_inv, data, scale_inv)

    a, b = quantized(shapes[0], layout == "tn"), quantized(shapes[1], layout != "nt")
    operands = (a.rows, a.rows_scale_inv), (b.rows, b.rows_scale_inv)
    expected = fp8_matmul(*operands, torch.float32, layout=layout)
    with tensor_core.emulated():
        actual = fp8_matmul(*operands, torch.float32, layout=layout)
    assert actual.shape == (m, n)
    error = (actual - expected).norm() / expected.norm()
    assert 1e-6 < error < 2e-3


def test_emulation_covers_the_forward_and_the_backward_and_ends():
    torch.manual_seed(0)
    layer, x = te.Linear(64, 32, bias=False), torch.randn(16, 64)
    x.requires_grad_()

    def run():
        x.grad = None
        with te.autocast(recipe=Float8CurrentScaling()):
            out = layer(x)
        out.backward(torch.ones_like(out) * out.detach())
        return out.detach(), x.grad

    plain = run()
    with tensor_core.emulated():
        emulated = run()
    for a, b in zip(plain, emulated, strict=True):
        assert not torch.equal(a, b)
        torch.testing.assert_close(a, b, rtol=0, atol=1e-2 * float(a.abs().max()))
    assert all(torch.equal(a, b) for a, b in zip(plain, run(), strict=True))


def test_recipes_choose_the_accumulation(monkeypatch):
    seen = []
    real = tensor_core.matmul

    def spy(*operands, fast):
        seen.append(fast)
        return real(*operands, fast=fast)

    monkeypatch.setattr(tensor_core, "matmul", spy)
    fast_wgrad = DelayedScaling()
    fast_wgrad.fp8_gemm_wgrad = MMParams(use_split_accumulator=False)
    expected = [
        (DelayedScaling(), [True, False, False]),
        (fast_wgrad, [True, False, True]),
        (Float8CurrentScaling(fp8_gemm_fprop=MMParams()), [False, False, False]),
        (Float8BlockScaling(), [False, False, False]),
    ]
    layer = te.Linear(32, 16, bias=False)
    for recipe, fast in expected:
        seen.clear()
        with tensor_core.emulated():
            with te.autocast(recipe=recipe):
                out = layer(torch.randn(16, 32, requires_grad=True))
            out.sum().backward()
        assert seen == fast
