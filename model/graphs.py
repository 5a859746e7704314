"""Capture a model's forward and backward passes as CUDA graphs, so that each micro-batch needs only two launches.

Small models spend much of their time launching kernels. FP8 is affected most, because it has more and shorter kernels.
The graphs cover the model from token ids to loss, including Transformer Engine's update of FP8 scales and amax
histories. Callers still use `model(...)`. A replayed forward pass returns a loss whose backward replays the captured
backward pass and hands each parameter its gradient, so hooks that an engine has set on parameters still run.

Parameters, FP8 state and gradient buffers that GEMMs add into must keep their addresses. DeepSpeed's ZeRO 0 to 2
ensures this.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from model.checks.gemm_counts import count_gemms, count_replay
from model.checks.health import HealthCheck, add_replay_totals, is_collecting, pause_collection
from model.documents import Documents
from model.fp8.precision import Precision
from model.fp8.state import load_fp8_state, reset_fp8_state, snapshot_fp8_state

WARMUP_PASSES = 3
# Capacity for documents, as a multiple of those in the captured batch. Unused ones cost attention a little.
CAPACITY_FACTOR = 2


class _Passes:
    """Forward and backward passes of `model` on a static batch, using stand-ins for the model's parameters.

    The stand-ins share memory with the parameters and their gradient buffers but have their own autograd nodes.
    DeepSpeed keeps references to the nodes of the parameters. These nodes therefore belong to the default stream, which
    a captured backward pass must not wait for.
    """

    def __init__(
        self, model: nn.Module, input_ids: torch.Tensor, labels: torch.Tensor, documents: Documents | None
    ):
        self.model, self.input_ids, self.labels, self.documents = model, input_ids, labels, documents
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.stand_ins = {}
        for name, parameter in self.parameters.items():
            stand_in = self.stand_ins[name] = nn.Parameter(parameter.detach())
            if hasattr(parameter, "main_grad"):
                stand_in.main_grad = parameter.main_grad  # type: ignore[attr-defined]

    def forward(self, first: bool | None) -> torch.Tensor:
        arguments = {"labels": self.labels, "is_first_microbatch": first, "documents": self.documents}
        return torch.func.functional_call(self.model, self.stand_ins, (self.input_ids,), arguments).loss

    def backward(self, loss: torch.Tensor, upstream: torch.Tensor) -> list[torch.Tensor | None]:
        """Return a gradient for each parameter, or None if a GEMM has already added the gradient to a buffer."""
        gradients = torch.autograd.grad(loss, list(self.stand_ins.values()), upstream, allow_unused=True)
        return [None if g is None else g.detach() for g in gradients]

    def take(self, input_ids: torch.Tensor, labels: torch.Tensor, documents: Documents | None) -> bool:
        """Copy a batch into the static input tensors and return True. If the batch does not fit, copy nothing and
        return False.
        """
        if input_ids.shape != self.input_ids.shape or (documents is None) != (self.documents is None):
            return False
        if documents is not None and self.documents is not None:
            if documents.pieces > self.documents.pieces:
                return False
            self.documents.copy_(documents)
        self.input_ids.copy_(input_ids)
        self.labels.copy_(labels)
        return True


class _Captured:
    """A captured forward and backward pass, and the static tensors of both.

    The value of `is_first_microbatch` and an optional FP8 health check are fixed during capture. The totals of the
    health check are also static tensors.
    """

    def __init__(
        self,
        passes: _Passes,
        precision: Precision,
        first: bool | None,
        pool: Any,
        check: HealthCheck | None = None,
    ):
        self.parameters = list(passes.parameters.values())
        # keep the angles that the graph reads: a longer sequence would replace them in the model
        self.angles = passes.model._rope_freqs
        self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # thread_local: other threads (data, NCCL's watchdog) may continue to call CUDA
        collecting = check.collecting if check else nullcontext
        with count_gemms(passes.model, precision) as self.gemms, collecting():
            with torch.cuda.graph(self.forward_graph, pool=pool, capture_error_mode="thread_local"):
                loss = passes.forward(first)
            self.loss, self.upstream = loss.detach(), torch.ones_like(loss)
            with torch.cuda.graph(self.backward_graph, pool=pool, capture_error_mode="thread_local"):
                self.gradients = passes.backward(loss, self.upstream)
                self.totals = check.totals() if check else None


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, captured: _Captured, *parameters: torch.Tensor) -> torch.Tensor:
        captured.forward_graph.replay()
        count_replay(captured.gemms.forward)
        ctx.captured = captured
        return captured.loss.clone()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        captured = ctx.captured
        captured.upstream.copy_(upstream)
        captured.backward_graph.replay()
        count_replay(Counter(), captured.gemms.backward)
        if captured.totals is not None:
            add_replay_totals(captured.totals)
        # copies: the caller may keep gradients, and the next replay overwrites the static ones
        return None, *(None if g is None else g.clone() for g in captured.gradients)


def _warm_up_and_capture(
    model: nn.Module, passes: _Passes, precision: Precision, kinds: Sequence[bool | None], health: bool
) -> tuple[dict[bool | None, _Captured], _Captured | None]:
    """Run warm-up passes, then capture the forward and backward passes as CUDA graphs.

    Args:
        kinds: the values of is_first_microbatch to capture.
        health: whether to capture an additional pass with an FP8 health check.

    Returns: the captured passes, keyed by the value of is_first_microbatch, and the pass with a health check, or None.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # the nested contexts keep these passes out of outer GEMM counts and health checks
    with torch.cuda.stream(stream), count_gemms(model, precision), pause_collection():
        for index in range(WARMUP_PASSES):
            watch = HealthCheck(model, precision).collecting if health and index == 0 else nullcontext
            for first in kinds:
                with watch():
                    loss = passes.forward(first)
                    passes.backward(loss, torch.ones_like(loss))
                del loss
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()  # the graphs' own pool cannot reuse the memory of the warm-up

    collecting = gc.isenabled()
    gc.disable()  # freeing another graph during a capture breaks it
    try:
        pool = torch.cuda.graph_pool_handle()
        with pause_collection():
            captured = {first: _Captured(passes, precision, first, pool) for first in kinds}
            check = HealthCheck(model, precision) if health else None
            return captured, _Captured(passes, precision, kinds[0], pool, check) if check else None
    finally:
        if collecting:
            gc.enable()


