"""Errors raised by the inference demo that the user can fix."""

from __future__ import annotations

from model.errors import UserError


class InferenceError(UserError, ValueError):
    """Error raised if a model, prompt, file or option cannot be used for inference.

    `key` is the name or path of the invalid item.
    """

    code = "inference"


class EngineError(InferenceError):
    """Error raised if the inference engine cannot run a request."""

    code = "engine"
