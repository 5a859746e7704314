"""The errors of the demo that the user can fix."""

from __future__ import annotations

from model.errors import UserError


class InferenceError(UserError, ValueError):
    """A model, prompt, file or option cannot be used for inference. `key` names it."""

    code = "inference"


class EngineError(InferenceError):
    """The engine cannot compute what was asked for. `row` is the index of the row at fault, if it is one."""

    code = "engine"

    row: int | None = None
