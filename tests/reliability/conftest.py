"""Fixtures for tests of stop signals."""

import signal
from collections.abc import Iterator

import pytest

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
