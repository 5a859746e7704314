"""Measure one case of bench_model.py: build the model, check it, warm up, time it, and free it.

A pass is forward + backward of one micro-batch; its gradients are dropped. With a cache of FP8 weights the first pass
of a step fills it and is slower, so the mean pass of a step is (first + (accumulation - 1) x later) / accumulation.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from model.autotune.timing import release_memory
from model.conversion import to_hf_state_dict
from model.documents import random_documents
from model.fp8 import te_backend
from model.fp8.modules import fp8_modules
from model.fp8.precision import Precision
from model.graphs import use_cuda_graphs
from model.proof import attention_of, prove, proving_fp8
from model.variants import VARIANTS, why_no_graphs
from test_fp8.common.cases import Unavailable
from test_fp8.common.same_model import DifferentModel, Reference, check_same_model, loss_error
from test_fp8.common.timing import Laps, enqueue_ms, timed_ms, times_in
from test_fp8.model.baselines import pinned_sdpa, sdpa_operations, use_loss
from test_fp8.model.cases import Setting
from train.config.arguments import TrainingArguments
from train.config.ds_config import resolve_ds_config
from train.data.stream import Batch
from train.engine.step import MicroStep, build_engine, release
from train.setup import model_for

GIB = 2**30
MIN_PASSES, MAX_PASSES, MAX_STEPS = 4, 48, 20
# How Transformer Engine's error begins when none of the allowed attentions takes the inputs.
NO_ATTENTION = "No dot product attention backend is available"


@dataclass
class Conditions:
    """What all cases share. A micro-batch is the first samples of `batch`; `seconds` of passes or steps are timed, and
    at least `steps` steps. document_length: mean tokens of the random documents in cases with a document mask."""

    config: Any
    reference: Reference
    batch: Batch
    seconds: float
    steps: int = 1
    document_length: int = 512


@dataclass
class Measurement:
    """laps: milliseconds of "step", or of "first" and "later" passes. facts: keys of the report."""

    laps: dict[str, list[float]]
    facts: dict[str, Any]


def measure_case(
    arguments: TrainingArguments, measure: str, setting: Setting, conditions: Conditions
) -> Measurement:
    """`arguments` are resolved. Raises Unavailable, DifferentModel, ProofError, PrecisionError, or whatever the case
    runs into."""
    free_memory()
    before, is_te = allocated_gib(), VARIANTS[arguments.model.variant].te
    no_graphs = why_no_graphs(arguments.model.variant, emulated=not torch.cuda.is_available())
    if arguments.speed.cuda_graphs and no_graphs:
        raise Unavailable(no_graphs)
    model, precision = model_for(arguments)
    model.train()
    pinned, engine = "auto" if is_te else setting.attention, None
    try:
        with pinned_sdpa(pinned):
            if not is_te:
                use_loss(model, setting.loss)
            checked = check_case(model, precision, arguments, conditions)
            if measure == "step":
                engine = build_engine(model, arguments, resolve_ds_config(arguments, dist.get_world_size()))
                found, one_pass = time_steps(engine, precision, arguments, conditions)
            else:
                found, one_pass = time_passes(model, precision, arguments, conditions)
            found.facts |= checked | peaks_gib() | {"before_gib": before}
            operations = sdpa_operations(one_pass)
    finally:
        if engine is not None:
            release(engine)  # DeepSpeed's tables would keep it, with its model
    ran = attention_of(model, precision)
    if ran.split()[0] != checked["attention"].split()[0]:
        raise DifferentModel(
            f"attention {checked['attention']} was checked, and {ran} ran in the timed batch"
        )
    found.facts["attention"] = named_attention(ran, operations, pinned)
    fused = is_te and model.fused_cross_entropy is not None
    found.facts["loss_kind"] = "fused" if fused else "torch" if is_te else setting.loss
    return found


def check_case(
    model: nn.Module, precision: Precision, arguments: TrainingArguments, conditions: Conditions
) -> dict[str, Any]:
    """Check that the model is the reference's and runs the precision and the attention that the case says; return what
    was found, for the report. Raises DifferentModel, ProofError, Unavailable."""
    compute, asked_for = precision.config.compute, arguments.model.attention_backend
    reference, ids = conditions.reference, conditions.batch.input_ids
    with asking_te_for(asked_for):
        error = check_same_model(model, to_hf_state_dict(model), compute, reference, ids)
        lines = prove(model, precision, asked_for, arguments.seed, arguments.max_seq_length)
    attention = attention_of(model, precision)
    if asked_for != "auto" and attention != "torch SDPA" and not attention.startswith(asked_for):
        raise DifferentModel(f"attention {asked_for} was asked for, and {attention} ran")
    planned = len(fp8_modules(model, precision).planned)
    return {"logits_error": error, "fp8_modules": planned, "attention": attention, "proof": lines}


@contextmanager
def asking_te_for(attention: str) -> Iterator[None]:
    """Run Transformer Engine's attention in the block. Raises Unavailable: it has no such `attention` here."""
    try:
        yield
    except ValueError as error:
        if NO_ATTENTION not in str(error):
            raise
        raise Unavailable(f"Transformer Engine has no attention {attention} for this model") from error


def named_attention(attention: str, operations: Sequence[str], pinned: str) -> str:
    """`attention` for the report, with the operations that torch's SDPA became. Raises DifferentModel: another one ran
    than was `pinned`."""
    if attention != "torch SDPA" or not operations:
        return attention
    if pinned != "auto" and list(operations) != [pinned]:
        raise DifferentModel(f"attention {pinned} was pinned, and {', '.join(operations)} ran")
    return f"{attention}, {' and '.join(operations)}"


