"""model/build.py: from a configuration to a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from model.build import build_model
from model.config import ModelConfigError, load_config
from model.conversion import to_hf_state_dict
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from tests.conftest import random_ids, refused, small_config


def write_config(path: Path, **changes: Any) -> Path:
    values = json.loads((Path(__file__).parents[2] / "model/configs/tiny.json").read_text()) | changes
    path.write_text(json.dumps(values))
    return path


def test_a_folder_is_found_by_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what lies here comes before what is shipped."""
    for name in (str(tmp_path), "hare_9b"):
        with refused(ModelConfigError, code="not_found", key=name) as error:
            load_config(name)
        assert "hare_1.1b" in str(error.value)
    monkeypatch.chdir(tmp_path)
    assert load_config("tiny").num_hidden_layers == 4
    write_config(tmp_path / "tiny", num_hidden_layers=2)
    assert load_config("tiny").num_hidden_layers == 2


@pytest.mark.parametrize("variant", ["hf", "torchao"])
def test_recomputation_runs_each_layer_again_and_changes_no_gradient(variant: str) -> None:
    keys = {"recipe": "tensorwise"} if variant == "torchao" else {"compute": "bf16"}
    precision, gradients, calls = Precision(PrecisionConfig(backend="reference", **keys)), [], []
    for recomputes in (False, True):
        model = build_model(small_config(), variant, precision, gradient_checkpointing=recomputes).train()
        calls.append(0)

        def count(*_: Any) -> None:
            calls[-1] += 1

        next(model.model.layers[1].children()).register_forward_pre_hook(count)
        ids = random_ids(model.config, 1, 33)
        model(ids[:, :-1], labels=ids[:, 1:].contiguous()).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert calls == [1, 2]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("spread", [0.02, 0.1])
def test_weights_begin_as_normal_numbers_of_their_own(spread: float) -> None:
    """Of initializer_range, and no two matrices alike: not of one shape, of one layer, nor parts of one parameter."""
    precision = Precision(PrecisionConfig(compute="fp32"))
    config = small_config(num_key_value_heads=4, initializer_range=spread, intermediate_size=128)
    weights = to_hf_state_dict(build_model(config, "te_layer", precision, seed=2)).values()
    matrices = [w.flatten()[: 128 * 128] / spread for w in weights if w.dim() == 2]
    products = torch.stack(matrices) @ torch.stack(matrices).t() / 128**2
    # of independent numbers the mean product is 0 with a standard deviation of 1/128
    assert len(matrices) == 16 and (products - torch.eye(16)).abs().max() < 0.04
    assert all(abs(float(matrix.mean())) < 0.03 for matrix in matrices)
    assert all(bool((w == 1).all()) for w in weights if w.dim() == 1)


@pytest.mark.parametrize("variant", ["hf", "torchao", "te_linear", "te_layer"])
def test_the_embedding_of_the_pad_token_is_trained(variant: str) -> None:
    """It is a token as any other; transformers would leave it as it began."""
    gradients = []
    for pad in (3, None):
        keys = {"recipe": "tensorwise"} if variant == "torchao" else {"compute": "bf16"}
        precision = Precision(PrecisionConfig(backend="reference", **keys))
        model = build_model(small_config(pad_token_id=pad), variant, precision, seed=2).train()
        ids = random_ids(model.config, 2, 65)
        ids[:, 5:9] = 3
        model(ids[:, :-1], labels=ids[:, 1:].contiguous()).loss.backward()
        gradients.append(model.model.embed_tokens.weight.grad)
    assert float(gradients[0][3].norm()) > 0
    assert torch.equal(*gradients)
