"""Measure one case of bench_model.py: build the model, check it, warm up, time it, and free it.

A pass is forward + backward of one micro-batch; its gradients are dropped. With a cache of FP8 weights the first pass
of a step fills it and is slower, so the mean pass of a step is (first + (accumulation - 1) x later) / accumulation.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from model.autotune.timing import release_memory
from model.conversion import to_hf_state_dict
from model.fp8 import te_backend
from model.fp8.modules import fp8_modules
from model.fp8.precision import Precision
from model.graphs import use_cuda_graphs
from model.startup_check import attention_in_use, check_startup, verify_fp8
from model.variants import VARIANTS, why_no_graphs
from test_fp8.common.cases import Unavailable
from test_fp8.common.report import Result
from test_fp8.common.same_model import DifferentModel, Reference, check_same_model, loss_error
from test_fp8.common.timing import enqueue_ms, laps_ms, timed_ms, times_in
from test_fp8.model.baselines import pinned_sdpa, sdpa_operations, use_loss
from test_fp8.model.cases import Setting
from train.config.arguments import TrainingArguments
from train.config.ds_config import resolve_ds_config
from train.data.stream import Batch
from train.engine.distributed import from_rank_0
from train.engine.step import MicroStep, build_engine, release
from train.setup import model_for

GIB = 2**30
MIN_PASSES, MAX_PASSES, MAX_STEPS = 4, 48, 20


@dataclass
class Conditions:
    """What all cases share. A micro-batch is the first samples of `batch`; `seconds` of passes or steps are timed, and
    at least `steps` steps."""

    config: Any
    reference: Reference
    batch: Batch
    seconds: float
    steps: int = 1


def measure_case(
    arguments: TrainingArguments, measure: str, setting: Setting, conditions: Conditions
) -> Result:
    """Measure a case once and return its facts for the report, among them "ms" of a pass or step. `arguments` are
    resolved.

    Raises Unavailable, DifferentModel, StartupCheckError, PrecisionError, or whatever the case runs into.
    """
    free_memory()
    before = torch.cuda.memory_allocated() / GIB
    no_graphs = why_no_graphs(arguments.model.variant, emulated=not torch.cuda.is_available())
    if arguments.speed.cuda_graphs and no_graphs:
        raise Unavailable(no_graphs)
    model, precision = model_for(arguments)
    model.train()
    is_te, engine = VARIANTS[arguments.model.variant].te, None
    pinned = "auto" if is_te else setting.attention
    try:
        with pinned_sdpa(pinned):
            if not is_te:
                use_loss(model, setting.loss)
            facts = check_case(model, precision, arguments, conditions)
            if measure == "step":
                engine = build_engine(model, arguments, resolve_ds_config(arguments, dist.get_world_size()))
                timed, one_pass = time_steps(engine, precision, arguments, conditions)
            else:
                timed, one_pass = time_passes(model, precision, arguments, conditions)
            memory = memory_facts(before)
            operations = sdpa_operations(one_pass)
    finally:
        if engine is not None:
            release(engine)  # DeepSpeed's tables would keep it, with its model
    ran = attention_in_use(model, precision)
    if ran.split()[0] != facts["attention"].split()[0]:
        raise DifferentModel(f"attention {facts['attention']} was checked, and {ran} ran in the timed batch")
    fused = is_te and model.fused_cross_entropy is not None
    loss_kind = "fused" if fused else "torch" if is_te else setting.loss
    return (
        facts
        | timed
        | memory
        | {"attention": named_attention(ran, operations, pinned), "loss_kind": loss_kind}
    )


def check_case(
    model: nn.Module, precision: Precision, arguments: TrainingArguments, conditions: Conditions
) -> Result:
    """Check that the model is the reference's and runs the precision and the attention that the case says; return what
    was found. Raises DifferentModel, StartupCheckError."""
    compute, asked_for = precision.config.compute, arguments.model.attention_backend
    weights, ids = to_hf_state_dict(model), conditions.batch.input_ids
    error = check_same_model(model, weights, compute, conditions.reference, ids)
    lines = check_startup(model, precision, asked_for, arguments.seed, arguments.max_seq_length)
    attention = attention_in_use(model, precision)
    if asked_for != "auto" and attention != "torch SDPA" and not attention.startswith(asked_for):
        raise DifferentModel(f"attention {asked_for} was asked for, and {attention} ran")
    planned = len(fp8_modules(model, precision).planned)
    return {"logits_error": error, "fp8_modules": planned, "attention": attention, "proof": lines}


def named_attention(attention: str, operations: Sequence[str], pinned: str) -> str:
    """`attention` for the report, with the operations that torch's SDPA became. Raises DifferentModel: another one ran
    than was `pinned`."""
    if attention != "torch SDPA" or not operations:
        return attention
    if pinned != "auto" and list(operations) != [pinned]:
        raise DifferentModel(f"attention {pinned} was pinned, and {', '.join(operations)} ran")
    return f"{attention}, {' and '.join(operations)}"


def first_loss(
    run: Callable[[], Any], model: nn.Module, precision: Precision, samples: int, reference: Reference
) -> Result:
    """Run the first pass of what is timed, counting its FP8 GEMMs, and compare its loss with the reference's. Raises
    StartupCheckError, DifferentModel."""
    start = time.perf_counter()
    with verify_fp8(model, precision):
        loss = float(run())
    prepare_s = time.perf_counter() - start
    error = loss_error(loss, precision.config.compute, reference, samples)
    return {"loss": loss, "loss_error": error, "prepare_s": prepare_s}


def time_passes(
    model: nn.Module, precision: Precision, arguments: TrainingArguments, conditions: Conditions
) -> tuple[Result, Callable[[], Any]]:
    """Time forward + backward; returns also one pass."""
    samples = arguments.per_device_train_batch_size
    ids, labels = (t[:samples].contiguous() for t in conditions.batch[:2])
    accumulation = arguments.gradient_accumulation_steps or 1
    cache_weights = precision.fp8 and VARIANTS[arguments.model.variant].te and accumulation > 1
    parameters = [p for p in model.parameters() if p.requires_grad]

    def one_pass(index: int = 1) -> torch.Tensor:
        first = index == 0 if cache_weights else None
        loss = model(ids, labels=labels, is_first_microbatch=first).loss
        torch.autograd.grad(loss, parameters, allow_unused=True)
        return loss.detach()

    start = time.perf_counter()
    if arguments.speed.cuda_graphs:
        use_cuda_graphs(model, precision, ids, labels, cache_weights)
    capture_s = time.perf_counter() - start
    facts = first_loss(lambda: one_pass(0), model, precision, samples, conditions.reference)
    one_pass()
    count = times_in(conditions.seconds, timed_ms(one_pass), MIN_PASSES, MAX_PASSES)
    launch_ms = enqueue_ms(one_pass)  # its work keeps the GPU busy when the first lap begins
    laps = laps_ms([partial(one_pass, number % accumulation) for number in range(count)])
    ms = mean_pass_ms(laps, accumulation) if cache_weights else statistics.median(laps)
    return facts | {"ms": ms, "launch_ms": launch_ms, "prepare_s": capture_s + facts["prepare_s"]}, one_pass


def time_steps(
    engine: Any, precision: Precision, arguments: TrainingArguments, conditions: Conditions
) -> tuple[Result, Callable[[], Any]]:
    """Time optimizer steps as train.py makes them; returns also one micro-batch."""
    samples = arguments.per_device_train_batch_size
    batch = Batch(*(t[:samples].contiguous() for t in conditions.batch[:2]))
    micro_step = MicroStep(engine, precision, arguments)
    one_pass = partial(micro_step, batch, 0)

    def micro_batches(first: int = 0) -> None:
        for index in range(first, arguments.gradient_accumulation_steps or 1):
            micro_step(batch, index)

    facts = first_loss(one_pass, engine.module, precision, samples, conditions.reference)
    micro_batches(1)
    step_ms = timed_ms(micro_batches)
    # every rank takes as many steps as rank 0
    count = from_rank_0(
        lambda: times_in(conditions.seconds, step_ms, conditions.steps, max(conditions.steps, MAX_STEPS))
    )
    launch_ms = enqueue_ms(one_pass)
    micro_batches(1)
    ms = statistics.median(laps_ms([micro_batches] * count))
    return facts | {"ms": ms, "launch_ms": launch_ms, "notes": micro_step.notes}, one_pass


def mean_pass_ms(laps: Sequence[float], accumulation: int) -> float:
    """The mean pass of a step, from the medians of its first pass, which quantizes the weights, and of the others."""
    first = statistics.median(laps[::accumulation])
    later = statistics.median(ms for number, ms in enumerate(laps) if number % accumulation)
    return (first + (accumulation - 1) * later) / accumulation


def memory_facts(before_gib: float) -> Result:
    """Peaks of GPU memory, and what was allocated before the model was built; 0 without a GPU."""
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"allocated_gib": peaks[0] / GIB, "reserved_gib": peaks[1] / GIB, "before_gib": before_gib}


def free_memory() -> None:
    """Free models, compiled code and graphs of earlier measurements, and what Transformer Engine keeps of them."""
    te_backend.forget_models()
    torch._dynamo.reset()
    gc.collect()  # the engine's own clean-up frees more, which release_memory collects
    release_memory()
