"""train/monitor/spikes.py: what is known of the last steps, and what spikes are judged by."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from train.monitor.spikes import Health


def recorded(*steps: tuple[float, float | None], norm: Any = 3.0) -> Health:
    """Health after steps with these losses and shares of tokens with a label."""
    health = Health(16, 10.0)
    for number, (loss, share) in enumerate(steps, start=1):
        health.record(number, 0, {}, torch.tensor(loss), None if share is None else torch.tensor(share), norm)
    return health


def test_interval_loss(process_group: None) -> None:
    health = recorded((2.0, 1.0), (0.5, 0.25))
    assert math.isnan(health.interval_loss())
    health.find_spikes(tokens=100)
    health.record(3, 0, {}, torch.tensor(5.0), None, 1.0)
    health.find_spikes(tokens=300)  # of a batch that a resume made larger
    resumed = Health(16, 10.0)
    resumed.load_state_dict(json.loads(json.dumps(health.state_dict())))
    assert resumed.interval_loss() == pytest.approx((2.0 * 125 + 5.0 * 300) / 425)
    assert math.isnan(resumed.interval_loss())


def test_health_state_round_trip() -> None:
    known = {
        "skipped_in_a_row": 2,
        "spikes": 3,
        "interval": [4.0, 5.0],
        "data_weights": {"web": 0.5, "code": 0.5},
        "fp8_alarms": {
            "count": 6,
            "active": [["fc2", "input", 7]],
            "looks": 5,
            "found": [["fc2", "input", 4]],
            "look_again": True,
        },
        "loss": [8.0, 9.0],
        "grad_norm": [1.0],
    }
    resumed = Health(16, 10.0)
    for _ in range(2):
        resumed.load_state_dict(known)
        assert resumed.state_dict() == known


def test_gradient_norms_belong_to_their_steps(process_group: None) -> None:
    """DeepSpeed may write the next one into the tensor that it handed out."""
    norm, health = torch.tensor(0.0), Health(16, 10.0)
    for step in (1, 2, 3):
        norm.fill_(step)
        health.record(step, 0, {}, torch.tensor(5.0), None, norm)
    health.find_spikes(tokens=1)
    assert health.state_dict()["grad_norm"] == [1, 2, 3]


def test_spike_detection_is_equal_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 they would depend on how many steps are judged together, and spikes with them."""
    health = recorded((1.0, None))
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda values: values.add_(torch.tensor([[2**-30, 1.0, 3.0]])))
    health.find_spikes(tokens=1)
    assert health.state_dict()["loss"] == [(1 + 2**-30) / 2]
    assert health.state_dict()["grad_norm"] == [3.0]
