"""FP8 inference with a trained Mistral, Llama or Qwen3 model.

fp8_inference.py is the command, engine.py runs the model, and sampling.py draws the tokens. This package may import
model/, but not train/.
"""

from __future__ import annotations

from model.errors import UserError


class InferenceError(UserError, ValueError):
    """Error raised if a model, prompt, file or option cannot be used for inference.

    `key` is the name or path of the invalid item.
    """

    code = "inference"
