"""Shared parts of the FP8 modules in the CPU reference implementation: FP8 state, quantizers and argument checks.

Delayed scaling combines the amaxes (largest magnitudes) of all modules twice per micro-batch. When the outermost
`autocast` exits with gradients enabled, the forward amaxes are converted to scales. The backward amaxes follow at the
end of the backward pass of the first FP8 module in that autocast, because the backward pass of this module runs last.
Modules register their state on first use. The registry does not keep modules alive.

As in Transformer Engine, a forward pass without gradients records its amaxes but does not update scales, so the next
training step uses the larger of the two amaxes.

As in Transformer Engine, `fp8_meta["scaling_fwd"]` has three columns per GEMM, [input, weight, output], and
`fp8_meta["scaling_bwd"]` has two, [grad_output, grad_input]. Outputs and input gradients are never quantized here, so
their columns are unused.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from model.te_reference.quantize import (
    BLOCK,
    FP8_MAX,
    MX_BLOCK,
    QuantizedMatrix,
    amax,
    quantize_blocks,
    quantize_current,
    quantize_mx,
    quantize_per_tensor,
    scaled_cast,
    update_delayed_scaling,
)
from model.te_reference.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe

INPUT, WEIGHT = 0, 1
"""Columns of a GEMM's forward tensors."""


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
        amax_history: float32 [amax_history_len, num_tensors]. Row 0 belongs to the current micro-batch.
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

    Contexts can be nested. An inner context replaces the outer context until the inner context exits, so
    `autocast(enabled=False)` disables FP8 inside an FP8 context.

    Wrap only the forward pass. When the outermost enabled context exits, delayed scaling updates the forward scales.

    As in Transformer Engine, a module in an inner context does not count as the first module of the outer context. If
    the backward pass of the inner module does not use FP8, the next module's backward pass updates the backward scales.
    If both modules use FP8, both update the scales. The second update finds no new amax and does nothing.
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


@dataclass
class Quantizer:
    """Quantizer for one tensor of a module, which uses the module's recipe.

    Attributes:
        state: FP8 state for the direction (forward or backward).
        column: column of the tensor in `state`.
        kind: "fwd_inp", "fwd_weight" or "bwd_grad".
    """

    state: RecipeState
    column: int
    kind: str

    def __call__(
        self, x: Tensor, *, columnwise: bool = True, rowwise: bool = True, amax_of_x: Tensor | None = None
    ) -> QuantizedMatrix:
        """Quantize a matrix [M, N] for contractions over its columns N (`rowwise`) and its rows M (`columnwise`)."""
        state, dtype = self.state, self.state.dtype
        if isinstance(state, DelayedScalingState):
            state.record(self.column, amax(x) if amax_of_x is None else amax_of_x)
            operand = quantize_per_tensor(x, state.scale[self.column], dtype)
            return QuantizedMatrix(operand, operand)
        if isinstance(state.recipe, MXFP8BlockScaling):
            rows = quantize_mx(x, (1, MX_BLOCK), dtype) if rowwise else None
            columns = quantize_mx(x, (MX_BLOCK, 1), dtype) if columnwise else None
            return QuantizedMatrix(rows, columns)
        options = asdict(getattr(state.recipe, f"fp8_quant_{self.kind}"))
        if isinstance(state.recipe, Float8CurrentScaling):
            operand = quantize_current(x, dtype, amax_of_x=amax_of_x, **options)
            return QuantizedMatrix(operand, operand)
        if self.kind == "fwd_weight":
            operand = quantize_blocks(x, (BLOCK, BLOCK), dtype, **options)
            return QuantizedMatrix(operand, operand)
        rows = quantize_blocks(x, (1, BLOCK), dtype, **options) if rowwise else None
        columns = quantize_blocks(x, (BLOCK, 1), dtype, **options) if columnwise else None
        return QuantizedMatrix(rows, columns)

    def fused(
        self, x: Tensor, dtype: torch.dtype, *, columnwise: bool, amax_before_rounding: bool = False
    ) -> QuantizedMatrix:
        """Quantize the float32 result of a norm or activation kernel.

        The kernel for delayed scaling quantizes the float32 result directly. With the other recipes, the result is
        rounded to `dtype` first. For current scaling, the activation kernel computes the amax (largest magnitude)
        before this rounding (`amax_before_rounding`), and the norm kernel computes the amax after the rounding.
        """
        if isinstance(self.state, DelayedScalingState):
            return self(x, columnwise=columnwise)
        before = amax_before_rounding and isinstance(self.state.recipe, Float8CurrentScaling)
        return self(x.to(dtype), columnwise=columnwise, amax_of_x=amax(x) if before else None)


