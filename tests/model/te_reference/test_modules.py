"""Linear, LayerNormLinear, LayerNormMLP and RMSNorm: what their GEMMs see, and what they refuse."""

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
    Format,
    QParams,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = [DelayedScaling(amax_history_len=4), Float8CurrentScaling(), Float8BlockScaling()]


def by_name(recipe):
    return type(recipe).__name__


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


def test_current_scaling_computes_all_three_gemms_from_fp8_operands():
    x, weight, grad = data()
    out, grad_x, (grad_weight,) = forward_backward(linear_with(weight), x, grad, Float8CurrentScaling())
    torch.testing.assert_close(out, one_scale(x) @ one_scale(weight).T)
    torch.testing.assert_close(grad_x, one_scale(grad, E5M2) @ one_scale(weight))
    torch.testing.assert_close(grad_weight, one_scale(grad, E5M2).T @ one_scale(x))
    assert (grad_weight - grad.T @ x).norm() > 0.01 * grad_weight.norm(), "FP8 rounding must be visible"


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


@pytest.mark.parametrize(("fp8_format", "grad_dtype"), [(Format.HYBRID, E5M2), (Format.E4M3, E4M3)])
def test_delayed_scaling_starts_from_scale_one(fp8_format, grad_dtype):
    x, weight, grad = data()
    recipe = DelayedScaling(fp8_format=fp8_format)
    out, grad_x, (grad_weight,) = forward_backward(linear_with(weight), x, grad, recipe)
    x8, weight8, grad8 = (t.to(dtype).float() for t, dtype in ((x, E4M3), (weight, E4M3), (grad, grad_dtype)))
    torch.testing.assert_close(out, x8 @ weight8.T)
    torch.testing.assert_close(grad_x, grad8 @ weight8)
    torch.testing.assert_close(grad_weight, grad8.T @ x8)


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


@pytest.mark.parametrize("recipe", RECIPES, ids=by_name)
def test_results_are_rounded_once_to_the_activation_dtype(recipe):
    x, weight, grad = data(dtype=torch.bfloat16)
    low = forward_backward(linear_with(weight), x, grad, recipe)
    high = forward_backward(linear_with(weight.float()), x.float(), grad.float(), recipe)
    assert low[0].dtype == low[1].dtype == low[2][0].dtype == torch.bfloat16
    for actual, expected in ((low[0], high[0]), (low[1], high[1]), (low[2][0], high[2][0])):
        assert torch.equal(actual, expected.bfloat16())


def test_leading_dimensions_are_kept():
    module = te.Linear(32, 48, bias=False)
    with te.autocast(recipe=DelayedScaling()):
        assert module(torch.randn(2, 8, 32)).shape == (2, 8, 48)


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


@pytest.mark.parametrize("recipe", RECIPES, ids=by_name)
@pytest.mark.parametrize("index", [0, 1], ids=["LayerNormLinear", "LayerNormMLP"])
def test_fp8_gradients_follow_the_high_precision_ones(index, recipe):
    module = mlp_with_norm()[index]
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 128, generator=generator, requires_grad=True)
    grad = torch.randn(high_precision(module, x).shape, generator=generator)
    inputs = (x, *module.parameters())
    for _ in range(2):  # the first step of delayed scaling has scale 1
        with te.autocast(recipe=recipe):
            out = module(x)
        actual = torch.autograd.grad(out, inputs, grad)
    expected = torch.autograd.grad(high_precision(module, x), inputs, grad)
    for a, b in zip(actual, expected, strict=True):
        error = ((a - b).norm() / b.norm()).item()
        assert 1e-3 < error < 0.12, "FP8 is neither exact nor far off"


def test_delayed_scaling_quantizes_the_norm_without_rounding_it_to_bfloat16():
    module = mlp_with_norm(torch.bfloat16)[0]
    x = torch.randn(16, 128).bfloat16()
    exact = rms_norm(x.float(), module.layer_norm_weight.float())
    with te.autocast(recipe=DelayedScaling(amax_history_len=2)):
        module(x)
        delayed = module.fp8_meta["scaling_fwd"].amax_history[0, 0].item()
    assert delayed == pytest.approx(exact.abs().max().item(), rel=1e-6)
    assert delayed != exact.bfloat16().abs().max().item()


def test_current_scaling_rounds_the_norm_to_bfloat16_first():
    module = mlp_with_norm(torch.bfloat16)[0]
    x = torch.randn(16, 128).bfloat16()
    rounded = rms_norm(x.float(), module.layer_norm_weight.float()).bfloat16()
    with torch.no_grad(), te.autocast(recipe=Float8CurrentScaling()):
        out = module(x)
    expected = one_scale(rounded) @ one_scale(module.weight.detach()).T
    torch.testing.assert_close(out, expected.bfloat16(), rtol=8e-3, atol=1e-3)