def use_cuda_graphs(
    model: nn.Module,
    precision: Precision,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    cache_weights: bool,
    documents: Documents | None = None,
    health: bool = False,
) -> None:
    """Capture CUDA graphs of the training pass, and make `model.forward` replay these graphs.

    Some calls run without graphs: evaluation, calls with additional arguments, inputs with a different shape, and
    batches with more than CAPACITY_FACTOR times as many document pieces as the captured batch (with its padding).

    The graphs reuse the same memory for the activations of each micro-batch. Run the backward pass of a micro-batch
    before the next forward pass.

    The capture does not change FP8 state, torch's random generators or `.grad`. Gradient buffers that GEMMs add into
    do change. Set these buffers to zero after the capture.

    Args:
        input_ids: int64 [B, T] (B rows of T tokens) on the GPU, with the batch shape used in training.
        labels: int64 [B, T] on the GPU.
        cache_weights: whether training passes is_first_microbatch as True and False (two captures) or as None (one).
        documents: document boundaries on the GPU, for a model with a document mask.
        health: whether to capture the first micro-batch of a step a second time with an FP8 health check. This graph is
            replayed while a check is running. The graph needs additional memory for gradients, unless GEMMs add
            gradients into buffers.

    Raises ValueError if the model has a document mask, but `documents` is None.
    """
    if model.document_mask and documents is None:
        raise ValueError(
            "the model uses a document mask, so capturing CUDA graphs requires the argument `documents`"
        )
    eager = model.forward
    capacity = None if documents is None else documents.padded(CAPACITY_FACTOR * documents.pieces)
    passes = _Passes(model, input_ids.clone(), labels.clone(), capacity and capacity.clone())
    before = snapshot_fp8_state(model, precision)
    kinds: tuple[bool | None, ...] = (True, False) if cache_weights else (None,)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):  # attention advances it even without dropout
        captured, checking_graphs = _warm_up_and_capture(model, passes, precision, kinds, health)
    if before:
        load_fp8_state(model, precision, before)
    else:
        reset_fp8_state(model, precision)

    def forward(
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        is_first_microbatch: bool | None = None,
        documents: Documents | None = None,
        **others: Any,
    ) -> CausalLMOutput:
        graphs = captured.get(is_first_microbatch)
        if checking_graphs and is_collecting() and is_first_microbatch == kinds[0]:
            graphs = checking_graphs
        training = model.training and torch.is_grad_enabled() and labels is not None and not others
        if graphs is None or not training or not passes.take(input_ids, labels, documents):
            return eager(
                input_ids,
                labels=labels,
                is_first_microbatch=is_first_microbatch,
                documents=documents,
                **others,
            )
        return CausalLMOutput(loss=_Replay.apply(graphs, *graphs.parameters))

    model.forward = forward  # type: ignore[method-assign]
