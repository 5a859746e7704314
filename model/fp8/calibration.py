"""Scales for delayed scaling before the first step.

Delayed scaling casts with a scale from earlier passes; before the first pass there is none, and Transformer Engine
begins with 1. Activations bear that. Gradients do not: those of a mean over thousands of tokens are about 1e-6, below
what e4m3 (2e-3) and e5m2 (1.5e-5) resolve, so most of the first backward is lost, and the first steps of Adam, which
takes gradients of any size for full ones, go astray. Here a few passes over the first micro-batch, whose gradients are
dropped, fill the histories first.
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
    """Fill the amax histories of a model that has not trained yet; returns lines for the log.

    input_ids, labels: int64 [B, T], with documents where the run has them, a micro-batch of the run on the model's
    device. accumulation: micro-batches of a step, by which the run divides its loss. More than one pass, because a
    gradient that was cast with a wrong scale is wrong for all below it; the residual stream, which is not cast, keeps
    that to a layer. Nothing but FP8 state changes. With other recipes, or precision.calibration_passes 0, nothing is
    done.
    """
    passes = precision.config.calibration_passes
    if not (precision.has_state and passes):
        return []
    model.train()
    for _ in range(passes):
        (model(input_ids, labels=labels, documents=documents).loss / accumulation).backward()
        model.zero_grad(set_to_none=True)
    return [f"delayed scaling: scales from {passes} passes over the first micro-batch"]