@dataclass
class FP8Call:
    """Settings for one FP8 forward pass of a module.

    Attributes:
        forward_state: FP8 state of the inputs and weights.
        backward_state: FP8 state of the gradients.
        trains: whether a backward pass follows the forward pass.
        moves_backward_scales: whether the backward pass of this module updates the gradient scales of all modules.
    """

    forward_state: RecipeState
    backward_state: RecipeState
    trains: bool
    moves_backward_scales: bool

    @property
    def high_precision_backward(self) -> bool:
        """Return whether gradients are computed from unquantized operands (the recipe's backward_override)."""
        return getattr(self.forward_state.recipe, "backward_override", None) is not None

    def quantizer(self, tensor: int, gemm: int) -> Quantizer:
        """Return the quantizer for a forward tensor (INPUT or WEIGHT) of the module's GEMM with index `gemm`."""
        kind = "fwd_weight" if tensor == WEIGHT else "fwd_inp"
        return Quantizer(self.forward_state, 3 * gemm + tensor, kind)

    def accumulates_fast(self, gemm: str) -> bool:
        """Return whether the recipe sets use_split_accumulator=False for a GEMM kind ("fprop", "dgrad" or "wgrad").

        For DelayedScaling, which has no such field, Transformer Engine uses the default of Float8CurrentScaling.
        """
        recipe, name = self.forward_state.recipe, f"fp8_gemm_{gemm}"
        params = getattr(recipe, name, getattr(Float8CurrentScaling, name))
        return not params.use_split_accumulator


class FP8Module(nn.Module):
    """Base class for modules with FP8 GEMMs.

    Attributes:
        fp8_meta: contains "num_gemms", "recipe" and, after an FP8 forward pass or `init_fp8_meta_tensors`,
            "scaling_fwd" and "scaling_bwd". With delayed scaling, the last two have `scale` and `amax_history`.
        weight_readers: for each GEMM, a function that replaces the quantization of the weight (see te_backend.load).
            Empty if there are none.
    """

    weight_readers: Sequence[Callable[[Tensor], tuple[Tensor, Tensor] | None]] = ()
    _is_fsdp2 = False  # if set, quantized weights are not cached (te_patches.quantize_weights_again)

    def __init__(self, num_gemms: int) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {"num_gemms": num_gemms}
        self._fp8_workspaces: dict[int, QuantizedMatrix] = {}

    def init_fp8_meta_tensors(self, recipe: Recipe) -> None:
        """Allocate the FP8 state for `recipe`, unless the module already has FP8 state.

        The recipe of a module cannot change.
        """
        for key, forward, tensors in (("scaling_fwd", True, 3), ("scaling_bwd", False, 2)):
            if key not in self.fp8_meta:
                device = next(self.parameters()).device
                num_tensors = tensors * self.fp8_meta["num_gemms"]
                self.fp8_meta[key] = (
                    DelayedScalingState(recipe, forward, num_tensors, device)
                    if isinstance(recipe, DelayedScaling)
                    else RecipeState(recipe, forward)
                )

    def prepare_fp8(self, inp: Tensor) -> FP8Call | None:
        """Return the settings for an FP8 forward pass in the current autocast context, or None without FP8.

        Call this method at the start of each forward pass.

        Args:
            inp: input of the module.
        """
        if not running.enabled:
            return None
        assert running.recipe is not None
        self.fp8_meta["recipe"] = running.recipe
        self.init_fp8_meta_tensors(running.recipe)
        forward, backward = self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"]
        if isinstance(forward, DelayedScalingState):
            register(forward)
            register(backward)
        wanted = any(tensor.requires_grad for tensor in (inp, *self.parameters()))
        trains = torch.is_grad_enabled() and wanted
        moves = trains and take_first_module() and getattr(running.recipe, "backward_override", None) is None
        return FP8Call(forward, backward, trains, moves)

    def quantize_weight(
        self, gemm: int, weight: Tensor, quantizer: Quantizer, is_first_microbatch: bool | None
    ) -> QuantizedMatrix:
        """Return the quantized weight for the module's GEMM with index `gemm`.

        Args:
            is_first_microbatch: None quantizes the weight. True also caches the result, and False returns the cached
                result.
        """
        stored = self.weight_readers[gemm](weight) if self.weight_readers else None
        if stored is not None:
            return QuantizedMatrix(stored, stored)
        if self._is_fsdp2:
            is_first_microbatch = None
        if is_first_microbatch is False and gemm in self._fp8_workspaces:
            return self._fp8_workspaces[gemm]
        quantized = quantizer(weight.detach())
        if is_first_microbatch is not None:
            self._fp8_workspaces[gemm] = quantized
        return quantized


