"""Attention against a dense softmax, and rotary positions of packed sequences."""

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("window", "left"), [(None, 99), ((-1, 0), 99), ((3, 0), 3), ((0, 0), 0)])
def test_attention_and_its_gradients_are_those_of_the_dense_masked_softmax(groups, window, left, dtype):
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
