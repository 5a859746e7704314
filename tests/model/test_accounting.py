from __future__ import annotations

import pytest
from transformers import MistralForCausalLM

from model.accounting import attention_pairs, flops_per_token, num_parameters, state_memory_gib
from model.build import load_config
from tests.conftest import small_config


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, {"head_dim": 64, "num_key_value_heads": 1}]
)
def test_parameters_are_what_transformers_has(changes: dict) -> None:
    config = small_config(**changes)
    model = MistralForCausalLM(config)
    assert num_parameters(config) == sum(p.numel() for p in model.parameters())


def test_hare_1_1b_by_hand() -> None:
    """22 layers of 2 x 2048 x 2048 + 2 x 2048 x 512 + 3 x 2048 x 5632 weights, a head of 32000 x 2048; 6 FLOPs each,
    and 6 x 2048 a token, layer and position for the causal half of attention."""
    matmul = 22 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 5632) + 32000 * 2048
    assert flops_per_token(load_config("hare_1.1b"), 2048) == 6 * matmul + 22 * 6 * 2048 * 2048
    assert num_parameters(load_config("hare_1.1b")) == 1_123_117_056


def test_a_window_saves_attention() -> None:
    config = small_config(sliding_window=4)
    seen = [min(i + 1, 4) for i in range(64)]
    # the usual convention counts T/2 for a causal row of T, not (T + 1)/2
    assert attention_pairs(config, 64) == pytest.approx(sum(seen) / 64, rel=0.15)
    assert attention_pairs(small_config(), 64) == 32


def test_zero_stages_share_state() -> None:
    config = load_config("hare_1.1b")
    n = num_parameters(config) / 2**30
    assert state_memory_gib(config, 0, 8) == pytest.approx(18 * n)
    assert state_memory_gib(config, 1, 8) == pytest.approx((2 + 4 + 12 / 8) * n)
    assert state_memory_gib(config, 3, 8) == pytest.approx(18 / 8 * n)