def read_weights(
    module: FP8Module, readers: Sequence[Callable[[Tensor], tuple[Tensor, Tensor] | None]]
) -> None:
    """Make `module` take its FP8 weights from `readers` (see te_backend.load)."""
    module.weight_readers = readers


def cast_weight(x: Tensor, scale: Tensor) -> Tensor:
    """Quantize a tensor to e4m3 with a given float32 scale. Returns the bytes, uint8."""
    return scaled_cast(x, scale, torch.float8_e4m3fn).view(torch.uint8)


def check_fp8_shapes(name: str, inp: Tensor, weight: Tensor, *, trains: bool, multiple: int = 16) -> None:
    """Raise ValueError for shapes that FP8 GEMMs on a Hopper GPU do not support.

    The number of rows (product of the leading dimensions) must be divisible by 8, and the last dimension by 16. In
    training, both must be divisible by 16, because the weight gradient contracts over the rows and the input gradient
    over the output features. `multiple` replaces 16: MXFP8 needs whole blocks of 32 everywhere.
    """
    divisor = multiple if trains or multiple == MX_BLOCK else 8
    rows, sizes = math.prod(inp.shape[:-1]), (inp.shape[-1], weight.shape[1])
    if rows % divisor or weight.shape[0] % divisor or any(size % multiple for size in sizes):
        raise ValueError(
            f"{name}: the input has shape {list(inp.shape)} and the weight {list(weight.shape)}. FP8 needs "
            f"in_features divisible by {multiple}. It also needs out_features and the number of rows (the "
            f"product of the input's leading dimensions) divisible by {divisor}. Pad the tensors, or run this "
            "module under autocast(enabled=False)."
        )


def check_supported(name: str, **arguments: tuple[Any, Any]) -> None:
    """Raise ValueError if an argument differs from its only supported value.

    Args:
        name: name of the class, for the message.
        arguments: (value, supported value) of each argument.
    """
    for argument, (value, only) in arguments.items():
        if value != only:
            raise ValueError(f"{name}: {argument} is {value!r}, but only {only!r} is supported on a CPU.")


def make_weight(
    out_features: int, in_features: int, dtype: torch.dtype | None, device: torch.device | str
) -> nn.Parameter:
    """Create a weight [out_features, in_features] with Transformer Engine's default initialization."""
    weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device))
    return nn.init.normal_(weight, mean=0.0, std=0.023)
