"""What FP8 has to remember between forwards: the autocast, the scales, and when the scales move.

Delayed scaling needs the amaxes of all modules at two moments. The forward ones are reduced over the ranks
and turned into scales when the outermost `autocast` exits with gradients enabled; the backward ones at the
end of the backward of the first FP8 module that ran in that autocast, which is the last one to run backward.
Modules register their state on first use, in that order, which must be the same on all ranks; the registry
does not keep them alive.

As in Transformer Engine, a forward without gradients records its amaxes but moves no scale, so the next
training step sees the larger of the two.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from model.te_reference.quantize import FP8_MAX, update_delayed_scaling
from model.te_reference.recipe import DelayedScaling, Recipe


class RecipeState:
    """State of the tensors that one direction of a module quantizes, under `recipe`; none but for delayed
    scaling.
    """

    def __init__(self, recipe: Recipe, forward: bool):
        self.recipe, self.forward = recipe, forward
        self.dtype = recipe.fp8_format.dtype(forward)


class DelayedScalingState(RecipeState):
    """scale: float32 [num_tensors]. amax_history: float32 [amax_history_len, num_tensors], row 0 the running
    step.
    """

    recipe: DelayedScaling

    def __init__(self, recipe: DelayedScaling, forward: bool, num_tensors: int, device: torch.device):
        super().__init__(recipe, forward)
        self.scale = torch.ones(num_tensors, dtype=torch.float32, device=device)
        self.amax_history = torch.zeros(
            recipe.amax_history_len, num_tensors, dtype=torch.float32, device=device
        )

    def record(self, column: int, amax: Tensor) -> None:
        """Maximize the running amax of a tensor."""
        row = self.amax_history[0]
        row[column] = torch.maximum(row[column], amax)


def make_recipe_state(recipe: Recipe, forward: bool, num_tensors: int, device: torch.device) -> RecipeState:
    if isinstance(recipe, DelayedScaling):
        return DelayedScalingState(recipe, forward, num_tensors, device)
    return RecipeState(recipe, forward)


@dataclass
class RecomputeFrame:
    """What the first forward of a checkpointed function leaves for its recomputation.

    scales: the forward scales of its FP8 modules in the order of their calls (None without delayed scaling).
    first: whether it holds the first FP8 module of its autocast. The other fields are the autocast that it
    ran in.
    """

    enabled: bool
    recipe: Recipe | None
    depth: int
    first: bool
    scales: list[Tensor | None] = field(default_factory=list)
    position: int = 0

    def next_scale(self) -> Tensor | None:
        self.position += 1
        return self.scales[self.position - 1]


@dataclass
class _Running:
    """The autocast and recomputation that the process is in."""

    enabled: bool = False
    recipe: Recipe | None = None
    depth: int = 0
    first_module: bool = False
    stashing: tuple[RecomputeFrame, ...] = ()
    replaying: RecomputeFrame | None = None


running = _Running()

# by direction and recipe, in the order of first use
_registry: dict[tuple[bool, str], weakref.WeakKeyDictionary[DelayedScalingState, None]] = {}


class autocast:  # noqa: N801 (Transformer Engine's name)
    """Context in which the FP8 modules quantize with `recipe` (default: DelayedScaling()).

    Contexts nest: an inner one replaces the outer until it exits, so that `autocast(enabled=False)` switches
    FP8 off inside. As in Transformer Engine a module in an inner one does not use up the mark of the first module:
    where its own backward is not FP8, the next one's moves the backward scales; where both do, the second finds no
    new amax. Wrap only the forward. At the exit of the outermost enabled context the forward scales of
    delayed scaling move, which reduces amaxes over all ranks: every rank must exit equally often.
    """

    def __init__(self, enabled: bool = True, *, recipe: Recipe | None = None):
        self.enabled = enabled
        self.recipe = recipe
        self._outer: tuple[bool, Recipe | None, bool] | None = None

    def __enter__(self) -> autocast:
        self._outer = (running.enabled, running.recipe, running.first_module)
        running.enabled = self.enabled
        running.recipe = (self.recipe or DelayedScaling()) if self.enabled else None
        if running.depth == 0:
            running.first_module = True
        running.depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._outer is not None
        running.enabled, running.recipe, running.first_module = self._outer
        self._outer = None
        running.depth -= 1
        outermost, moves = running.depth == 0, torch.is_grad_enabled() and running.replaying is None
        if outermost and self.enabled and moves and error is None:
            update_scales(forward=True)


def take_first_module() -> bool:
    """True for the first caller in an autocast: the module whose backward moves the backward scales."""
    first, running.first_module = running.first_module, False
    return first


def register(state: DelayedScalingState) -> None:
    """Include `state` in the scale updates of its recipe, after those registered before it."""
    members = _registry.setdefault((state.forward, repr(state.recipe)), weakref.WeakKeyDictionary())
    members[state] = None


def update_scales(forward: bool) -> None:
    """Move the scales of one direction: reduce the running amaxes over the ranks, roll the histories, set the
    scales.

    One all-reduce for all modules of a recipe.
    """
    for (direction, _), members in _registry.items():
        states = list(members)
        if direction is not forward or not states:
            continue
        recipe = states[0].recipe
        latest = torch.cat([state.amax_history[0] for state in states])
        distributed = dist.is_available() and dist.is_initialized()
        if recipe.reduce_amax and distributed and dist.get_world_size() > 1:
            dist.all_reduce(latest, op=dist.ReduceOp.MAX)
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


def new_frame() -> RecomputeFrame:
    """A frame for a function that is about to be checkpointed in the running autocast."""
    return RecomputeFrame(running.enabled, running.recipe, running.depth, running.first_module)


@contextmanager
def stash(frame: RecomputeFrame) -> Iterator[None]:
    """The first forward of a checkpointed function: its scales go to `frame`."""
    outer = running.stashing
    running.stashing = (*outer, frame)
    try:
        yield
    finally:
        running.stashing = outer


@contextmanager
def replay(frame: RecomputeFrame) -> Iterator[None]:
    """The recomputation of a checkpointed function: the autocast and the scales of its first forward.

    Amaxes are not recorded again and no forward scale moves, also where the function has an autocast of its
    own.
    """
    outer = _Running(**vars(running))
    frame.position = 0
    running.enabled, running.recipe = frame.enabled, frame.recipe
    running.depth, running.first_module = frame.depth, frame.first
    running.replaying, running.stashing = frame, ()
    try:
        yield
    finally:
        vars(running).update(vars(outer))
