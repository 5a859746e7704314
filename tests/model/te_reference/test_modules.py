"""Linear, LayerNormLinear and LayerNormMLP: what test_te_recorded.py does not compare, and what they refuse."""

import pytest
import torch
import torch.nn.functional as F

from model import te_reference as te
from model.te_reference.quantize import (
    dequantize,
    quantize_blocks,
    quantize_current,
    quantize_per_tensor,
    scale_from_amax,
)
from model.te_reference.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    QParams,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def data(rows=64, inputs=128, outputs=96, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )


def linear_with(weight):
    module = te.Linear(*weight.T.shape, bias=False, params_dtype=weight.dtype)
    with torch.no_grad():
        module.weight.copy_(weight)
    return module


def forward_backward(module, x, grad, recipe):
    x = x.clone().requires_grad_()
    with te.autocast(recipe=recipe):
        out = module(x)
    out.backward(grad)
    return out.detach(), x.grad, [parameter.grad for parameter in module.parameters()]


def one_scale(x, dtype=E4M3):
    quantized = quantize_current(x, dtype)
    return dequantize(quantized.rows, quantized.rows_scale_inv)


def tiles(x, block):
    return dequantize(*quantize_blocks(x, block, E4M3))


def test_block_scaling_quantizes_along_each_contraction():
    x, weight, grad = data(rows=144, inputs=256, outputs=208)
    # a wide range, so that small values of a tile underflow with one tiling and not with the other
    x, grad = (
        x * torch.exp2(torch.randint(-12, 12, x.shape)),
        grad * torch.exp2(torch.randint(-12, 12, grad.shape)),
    )
    out, grad_x, (grad_weight,) = forward_backward(linear_with(weight), x, grad, Float8BlockScaling())
    square = tiles(weight, (128, 128))
    assert not torch.equal(tiles(x, (128, 1)), tiles(x, (1, 128)))
    assert torch.equal(out, tiles(x, (1, 128)) @ square.T)
    assert torch.equal(grad_x, tiles(grad, (1, 128)) @ square)
    assert torch.equal(grad_weight, tiles(grad, (128, 1)).T @ tiles(x, (128, 1)))


def test_quantization_options_reach_their_tensors():
    x, weight, grad = data()
    recipe = Float8CurrentScaling()
    recipe.fp8_quant_fwd_inp = QParams(power_2_scale=True)
    recipe.fp8_quant_fwd_weight = QParams(amax_epsilon=100.0)
    out, grad_x, _ = forward_backward(linear_with(weight), x, grad, recipe)
    scale = scale_from_amax(x.abs().max(), 448.0, power_2_scale=True)
    x8 = quantize_per_tensor(x, scale, E4M3).rows.float() / scale
    weight8 = quantize_per_tensor(weight, torch.tensor(4.48), E4M3).rows.float() / 4.48
    torch.testing.assert_close(out, x8 @ weight8.T)
    torch.testing.assert_close(grad_x, one_scale(grad, E5M2) @ weight8)


def test_frozen_weights_and_inputs_without_gradient():
    x, weight, grad = data()
    frozen = linear_with(weight).requires_grad_(False)
    _, grad_x, _ = forward_backward(frozen, x, grad, Float8BlockScaling())
    assert frozen.weight.grad is None and grad_x is not None
    module = linear_with(weight)
    with te.autocast(recipe=Float8BlockScaling()):
        module(x).backward(grad)
    assert module.weight.grad is not None


def mlp_with_norm(dtype=torch.float32):
    torch.manual_seed(1)
    options = {"bias": False, "normalization": "RMSNorm", "params_dtype": dtype, "eps": 1e-6}
    modules = (
        te.LayerNormLinear(128, 96, **options),
        te.LayerNormMLP(128, 64, activation="swiglu", **options),
    )
    for module in modules:
        with torch.no_grad():
            module.layer_norm_weight.uniform_(0.5, 1.5)
            for name, parameter in module.named_parameters():
                if name != "layer_norm_weight":
                    parameter.normal_(std=0.1)
    return modules


