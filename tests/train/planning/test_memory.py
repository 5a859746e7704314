"""GPU memory beside sums by hand: what the optimizer's step holds, buckets, logits, the least that a run needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from model.config import GIB, load_sizes
from model.fp8.recipes import STATE_CHUNK
from tests.train.planning.settings import setting
from train.planning import memory
from train.planning.memory import Memory, least_memory_gib
from train.planning.setting import Setting

SMALL, LARGE = "hare_0.4b", "mistral_7b"  # less than a bucket of 500 M elements, and more


@pytest.fixture(scope="module")
def usual() -> Setting:
    """te_layer in FP8 at ZeRO 1 with float32 gradients."""
    return setting()


def of(usual: Setting, model: str, **other: Any) -> Setting:
    return replace(usual, sizes=load_sizes(model), **other)


@pytest.mark.parametrize(
    ("model", "other", "bytes_"),
    [
        (SMALL, {"zero_stage": 0}, 4.0),
        (SMALL, {"zero_stage": 2, "float32_gradients": False, "ranks": 8}, 6 / 8),
        (SMALL, {"zero_stage": 2, "ranks": 8}, 0.0),
        (SMALL, {"float32_gradients": False, "ranks": 8}, 6 / 8),
        (SMALL, {"zero_stage": 3, "float32_gradients": False, "ranks": 8}, 4 / 8),
        (SMALL, {}, 4.0 + 2.0),  # joined in one bucket in float32, and cast for their reduction
        (SMALL, {"reduce_bucket": 1}, 4.0 + 2.0),
        (SMALL, {"reduces_in_float32": True}, 4.0),
        (LARGE, {}, 2.0),
        (LARGE, {"reduces_in_float32": True}, 0.0),
        (SMALL, {"compute": "fp32"}, 0.0),
    ],
)
def test_what_the_step_of_adamw_holds_of_each_parameter(
    usual: Setting, model: str, other: dict[str, Any], bytes_: float
) -> None:
    s = of(usual, model, **other)
    assert memory._in_the_step(s) == pytest.approx(bytes_ * s.parameters)


def test_what_a_step_holds_of_parameters_at_a_time(usual: Setting) -> None:
    """At ZeRO 3 those that may be live, of packed states a chunk in six tensors, of Muon the largest matrix."""
    alone = of(usual, LARGE, zero_stage=3, float32_gradients=False)
    assert memory._in_the_step(alone) == 4 * 1e9
    packed = of(usual, LARGE, reduces_in_float32=True, optimizer_states="int8", moments="int8")
    assert memory._in_the_step(packed) == 6 * 4 * STATE_CHUNK
    ranks = 10**5
    assert memory._in_the_step(replace(packed, ranks=ranks)) == 6 * 4 * packed.parameters / ranks
    muon = of(usual, LARGE, optim="muon", reduces_in_float32=True)
    matrix = 22 * muon.sizes.hidden_size * muon.sizes.intermediate_size
    assert memory._in_the_step(muon) == matrix
    assert memory._in_the_step(replace(muon, zero_stage=0)) == 4 * muon.parameters + matrix
    assert memory._in_the_step(replace(muon, zero_stage=0, compute="fp32")) == matrix


def test_what_deepspeed_gathers_is_bounded_by_the_model_and_by_what_may_be_live(usual: Setting) -> None:
    for model, gathered in ((SMALL, of(usual, SMALL).parameters), (LARGE, 1e9)):
        assert memory._buckets(of(usual, model, zero_stage=3, reduce_bucket=7)) == 2 * (gathered + 7)
        assert memory._buckets(of(usual, model, zero_stage=1, reduce_bucket=7)) == 0
        in_bf16 = of(usual, model, zero_stage=1, reduce_bucket=7, float32_gradients=False)
        assert memory._buckets(replace(in_bf16, overlap_comm=False)) == 2 * 7


def test_the_bytes_of_a_token_by_type(usual: Setting) -> None:
    """Logits and their neighbours in 2 and 4 bytes, a layer's gradients with and without FP8 columns."""
    H, I, q, kv, V = usual.widths  # noqa: E741
    fp32 = replace(
        usual, variant="hf", compute="fp32", fp8_layers=0, fp8_head=False, fused_cross_entropy=False
    )
    bf16 = replace(fp32, compute="bf16")
    assert [memory.evaluation_bytes(s) for s in (fp32, bf16)] == [8 * V + 8 * H, 10 * V + 4 * H]
    assert [memory.head_bytes(s) for s in (fp32, bf16)] == [12 * V + 8 * H] * 2
    te = replace(usual, variant="te_layer", fused_cross_entropy=False)
    assert memory.head_bytes(replace(te, compute="fp32")) == 12 * V + 3 * 4 * H
    # per layer of hf: out of attention and its inputs, two norms, gate, up, silu(gate), their product
    heads = 4 * usual.sizes.num_attention_heads
    assert memory.saved_by_layer(fp32, False) == 4 * (2 * q + 2 * kv) + heads + 2 * 8 * H + 4 * 4 * I
    assert memory.saved_by_layer(bf16, False) == 2 * (2 * q + 2 * kv) + heads + 2 * 8 * H + 4 * 2 * I
    backward = [memory.backward_of_layer(replace(usual, recipe=recipe)) for recipe in ("delayed", "current")]
    assert backward == [4 * H + 3 * I, 4 * H + 4 * I]


def test_the_least_is_weights_gradients_in_16_bits_and_the_optimizer(usual: Setting) -> None:
    """Whatever type gradients are added up in: a run is refused only where it cannot fit."""
    assert usual.float32_gradients
    for ranks in (1, 8):
        s = replace(usual, ranks=ranks)
        assert least_memory_gib(s) * GIB == pytest.approx((2 + 2 + 12 / ranks) * s.parameters)


def test_parts_that_would_be_told_as_nothing_are_not() -> None:
    parts = {"weights": 2.04, "logits": 0.05, "workspaces": 0.049}
    assert Memory(parts, "optimizer", 2.0).described() == "weights 2.0, logits 0.1"
