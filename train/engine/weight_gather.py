"""Gather the weights of FP8 modules in 8 bits (precision.fp8_weight_gather, ZeRO 3).

ZeRO 3 stores a part of each bf16 weight on each rank, and gathers the whole weight for each forward and backward pass.
A module that runs FP8 then quantizes the weight. With one scale per tensor, quantization is element-wise: if each rank
quantizes its part with the same scale, the gathered bytes are those of the quantized weight. This halves the
communication.

    quantize      once per step: amaxes (largest magnitudes) over all ranks, scales, and the bytes of each rank's part
    gather        in each pass, when DeepSpeed asks for the weights: one call for all weights of a module
    read          the module reads the bytes in its forward and backward pass, where it would quantize the weight

A gathered parameter keeps its shape and data type, but its memory contains the FP8 bytes, and all of its strides are 0.
Only `read` may access its values.

This file uses private attributes of DeepSpeed 0.19.8 (runtime/zero/partition_parameters.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import (
    MultipleAllGatherHandles,
    ZeroParamStatus,
)
from torch import Tensor, nn

from model.checks.quantize_hooks import Source, report_operand
from model.fp8.modules import fp8_modules, gemm_modules, matrices
from model.fp8.precision import Precision
from model.fp8.state import allocate_fp8_state
from model.te_reference.quantize import FP8_MAX, scale_from_amax
from train.engine.zero import gather_together

E4M3 = torch.float8_e4m3fn
GATHERED_RECIPES = ("delayed", "current")  # the recipes with one scale per tensor
PACKED = (0, 0)  # the strides of a parameter that holds the bytes of its quantized weight


@dataclass(eq=False)
class _Weight:
    """A weight that is gathered in 8 bits.

    Attributes:
        gemm: index of the weight among the matrices of its module.
        scale, amax: the FP8 state of the weight, float32 scalars that Transformer Engine updates. None with current
            scaling.
        codes: bytes of this rank's part, uint8.
        scale_inv: inverse of the scale that `codes` were quantized with, float32 scalar.
    """

    parameter: Any
    module: nn.Module
    gemm: int
    scale: Tensor | None = None
    amax: Tensor | None = None
    codes: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    scale_inv: Tensor = field(default_factory=lambda: torch.empty(()))

    def part(self) -> Tensor:
        """Return this rank's part of the weight in bf16, 1-D, without padding."""
        stored, rank = self.parameter.ds_tensor, dist.get_rank(self.parameter.ds_process_group)
        size = min(self.parameter.ds_numel - rank * stored.numel(), stored.numel())
        return stored[: max(size, 0)]


