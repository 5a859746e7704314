"""checkpoint: run a function without keeping its activations, and run it again in the backward.

With delayed scaling the scales have moved by then, so that a plain recomputation would compute something
else. This one replays the scales of the first forward and records nothing, which makes gradients and FP8
state equal, bit for bit, to those of a run without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint

from model.te_reference.base import check_arguments
from model.te_reference.state import RecomputeFrame, new_frame, replay, stash


class _Reentrant(torch.autograd.Function):
    """The function without gradients, and in the backward a forward and backward of their own."""

    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Any], frame: RecomputeFrame, kwargs: dict[str, Any], *args: Any
    ) -> Any:
        ctx.function, ctx.frame, ctx.kwargs = function, frame, kwargs
        ctx.rng_state = torch.get_rng_state()
        ctx.autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        ctx.others = [None if isinstance(arg, Tensor) else arg for arg in args]
        ctx.is_tensor = [isinstance(arg, Tensor) for arg in args]
        ctx.save_for_backward(*[arg for arg in args if isinstance(arg, Tensor)])
        with torch.no_grad(), stash(frame):
            return function(*args, **kwargs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = iter(ctx.saved_tensors)
        inputs = []
        for is_tensor, other in zip(ctx.is_tensor, ctx.others, strict=True):
            if is_tensor:
                tensor = next(saved)
                inputs.append(tensor.detach().requires_grad_(tensor.requires_grad))
            else:
                inputs.append(other)
        enabled, dtype = ctx.autocast
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.autocast("cpu", dtype, enabled):
            torch.set_rng_state(ctx.rng_state)
            with replay(ctx.frame):
                outputs = ctx.function(*inputs, **ctx.kwargs)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if isinstance(output, Tensor) and output.requires_grad and grad is not None
        ]
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        return None, None, None, *(inp.grad if isinstance(inp, Tensor) else None for inp in inputs)


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = True, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, with its activations recomputed in the backward.

    use_reentrant: True reruns the function under a backward of its own, which needs an argument in `args`
    that requires grad; False replaces the tensors that autograd saved. The function must do the same each
    time, in the same order. Random numbers are replayed. Without gradients it is a plain call.

    Raises ValueError: `distribute_saved_activations`, `tp_group` or `get_rng_state_tracker`.
    """
    unsupported = {
        "distribute_saved_activations": (False,),
        "get_rng_state_tracker": (None,),
        "tp_group": (None,),
    }
    check_arguments(
        "checkpoint", {name: kwargs.pop(name) for name in unsupported if name in kwargs}, unsupported
    )
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    frame = new_frame()
    if use_reentrant:
        return _Reentrant.apply(function, frame, kwargs, *args)
    return torch_checkpoint.checkpoint(
        function,
        *args,
        use_reentrant=False,
        context_fn=lambda: (stash(frame), replay(frame)),
        # ZeRO 3 changes the shape of parameters between the two forwards
        determinism_check="none",
        **kwargs,
    )
