"""FP8 state between forward passes: the autocast context, the scales, and when scales are updated.

Delayed scaling combines the amaxes (largest magnitudes) of all modules twice per step. When the outermost `autocast`
exits with gradients enabled, the forward amaxes are converted to scales. The backward amaxes follow at the end of the
backward pass of the first FP8 module in that autocast, because the backward pass of this module runs last. Modules
register their state on first use. The registry does not keep modules alive.

As in Transformer Engine, a forward pass without gradients records its amaxes but does not update scales, so the next
training step uses the larger of the two amaxes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from model.te_reference.quantize import FP8_MAX, update_delayed_scaling
from model.te_reference.recipe import DelayedScaling, Recipe


class RecipeState:
    """FP8 state for the tensors that a module quantizes in one direction (forward or backward).

    Only the subclass for delayed scaling contains tensors.
    """

    def __init__(self, recipe: Recipe, forward: bool):
        self.recipe, self.forward = recipe, forward
        self.dtype = recipe.fp8_format.dtype(forward)


class DelayedScalingState(RecipeState):
    """FP8 state for delayed scaling.

    Attributes:
        scale: float32 [num_tensors].
        amax_history: float32 [amax_history_len, num_tensors]. Row 0 belongs to the current step.
    """

    recipe: DelayedScaling

    def __init__(self, recipe: DelayedScaling, forward: bool, num_tensors: int, device: torch.device):
        super().__init__(recipe, forward)
        self.scale = torch.ones(num_tensors, dtype=torch.float32, device=device)
        self.amax_history = torch.zeros(
            recipe.amax_history_len, num_tensors, dtype=torch.float32, device=device
        )

    def record(self, column: int, amax: Tensor) -> None:
        """Update the current amax of the tensor in `column` if the given amax is larger."""
        row = self.amax_history[0]
        row[column] = torch.maximum(row[column], amax)


@dataclass
class _Running:
    """State of the active autocast context in this process."""

    enabled: bool = False
    recipe: Recipe | None = None
    depth: int = 0
    first_module: bool = False


running = _Running()

# states by direction and recipe, in the order of first use
_registry: dict[tuple[bool, str], weakref.WeakKeyDictionary[DelayedScalingState, None]] = {}


@contextmanager
def autocast(enabled: bool = True, *, recipe: Recipe | None = None) -> Iterator[None]:
    """Context manager in which FP8 modules quantize with `recipe`, which defaults to DelayedScaling().

    Contexts nest: an inner context replaces the outer one until it exits, so `autocast(enabled=False)` disables FP8
    inside.

    Wrap only the forward pass. When the outermost enabled context exits, delayed scaling updates the forward scales.

    As in Transformer Engine, a module in an inner context does not count as the first module of the outer context. If
    the backward pass of the inner module does not use FP8, the next module's backward pass updates the backward scales.
    If both use FP8, the second update finds no new amax and does nothing.
    """
    outer = running.enabled, running.recipe, running.first_module
    running.enabled = enabled
    running.recipe = (recipe or DelayedScaling()) if enabled else None
    running.first_module = running.first_module or running.depth == 0
    running.depth += 1
    try:
        yield
    finally:
        running.enabled, running.recipe, running.first_module = outer
        running.depth -= 1
    if running.depth == 0 and enabled and torch.is_grad_enabled():
        update_scales(forward=True)


def take_first_module() -> bool:
    """Return True for the first module that calls this function in an autocast context.

    The backward pass of the first module updates the backward scales.
    """
    first, running.first_module = running.first_module, False
    return first


def register(state: DelayedScalingState) -> None:
    """Register `state`, so that `update_scales` includes it. States are updated in the order of registration."""
    members = _registry.setdefault((state.forward, repr(state.recipe)), weakref.WeakKeyDictionary())
    members[state] = None


def update_scales(forward: bool) -> None:
    """Update the scales for one direction (forward or backward) with delayed scaling.

    This function rolls the amax histories and computes new scales.
    """
    for (direction, _), members in _registry.items():
        states = list(members)
        if direction is not forward or not states:
            continue
        recipe = states[0].recipe
        latest = torch.cat([state.amax_history[0] for state in states])
        if not latest.any():
            continue
        history, scale = update_delayed_scaling(
            torch.cat([state.amax_history for state in states], dim=1),
            torch.cat([state.scale for state in states]),
            latest,
            FP8_MAX[recipe.fp8_format.dtype(forward)],
            margin=recipe.margin,
            amax_compute_algo=recipe.amax_compute_algo,
        )
        widths = [len(state.scale) for state in states]
        parts = zip(states, history.split(widths, dim=1), scale.split(widths), strict=True)
        for state, state_history, state_scale in parts:
            state.amax_history.copy_(state_history)
            state.scale.copy_(state_scale)
