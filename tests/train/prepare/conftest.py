"""How commands of preparation end."""

from typing import Any

import pytest

from train import command
from train.files import describe_error


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The errors that commands in this process ended with and that no test has popped, as they were raised."""
    errors: list[Any] = []

    def record(error: BaseException) -> str:
        errors.append(error)
        return describe_error(error)

    monkeypatch.setattr(command, "describe_error", record)
    return errors
