"""The DeepSpeed engine of a model, one micro-batch through it, and whether a step is skipped.

engine = build_engine(model, arguments, ds_config)
micro_step = MicroStep(engine, precision, arguments)
skip_decision = SkipDecision(engine, precision)
skip_decision.keep_fp8_state()
for index, batch in enumerate(micro_batches):  # gradient_accumulation_steps of them; the last one steps
    loss = micro_step(batch, index)
skipped = skip_decision.is_skipped(step)
"""

from __future__ import annotations

import contextlib
import gc
import io
import math
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from torch import nn

from model.fp8 import te_backend
from model.fp8.modules import gemm_modules, matrices
from model.fp8.precision import Precision
from model.fp8.state import fp8_state, reset_fp8_state
from model.graphs import use_cuda_graphs
from model.variants import VARIANTS, why_no_graphs
from train.config.arguments import TrainingArguments
from train.data.stream import Batch
from train.engine.distributed import set_group_timeouts
from train.engine.optimizer import build_optimizer, orthogonalize_each_matrix
from train.engine.zero import (
    GradientBuffer,
    forget_module,
    gradient_buffers,
    pack_states,
    skip_steps_that_are_not_finite,
    undo_initial_step,
)

# Steps of the run between two removals of amaxes that are not finite. Counted in steps of the run, because the values
# that a step computes may depend on it.
MEND_STEPS = 10


