"""Read, copy, reduce, load and reset the state of delayed scaling (scales and amax histories)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

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
    """Set each amax to the largest and each scale to the smallest of all ranks.

    Transformer Engine can reduce amaxes after every forward and backward pass, but then all ranks wait for the slowest
    one in every pass. Training calls this function once per optimizer step. In between, each rank uses its own scales
    for activations and gradients. Collective: all ranks must call this function. It runs at most one all-reduce.

    Args:
        state: the result of `fp8_state`, which is changed in place. It is empty if all modules use a fallback.
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
            meta["recipe"] = precision.recipe
            meta["num_gemms"] = tensor.numel() // COLUMNS[direction]
            modules[name].init_fp8_meta_tensors(precision.recipe)
    state = fp8_state(model, precision)
    shapes, expected = ({key: tuple(t.shape) for key, t in tensors.items()} for tensors in (loaded, state))
    if wrong := sorted(key for key in {*loaded, *state} if shapes.get(key) != expected.get(key)):
        raise PrecisionError(
            f"{len(wrong)} tensors in the saved FP8 state do not match the model. For example, {wrong[0]} has "
            f"shape {shapes.get(wrong[0])}, but the model expects {expected.get(wrong[0])} (None means that "
            "the tensor does not exist)",
            code="fp8_state",
            key=wrong[0],
        )
    with torch.no_grad():
        for key, tensor in loaded.items():
            state[key].copy_(tensor)


def reset_fp8_state(model: nn.Module, precision: Precision) -> None:
    """Reset FP8 scales to 1 and amax histories to 0, as before the first forward pass."""
    with torch.no_grad():
        for key, tensor in fp8_state(model, precision).items():
            tensor.fill_(1.0 if key.endswith(".scale") else 0.0)
