"""The key/value cache of the te_linear variant."""

from __future__ import annotations

import pytest
import torch

from model.build import build_model
from model.fp8.gemms import count_gemms
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from tests.conftest import random_ids, small_config


def model_of(window: int | None = None, variant: str = "te_linear", **keys: object) -> torch.nn.Module:
    precision = Precision(PrecisionConfig(backend="reference", **keys))
    return build_model(small_config(sliding_window=window), variant, precision, seed=2).eval()


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize("prompt", [1, 13])
def test_cache_equals_the_whole_sequence(window: int | None, prompt: int) -> None:
    model = model_of(window, compute="fp32")
    ids = random_ids(model.config, 2, 32)
    cache = model.new_cache(2, 32)
    parts = [model(ids[:, :prompt], cache=cache).logits]
    parts += [model(ids[:, i : i + 1], cache=cache).logits for i in range(prompt, 32)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits, rtol=1e-5, atol=1e-5)
    assert cache.length == 32


@torch.no_grad()
@pytest.mark.parametrize("recipe", ["current", "block"])
def test_one_token_at_a_time_runs_fp8(recipe: str) -> None:
    model = model_of(recipe=recipe)
    cache = model.new_cache(1, 4)
    with count_gemms(model, model.precision) as gemms:
        for token in range(4):
            model(torch.tensor([[token]]), cache=cache)
    assert len(gemms.ran) == 14 and not gemms.problem(passes=4, backward=False)


@torch.no_grad()
def test_a_full_cache_is_an_error() -> None:
    model = model_of(compute="fp32")
    cache = model.new_cache(1, 4)
    with pytest.raises(ValueError):
        model(torch.zeros(1, 5, dtype=torch.long), cache=cache)


def test_te_layer_says_that_it_does_not_decode() -> None:
    with pytest.raises(ValueError):
        model_of(variant="te_layer").new_cache(1, 4)
