"""How commands of preparation end."""

from typing import Any

import pytest

from train import import_megatron, prepare_data, train_tokenizer
from train.files import reason


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The errors that commands in this process ended with and that no test has popped, as they were raised."""
    errors: list[Any] = []

    def record(error: BaseException) -> str:
        errors.append(error)
        return reason(error)

    for program in (prepare_data, train_tokenizer, import_megatron):
        monkeypatch.setattr(program, "reason", record)
    return errors
