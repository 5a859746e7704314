"""Delayed scaling starts with scales, not with 1."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from model.build import build_model
from model.fp8.calibration import calibrate
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from model.fp8.state import fp8_state
from tests.conftest import random_ids, small_config

# As many micro-batches as make the gradients of so small a model as small as those of a real one.
ACCUMULATION = 4096


def model_of(**precision: object) -> tuple[nn.Module, Precision, torch.Tensor, torch.Tensor]:
    resolved = Precision(PrecisionConfig(**precision))
    model = build_model(small_config(), "te_layer", resolved, seed=5).train()
    ids = random_ids(model.config, 2, 65).to(resolved.device)
    return model, resolved, ids[:, :-1], ids[:, 1:].contiguous()


def first_gradients(**precision: object) -> dict[str, torch.Tensor]:
    """Of the first pass of a run."""
    model, resolved, inputs, labels = model_of(**precision)
    calibrate(model, resolved, inputs, labels, ACCUMULATION)
    (model(inputs, labels=labels).loss / ACCUMULATION).backward()
    return {name: p.grad.float() for name, p in model.named_parameters()}


def test_the_first_backward_is_not_lost(device: str) -> None:
    exact = first_gradients(compute="bf16")
    # of all matrices, those whose gradient is made of gradients that were cast on their way
    names = [name for name, gradient in exact.items() if "layers" in name and gradient.dim() == 2]

    def errors(gradients: dict[str, torch.Tensor]) -> list[float]:
        return [float((gradients[name] - exact[name]).norm() / exact[name].norm()) for name in names]

    lost = errors(first_gradients(recipe="delayed", calibration_passes=0))
    kept = errors(first_gradients(recipe="delayed"))
    # measured: 1.00 each with 1 as a scale, 0.064 to 0.097 with calibration, 0.062 to 0.097 with scales of the tensors
    # at hand, which is what FP8 leaves at best; after 2 passes in place of 4 it is 0.19
    best = errors(first_gradients(recipe="current"))
    assert min(lost) > 0.99
    assert all(a < 1.05 * b for a, b in zip(kept, best, strict=True))
    assert max(kept) < 0.105


def test_only_scales_change() -> None:
    model, precision, inputs, labels = model_of(recipe="delayed", calibration_passes=2)
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert calibrate(model, precision, inputs, labels, 1)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    state = fp8_state(model, precision)
    assert any(key.endswith("scaling_bwd.scale") and bool((t > 1e3).any()) for key, t in state.items())


@pytest.mark.parametrize("precision", [{"compute": "bf16"}, {"recipe": "current"}, {"calibration_passes": 0}])
def test_nothing_to_calibrate(precision: dict) -> None:
    model, resolved, inputs, labels = model_of(**precision)
    assert calibrate(model, resolved, inputs, labels, 1) == []
    assert fp8_state(model, resolved) == {}
