"""Attention against a dense softmax, rotary positions against their definition, and the layer against transformers."""

import math

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from model import te_reference as te
from model.fp8.gemms import count_gemms
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from tests.conftest import MISTRAL_LAYER


def dense_attention(q, k, v, left):
    """[B, S, N, D] queries, [B, S, K, D] keys and values, `left` keys before each query -> [B, S, N * D]."""
    repeats = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(repeats, dim=2) for t in (k, v))
    scores = torch.einsum("bind,bjnd->bnij", q, k) / math.sqrt(q.shape[-1])
    for i in range(q.shape[1]):
        for j in range(k.shape[1]):
            if j > i or i - j > left:
                scores[:, :, i, j] = -math.inf
    return torch.einsum("bnij,bjnd->bind", scores.softmax(-1), v).flatten(2)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(
    ("window", "left"), [(None, 99), ((-1, 0), 99), ((3, 0), 3), ((0, 0), 0), ((11, 0), 11)]
)
def test_attention_is_the_dense_masked_softmax(groups, window, left):
    q, k, v = (torch.randn(2, 12, heads, 8) for heads in (4, groups, groups))
    attention = te.DotProductAttention(4, 8, num_gqa_groups=groups, qkv_format="bshd", window_size=window)
    torch.testing.assert_close(attention(q, k, v), dense_attention(q, k, v, left))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_sixteen_bit_attention_and_its_gradients(groups, dtype):
    attention = te.DotProductAttention(4, 8, num_gqa_groups=groups, qkv_format="bshd", window_size=(5, 0))
    inputs = [torch.randn(2, 24, heads, 8).to(dtype).requires_grad_() for heads in (4, groups, groups)]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    grad = torch.randn(2, 24, 32).to(dtype)
    out, expected = attention(*inputs), dense_attention(*exact, 5)
    out.backward(grad)
    expected.backward(grad.double())
    assert out.dtype == dtype
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    pairs = [(out, expected), *((t.grad, e.grad) for t, e in zip(inputs, exact, strict=True))]
    for actual, right in pairs:
        assert (actual.double() - right).norm() < 1.5 * rounding * right.norm()


def test_attention_rounds_the_exponentials_before_it_divides_by_their_sum():
    """64 sequences of two tokens: the second sees scores s < 0 and 0 with values 1 and 0, exp(s) / (1 + exp(s))."""
    scores = -torch.linspace(0.1, 3, 64).bfloat16()
    q, k, v = torch.zeros(3, 64, 2, 1, 16, dtype=torch.bfloat16)
    q[:, 1, 0, 0], k[:, 0, 0, 0], v[:, 0, 0, 0] = 4.0, scores, 1.0
    out = te.DotProductAttention(1, 16, qkv_format="bshd")(q, k, v)[:, 1, 0]
    exponentials = scores.float().exp()
    total = 1 + exponentials
    assert torch.equal(out, (exponentials.bfloat16() / total).bfloat16())
    assert not torch.equal(out, (exponentials / total).bfloat16())


@pytest.mark.parametrize("window", [(-1, 0), (3, 0)])
def test_gradients_of_attention_in_16_bits_are_float32s_rounded_once(window):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 12, heads, 16).bfloat16() for heads in (4, 2, 2))
    attention = te.DotProductAttention(4, 16, num_gqa_groups=2, qkv_format="bshd", window_size=window)
    upstream = torch.randn(2, 12, 64).bfloat16()
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    attention(*leaves).backward(upstream)
    exact = [t.float().requires_grad_() for t in (q, k, v)]
    attention(*exact).backward(upstream.float())
    for ours, theirs in zip(leaves, exact, strict=True):
        assert torch.equal(ours.grad, theirs.grad.bfloat16())


@pytest.mark.parametrize("window", [(-2, 0), (3, 1), (3, -1)])
def test_windows_that_are_not_causal_are_refused(window):
    with pytest.raises(ValueError, match="window_size"):
        te.DotProductAttention(4, 8, qkv_format="bshd", window_size=window)


def test_wrong_heads_are_refused():
    with pytest.raises(ValueError, match="must be"):
        te.DotProductAttention(4, 8, qkv_format="bshd")(*[torch.randn(1, 4, 2, 8)] * 3)
    with pytest.raises(ValueError, match="divisible"):
        te.DotProductAttention(4, 8, num_gqa_groups=3, qkv_format="bshd")


def test_rotary_frequencies():
    freqs = te.RotaryPositionEmbedding(8, rotary_base=100.0)(5)
    assert freqs.shape == (5, 1, 1, 8) and freqs.dtype == torch.float32
    for position in range(5):
        for channel in range(8):
            expected = position * 100.0 ** (-2 * (channel % 4) / 8)
            assert freqs[position, 0, 0, channel].item() == pytest.approx(expected, rel=1e-6)


