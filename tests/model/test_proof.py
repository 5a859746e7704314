"""model/proof.py: the probe fits every valid configuration, and an attention that never ran is no proof."""

from __future__ import annotations

import pytest

from model.build import build_model
from model.fp8 import te_backend
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from model.proof import ProofError, probe_tokens, prove
from tests.conftest import small_config


@pytest.mark.parametrize(("positions", "tokens"), [(5, 16), (16, 16), (100, 96), (255, 240), (4096, 256)])
def test_probe_tokens_are_what_fp8_takes(positions: int, tokens: int) -> None:
    assert probe_tokens(small_config(max_position_embeddings=positions)) == tokens


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_positions_that_are_no_multiple_of_16_pass(recipe: str) -> None:
    precision = Precision(PrecisionConfig(recipe=recipe, backend="reference"))
    model = build_model(small_config(max_position_embeddings=100), "te_linear", precision)
    assert any("14 of 15 GEMM modules ran FP8" in line for line in prove(model, precision))


def test_an_attention_that_did_not_run_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    precision = Precision(PrecisionConfig(backend="reference"))
    model = build_model(small_config(), "te_linear", precision)
    monkeypatch.setattr(te_backend, "attention_backend_in_use", lambda te: te_backend.NO_ATTENTION_YET)
    with pytest.raises(ProofError, match="reports no attention"):
        prove(model, precision)
