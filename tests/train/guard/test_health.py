"""train/guard/health.py: what is known of the last steps, and the FP8 state that a skipped step leaves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from model.build import build_model
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from model.fp8.state import fp8_state
from tests.conftest import random_ids, small_config
from train.guard.health import Health


def test_norms_are_those_of_their_steps(process_group: None) -> None:
    """DeepSpeed may write the next one into the tensor that it handed out."""
    norm = torch.tensor(0.0)
    engine: Any = SimpleNamespace(module=None, skipped_steps=0, get_global_grad_norm=lambda: norm)
    precision: Any = SimpleNamespace(device="cpu", has_state=False)
    health = Health(engine, precision, 16, 10.0)
    for step in (1, 2, 3):
        norm.fill_(step)
        health.after_step(step, 0, {}, torch.tensor(5.0), None)
    health.look(tokens=1)
    assert list(health.detectors["grad_norm"].recent) == [1, 2, 3]


def test_ranks_judge_by_sums_that_know_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 they would depend on how many steps are looked at together, and spikes with them."""
    engine: Any = SimpleNamespace(module=None, skipped_steps=0, get_global_grad_norm=lambda: 3.0)
    precision: Any = SimpleNamespace(device="cpu", has_state=False)
    health = Health(engine, precision, 16, 10.0)
    health.after_step(1, 0, {}, torch.tensor(1.0), None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda values: values.add_(torch.tensor([[2**-30, 1.0, 3.0]])))
    health.look(tokens=1)
    assert list(health.detectors["loss"].recent) == [(1 + 2**-30) / 2]
    assert list(health.detectors["grad_norm"].recent) == [3.0]


def test_a_first_step_that_is_skipped_leaves_no_scales() -> None:
    """There was no FP8 state before it that could be put back."""
    config = small_config(num_hidden_layers=1)
    precision = Precision(PrecisionConfig(recipe="delayed", amax_history_len=4))
    model = build_model(config, "te_layer", precision, seed=1)
    engine: Any = SimpleNamespace(module=model, skipped_steps=0, get_global_grad_norm=lambda: None)
    health = Health(engine, precision, 16, 10.0)
    ids = random_ids(config, 2, 16)
    for _ in range(2):
        health.before_step() if not fp8_state(model, precision) else None
        loss = model(ids, labels=ids).loss
        loss.backward()
    assert any(t.any() for key, t in fp8_state(model, precision).items() if key.endswith("amax_history"))
    engine.skipped_steps += 1
    assert health.after_step(1, 0, {}, loss.detach(), None)
    for key, tensor in fp8_state(model, precision).items():
        assert bool((tensor == (1.0 if key.endswith(".scale") else 0.0)).all()), key
