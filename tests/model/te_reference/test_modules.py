"""Modules of the reference: what test_te_recorded.py does not compare, and what they refuse."""

import pytest
import torch

from model import te_reference as te
from model.te_reference.quantize import dequantize, quantize_current, quantize_per_tensor, scale_from_amax
from model.te_reference.recipe import DelayedScaling, Float8CurrentScaling, QParams


def linear_with(weight):
    module = te.Linear(*weight.T.shape, bias=False, params_dtype=weight.dtype)
    with torch.no_grad():
        module.weight.copy_(weight)
    return module


def test_quantization_options_reach_their_tensors():
    torch.manual_seed(0)
    x, weight, grad = torch.randn(64, 128), torch.randn(96, 128), torch.randn(64, 96)
    recipe, leaf = Float8CurrentScaling(), x.clone().requires_grad_()
    recipe.fp8_quant_fwd_inp = QParams(power_2_scale=True)
    recipe.fp8_quant_fwd_weight = QParams(amax_epsilon=100.0)
    with te.autocast(recipe=recipe):
        out = linear_with(weight)(leaf)
    out.backward(grad)
    scale = scale_from_amax(x.abs().max(), 448.0, power_2_scale=True)
    x8 = quantize_per_tensor(x, scale, torch.float8_e4m3fn).rows.float() / scale
    weight8 = quantize_per_tensor(weight, torch.tensor(4.48), torch.float8_e4m3fn).rows.float() / 4.48
    grad8 = quantize_current(grad, torch.float8_e5m2)
    torch.testing.assert_close(out, x8 @ weight8.T, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(
        leaf.grad, dequantize(grad8.rows, grad8.rows_scale_inv) @ weight8, rtol=1e-5, atol=1e-4
    )


def test_without_fp8_a_product_and_its_gradients_are_rounded_once():
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
def test_shapes_that_fp8_gemms_take(shape, outputs, training, fits):
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
def test_arguments_without_an_implementation_are_refused(make):
    with pytest.raises((ValueError, TypeError)):
        make()
