"""Attention against a dense softmax, rotary positions of packed sequences, and what is refused."""

import math

import pytest
import torch

from model import te_reference as te


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
    with pytest.raises(ValueError):
        te.DotProductAttention(4, 8, qkv_format="bshd", window_size=window)


def test_wrong_heads_are_refused():
    with pytest.raises(ValueError):
        te.DotProductAttention(4, 8, qkv_format="bshd")(*[torch.randn(1, 4, 2, 8)] * 3)
    with pytest.raises(ValueError):
        te.DotProductAttention(4, 8, num_gqa_groups=3, qkv_format="bshd")


def test_packed_sequences_begin_at_position_0():
    freqs, t = te.RotaryPositionEmbedding(8)(6), torch.randn(9, 3, 8)
    cu_seqlens = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    out = te.apply_rotary_pos_emb(t, freqs, tensor_format="thd", fused=True, cu_seqlens=cu_seqlens)
    for first, end in ((0, 4), (4, 9)):
        alone = te.apply_rotary_pos_emb(t[None, first:end], freqs, tensor_format="bshd", fused=True)
        assert torch.equal(out[first:end], alone[0])
    with pytest.raises(ValueError):
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
    with pytest.raises(ValueError):
        te.apply_rotary_pos_emb(t, freqs, **arguments)
    assert te.apply_rotary_pos_emb(t, freqs, "bshd", fused=True).shape == t.shape, "as many as positions"
    with pytest.raises(ValueError):
        te.apply_rotary_pos_emb(t, freqs[:3], "bshd", fused=True)
