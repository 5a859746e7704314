"""model/initialization.py: how the weights of a new model are drawn."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from model.build import build_model
from model.conversion import to_hf_state_dict
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from model.fp8.state import calibrate, decoder_gradients, relative_error
from tests.conftest import random_ids, small_config

FLOAT32 = PrecisionConfig(compute="fp32", backend="reference")


def weights_of(initialization: Any, variant: str = "te_layer", **config: Any) -> dict[str, Tensor]:
    model = build_model(
        small_config(**config), variant, Precision(FLOAT32), seed=2, initialization=initialization
    )
    return to_hf_state_dict(model)


def deviations(weights: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(w.std()) for name, w in weights.items() if w.dim() == 2}


def test_normal_weights_are_reproducible() -> None:
    """Old runs that are started again must get the same bits."""
    for name, weight in weights_of("normal", initializer_range=0.1).items():
        key = int.from_bytes(hashlib.sha256(f"2/{name}".encode()).digest()[:7], "little")
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(key))
        assert weight.dim() == 1 or torch.equal(weight, noise * 0.1)


@pytest.mark.parametrize("tied", [False, True])
def test_scaled_standard_deviations(tied: bool) -> None:
    sizes = dict(hidden_size=64, intermediate_size=256, num_hidden_layers=8, tie_word_embeddings=tied)
    found = deviations(weights_of("scaled", **sizes))
    # hidden size 64, attention output 4 heads x 32, MLP 256, 8 layers
    embedding = 1 / 8 if tied else 1.0
    expected = {
        "q_proj": 1 / 8,
        "k_proj": 1 / 8,
        "v_proj": 1 / 8,
        "o_proj": embedding / math.sqrt(128 * 16),
        "gate_proj": 1 / 8,
        "up_proj": 1 / 8,
        "down_proj": embedding / (16 * 4),
        "embed_tokens": embedding,
        "lm_head": 0.02,
    }
    for name, value in found.items():
        assert value == pytest.approx(expected[name.split(".")[-2]], rel=0.05), name


@pytest.mark.parametrize("initialization", ["normal", "scaled"])
def test_all_variants_get_the_same_weights(initialization: str) -> None:
    one, *others = (weights_of(initialization, variant) for variant in ("hf", "te_linear", "te_layer"))
    for other in others:
        assert other.keys() == one.keys() and all(torch.equal(w, other[name]) for name, w in one.items())


@pytest.mark.parametrize("initialization", ["normal", "scaled"])
def test_matrices_are_independent(initialization: str) -> None:
    """No two matrices are alike, even if they have the same shape, layer or fused parameter."""
    weights = weights_of(initialization, num_key_value_heads=4, intermediate_size=128).values()
    matrices = [w.flatten()[: 128 * 128] / w.std() for w in weights if w.dim() == 2]
    products = torch.stack(matrices) @ torch.stack(matrices).t() / 128**2
    # the mean product of independent numbers is 0 with a standard deviation of 1/128
    assert len(matrices) == 16 and (products - torch.eye(16)).abs().max() < 0.04
    assert all(abs(float(matrix.mean())) < 0.03 for matrix in matrices)
    assert all(bool((w == 1).all()) for w in weights if w.dim() == 1)


def first_gradient_error(initialization: Any, **config: Any) -> float:
    gradients = []
    for section in ({"compute": "bf16"}, {"recipe": "delayed"}):
        precision = Precision(PrecisionConfig(backend="reference", **section))
        model = build_model(
            small_config(**config), "te_layer", precision, seed=2, initialization=initialization
        )
        ids = random_ids(model.config, 1, 129)
        compute = calibrate if precision.fp8 else lambda m, _, *batch: decoder_gradients(m, *batch)
        gradients.append(compute(model, precision, ids[:, :-1], ids[:, 1:].contiguous(), 4))
    return relative_error(*reversed(gradients))


@pytest.mark.parametrize("tied", [False, True])
def test_scaled_weights_keep_fp8_gradients_accurate(tied: bool) -> None:
    sizes = dict(
        hidden_size=512, intermediate_size=512, num_hidden_layers=12, head_dim=64, tie_word_embeddings=tied
    )
    normal, scaled = (first_gradient_error(kind, **sizes) for kind in ("normal", "scaled"))
    assert scaled < 0.1 < normal / 1.5
