"""train/engine/step.py: what a step leaves of the FP8 state."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model.build import build_model
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from model.fp8.state import fp8_state
from tests.conftest import random_ids, small_config
from train.engine.step import SkipDecision


@pytest.fixture
def decision() -> SkipDecision:
    """Of an engine whose modules have no FP8 state yet."""
    precision = Precision(PrecisionConfig(recipe="delayed", amax_history_len=4))
    model = build_model(small_config(num_hidden_layers=1), "te_layer", precision, seed=1)
    engine: Any = SimpleNamespace(module=model, skipped_steps=3)
    return SkipDecision(engine, precision)


def run_micro_batch(decision: SkipDecision) -> dict[str, torch.Tensor]:
    """Return the FP8 state after it."""
    model = decision.engine.module
    ids = random_ids(model.config, 2, 16)
    model(ids, labels=ids).loss.backward()
    return fp8_state(model, decision.precision)


def test_skipped_first_step_restores_scales(decision: SkipDecision) -> None:
    """There was no FP8 state before it that could be restored."""
    decision.keep_fp8_state()
    run_micro_batch(decision)
    state = run_micro_batch(decision)
    assert any(t.any() for key, t in state.items() if key.endswith("amax_history"))
    decision.engine.skipped_steps += 1
    assert decision.is_skipped(1)
    for key, tensor in state.items():
        assert bool((tensor == (1.0 if key.endswith(".scale") else 0.0)).all()), key


def test_non_finite_amaxes_are_removed(decision: SkipDecision) -> None:
    """In every tenth step of the run, also after a resume, or it would have other numbers."""
    histories = [t for key, t in run_micro_batch(decision).items() if key.endswith("amax_history")]
    for step, is_mended in ((9, False), (10, True), (15, False), (20, True)):
        decision.keep_fp8_state()
        for history in histories:
            history[-1] = torch.inf
        assert not decision.is_skipped(step)
        assert all(history.isfinite().all() == is_mended for history in histories)