def test_swiglu_gates_with_the_first_half():
    module = mlp_with_norm()[1]
    with torch.no_grad():
        module.fc1_weight[:64] = 0
        assert module(torch.randn(8, 128)).abs().max() == 0, "silu(0) * up"
        module.fc1_weight[:64].normal_()
        module.fc1_weight[64:] = 0
        assert module(torch.randn(8, 128)).abs().max() == 0


def test_the_two_gemms_of_the_mlp_have_their_own_columns():
    module = mlp_with_norm()[1]
    with te.autocast(recipe=DelayedScaling(amax_history_len=2)):
        out = module(torch.randn(16, 128))
    out.backward(torch.full_like(out, 0.5))
    forward, backward = module.fp8_meta["scaling_fwd"], module.fp8_meta["scaling_bwd"]
    assert module.fp8_meta["num_gemms"] == 2
    assert forward.scale.shape == (6,) and backward.scale.shape == (4,)
    fp8_max = torch.tensor(448.0)
    assert forward.scale[1] == fp8_max / module.fc1_weight.abs().max()
    assert forward.scale[4] == fp8_max / module.fc2_weight.abs().max()
    assert forward.scale[2] == forward.scale[5] == 1, "outputs are not quantized"
    assert backward.scale[2] == 57344 / 0.5, "the gradient of the output belongs to the second GEMM"
    assert backward.scale[1] == backward.scale[3] == 1


@pytest.mark.parametrize("frozen", [(), ("layer_norm_weight", "fc1_weight")])
def test_the_backward_scales_of_the_mlp_move_once(monkeypatch, frozen):
    """After the last of its gradients that anybody needs; each time is a reduction over the ranks."""
    module, moved = mlp_with_norm()[1], []
    for name in frozen:
        getattr(module, name).requires_grad_(False)
    monkeypatch.setattr("model.te_reference.gemm.update_scales", lambda forward: moved.append(forward))
    with te.autocast(recipe=DelayedScaling()):
        out = module(torch.randn(16, 128))
    out.sum().backward()
    assert moved == [False]
    assert module.fp8_meta["scaling_bwd"].amax_history[0, 2] > 0


def test_rms_norm_module():
    norm = te.RMSNorm(128, eps=1e-6, dtype=torch.bfloat16)
    x = torch.randn(4, 3, 128)
    out = norm(x)
    assert out.dtype == torch.bfloat16
    expected = rms_norm(x.bfloat16().float(), torch.ones(128)).bfloat16()
    assert torch.equal(out, expected)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]


def test_default_initialization():
    weight = te.Linear(256, 256, bias=False).weight
    assert weight.std().item() == pytest.approx(0.023, rel=0.05)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(4, 32), (8, 24), (3, 5, 32)])
def test_shapes_that_fp8_gemms_refuse(shape, training):
    module = te.Linear(shape[-1], 48, bias=False)
    with torch.set_grad_enabled(training), te.autocast(recipe=DelayedScaling()):
        with pytest.raises(ValueError, match=r"divisible by 16.*" + str(shape[-1])):
            module(torch.zeros(shape))


def test_training_needs_rows_and_outputs_divisible_by_16():
    x = torch.zeros(8, 32)
    with te.autocast(recipe=DelayedScaling()):
        with torch.no_grad():
            assert te.Linear(32, 24, bias=False)(x).shape == (8, 24)
        with pytest.raises(ValueError, match="rows"):
            te.Linear(32, 48, bias=False)(x)
        with pytest.raises(ValueError, match="out_features"):
            te.Linear(32, 24, bias=False)(x.repeat(2, 1))


def test_input_and_weights_must_have_one_dtype():
    for module in (te.Linear(32, 48, bias=False), *mlp_with_norm()):
        with pytest.raises(ValueError, match="same dtype"):
            module(torch.randn(16, 128 if hasattr(module, "eps") else 32).bfloat16())


@pytest.mark.parametrize(
    "make",
    [
        lambda: te.Linear(16, 16),
        lambda: te.LayerNormLinear(16, 16, bias=False),
        lambda: te.LayerNormMLP(16, 16, bias=False, normalization="RMSNorm"),
        lambda: te.TransformerLayer(16, 16, 1),
        lambda: te.DotProductAttention(1, 16),
        lambda: te.DotProductAttention(1, 16, qkv_format="bshd", attn_mask_type="padding"),
        lambda: te.DotProductAttention(1, 16, attention_dropout=0.1),
        lambda: te.apply_rotary_pos_emb(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2)),
    ],
)
def test_unsupported_arguments_name_what_is_supported(make):
    with pytest.raises(ValueError, match="the CPU reference supports"):
        make()


def test_unknown_arguments_are_errors():
    with pytest.raises(TypeError, match="argument 'biass'"):
        te.Linear(16, 16, bias=False, biass=True)
