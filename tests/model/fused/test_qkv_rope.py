"""model/fused/qkv_rope.py against the reference's rotation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from model.modeling_mistral_fp8_trans import split_and_rotate
from model.te_reference.rotary import RotaryPositionEmbedding, apply_rotary_pos_emb

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "heads,kv_heads,D,tokens",
    [(32, 8, 64, 256), (8, 2, 16, 40), (4, 2, 128, 33), (3, 1, 80, 17), (2, 2, 8, 16)],
)
def test_split_and_rotate_equals_the_reference(
    fused: Callable, device: str, heads: int, kv_heads: int, D: int, tokens: int
) -> None:
    kernel = fused("qkv_rope").split_and_rotate
    freqs = RotaryPositionEmbedding(D).to(device)(tokens)
    torch.manual_seed(0)
    packed = torch.randn(2, tokens, (heads + 2 * kv_heads) * D, device=device, dtype=torch.bfloat16)
    results = []
    for function in (kernel, partial(split_and_rotate, apply_rotary_pos_emb)):
        leaf = packed.clone().requires_grad_()
        parts = function(leaf, freqs, heads, kv_heads)
        assert [tuple(p.shape) for p in parts] == [(2, tokens, n, D) for n in (heads, kv_heads, kv_heads)]
        assert all(p.is_contiguous() for p in parts)
        turned = [p.transpose(1, 2) for p in parts]  # as attention's gradients are not contiguous either
        weights = [torch.linspace(-1, 1, p.numel(), device=device).view(p.shape) for p in turned]
        sum((p.float() * w).sum() for p, w in zip(turned, weights, strict=True)).backward()
        results.append([*parts, leaf.grad])
    for ours, theirs in zip(*results, strict=True):
        # the same float32 arithmetic but for the last bit of sine and cosine, then one rounding to bf16
        torch.testing.assert_close(ours, theirs, rtol=8e-3, atol=1e-2)
        assert float((ours == theirs).float().mean()) > 0.999
    assert torch.equal(results[0][2], results[1][2])  # v is only moved


@pytest.mark.parametrize("heads,D,tokens", [(32, 64, 256), (8, 32, 33), (3, 80, 17), (1, 8, 16)])
def test_rotate_equals_the_reference(fused: Callable, device: str, heads: int, D: int, tokens: int) -> None:
    kernel = fused("qkv_rope").rotate
    freqs = RotaryPositionEmbedding(D).to(device)(tokens)
    torch.manual_seed(0)
    # neither x nor the gradient is contiguous
    x, upstream = (torch.randn(2, heads, tokens, D, device=device).bfloat16().transpose(1, 2) for _ in "ab")
    leaves = [x.detach().requires_grad_() for _ in "ab"]
    ours, theirs = kernel(leaves[0], freqs), apply_rotary_pos_emb(leaves[1], freqs, "bshd", fused=True)
    gradients = [
        torch.autograd.grad(y, leaf, upstream) for y, leaf in zip((ours, theirs), leaves, strict=True)
    ]
    assert ours.is_contiguous() and ours.shape == x.shape
    for a, b in ((ours, theirs), (gradients[0][0], gradients[1][0])):
        torch.testing.assert_close(a, b, rtol=8e-3, atol=1e-2)
        assert float((a == b).float().mean()) > 0.999
