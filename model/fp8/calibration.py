"""Initial scales for delayed scaling.

Delayed scaling casts with a scale from earlier passes. Before the first pass there is none, and Transformer Engine
starts with 1. This is good enough for activations, but not for gradients. The gradients of a mean over thousands of
tokens are about 1e-6, below the resolution of e4m3 (2e-3) and e5m2 (1.5e-5). Most of the first backward would be lost,
and because Adam scales gradients of any size to full steps, its first steps would go in wrong directions. Calibration
runs a few passes over the first micro-batch to fill the amax histories, and discards the gradients.
"""

from __future__ import annotations

import torch
from torch import nn

from model.documents import Documents
from model.fp8.precision import Precision


def calibrate(
    model: nn.Module,
    precision: Precision,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    accumulation: int,
    documents: Documents | None = None,
) -> list[str]:
    """Fill the amax histories of a model that has not trained yet, and return lines for the log.

    Only FP8 state changes. With other recipes, or with precision.calibration_passes 0, this does nothing.

    There is more than one pass, because a gradient cast with a wrong scale makes all gradients below it wrong. The
    residual stream, which is not cast, limits the error to one layer.

    Args:
        input_ids: int64 [B, T], a micro-batch of the run on the model's device, as labels and documents.
        accumulation: micro-batches per step; the run divides its loss by it.
    """
    passes = precision.config.calibration_passes
    if not (precision.has_state and passes):
        return []
    model.train()
    for _ in range(passes):
        (model(input_ids, labels=labels, documents=documents).loss / accumulation).backward()
        model.zero_grad(set_to_none=True)
    return [f"delayed scaling: scales from {passes} passes over the first micro-batch"]
