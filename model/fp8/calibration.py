"""Initial scales for delayed scaling, and the error of the first FP8 gradients.

Delayed scaling casts tensors to FP8 with a scale from earlier passes. Before the first pass, Transformer Engine uses a
scale of 1. This is good enough for activations, but not for gradients: the gradients of a mean over thousands of tokens
are about 1e-6, below the resolution of e4m3 (2e-3) and e5m2 (1.5e-5). Most of the first backward pass would be lost,
and because Adam scales gradients of any size to full steps, the first steps would go in wrong directions. Calibration
therefore runs a few passes over the first micro-batch to fill the amax histories (recent maximum absolute values), and
discards the gradients.

The gradients of the last pass show how well FP8 fits the initial weights (`relative_error`). This depends far more on
how the weights are drawn (initialization.py) than on the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from model.documents import Documents
from model.fp8.precision import Precision
from model.fp8.state import fp8_state, reduce_amaxes

Gradients = Mapping[str, Tensor]

# Relative error of the first FP8 gradients above which a run warns. Measured with trained weights: 5 to 8 %, with the
# initialization "scaled": at most 10 % (docs/validation.md).
MAX_GRADIENT_ERROR = 0.2


def calibrate(
    model: nn.Module,
    precision: Precision,
    input_ids: Tensor,
    labels: Tensor,
    accumulation: int,
    documents: Documents | None = None,
) -> Gradients:
    """Fill the amax histories of an untrained model for delayed scaling, and return the gradients of the last pass.

    Only FP8 state changes. With other recipes, one pass computes the gradients. If precision.calibration_passes is 0,
    this function does nothing and returns {}. Collective if precision.reduce_amax is true.

    Several passes are needed, because a gradient that is cast with a wrong scale also makes the gradients of earlier
    layers wrong, and with them the amaxes (largest magnitudes) recorded there.

    Args:
        input_ids: int64 [B, T] (B rows of T tokens), a training micro-batch on the model's device.
        labels: int64 [B, T] on the same device.
        accumulation: micro-batches per step. The training loss is divided by this number.
        documents: document boundaries on the same device, for a model with a document mask.

    Returns:
        The gradients of the weight matrices of the decoder layers by parameter name (see `decoder_gradients`).
    """
    gradients: Gradients = {}
    for _ in range(precision.config.calibration_passes if precision.has_state else 1):
        gradients = {}  # free the memory of the previous pass
        gradients = decoder_gradients(model, input_ids, labels, accumulation, documents)
    if precision.has_state and gradients and precision.config.reduce_amax:
        reduce_amaxes(fp8_state(model, precision))
    return gradients


def decoder_gradients(
    model: nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    accumulation: int = 1,
    documents: Documents | None = None,
) -> Gradients:
    """Return the gradients of the weight matrices in the decoder layers for one micro-batch, by parameter name.

    For the arguments, see `calibrate`. The model keeps no gradients.
    """
    model.train()
    (model(input_ids, labels=labels, documents=documents).loss / accumulation).backward()
    found = {name: p.grad for name, p in model.model.layers.named_parameters() if p.dim() == 2}
    model.zero_grad(set_to_none=True)
    return found


def relative_error(g: Gradients, r: Gradients) -> float:
    """Return |g - r| / |r| over all tensors, for gradients `g` and reference gradients `r` with the same keys."""
    differences = torch.stack([(g[k] - r[k].to(g[k].device)).double().norm() for k in r])
    return float(
        differences.norm()
        / torch.stack([t.double().norm().to(differences.device) for t in r.values()]).norm()
    )
