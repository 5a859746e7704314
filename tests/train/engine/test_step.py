"""train/engine/step.py: what a skipped step leaves of the FP8 state."""

from types import SimpleNamespace
from typing import Any

from model.build import build_model
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from model.fp8.state import fp8_state
from tests.conftest import random_ids, small_config
from train.engine.step import SkipDecision


def test_a_first_step_that_is_skipped_leaves_no_scales() -> None:
    """There was no FP8 state before it that could be restored."""
    config = small_config(num_hidden_layers=1)
    precision = Precision(PrecisionConfig(recipe="delayed", amax_history_len=4))
    model = build_model(config, "te_layer", precision, seed=1)
    engine: Any = SimpleNamespace(module=model, skipped_steps=3)
    decision = SkipDecision(engine, precision)
    decision.keep_fp8_state()
    ids = random_ids(config, 2, 16)
    for _ in range(2):
        model(ids, labels=ids).loss.backward()
    assert any(t.any() for key, t in fp8_state(model, precision).items() if key.endswith("amax_history"))
    engine.skipped_steps += 1
    assert decision.is_skipped(1)
    for key, tensor in fp8_state(model, precision).items():
        assert bool((tensor == (1.0 if key.endswith(".scale") else 0.0)).all()), key
