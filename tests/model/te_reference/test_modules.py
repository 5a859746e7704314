"""Modules of the reference: what test_te_recorded.py does not compare, and what they refuse."""

import math

import pytest
import torch

from model import te_reference as te
from model.te_reference.quantize import (
    amax,
    dequantize,
    fp8_values,
    quantize_blocks,
)
from model.te_reference.recipe import DelayedScaling

INF, NAN = math.inf, math.nan
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_fp8_values_equal_torch_conversion(dtype):
    """All 256 bytes to the bit, NaN too, in the memory layout that it would have: sums over it keep their order."""
    data = torch.arange(256, dtype=torch.uint8).view(dtype).repeat(3).view(32, 24)
    for layout in (data, data.t(), data[:, ::2], data.view(4, 8, 24), data[:0], data[3]):
        found, expected = fp8_values(layout), layout.float()
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
        assert found.stride() == expected.stride()


def test_amax_ignores_nan():
    for values, largest in (([NAN, -4.0, 3.0], 4), ([NAN, NAN], 0), ([NAN, -INF], INF), ([], 0)):
        assert amax(torch.tensor(values)) == largest


@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128)])
def test_dequantize_round_trip(block):
    x = torch.randint(-8, 9, (200, 136)).float() * 0.25
    data, scale_inv = quantize_blocks(x, block, E4M3)
    assert torch.equal(dequantize(data, scale_inv), x)
    assert torch.equal(dequantize(data.t(), scale_inv.t()), x.t())


def dense_attention(q, k, v, left):
    """[B, S, N, D] queries, [B, S, K, D] keys and values, `left` keys before each query -> [B, S, N * D]."""
    repeats = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(repeats, dim=2) for t in (k, v))
    scores = torch.einsum("bind,bjnd->bnij", q, k) / math.sqrt(q.shape[-1])
    age = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    scores.masked_fill_((age < 0) | (age > left), -math.inf)
    return torch.einsum("bnij,bjnd->bind", scores.softmax(-1), v).flatten(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("window", "left"), [(None, 99), ((-1, 0), 99), ((3, 0), 3), ((0, 0), 0)])
def test_attention_equals_dense_masked_softmax(groups, window, left, dtype):
    torch.manual_seed(0)
    attention = te.DotProductAttention(4, 8, num_gqa_groups=groups, qkv_format="bshd", window_size=window)
    inputs = [torch.randn(2, 12, heads, 8).to(dtype).requires_grad_() for heads in (4, groups, groups)]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    grad = torch.randn(2, 12, 32).to(dtype)
    out, expected = attention(*inputs), dense_attention(*exact, left)
    out.backward(grad)
    expected.backward(grad.double())
    assert out.dtype == dtype
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    pairs = [(out, expected), *((t.grad, e.grad) for t, e in zip(inputs, exact, strict=True))]
    for actual, right in pairs:
        assert (actual.double() - right).norm() <= 1.5 * rounding * right.norm() + 1e-5


def linear_with(weight):
    module = te.Linear(*weight.T.shape, bias=False, params_dtype=weight.dtype)
    with torch.no_grad():
        module.weight.copy_(weight)
    return module


def test_linear_without_fp8_rounds_once():
    torch.manual_seed(0)
    x, weight, grad = (torch.randn(shape).bfloat16() for shape in ((64, 128), (96, 128), (64, 96)))
    module, leaf = linear_with(weight), x.view(4, 16, -1).clone().requires_grad_()
    out = module(leaf)
    out.backward(grad.view(4, 16, -1))
    wide = [t.float() for t in (x, weight, grad)]
    assert torch.equal(out.view(64, -1), (wide[0] @ wide[1].t()).bfloat16())
    assert torch.equal(leaf.grad.view(64, -1), (wide[2] @ wide[1]).bfloat16())
    assert torch.equal(module.weight.grad, (wide[2].t() @ wide[0]).bfloat16())


@pytest.mark.parametrize(
    ("shape", "outputs", "training", "fits"),
    [
        ((4, 32), 48, False, False),
        ((8, 24), 48, False, False),
        ((3, 5, 32), 48, False, False),
        ((8, 32), 48, True, False),
        ((16, 32), 24, True, False),
        ((8, 32), 24, False, True),
        ((16, 32), 48, True, True),
    ],
)
def test_supported_gemm_shapes(shape, outputs, training, fits):
    module = te.Linear(shape[-1], outputs, bias=False)
    with torch.set_grad_enabled(training), te.autocast(recipe=DelayedScaling()):
        if fits:
            assert module(torch.zeros(shape)).shape == (*shape[:-1], outputs)
        else:
            with pytest.raises(ValueError):
                module(torch.zeros(shape))


@pytest.mark.parametrize(
    "make",
    [
        lambda: te.Linear(16, 16),
        lambda: te.Linear(16, 16, bias=False, biass=True),
        lambda: te.LayerNormLinear(16, 16, bias=False),
        lambda: te.LayerNormMLP(16, 16, bias=False, normalization="RMSNorm"),
        lambda: te.DotProductAttention(1, 16),
        lambda: te.DotProductAttention(1, 16, qkv_format="bshd", attn_mask_type="padding"),
        lambda: te.DotProductAttention(1, 16, attention_dropout=0.1),
        lambda: te.DotProductAttention(1, 16, qkv_format="bshd", window_size=(3, 1)),
        lambda: te.apply_rotary_pos_emb(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2)),
    ],
)
def test_unsupported_arguments_raise(make):
    with pytest.raises((ValueError, TypeError)):
        make()


def test_fp8_state_stays_float32_after_bfloat16():
    """DeepSpeed calls module.bfloat16()."""
    module, x = te.Linear(32, 48, bias=False), torch.randn(16, 32)
    with te.autocast(recipe=DelayedScaling()):
        module(x).sum().backward()
    module.bfloat16()
    assert module.fp8_meta["scaling_fwd"].scale.dtype == torch.float32
    with te.autocast(recipe=DelayedScaling()):
        assert module(x.bfloat16()).dtype == torch.bfloat16
