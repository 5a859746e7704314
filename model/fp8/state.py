"""The state of delayed scaling: read, copied, put back, forgotten."""

from __future__ import annotations

import torch
from torch import nn

from model.fp8.precision import Precision, PrecisionError

COLUMNS = {"scaling_fwd": 3, "scaling_bwd": 2}  # tensors of a GEMM, by direction


def fp8_state(model: nn.Module, precision: Precision) -> dict[str, torch.Tensor]:
    """Scales and amax histories of delayed scaling, as plain float32 tensors.

    Keys are "<module>.scaling_fwd.scale" ([3 x GEMMs]), "....amax_history" ([history, 3 x GEMMs]) and the same for
    scaling_bwd (2 x GEMMs). Empty for recipes without state, and without modules at other levels (Precision.level).
    Attention is left out, for which TE keeps scales that nothing uses: its products are not FP8, and the reference has
    none. TE's own `_extra_state` is a pickle that it refuses to load, so it is not used.
    """
    state = {}
    if precision.has_state:
        for name, module in model.named_modules():
            meta = getattr(module, "fp8_meta", None)
            if meta is None or _is_attention(module) or precision.level(name) != precision.config.recipe:
                continue
            for direction in COLUMNS:
                if direction in meta:
                    state[f"{name}.{direction}.scale"] = meta[direction].scale
                    state[f"{name}.{direction}.amax_history"] = meta[direction].amax_history
    return state


def _is_attention(module: nn.Module) -> bool:
    return type(module).__name__ == "DotProductAttention"


def snapshot_fp8_state(model: nn.Module, precision: Precision) -> dict[str, torch.Tensor]:
    """A copy of `fp8_state`, on the same device."""
    return {key: tensor.detach().clone() for key, tensor in fp8_state(model, precision).items()}


def load_fp8_state(model: nn.Module, precision: Precision, saved: dict[str, torch.Tensor]) -> None:
    """Put back what `fp8_state` gave, allocating the state of modules that have not run yet. What modules had that are
    at another level since is left.

    Raises PrecisionError: a module or tensor of the saved state that this model does not have, or the reverse.
    """
    modules = dict(model.named_modules())
    for key, tensor in saved.items():
        name, direction, what = ["", "", *key.rsplit(".", 2)][-3:]
        if name in modules and _is_attention(modules[name]):
            continue  # an attention's, of a checkpoint that has it
        if precision.level(name) != precision.config.recipe:
            continue
        if name not in modules or not hasattr(modules[name], "fp8_meta"):
            message = f"saved FP8 state names {name!r}, which this model does not have"
            raise PrecisionError(message, code="fp8_state_unknown", key=name)
        if direction not in COLUMNS or what not in ("scale", "amax_history"):
            message = f"saved FP8 state has {key}, which is neither a scale nor an amax_history"
            raise PrecisionError(message, code="fp8_state_unknown", key=key)
        meta = modules[name].fp8_meta
        if direction not in meta:
            if (scale := f"{name}.{direction}.scale") not in saved:
                message = f"saved FP8 state lacks {scale}, and has {key}"
                raise PrecisionError(message, code="fp8_state_missing", key=scale)
            meta["recipe"] = precision.recipe
            meta["num_gemms"] = saved[scale].numel() // COLUMNS[direction]
            modules[name].init_fp8_meta_tensors(precision.recipe)
        target = getattr(meta[direction], what)
        if target.shape != tensor.shape:
            raise PrecisionError(
                f"saved FP8 state {key}: shape {tuple(tensor.shape)}, this model has {tuple(target.shape)}",
                code="fp8_state_shape",
                key=key,
            )
        with torch.no_grad():
            target.copy_(tensor)
    missing = fp8_state(model, precision).keys() - saved.keys()
    if missing:
        message = f"saved FP8 state lacks {len(missing)} tensors, such as {min(missing)}"
        raise PrecisionError(message, code="fp8_state_missing", key=min(missing))


def reset_fp8_state(model: nn.Module, precision: Precision) -> None:
    """Back to the state before the first forward: scales 1, histories 0."""
    with torch.no_grad():
        for key, tensor in fp8_state(model, precision).items():
            tensor.fill_(1.0 if key.endswith(".scale") else 0.0)
