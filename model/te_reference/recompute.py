"""Gradient checkpointing: run a function without keeping its activations, and run it again in the backward.

With delayed scaling the scales have changed by then, so a plain recomputation would give other values. `checkpoint`
replays the scales of the first forward and records no amaxes. Gradients and FP8 state are bit-equal to those without
checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from model.te_reference.base import check_supported
from model.te_reference.state import new_frame, replay, stash


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = True, **kwargs: Any) -> Any:
    """Call `function(*args, **kwargs)` and recompute its activations in the backward.

    The function must do the same in both calls, in the same order. Random numbers are replayed. Without gradients this
    is a plain call.

    Raises ValueError: use_reentrant is True, which would need an argument that requires a gradient.
    """
    check_supported("checkpoint", use_reentrant=(use_reentrant, False))
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    frame = new_frame()
    return torch_checkpoint.checkpoint(
        function,
        *args,
        use_reentrant=False,
        context_fn=lambda: (stash(frame), replay(frame)),
        # ZeRO 3 changes the shape of parameters between the two forwards
        determinism_check="none",
        **kwargs,
    )