def micro_batch(arguments: TrainingArguments, conditions: Conditions) -> Batch:
    samples, (ids, labels, _) = arguments.per_device_train_batch_size, conditions.batch
    ids, labels = ids[:samples].contiguous(), labels[:samples].contiguous()
    if not arguments.data.document_mask:
        return Batch(ids, labels)
    generator = torch.Generator().manual_seed(arguments.seed)
    documents = random_documents(samples, arguments.max_seq_length, conditions.document_length, generator)
    return Batch(ids, labels, documents.to(ids.device))


def first_loss(
    run: Callable[[], Any], model: nn.Module, precision: Precision, batch: Batch, conditions: Conditions
) -> dict[str, Any]:
    """Run the first pass of what is timed, counting its FP8 GEMMs, and compare its loss with the reference's, of whole
    samples. Raises ProofError, DifferentModel."""
    start = time.perf_counter()
    with proving_fp8(model, precision):
        loss = whole = float(run())
    prepare_s = time.perf_counter() - start
    if batch.documents is not None:
        with torch.no_grad():
            whole = float(model(batch.input_ids, labels=batch.labels).loss)
    error = loss_error(whole, precision.config.compute, conditions.reference, len(batch.input_ids))
    return {"loss": loss, "loss_error": error, "prepare_s": prepare_s, "capture_s": None, "notes": []}


def time_passes(
    model: nn.Module, precision: Precision, arguments: TrainingArguments, conditions: Conditions
) -> tuple[Measurement, Callable[[], Any]]:
    """Time forward + backward; returns also one pass."""
    batch = micro_batch(arguments, conditions)
    accumulation = arguments.gradient_accumulation_steps or 1
    cache_weights = precision.fp8 and VARIANTS[arguments.model.variant].te and accumulation > 1
    parameters = [p for p in model.parameters() if p.requires_grad]

    def one_pass(index: int = 1) -> torch.Tensor:
        first = index == 0 if cache_weights else None
        ids, labels, documents = batch
        loss = model(ids, labels=labels, is_first_microbatch=first, documents=documents).loss
        torch.autograd.grad(loss, parameters, allow_unused=True)
        return loss.detach()

    start, capture_s = time.perf_counter(), None
    if arguments.speed.cuda_graphs:
        use_cuda_graphs(model, precision, batch.input_ids, batch.labels, cache_weights, batch.documents)
        capture_s = time.perf_counter() - start
    facts = first_loss(lambda: one_pass(0), model, precision, batch, conditions)
    facts |= {"capture_s": capture_s, "prepare_s": facts["prepare_s"] + (capture_s or 0)}
    one_pass()
    count = times_in(conditions.seconds, timed_ms(one_pass), MIN_PASSES, MAX_PASSES)
    facts["launch_ms"] = enqueue_ms(one_pass)  # its work keeps the GPU busy when the first lap begins
    laps = Laps()
    laps.mark()
    for number in range(count):
        index = number % accumulation
        one_pass(index)
        laps.mark("first" if cache_weights and index == 0 else "later")
    return Measurement(laps.ms(), facts), one_pass


def time_steps(
    engine: Any, precision: Precision, arguments: TrainingArguments, conditions: Conditions
) -> tuple[Measurement, Callable[[], Any]]:
    """Time optimizer steps as train.py makes them; returns also one micro-batch."""
    batch = micro_batch(arguments, conditions)
    accumulation = arguments.gradient_accumulation_steps or 1
    micro_step = MicroStep(engine, precision, arguments)

    def micro_batches(first: int = 0) -> None:
        for index in range(first, accumulation):
            micro_step(batch, index)

    facts = first_loss(lambda: micro_step(batch, 0), engine.module, precision, batch, conditions)
    micro_batches(1)
    count = times_in(
        conditions.seconds, timed_ms(micro_batches), conditions.steps, max(conditions.steps, MAX_STEPS)
    )
    if dist.get_world_size() > 1:  # every rank takes as many steps as rank 0
        counts = [count]
        dist.broadcast_object_list(counts, src=0)
        (count,) = counts
    facts["launch_ms"] = enqueue_ms(lambda: micro_step(batch, 0))
    micro_batches(1)
    laps = Laps()
    laps.mark()
    for _ in range(count):
        micro_batches()
        laps.mark("step")
    return Measurement(laps.ms(), facts | {"notes": micro_step.notes}), lambda: micro_step(batch, 0)


def mean_pass_ms(laps: Mapping[str, Sequence[float]], accumulation: int) -> float:
    """The mean pass of a step, from the medians of first and later passes."""
    later = statistics.median(laps["later"])
    first = statistics.median(laps["first"]) if laps.get("first") else later
    return (first + (accumulation - 1) * later) / accumulation


def allocated_gib() -> float | None:
    return torch.cuda.memory_allocated() / GIB if torch.cuda.is_available() else None


def peaks_gib() -> dict[str, float | None]:
    if not torch.cuda.is_available():
        return {"allocated_gib": None, "reserved_gib": None}
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"allocated_gib": peaks[0] / GIB, "reserved_gib": peaks[1] / GIB}


def free_memory() -> None:
    """Free models, compiled code and graphs of earlier measurements, and what Transformer Engine keeps of them."""
    te_backend.forget_models()
    torch._dynamo.reset()
    gc.collect()  # the engine's own clean-up frees more, which release_memory collects
    release_memory()