@contextlib.contextmanager
def without_prints() -> Iterator[None]:
    """DeepSpeed prints its own memory readings, unasked, when it builds or loads."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def build_engine(model: nn.Module, arguments: TrainingArguments, ds_config: dict[str, Any]) -> Any:
    """deepspeed.initialize with AdamW or Muon, before its first step. `ds_config`: of `resolve_ds_config`."""
    with without_prints():
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=build_optimizer(model, arguments), config=ds_config
        )
        set_group_timeouts()  # DeepSpeed has created groups of its own
        undo_initial_step(engine)
        if arguments.precision.optimizer_states != "fp32":
            pack_states(engine, arguments.precision.moment_type)
    orthogonalize_each_matrix(engine)
    skip_steps_that_are_not_finite(engine)
    return engine


def release(engine: Any) -> None:
    """Destroy an engine. Its memory is free once the caller drops the last references to it and to its model, and
    calls `free_memory`."""
    parameters = list(engine.module.parameters())
    with without_prints():
        engine.destroy()
    forget_module(engine)
    for parameter in parameters:
        # DeepSpeed gives them methods of their own, by which they would hold themselves: no garbage collector sees that
        vars(parameter).clear()
    te_backend.forget_models()


def free_memory() -> None:
    """Free the memory of models and engines that nothing refers to any more."""
    gc.collect()  # they are in reference cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class MicroStep:
    """Forward, backward and, at the last micro-batch of a step, the optimizer. `notes`, for the log: what came of the
    switches of the section "speed". `arguments` are resolved."""

    def __init__(self, engine: Any, precision: Precision, arguments: TrainingArguments):
        self.engine, self.precision = engine, precision
        accumulation, speed = arguments.gradient_accumulation_steps or 1, arguments.speed
        stage, te_model = engine.zero_optimization_stage(), VARIANTS[arguments.model.variant].te
        # With accumulation the FP8 copy of the weights is made once a step. Not at ZeRO 3, which frees the weights.
        self.cache_weights = precision.fp8 and te_model and accumulation > 1 and stage < 3
        on_gpu = te_model and engine.device.type == "cuda" and not precision.emulated
        self.main_grads = MainGrads(engine, precision) if speed.main_grad and on_gpu else None
        no_graphs = why_no_graphs(arguments.model.variant, zero_stage=stage, emulated=precision.emulated)
        self.capture = speed.cuda_graphs and no_graphs is None
        self.health = precision.health_steps > 0
        self.plain = not (self.capture or self.main_grads and self.main_grads.buffers)
        self.notes = [
            f"weight gradients: {len(self.main_grads.buffers)} GEMMs add into the float32 accumulation buffer"
            if self.main_grads and self.main_grads.buffers
            else "weight gradients: in the parameters' type, accumulated by DeepSpeed",
            f"CUDA graphs: {'on' if self.capture else 'off'}",
            *filter(None, [arguments.precision.described_states()]),
        ]

    def __call__(self, batch: Batch, index: int) -> torch.Tensor:
        """`batch` on the engine's device. Returns the mean loss of the micro-batch, detached, without waiting for it.

        With documents, whose last tokens have no labels, it is the sum of the losses over B * T instead, here and for
        the gradients: so that each label has the same weight in whatever micro-batch and on whatever rank it is.
        """
        engine, (input_ids, labels, documents) = self.engine, batch
        if self.capture:
            of_run = self.precision, input_ids, labels, self.cache_weights, documents, self.health
            use_cuda_graphs(engine.module, *of_run)
            if self.main_grads:
                self.main_grads.zero()
            self.capture = False
        first = index == 0 if self.cache_weights else None
        loss = engine(input_ids, labels=labels, is_first_microbatch=first, documents=documents).loss
        if documents is not None:
            loss = loss * batch.labelled()
        # A loss that is not finite can have finite gradients (that of an inf is as large as any other's). This makes
        # them NaN on this rank, so that the norm after the reduction is NaN on all (SkipDecision). Else it multiplies
        # by 1.
        engine.backward(
            loss * torch.where(loss.detach().isfinite(), 1.0, math.nan)
        )  # divides by the accumulation steps
        if self.main_grads:
            self.main_grads.mark()
        engine.step()  # acts at the last micro-batch
        return loss.detach()

    @contextlib.contextmanager
    def through_autograd(self) -> Iterator[None]:
        """Within it, before the first step, all gradients pass hooks of parameters: no GEMM adds one into a buffer, and
        nothing is captured. `plain`: it is so anyway."""
        capture, main_grads, self.capture, self.main_grads = self.capture, self.main_grads, False, None
        if main_grads:
            main_grads.switch(False)
        yield
        if main_grads:
            main_grads.switch(True)
        self.capture, self.main_grads = capture, main_grads


class SkipDecision:
    """Decides whether a step is skipped: on all ranks or on none, if the norm of its reduced gradients is not finite.

    MicroStep makes gradients NaN where the loss is not finite, so this norm shows every step to skip. The optimizers
    of DeepSpeed then leave weights and optimizer state as they are, and the engine counts the step in
    `skipped_steps`; engine/zero.py gives that behavior to the only optimizer without it. `is_skipped` reads the count
    and restores the FP8 state, so that a skipped step changes nothing. Nobody else decides: the trainer reports the
    step, and ends a run that skips too many.
    """

    def __init__(self, engine: Any, precision: Precision):
        self.engine, self.precision = engine, precision
        self._count_before = 0
        self._live: list[torch.Tensor] = []  # FP8 scales and histories
        self._kept: list[torch.Tensor] = []  # their values before the step
        self._histories: list[torch.Tensor] = []
        self._removed = torch.zeros((), dtype=torch.int64, device=precision.device)

    def keep_fp8_state(self) -> None:
        """Keep the FP8 state of before a step. With an amax of inf a scale would not move while it is in the history
        (16 passes by default); with a finite but enormous one, everything after it would underflow as long."""
        self._count_before = self.engine.skipped_steps
        if not self._live:  # allocated in the modules' first forward; from then on it stays where it is
            state = fp8_state(self.engine.module, self.precision)
            self._live = list(state.values())
            self._kept = [torch.empty_like(t) for t in self._live]
            self._histories = [t for key, t in state.items() if key.endswith(".amax_history")]
        if self._live:
            torch._foreach_copy_(self._kept, self._live)

    @torch.no_grad()
    def is_skipped(self, step: int) -> bool:
        """Return whether this step, which was the `step`-th of the run, is skipped; if so, restore the FP8 state."""
        skipped = self.engine.skipped_steps > self._count_before
        if skipped and self._live:
            torch._foreach_copy_(self._live, self._kept)
        elif skipped:
            reset_fp8_state(self.engine.module, self.precision)
        if step % MEND_STEPS == 0 and self._histories:
            self._remove_bad_amaxes()
        return skipped

    def _remove_bad_amaxes(self) -> None:
        """Remove amaxes that are not finite from the histories. FP8 casts saturate, so that an inf need not make a
        gradient infinite and its step need not be skipped."""
        amaxes = torch.cat([history.flatten() for history in self._histories])
        bad = ~amaxes.isfinite()
        self._removed += bad.sum()
        right = amaxes.masked_fill(bad, 0.0).split([history.numel() for history in self._histories])
        torch._foreach_copy_(
            self._histories, [r.view_as(h) for r, h in zip(right, self._histories, strict=True)]
        )

    def count_removed_amaxes(self) -> int:
        """Return how many amaxes were removed since the last call. Waits for the GPU."""
        count = int(self._removed)
        self._removed.zero_()
        return count


class MainGrads:
    """Lets Transformer Engine's weight-gradient GEMMs add straight into DeepSpeed's float32 gradients.

    DeepSpeed's BF16_Optimizer (ZeRO 1 with float32 accumulation) keeps a float32 gradient of every parameter and, after
    each backward, adds the bf16 `.grad` to it: 24 bytes of memory traffic a parameter and micro-batch. Here the GEMM
    itself adds, in float32 and without the rounding to bf16; `.grad` stays None. Other optimizers have no such buffer:
    then nothing changes and there are no `buffers`.
    """

    def __init__(self, engine: Any, precision: Precision):
        found = gradient_buffers(engine)
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
        """Whether the GEMMs add into the buffers."""
        for module in self.modules:
            module.fuse_wgrad_accumulation = on  # type: ignore[assignment]

    def mark(self) -> None:
        """The gradients of a micro-batch have been added."""
        for buffer in self.buffers:
            buffer.mark()

    def zero(self) -> None:
        for buffer in self.buffers:
            buffer.tensor.zero_()
