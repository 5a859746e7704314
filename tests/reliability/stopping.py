"""Helpers that stop a run in this process by signals, and compare the results of two runs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.train.runs import curve


def stop_when(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, call: int, number: int) -> None:
    """Send the signal `number` and SIGTERM to this process at the start of the `call`-th call of `owner.name`."""
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
    """Check that two runs have the same training curves, and bit-identical weights after `step`."""
    assert curve(one) == curve(other)
    found, expected = weights(one, step), weights(other, step)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
