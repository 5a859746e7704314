"""Read, copy, reduce, load, reset and calibrate the state of delayed scaling (scales and amax histories)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from model.documents import Documents
from model.fp8.precision import Precision, PrecisionError

COLUMNS = {"scaling_fwd": 3, "scaling_bwd": 2}  # tensors of a GEMM, by direction


def fp8_state(model: nn.Module, precision: Precision) -> dict[str, torch.Tensor]:
    """Return the scales and amax histories for delayed scaling as float32 tensors, without copying them.

    Keys are "<module>.scaling_fwd.scale" ([3 x GEMMs]), "<module>.scaling_fwd.amax_history" ([history, 3 x GEMMs]), and
    the same for scaling_bwd (2 x GEMMs). The result is empty for recipes without state, and excludes modules with a
    fallback (Precision.module_recipe).

    Transformer Engine (TE) also keeps unused scales for attention; these are skipped. TE's own `_extra_state` is not
    used, because it is a pickle that TE refuses to load.
    """
    state = {}
    if precision.has_state:
        for name, module in model.named_modules():
            meta = getattr(module, "fp8_meta", None)
            if (
                meta is None
                or _is_attention(module)
                or precision.module_recipe(name) != precision.config.recipe
            ):
                continue
            for direction in COLUMNS:
                if direction in meta:
                    state[f"{name}.{direction}.scale"] = meta[direction].scale
                    state[f"{name}.{direction}.amax_history"] = meta[direction].amax_history
    return state


def _is_attention(module: nn.Module | None) -> bool:
    return type(module).__name__ == "DotProductAttention"


def snapshot_fp8_state(model: nn.Module, precision: Precision) -> dict[str, torch.Tensor]:
    """Return a copy of the FP8 state (see `fp8_state`) on the same device."""
    return {key: tensor.detach().clone() for key, tensor in fp8_state(model, precision).items()}


def reduce_amaxes(state: dict[str, torch.Tensor]) -> None:
    """Replace each amax with its maximum over all ranks, and each scale with its minimum.

    If Transformer Engine reduced amaxes after every forward and backward pass, all ranks would wait for the slowest
    rank in every pass. Training instead calls this function once per optimizer step. Between two calls, each rank has
    different scales for activations and gradients. Collective: all ranks must call this function. It runs at most one
    all-reduce.

    Args:
        state: the result of `fp8_state`, changed in place. An empty state is allowed (if all modules use a fallback).
    """
    if not state or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    scales = [tensor for key, tensor in state.items() if key.endswith(".scale")]
    histories = [tensor for key, tensor in state.items() if key.endswith(".amax_history")]
    tensors = [*torch._foreach_neg(scales), *histories]  # a larger amax gives a smaller scale
    flat = _flatten_dense_tensors(tensors)
    dist.all_reduce(flat, op=dist.ReduceOp.MAX)
    reduced = _unflatten_dense_tensors(flat, tensors)
    torch._foreach_copy_(scales, torch._foreach_neg(reduced[: len(scales)]))
    torch._foreach_copy_(histories, reduced[len(scales) :])


def load_fp8_state(model: nn.Module, precision: Precision, saved: dict[str, torch.Tensor]) -> None:
    """Load a state returned by `fp8_state`, and allocate the state of modules that have not run yet.

    Saved tensors are ignored if they belong to attention or to a module that fell back to another recipe after the
    state was saved.

    Raises PrecisionError if the names or shapes of the saved tensors do not match the model.
    """
    modules = dict(model.named_modules())
    places = {key: (["", "", *key.rsplit(".", 2)])[-3:] for key in saved}
    loaded = {
        key: tensor
        for key, tensor in saved.items()
        if not _is_attention(modules.get(places[key][0]))
        and precision.module_recipe(places[key][0]) == precision.config.recipe
    }
    for key, tensor in loaded.items():
        name, direction, what = places[key]
        meta = getattr(modules.get(name), "fp8_meta", None)
        if meta is not None and what == "scale" and direction in COLUMNS and direction not in meta:
            allocate_fp8_state(modules[name], precision, tensor.numel() // COLUMNS[direction])
    state = fp8_state(model, precision)
    shapes, expected = ({key: tuple(t.shape) for key, t in tensors.items()} for tensors in (loaded, state))
    if wrong := sorted(key for key in {*loaded, *state} if shapes.get(key) != expected.get(key)):
        raise PrecisionError(
            f"{len(wrong)} tensors in the saved FP8 state do not match the model. For example, {wrong[0]} has "
            f"shape {shapes.get(wrong[0])} in the checkpoint and {expected.get(wrong[0])} in the model (None: no such "
            "tensor). Choose a checkpoint of this model with the same precision settings",
            code="fp8_state",
            key=wrong[0],
        )
    with torch.no_grad():
        for key, tensor in loaded.items():
            state[key].copy_(tensor)


def allocate_fp8_state(module: Any, precision: Precision, num_gemms: int) -> None:
    """Allocate the FP8 state of a module. Otherwise, the first FP8 forward pass of the module allocates the state."""
    module.fp8_meta["recipe"] = precision.recipe
    module.fp8_meta["num_gemms"] = num_gemms
    module.init_fp8_meta_tensors(precision.recipe)


def reset_fp8_state(model: nn.Module, precision: Precision) -> None:
    """Reset FP8 scales to 1 and amax histories to 0, as before the first forward pass."""
    with torch.no_grad():
        for key, tensor in fp8_state(model, precision).items():
            tensor.fill_(1.0 if key.endswith(".scale") else 0.0)


# ---------------------------------------------------------------- calibration

# Delayed scaling casts tensors to FP8 with a scale from earlier passes. Before the first pass, Transformer Engine
# uses a scale of 1. This is good enough for activations, but not for gradients: the gradients of a mean over
# thousands of tokens are about 1e-6, below the resolution of e4m3 (2e-3) and e5m2 (1.5e-5). Most of the first
# backward pass would be lost, and because Adam scales gradients of any size to full steps, the first steps would go
# in wrong directions. Calibration therefore runs a few passes over the first micro-batch to fill the amax histories
# (recent maximum absolute values), and discards the gradients.
#
# The gradients of the last pass show how well FP8 fits the initial weights (`relative_error`). This depends far more
# on how the weights are drawn (initialization.py) than on the recipe.
Gradients = Mapping[str, Tensor]

# Relative error of the first FP8 gradients above which a run warns. Measured: 5 to 8 % with trained weights, 6 % with
# the initialization "scaled" (14 % for a tiny model with tied embeddings), 10 to 84 % with "normal"
# (docs/validation.md).
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

    Only FP8 state changes. With other recipes, one pass computes the gradients. With delayed scaling and
    precision.calibration_passes 0, this function does nothing and returns {}. Collective if precision.reduce_amax is
    true.

    Several passes are needed. If a gradient is cast with a wrong scale, the gradients of all earlier layers are also
    wrong, and wrong amaxes (largest magnitudes) are recorded in these layers.

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

    For the arguments, see `calibrate`. The gradients of `model` are cleared.
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