class WeightGather:
    """Gathers the FP8 weights of a new ZeRO 3 engine in 8 bits, in place of DeepSpeed's gather in bf16.

    As in Transformer Engine, the model's argument `is_first_microbatch` determines when weights are quantized: True and
    None quantize them, and False reuses the bytes of the last call. The first micro-batch after a step, a skipped step,
    a rollback or an evaluation therefore uses the current weights and scales.
    """

    def __init__(self, engine: Any, precision: Precision):
        model = engine.module
        self.precision = precision
        self.weights: list[_Weight] = []
        self.quantized: Any = None  # CUDA event
        self.current = precision.make_recipe("current").fp8_quant_fwd_weight
        shared = model.model.embed_tokens.weight  # tied to lm_head, and read by the embedding in bf16
        modules, planned = gemm_modules(model, precision), fp8_modules(model, precision).planned
        for name in planned:
            module, recipe = modules[name], precision.module_recipe(name)
            if recipe in GATHERED_RECIPES and all(weight is not shared for weight in matrices(module)):
                self._add(module, recipe)
        self._replace_gather(engine)
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True)

    def _add(self, module: nn.Module, recipe: str) -> None:
        parameters = matrices(module)
        weights = [_Weight(parameter, module, gemm) for gemm, parameter in enumerate(parameters)]
        if recipe == "delayed":
            if "scaling_fwd" not in module.fp8_meta:  # type: ignore[operator]
                allocate_fp8_state(module, self.precision, len(parameters))
            state = module.fp8_meta["scaling_fwd"]  # type: ignore[index]
            for weight in weights:
                column = 3 * weight.gemm + 1
                weight.scale, weight.amax = state.scale[column], state.amax_history[0, column]
        self.precision.te.read_weights(module, [partial(self._read, weight) for weight in weights])
        self.weights += weights

    def _replace_gather(self, engine: Any) -> None:
        """Replace DeepSpeed's function that gathers the weights of the next modules."""
        by_id = {weight.parameter.ds_id: weight for weight in self.weights}
        gather_others = next(engine.module.parameters()).all_gather_coalesced

        def gather(parameters: Iterable[Any], **options: Any) -> MultipleAllGatherHandles:
            # the same order on all ranks
            ordered = sorted(parameters, key=lambda parameter: parameter.ds_id)
            others = [parameter for parameter in ordered if parameter.ds_id not in by_id]
            weights = [by_id[p.ds_id] for p in ordered if p.ds_id in by_id]
            handles = [self._gather(weights)] if weights else []
            if others:
                handles.append(gather_others(others, **options))
            return MultipleAllGatherHandles(handles)

        for parameter in engine.module.parameters():
            parameter.all_gather_coalesced = gather
        # DeepSpeed keeps small parameters on all ranks in bf16 (stage3_param_persistence_threshold)
        kept = engine.optimizer.persistent_parameters
        kept[:] = [parameter for parameter in kept if parameter.ds_id not in by_id]
        for weight in self.weights:
            weight.parameter.ds_persist = False

    def _before_forward(self, _: nn.Module, __: Any, options: dict[str, Any]) -> None:
        if options.get("is_first_microbatch") is not False:
            self.quantize()

    @torch.no_grad()
    def quantize(self) -> None:
        """Quantize this rank's part of each weight, and update the amaxes of the weights in the FP8 state.

        Collective: all ranks must call this method, which runs one all-reduce.
        """
        if not self.weights:
            return
        for weight in self.weights:
            # a forward pass without a backward pass leaves weights in memory
            if weight.parameter.ds_status == ZeroParamStatus.AVAILABLE:
                weight.parameter.partition()
        parts = [weight.part() for weight in self.weights]
        # an empty part has only padding
        filled = [part if part.numel() else part.new_zeros(1) for part in parts]
        amaxes = torch.stack(torch._foreach_norm(filled, math.inf)).float()
        dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=self.weights[0].parameter.ds_process_group)
        current = scale_from_amax(
            amaxes,
            FP8_MAX[E4M3],
            power_2_scale=self.current.power_2_scale,
            amax_epsilon=self.current.amax_epsilon,
        )
        scales = torch.stack(
            [
                own if weight.scale is None else weight.scale
                for weight, own in zip(self.weights, current, strict=True)
            ]
        )
        rows = [
            (weight.amax, amax)
            for weight, amax in zip(self.weights, amaxes, strict=True)
            if weight.amax is not None
        ]
        if rows:
            torch._foreach_maximum_(*map(list, zip(*rows, strict=True)))
        # cuBLAS reads the scale of an operand only at a multiple of 16 bytes
        inverses = scales.reciprocal().unsqueeze(1).repeat(1, 4)[:, 0]
        for weight, scale, inverse, part in zip(self.weights, scales, inverses, parts, strict=True):
            weight.codes = self.precision.te.cast_weight(weight.parameter.ds_tensor, scale)
            weight.scale_inv = inverse
            self._report(weight, part)
        if amaxes.is_cuda:  # DeepSpeed gathers in a stream of its own
            self.quantized = torch.cuda.Event()
            self.quantized.record()

    def _report(self, weight: _Weight, part: Tensor) -> None:
        """Report this rank's part of a weight to an FP8 health check, as a matrix."""
        if part.numel():
            shape = -1, math.gcd(part.numel(), weight.parameter.ds_shape[1])
            codes = weight.codes[: part.numel()].view(E4M3).view(shape)
            report_operand(
                weight.module,
                3 * weight.gemm + 1,
                Source("matrix", (part.view(shape),)),
                (codes, weight.scale_inv),
            )

    def _gather(self, weights: list[_Weight]) -> MultipleAllGatherHandles:
        """Start gathering the bytes of weights, and return the handle that waits for them."""
        if self.quantized is not None:
            self.quantized.wait()
        parameters, buffers, gathered = [weight.parameter for weight in weights], [], []
        for weight in weights:
            size = weight.codes.numel() * dist.get_world_size()
            buffers.append(weight.codes.new_empty(math.ceil(size / 2), dtype=weight.parameter.dtype))
            gathered.append(buffers[-1].view(torch.uint8)[:size])
        handle = gather_together(parameters, [weight.codes for weight in weights], gathered)
        for parameter, buffer in zip(parameters, buffers, strict=True):
            parameter.data = buffer.as_strided(parameter.ds_shape, PACKED)
        return handle

    def _read(self, weight: _Weight, gathered: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the FP8 bytes and the inverse scale of a gathered weight, or None if it was gathered in bf16."""
        if gathered.stride() != PACKED:
            return None
        packed = gathered.detach().as_strided((gathered.numel() // 2,), (1,))
        return packed.view(E4M3).view(gathered.shape), weight.scale_inv
