"""Fixtures and helpers for tests of stopped and resumed runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.runs import curve, tensors
from train.monitor import signals


@pytest.fixture
def handlers() -> Iterator[None]:
    """Install the signal handlers of train.py, with no signal received yet."""
    before = {number: signal.getsignal(number) for number in (*signals.SIGNALS, signal.SIGINT)}
    signals.install()
    signals.received.clear()
    yield
    signals.received.clear()
    for number, handler in before.items():
        signal.signal(number, handler)


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


def assert_equal_runs(one: Path, other: Path, step: int = 6) -> None:
    """Check that two runs have the same training curves, and bit-identical checkpoints of `step`."""
    assert curve(one) == curve(other)
    assert tensors(one, step) == tensors(other, step)
