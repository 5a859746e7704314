"""The errors of the demo that the user can fix."""

from __future__ import annotations

from model.errors import UserError


class InferenceError(UserError, ValueError):
    """A model, prompt, file or option cannot be used for inference. `key` names it."""

    code = "inference"


class EngineError(InferenceError):
    """The engine cannot run the request."""

    code = "engine"