def rms_norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def high_precision(module, x):
    hidden = rms_norm(x, module.layer_norm_weight)
    if isinstance(module, te.LayerNormLinear):
        return F.linear(hidden, module.weight)
    gate, up = F.linear(hidden, module.fc1_weight).chunk(2, -1)
    return F.linear(F.silu(gate) * up, module.fc2_weight)


def test_without_fp8_a_product_and_its_gradients_are_rounded_once():
    x, weight, grad = data(dtype=torch.bfloat16)
    module, leaf = linear_with(weight), x.view(4, 16, -1).clone().requires_grad_()
    out = module(leaf)
    out.backward(grad.view(4, 16, -1))
    wide = [t.float() for t in (x, weight, grad)]
    assert torch.equal(out.view(64, -1), (wide[0] @ wide[1].t()).bfloat16())
    assert torch.equal(leaf.grad.view(64, -1), (wide[2] @ wide[1]).bfloat16())
    assert torch.equal(module.weight.grad, (wide[2].t() @ wide[0]).bfloat16())
    module.weight.requires_grad_(False)
    module(leaf.detach()).sum()  # without any gradient


@pytest.mark.parametrize("index", [0, 1], ids=["LayerNormLinear", "LayerNormMLP"])
def test_without_fp8_modules_are_their_formula(index):
    module = mlp_with_norm(torch.float64)[index]
    x = torch.randn(16, 128, dtype=torch.float64, requires_grad=True)
    inputs = (x, *module.parameters())
    out, expected = module(x), high_precision(module, x)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    grad = torch.randn_like(out)
    actual_grads = torch.autograd.grad(out, inputs, grad)
    expected_grads = torch.autograd.grad(expected, inputs, grad)
    torch.testing.assert_close(actual_grads, expected_grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "outputs", "training"),
    [
        *(((4, 32), 48, training) for training in (True, False)),
        *(((8, 24), 48, training) for training in (True, False)),
        *(((3, 5, 32), 48, training) for training in (True, False)),
        ((8, 32), 48, True),  # rows of a training; others are padded
        ((16, 32), 24, True),
    ],
)
def test_shapes_that_fp8_gemms_refuse(shape, outputs, training):
    with torch.set_grad_enabled(training), te.autocast(recipe=DelayedScaling()), pytest.raises(ValueError):
        te.Linear(shape[-1], outputs, bias=False)(torch.zeros(shape))


def test_rows_and_outputs_of_an_evaluation_need_not_divide_by_16():
    with torch.no_grad(), te.autocast(recipe=DelayedScaling()):
        assert te.Linear(32, 24, bias=False)(torch.zeros(8, 32)).shape == (8, 24)


def test_input_and_weights_must_have_one_dtype():
    for module in (te.Linear(32, 48, bias=False), *mlp_with_norm()):
        with pytest.raises(ValueError):
            module(torch.randn(16, 128 if hasattr(module, "eps") else 32).bfloat16())


@pytest.mark.parametrize(
    "make",
    [
        lambda: te.Linear(16, 16),
        lambda: te.Linear(16, 16, bias=False, biass=True),
        lambda: te.LayerNormLinear(16, 16, bias=False),
        lambda: te.LayerNormMLP(16, 16, bias=False, normalization="RMSNorm"),
        lambda: te.TransformerLayer(16, 16, 1),
        lambda: te.DotProductAttention(1, 16),
        lambda: te.DotProductAttention(1, 16, qkv_format="bshd", attn_mask_type="padding"),
        lambda: te.DotProductAttention(1, 16, attention_dropout=0.1),
        lambda: te.apply_rotary_pos_emb(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2)),
    ],
)
def test_unsupported_and_unknown_arguments_are_refused(make):
    with pytest.raises((ValueError, TypeError)):
        make()
