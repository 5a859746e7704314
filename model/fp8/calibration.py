"""Initial scales for delayed scaling.

Delayed scaling casts tensors to FP8 with a scale from earlier passes. Before the first pass, Transformer Engine uses a
scale of 1. This is good enough for activations, but not for gradients: the gradients of a mean over thousands of tokens
are about 1e-6, below the resolution of e4m3 (2e-3) and e5m2 (1.5e-5). Most of the first backward pass would be lost,
and because Adam scales gradients of any size to full steps, the first steps would go in wrong directions. Calibration
therefore runs a few passes over the first micro-batch to fill the amax histories (recent maximum absolute values), and
discards the gradients.
"""

from __future__ import annotations

import torch
from torch import nn

from model.documents import Documents
from model.fp8.precision import Precision
from model.fp8.state import fp8_state, reduce_amaxes


def calibrate(
    model: nn.Module,
    precision: Precision,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    accumulation: int,
    documents: Documents | None = None,
) -> list[str]:
    """Fill the amax histories of an untrained model for delayed scaling, and return log lines.

    Only FP8 state changes. With other recipes, or if precision.calibration_passes is 0, this function does nothing.
    Collective if precision.reduce_amax is true.

    Several passes are needed, because a gradient that is cast with a wrong scale also makes the gradients of earlier
    layers wrong, and with them the amaxes (largest magnitudes) recorded there.

    Args:
        input_ids: int64 [B, T] (B rows of T tokens), a training micro-batch on the model's device.
        labels: int64 [B, T] on the same device.
        accumulation: micro-batches per step. The training loss is divided by this number.
        documents: document boundaries on the same device, for a model with a document mask.
    """
    passes = precision.config.calibration_passes
    if not (precision.has_state and passes):
        return []
    model.train()
    for _ in range(passes):
        (model(input_ids, labels=labels, documents=documents).loss / accumulation).backward()
        model.zero_grad(set_to_none=True)
    if precision.config.reduce_amax:
        reduce_amaxes(fp8_state(model, precision))
    return [f"delayed scaling: scales from {passes} passes over the first micro-batch"]
