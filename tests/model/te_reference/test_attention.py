"""Attention against a dense softmax, rotary positions against their definition, and the layer against transformers."""

import math

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from model import te_reference as te
from model.te_reference.recipe import DelayedScaling
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


def test_a_sequence_first_layout_gives_the_same():
    q, k, v = torch.randn(12, 2, 4, 8), torch.randn(12, 2, 2, 8), torch.randn(12, 2, 2, 8)
    attention = te.DotProductAttention(4, 8, num_gqa_groups=2)
    expected = dense_attention(*(t.transpose(0, 1) for t in (q, k, v)), 99).transpose(0, 1)
    torch.testing.assert_close(attention(q, k, v), expected)


def test_later_queries_align_at_the_bottom_right():
    q, k, v = (torch.randn(1, 12, heads, 8) for heads in (4, 2, 2))
    attention = te.DotProductAttention(4, 8, num_gqa_groups=2, qkv_format="bshd", window_size=(5, 0))
    tail = attention(q[:, -3:], k, v, attn_mask_type="causal_bottom_right")
    torch.testing.assert_close(tail, attention(q, k, v)[:, -3:])


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


def test_a_query_without_keys_gives_zeros():
    q, k = (torch.randn(1, length, 1, 8).bfloat16().requires_grad_() for length in (6, 4))
    attention = te.DotProductAttention(1, 8, qkv_format="bshd", attn_mask_type="causal_bottom_right")
    out = attention(q, k, k)
    out.sum().backward()
    assert torch.equal(out[:, :2], torch.zeros(1, 2, 8)) and out[:, 2:].any()
    assert torch.equal(q.grad[:, :2], torch.zeros(1, 2, 1, 8)) and q.grad.isfinite().all()


@pytest.mark.parametrize("window", [(-2, 0), (3, 1), (3, -1)])
def test_windows_that_are_not_causal_are_refused(window):
    with pytest.raises(ValueError, match="window_size"):
        te.DotProductAttention(4, 8, window_size=window)


def test_wrong_heads_are_refused():
    with pytest.raises(ValueError, match="must be"):
        te.DotProductAttention(4, 8, qkv_format="bshd")(*[torch.randn(1, 4, 2, 8)] * 3)
    with pytest.raises(ValueError, match="divisible"):
        te.DotProductAttention(4, 8, num_gqa_groups=3)


def test_rotary_frequencies():
    freqs = te.RotaryPositionEmbedding(8, rotary_base=100.0)(5)
    assert freqs.shape == (5, 1, 1, 8) and freqs.dtype == torch.float32
    for position in range(5):
        for channel in range(8):
            expected = position * 100.0 ** (-2 * (channel % 4) / 8)
            assert freqs[position, 0, 0, channel].item() == pytest.approx(expected, rel=1e-6)
    assert torch.equal(te.RotaryPositionEmbedding(8, rotary_base=100.0)(2, offset=3), freqs[3:])


@pytest.mark.parametrize("fused", [False, True])
def test_rotation_turns_pairs_by_the_angle_of_their_position(fused):
    freqs = te.RotaryPositionEmbedding(8)(16)
    t = torch.randn(2, 10, 3, 8)
    out = te.apply_rotary_pos_emb(t, freqs, tensor_format="bshd", fused=fused)
    pairs = torch.complex(t[..., :4], t[..., 4:]) * torch.polar(torch.ones(10, 1, 4), freqs[:10, 0, :, :4])
    torch.testing.assert_close(out, torch.cat((pairs.real, pairs.imag), dim=-1))
    swapped = te.apply_rotary_pos_emb(t.transpose(0, 1), freqs, fused=fused)
    assert torch.equal(swapped, out.transpose(0, 1))


def test_rotation_leaves_channels_beyond_the_frequencies_alone():
    t = torch.randn(1, 4, 2, 16)
    out = te.apply_rotary_pos_emb(t, te.RotaryPositionEmbedding(8)(4), tensor_format="bshd")
    assert torch.equal(out[..., 8:], t[..., 8:]) and not torch.equal(out[..., :8], t[..., :8])


def test_start_positions_shift_each_sequence():
    freqs, t = te.RotaryPositionEmbedding(8)(16), torch.randn(2, 4, 3, 8)
    out = te.apply_rotary_pos_emb(t, freqs, tensor_format="bshd", start_positions=torch.tensor([0, 7]))
    for row, start in enumerate((0, 7)):
        expected = te.apply_rotary_pos_emb(t[row : row + 1], freqs[start:], tensor_format="bshd")
        torch.testing.assert_close(out[row : row + 1], expected)
    with pytest.raises(ValueError, match="17 are needed"):
        te.apply_rotary_pos_emb(t, freqs, tensor_format="bshd", start_positions=torch.tensor([0, 13]))


def test_the_fused_rotation_has_the_gradient_of_the_other():
    freqs, t = te.RotaryPositionEmbedding(8)(6), torch.randn(2, 6, 3, 12)
    grads = []
    for fused in (False, True):
        x = t.clone().requires_grad_()
        (te.apply_rotary_pos_emb(x, freqs, tensor_format="bshd", fused=fused) * t.cos()).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0])


def test_fused_rotation_of_bfloat16_rounds_once():
    freqs, t = te.RotaryPositionEmbedding(8)(16), torch.randn(1, 16, 1, 8).bfloat16()
    fused = te.apply_rotary_pos_emb(t, freqs, tensor_format="bshd", fused=True)
    exact = te.apply_rotary_pos_emb(t.float(), freqs, tensor_format="bshd")
    assert torch.equal(fused, exact.bfloat16())
    assert not torch.equal(te.apply_rotary_pos_emb(t, freqs, tensor_format="bshd"), fused)


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


def test_interleaved_qkv_rows_are_grouped_by_key_value_head():
    plain, interleaved = layer(), layer(qkv_weight_interleaved=True)
    state = plain.state_dict()
    q, k, v = state["self_attention.layernorm_qkv.weight"].split((64, 32, 32))
    rows = [
        part for group in range(2) for part in (q.split(32)[group], k.split(16)[group], v.split(16)[group])
    ]
    interleaved.load_state_dict({**state, "self_attention.layernorm_qkv.weight": torch.cat(rows)})
    x, freqs = torch.randn(2, 16, 64), te.RotaryPositionEmbedding(16)(16)
    torch.testing.assert_close(interleaved(x, rotary_pos_emb=freqs), plain(x, rotary_pos_emb=freqs))


def test_a_sequence_first_layer_gives_the_same():
    batch_first, sequence_first = layer(), layer(attn_input_format="sbhd")
    sequence_first.load_state_dict(batch_first.state_dict())
    x, freqs = torch.randn(2, 16, 64), te.RotaryPositionEmbedding(16)(16)
    expected = batch_first(x, rotary_pos_emb=freqs)
    actual = sequence_first(x.transpose(0, 1), rotary_pos_emb=freqs).transpose(0, 1)
    torch.testing.assert_close(actual, expected)


def test_every_gemm_of_the_layer_runs_in_fp8():
    module = layer()
    with te.autocast(recipe=DelayedScaling()):
        module(torch.randn(2, 16, 64), rotary_pos_emb=te.RotaryPositionEmbedding(16)(16))
    ran = [name for name, child in module.named_modules() if getattr(child, "fp8", False)]
    assert ran == ["self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp"]


def test_dropout_acts_in_training_only():
    module = layer(hidden_dropout=0.5)
    x = torch.randn(2, 16, 64)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