def turned(t, freqs):
    """t [B, S, N, 8] by pairs of channels as complex numbers."""
    length = t.shape[1]
    angles = torch.polar(torch.ones(length, 1, 4, dtype=t.dtype), freqs[:length, 0, :, :4].to(t.dtype))
    pairs = torch.complex(t[..., :4], t[..., 4:]) * angles
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def test_rotation_turns_pairs_by_the_angle_of_their_position_and_back_in_the_backward():
    freqs = te.RotaryPositionEmbedding(8)(16)
    t, grad = torch.randn(2, 10, 3, 8, requires_grad=True), torch.randn(2, 10, 3, 8)
    out = te.apply_rotary_pos_emb(t, freqs, tensor_format="bshd", fused=True)
    torch.testing.assert_close(out, turned(t, freqs))
    (expected,) = torch.autograd.grad(turned(t, freqs), t, grad)
    (actual,) = torch.autograd.grad(out, t, grad)
    torch.testing.assert_close(actual, expected)


def test_packed_sequences_begin_at_position_0():
    freqs, t = te.RotaryPositionEmbedding(8)(6), torch.randn(9, 3, 8)
    cu_seqlens = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    out = te.apply_rotary_pos_emb(t, freqs, tensor_format="thd", fused=True, cu_seqlens=cu_seqlens)
    for first, end in ((0, 4), (4, 9)):
        alone = te.apply_rotary_pos_emb(t[None, first:end], freqs, tensor_format="bshd", fused=True)
        assert torch.equal(out[first:end], alone[0])
    with pytest.raises(ValueError, match="5 are needed"):
        te.apply_rotary_pos_emb(t, freqs[:4], tensor_format="thd", fused=True, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize(
    "arguments",
    [
        {"tensor_format": "sbhd", "fused": True},
        {"tensor_format": "bshd", "fused": False},
        {"tensor_format": "thd", "fused": True},
        {"tensor_format": "bshd", "fused": True, "cu_seqlens": torch.tensor([0, 4], dtype=torch.int32)},
    ],
)
def test_layouts_that_the_reference_does_not_rotate_are_refused(arguments):
    freqs, t = te.RotaryPositionEmbedding(8)(4), torch.randn(1, 4, 3, 8)
    with pytest.raises(
        ValueError, match="the CPU reference supports 'bshd', and 'thd' with cu_seqlens, fused"
    ):
        te.apply_rotary_pos_emb(t, freqs, **arguments)
    assert te.apply_rotary_pos_emb(t, freqs, "bshd", fused=True).shape == t.shape, "as many as positions"
    with pytest.raises(ValueError, match="for 3 positions, but 4 are needed"):
        te.apply_rotary_pos_emb(t, freqs[:3], "bshd", fused=True)


def test_rotation_of_bfloat16_rounds_once():
    freqs, t = te.RotaryPositionEmbedding(8)(16), torch.randn(1, 16, 1, 8).bfloat16()
    rotated = te.apply_rotary_pos_emb(t, freqs, tensor_format="bshd", fused=True)
    assert torch.equal(rotated, turned(t.double(), freqs).bfloat16())


def layer(**changes):
    options = dict(
        num_gqa_groups=2,
        kv_channels=16,
        layernorm_epsilon=1e-6,
        hidden_dropout=0.0,
        window_size=(7, 0),
    )
    return te.TransformerLayer(64, 128, 4, **{**MISTRAL_LAYER, **options, **changes})


def test_the_layer_is_a_mistral_layer():
    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=100,
        sliding_window=8,
        rms_norm_eps=1e-6,
    )
    reference, ours = MistralForCausalLM(config), layer()
    theirs = reference.model.layers[0]
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(std=0.2)
        ours.load_state_dict(
            {
                "self_attention.layernorm_qkv.layer_norm_weight": theirs.input_layernorm.weight,
                "self_attention.layernorm_qkv.weight": torch.cat(
                    [getattr(theirs.self_attn, f"{name}_proj").weight for name in "qkv"]
                ),
                "self_attention.proj.weight": theirs.self_attn.o_proj.weight,
                "layernorm_mlp.layer_norm_weight": theirs.post_attention_layernorm.weight,
                "layernorm_mlp.fc1_weight": torch.cat(
                    [theirs.mlp.gate_proj.weight, theirs.mlp.up_proj.weight]
                ),
                "layernorm_mlp.fc2_weight": theirs.mlp.down_proj.weight,
            }
        )
        norm = te.RMSNorm(64, eps=1e-6)
        norm.weight.copy_(reference.model.norm.weight)
        ids = torch.randint(0, 100, (2, 32))
        hidden = ours(reference.model.embed_tokens(ids), rotary_pos_emb=te.RotaryPositionEmbedding(16)(32))
        logits, expected = reference.lm_head(norm(hidden)), reference(ids).logits
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_every_gemm_of_the_layer_runs_in_fp8():
    module, precision = layer(), Precision(PrecisionConfig(backend="reference"))
    with count_gemms(module, precision) as gemms, precision.autocast():
        module(torch.randn(2, 16, 64), rotary_pos_emb=te.RotaryPositionEmbedding(16)(16))
    assert gemms.forward == {
        "self_attention.layernorm_qkv": 1,
        "self_attention.proj": 1,
        "layernorm_mlp": 2,
    }
