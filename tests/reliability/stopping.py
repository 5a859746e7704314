"""Stopping a run of this process by signals, and comparing what two runs leave."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.train.runs import curve


def stop_when(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, call: int, number: int) -> None:
    """The `call`-th call of `owner.name` begins with two signals to this process."""
    right, calls = getattr(owner, name), []

    def signalled(*arguments: object, **options: object) -> object:
        calls.append(name)
        if len(calls) == call:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGTERM)
        return right(*arguments, **options)

    monkeypatch.setattr(owner, name, signalled)


def weights(output_dir: Path, step: int) -> dict[str, torch.Tensor]:
    path = output_dir / f"checkpoints/step-{step:08d}/mp_rank_00_model_states.pt"
    return torch.load(path, weights_only=False)["module"]


def assert_equal_runs(one: Path, other: Path, step: int = 6) -> None:
    """Their curves, and their weights after `step`, bit for bit."""
    assert curve(one) == curve(other)
    found, expected = weights(one, step), weights(other, step)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
