"""What a short whole run needs, as in tests/train, and the handlers of stop signals."""

import signal
from collections.abc import Iterator

import pytest

from tests.train.conftest import data, settings, small_model
from train.guard import signals

__all__ = ["data", "handlers", "settings", "small_model"]


@pytest.fixture
def handlers() -> Iterator[None]:
    """As in train.py, whose __main__ installs them; nothing is noted yet."""
    before = {number: signal.getsignal(number) for number in signals.SIGNALS}
    signals.install()
    signals._received.clear()
    yield
    signals._received.clear()
    for number, handler in before.items():
        signal.signal(number, handler)
