"""checkpoint: run a function without keeping its activations, and run it again in the backward.

With delayed scaling the scales have moved by then, so that a plain recomputation would compute something
else. This one replays the scales of the first forward and records nothing, which makes gradients and FP8
state equal, bit for bit, to those of a run without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from model.te_reference.base import check_supported
from model.te_reference.state import new_frame, replay, stash


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = True, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, with its activations recomputed in the backward.

    The function must do the same each time, in the same order. Random numbers are replayed. Without gradients it is a
    plain call. Raises ValueError: use_reentrant, which would need an argument that requires a gradient.
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
