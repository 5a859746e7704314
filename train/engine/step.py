"""Build the DeepSpeed engine, run micro-batches through it, and detect skipped steps.

engine = build_engine(model, arguments, ds_config)
micro_step = MicroStep(engine, precision, arguments)
skip_decision = SkipDecision(engine, precision)
skip_decision.keep_fp8_state()
for index, batch in enumerate(micro_batches):  # the last of gradient_accumulation_steps also runs the optimizer
    loss = micro_step(batch, index)
skipped = skip_decision.is_skipped(step)
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from torch import nn

from model.checks.health import has_health_checks
from model.fp8 import te_backend
from model.fp8.modules import gemm_modules, matrices
from model.fp8.precision import Precision
from model.fp8.state import fp8_state, reduce_amaxes, reset_fp8_state
from model.fp8.te_patches import quantize_weights_again
from model.graphs import use_cuda_graphs
from model.variants import VARIANTS, cuda_graphs_problem
from train.config.arguments import TrainingArguments
from train.config.ds_config import offloads_optimizer
from train.data.stream import Batch
from train.engine.optimizer import build_optimizer, orthogonalize_each_matrix
from train.engine.process_group import suppress_prints
from train.engine.weight_gather import WeightGather
from train.engine.zero import (
    GradientBuffer,
    communicate_in_place,
    drop_skipped_gradients,
    gradient_buffers,
    pack_states,
    release_module,
    scatter_gradients,
    skip_non_finite_steps,
    undo_initial_step,
)

# Interval in steps at which non-finite amaxes are removed. Steps are counted from the start of the run, not from a
# resume, because the results may depend on the interval.
RECOVERY_STEPS = 10


def build_engine(model: Any, arguments: TrainingArguments, ds_config: dict[str, Any]) -> Any:
    """Build a new DeepSpeed engine with the AdamW or Muon optimizer.

    Args:
        ds_config: The DeepSpeed configuration from `resolve_ds_config`.
    """
    gathers_fp8 = arguments.precision.fp8_weight_gather and arguments.precision.compute == "fp8"
    is_stage_3 = ds_config["zero_optimization"]["stage"] == 3
    if is_stage_3 and (gathers_fp8 or arguments.gradient_checkpointing == "mlp"):
        quantize_weights_again(gemm_modules(model, model.precision).values())
    with suppress_prints():
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=build_optimizer(model, arguments, offloads_optimizer(ds_config)),
            config=ds_config,
        )
        undo_initial_step(engine)
        drop_skipped_gradients(engine)
        scatter_gradients(engine)
        communicate_in_place(engine)
        if arguments.precision.optimizer_states != "fp32":
            pack_states(engine, arguments.precision.moment_type)
    if gathers_fp8:
        WeightGather(engine, model.precision)
    orthogonalize_each_matrix(engine)
    skip_non_finite_steps(engine)
    return engine


def release(engine: Any) -> None:
    """Destroy a DeepSpeed engine.

    To free the memory of the engine, drop the last references to the engine and its model, then call `free_memory`.
    """
    parameters = list(engine.module.parameters())
    with suppress_prints():
        engine.destroy()
    release_module(engine)
    for parameter in parameters:
        # DeepSpeed adds methods to each parameter that refer to the parameter; the garbage collector misses this cycle
        vars(parameter).clear()
    te_backend.release_models()


def free_memory() -> None:
    """Free the GPU and host memory of released models and engines."""
    gc.collect()  # models and engines are in reference cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class MicroStep:
    """Callable that runs the forward and backward passes of one micro-batch.

    After the last micro-batch of a step, it also runs the optimizer.

    Args:
        arguments: The resolved training arguments.

    Attributes:
        notes: Log lines with the effective settings of the configuration section "speed".
        plain: Whether all gradients pass through autograd hooks even without `disable_main_grads`.
    """

    def __init__(self, engine: Any, precision: Precision, arguments: TrainingArguments):
        self.engine, self.precision = engine, precision
        accumulation, speed = arguments.gradient_accumulation_steps or 1, arguments.speed
        stage, te_model = engine.zero_optimization_stage(), VARIANTS[arguments.model.variant].te
        # With gradient accumulation, weights are cast to FP8 once per step. Not with ZeRO 3, as it frees them, except
        # for the parts that WeightGather keeps.
        keeps_weights = stage < 3 or precision.config.fp8_weight_gather
        self.cache_weights = precision.fp8 and te_model and accumulation > 1 and keeps_weights
        on_gpu = te_model and engine.device.type == "cuda" and not precision.emulated
        self.main_grads = MainGrads(engine, precision, speed.main_grad and on_gpu)
        self.capture = speed.cuda_graphs and not cuda_graphs_problem(
            arguments.model.variant, zero_stage=stage, emulated=precision.emulated
        )
        self.plain = not (self.capture or self.main_grads.buffers)
        self._fp8_state: dict[str, torch.Tensor] = {}
        self.notes = [
            f"weight gradients: {len(self.main_grads.buffers)} GEMMs add to the float32 accumulation buffer"
            if self.main_grads.buffers
            else "weight gradients: in the dtype of the parameters, accumulated by DeepSpeed",
            f"CUDA graphs: {'on' if self.capture else 'off'}",
        ]

    def __call__(self, batch: Batch, index: int) -> torch.Tensor:
        """Run one micro-batch and return its detached mean loss, without waiting for the GPU.

        With a document mask, the last token of each document has no label. The loss is then the sum over all labels,
        divided by the number of all tokens in the micro-batch. Each label thus has the same weight in the gradients, in
        every micro-batch and on every rank.

        Args:
            batch: Micro-batch on the device of the engine.
            index: Index of the micro-batch within the step.
        """
        engine, (input_ids, labels, documents) = self.engine, batch
        if self.capture:
            use_cuda_graphs(
                engine.module,
                self.precision,
                input_ids,
                labels,
                self.cache_weights,
                documents,
                has_health_checks(engine.module, self.precision),
            )
            self.main_grads.zero()
            self.capture = False
        first = index == 0 if self.cache_weights else None
        loss = engine(input_ids, labels=labels, is_first_microbatch=first, documents=documents).loss
        if documents is not None:
            loss = loss * batch.labelled()
        # A non-finite loss can have finite gradients. The factor makes them NaN on this rank, so the norm after the
        # reduction is NaN on all ranks (SkipDecision). With a finite loss the factor is 1.
        # backward() divides the loss by the number of accumulation steps.
        engine.backward(loss * torch.where(loss.detach().isfinite(), 1.0, math.nan))
        self.main_grads.mark()
        if self.precision.config.reduce_amax and engine.is_gradient_accumulation_boundary():
            self._fp8_state = self._fp8_state or fp8_state(engine.module, self.precision)
            reduce_amaxes(self._fp8_state)
        engine.step()  # updates the weights only after the last micro-batch
        return loss.detach()

    @contextlib.contextmanager
    def disable_main_grads(self) -> Iterator[None]:
        """Disable `MainGrads` and CUDA graphs during a `with` block, so that all gradients pass through autograd hooks.

        Use this only before the first step. It has no effect if `plain` is true.
        """
        capture, self.capture = self.capture, False
        self.main_grads.switch(False)
        yield
        self.main_grads.switch(True)
        self.capture = capture


class SkipDecision:
    """Detector for skipped steps. It restores the FP8 state, so that a skipped step changes nothing.

    A step is skipped on all ranks if the norm of its reduced gradients is not finite. If the loss is not finite,
    MicroStep sets the gradients to NaN, so checking the norm is sufficient. When a step is skipped, DeepSpeed's
    optimizers leave weights and optimizer state unchanged, and the engine counts the step in `skipped_steps`. One
    DeepSpeed optimizer does not check the norm, so train/engine/zero.py adds the check.

    `is_skipped` reads the count and restores the FP8 state. The trainer reports skipped steps, and stops a run that
    skips too many steps.
    """

    def __init__(self, engine: Any, precision: Precision):
        self.engine, self.precision = engine, precision
        self._live: dict[str, torch.Tensor] = {}  # FP8 scales and histories
        self._kept: list[torch.Tensor] = []  # their values before the step

    def keep_fp8_state(self) -> None:
        """Copy the FP8 state, so that `is_skipped` can restore it. Call this before each step."""
        self._count_before = self.engine.skipped_steps
        if not self._live:  # the modules allocate their state in the first forward pass and never move it
            self._live = fp8_state(self.engine.module, self.precision)
            self._kept = [torch.empty_like(tensor) for tensor in self._live.values()]
        if self._live:
            torch._foreach_copy_(self._kept, list(self._live.values()))

    @torch.no_grad()
    def is_skipped(self, step: int) -> bool:
        """Return whether step number `step` of the run was skipped. If so, restore the FP8 state.

        Every RECOVERY_STEPS steps, non-finite values in the amax histories are replaced with 0. An inf in an activation
        does not always cause a skipped step, because FP8 casts saturate and the gradients may stay finite. However, an
        inf in an amax history would freeze the scale until the inf leaves the history (after 16 passes by default).
        """
        skipped = self.engine.skipped_steps > self._count_before
        if skipped and self._live:
            torch._foreach_copy_(list(self._live.values()), self._kept)
        elif skipped:
            reset_fp8_state(self.engine.module, self.precision)
        if step % RECOVERY_STEPS == 0:
            for key, tensor in self._live.items():
                if key.endswith(".amax_history"):
                    tensor.nan_to_num_(0.0, 0.0, 0.0)
        return skipped


class MainGrads:
    """Fused gradient accumulation: Transformer Engine's weight-gradient GEMMs add directly to float32 gradients.

    DeepSpeed's BF16_Optimizer (ZeRO 1 with float32 accumulation) keeps a float32 gradient of every parameter. The
    optimizer adds the bf16 `.grad` to this gradient after each backward pass, which costs 24 bytes of memory traffic
    per parameter and micro-batch.
    With fused accumulation, the GEMM itself adds in float32 without rounding to bf16, and `.grad` stays None.

    If the optimizer has no float32 gradients, or `is_wanted` is False, `buffers` is empty and nothing changes.
    """

    def __init__(self, engine: Any, precision: Precision, is_wanted: bool):
        found = gradient_buffers(engine) if is_wanted else {}
        self.buffers: list[GradientBuffer] = []
        self.modules: list[nn.Module] = []
        for module in gemm_modules(engine.module, precision).values() if found else ():
            for weight in matrices(module):
                buffer = found[id(weight)]
                weight.main_grad = buffer.tensor.view(weight.shape)
                self.buffers.append(buffer)
            self.modules.append(module)
        self.switch(True)

    def switch(self, on: bool) -> None:
        """Set whether the weight-gradient GEMMs add their results directly to the float32 gradient buffers."""
        self.is_on = on
        for module in self.modules:
            module.fuse_wgrad_accumulation = on  # type: ignore[assignment]

    def mark(self) -> None:
        """Mark the float32 buffers as filled. With a single rank, DeepSpeed ignores buffers that are not marked."""
        for buffer in self.buffers if self.is_on else ():
            buffer.mark()

    def zero(self) -> None:
        for buffer in self.buffers:
            buffer.tensor.zero_()
