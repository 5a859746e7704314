"""One visit of `bench_model.py` to a row: the model is built, checked, warmed up, timed, and freed again.

A pass is forward + backward of one micro-batch; its gradients are dropped, but for those that a GEMM has added into an
accumulation buffer already. With a cache of FP8 weights the first pass of a step fills it and is slower, so a pass in
the mean of a step is (first + (accumulation - 1) x later) / accumulation.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from model.autotune.timing import release_memory
from model.documents import random_documents
from model.fp8 import te_backend
from model.fp8.modules import fp8_modules
from model.fp8.precision import Precision
from model.graphs import use_cuda_graphs
from model.proof import attention_of, prove, proving_fp8
from model.variants import VARIANTS, why_no_graphs
from test_fp8.common.rows import NotHere
from test_fp8.common.same_model import DifferentModel, Reference, check_same_model, loss_error
from test_fp8.common.timing import Laps, enqueue_ms, synchronize, timed_ms, times_in
from test_fp8.model.baselines import attention_kernels, pinned_sdpa, use_loss
from test_fp8.model.rows import OWN_LOSS
from train.config.arguments import TrainingArguments
from train.config.ds_config import resolve_ds_config
from train.data.stream import Batch
from train.engine.optimizer import build_optimizer
from train.engine.step import MicroStep, build_engine, release
from train.setup import model_for

GIB = 2**30
MIN_PASSES, MAX_PASSES = 4, 48
MAX_STEPS = 20
# How Transformer Engine's error begins when none of the attentions that are allowed takes the inputs.
NO_ATTENTION = "No dot product attention backend is available"
PASSES_AFTER_A_STEP = 3  # the first of a step and two later ones


@dataclass
class Proof:
    """What the first visit to a row has shown."""

    logits_error: float
    fp8_modules: int  # that ran FP8
    attention: str
    lines: list[str] = field(default_factory=list)  # for the log


@dataclass
class Visit:
    """What one visit found. Milliseconds by lap: "first" and "later" passes, in the measure step also "step"."""

    laps: dict[str, list[float]]
    launch_ms: float  # of the host, to enqueue a pass; in the measure step a micro-batch through the engine
    prepare_s: float  # until the first loss: compiling, choosing kernels, capturing
    capture_s: float | None  # of that, capturing; None without graphs, and where the engine captures
    loss: float
    loss_error: float
    notes: list[str]  # what came of the section "speed", in the measure step
    proof: Proof = field(init=False)
    attention: str = ""
    kernels: list[str] = field(default_factory=list)  # of attention on the GPU, as the profiler names them
    loss_kind: str = ""
    turn: int = 0  # the round
    before_gib: float | None = None  # allocated before the model was built: what others left behind
    allocated_gib: float | None = None  # peaks
    reserved_gib: float | None = None
    seconds: float = 0.0
    sdpa: list[str] = field(default_factory=list)  # operations that torch's SDPA became


def loss_kind(model: nn.Module, loss: str) -> str:
    """What computed the loss of `model`, for the report."""
    if VARIANTS[model.variant].te:
        return "torch" if model.fused_cross_entropy is None else "fused"
    return "torch" if loss == OWN_LOSS else loss


def named_attention(attention: str, operations: list[str], pinned: str) -> str:
    """For the report: `attention`, if it is torch's SDPA with the operations that it became. Raises DifferentModel:
    another one ran than was `pinned`."""
    if attention != "torch SDPA" or not operations:
        return attention
    expected = "flash" if pinned == "fa4" else pinned
    if pinned != "auto" and operations != [expected]:
        raise DifferentModel(f"attention {pinned} was pinned, and {', '.join(operations)} ran")
    return f"{attention}, {'fa4' if pinned == 'fa4' else ' and '.join(operations)}"


class Passes:
    """passes(index): pass `index` of a step, always on `batch`; returns the loss, detached.

    The gradients come back to be dropped, not through `.grad`: an engine's hooks do not see them.
    """

    def __init__(self, model: nn.Module, cache_weights: bool, batch: Batch):
        self.model, self.cache_weights, self.batch = model, cache_weights, batch
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def __call__(self, index: int) -> Tensor:
        input_ids, labels, documents = self.batch
        first = index == 0 if self.cache_weights else None
        loss = self.model(input_ids, labels=labels, is_first_microbatch=first, documents=documents).loss
        torch.autograd.grad(loss, self.parameters, allow_unused=True)
        return loss.detach()

    def kind(self, index: int) -> str:
        return "first" if self.cache_weights and index == 0 else "later"


@contextmanager
def asking_te_for(attention: str) -> Iterator[None]:
    """A block that runs Transformer Engine's attention first. Raises NotHere: it has no such `attention` here."""
    try:
        yield
    except ValueError as error:
        if NO_ATTENTION not in str(error):
            raise
        raise NotHere(f"Transformer Engine has no attention {attention} for this model") from error


def prove_row(
    model: nn.Module, precision: Precision, arguments: TrainingArguments, reference: Reference, ids: Tensor
) -> Proof:
    """Show that the model of a row is the reference's, runs the precision and the attention that it says, and attends
    as SDPA does.

    Raises DifferentModel: it is not, or another attention runs than was asked for; ProofError: as model.proof.prove.
    """
    error = check_same_model(model, precision.config.compute, reference, ids)
    asked_for = arguments.model.attention_backend
    lines = prove(model, precision, asked_for, arguments.seed, arguments.max_seq_length)
    ran, attention = len(fp8_modules(model, precision).planned), attention_of(model, precision)
    if asked_for != "auto" and attention != "torch SDPA" and not attention.startswith(asked_for):
        raise DifferentModel(f"attention {asked_for} was asked for, and {attention} ran")
    return Proof(error, ran, attention, lines)


class Visitor:
    """Visits to rows under the same conditions: a micro-batch is the first samples of `batch`; `seconds` of timed
    passes or steps, and at least `steps` steps. Rows with a document mask are timed within random documents of
    `document_length` tokens on average; that they compute the reference's model is shown with each row as one
    document."""

    def __init__(
        self, reference: Reference, batch: Batch, seconds: float, document_length: int = 512, steps: int = 1
    ):
        self.reference, self.batch, self.seconds = reference, batch, seconds
        self.document_length, self.steps = document_length, steps
        self.proofs: dict[str, Proof] = {}  # by what makes a model run alike, whatever the batch
        self.attentions: dict[
            str, tuple[list[str], list[str]]
        ] = {}  # of attention_kernels, by what runs alike

    def visit(
        self, arguments: TrainingArguments, measure: str, sdpa: str = "auto", loss: str = OWN_LOSS
    ) -> Visit:
        """`arguments` are resolved; `sdpa` and `loss` are for rows of transformers' modules (baselines.py). Raises
        NotHere, DifferentModel, ProofError, PrecisionError, and whatever the row runs into; the model is free to be
        collected then."""
        start, emulated = time.perf_counter(), not torch.cuda.is_available()
        free_memory()
        before = None if emulated else torch.cuda.memory_allocated() / GIB
        no_graphs = why_no_graphs(arguments.model.variant, emulated=emulated)
        if arguments.speed.cuda_graphs and no_graphs:
            raise NotHere(no_graphs)
        model, precision = model_for(arguments)
        model.train()
        te = VARIANTS[arguments.model.variant].te
        with pinned_sdpa("auto" if te else sdpa, model.config, arguments.max_seq_length):
            if not te:
                use_loss(model, "torch" if loss == OWN_LOSS else loss)
            proof = self._proof(model, precision, arguments, sdpa)
            key = (measure, arguments.to_dict(), sdpa, loss)
            visit = (self._step if measure == "step" else self._bare)(model, precision, arguments, key)
        ran = attention_of(model, precision)
        if ran.split()[0] != proof.attention.split()[0]:
            raise DifferentModel(f"attention {proof.attention} was checked, and {ran} ran in the timed batch")
        visit.attention = named_attention(ran, visit.sdpa, "auto" if te else sdpa)
        visit.loss_kind = loss_kind(model, loss)
        visit.proof, visit.before_gib = proof, before
        visit.seconds = time.perf_counter() - start
        return visit

    def look(self, visit: Visit, key: object, run: Callable[[], object]) -> None:
        """What is left to see after the timing: memory, and at the first visit of `key` the attention of one pass more,
        `run`."""
        if torch.cuda.is_available():
            visit.allocated_gib = torch.cuda.max_memory_allocated() / GIB
            visit.reserved_gib = torch.cuda.max_memory_reserved() / GIB
        if repr(key) not in self.attentions:
            self.attentions[repr(key)] = attention_kernels(run)
        visit.sdpa, visit.kernels = self.attentions[repr(key)]

    def _proof(
        self, model: nn.Module, precision: Precision, arguments: TrainingArguments, sdpa: str
    ) -> Proof:
        """That of the first visit to what runs alike."""
        a, ids = arguments, self.batch.input_ids
        key = repr((a.model, a.precision, a.speed, a.gradient_checkpointing, a.data.document_mask, sdpa))
        if key not in self.proofs:
            with asking_te_for(arguments.model.attention_backend):
                self.proofs[key] = prove_row(model, precision, arguments, self.reference, ids)
        return self.proofs[key]

    def _micro_batch(self, arguments: TrainingArguments) -> Batch:
        samples = arguments.per_device_train_batch_size
        ids, labels = self.batch.input_ids[:samples].contiguous(), self.batch.labels[:samples].contiguous()
        if not arguments.data.document_mask:
            return Batch(ids, labels)
        generator = torch.Generator().manual_seed(arguments.seed)
        documents = random_documents(samples, arguments.max_seq_length, self.document_length, generator)
        return Batch(ids, labels, documents.to(ids.device))

    def _error(self, loss: float, model: nn.Module, batch: Batch, arguments: TrainingArguments) -> float:
        """How far `loss`, in whole rows where `batch` has documents, is from the reference's."""
        if batch.documents is not None:
            with torch.no_grad():
                loss = float(model(batch.input_ids, labels=batch.labels).loss)
        return loss_error(loss, arguments.precision.compute, self.reference, len(batch.input_ids))

    def _bare(
        self, model: nn.Module, precision: Precision, arguments: TrainingArguments, key: object
    ) -> Visit:
        batch, accumulation = self._micro_batch(arguments), arguments.gradient_accumulation_steps or 1
        cache_weights = precision.fp8 and VARIANTS[arguments.model.variant].te and accumulation > 1
        start, capture_s = time.perf_counter(), None
        if arguments.speed.cuda_graphs:
            use_cuda_graphs(model, precision, batch.input_ids, batch.labels, cache_weights, batch.documents)
            capture_s = time.perf_counter() - start
        passes = Passes(model, cache_weights, batch)
        with proving_fp8(model, precision):
            loss = float(passes(0))
        prepare_s = time.perf_counter() - start
        error = self._error(loss, model, batch, arguments)
        passes(1)
        count = times_in(self.seconds, timed_ms(lambda: passes(1)), MIN_PASSES, MAX_PASSES)
        launch_ms = enqueue_ms(lambda: passes(1))  # whose work keeps the GPU busy when the first lap begins
        laps = Laps()
        laps.mark()
        for number in range(count):
            index = number % accumulation
            passes(index)
            laps.mark(passes.kind(index))
        visit = Visit(laps.ms(), launch_ms, prepare_s, capture_s, loss, error, [])
        self.look(visit, key, lambda: passes(1))
        return visit

    def _step(
        self, model: nn.Module, precision: Precision, arguments: TrainingArguments, key: object
    ) -> Visit:
        batch, accumulation = self._micro_batch(arguments), arguments.gradient_accumulation_steps or 1
        ds_config = resolve_ds_config(arguments, dist.get_world_size())
        engine = build_engine(model, arguments, ds_config)
        try:
            micro_step = MicroStep(engine, precision, arguments)
            start = time.perf_counter()
            with proving_fp8(engine.module, precision):
                loss = float(micro_step(batch, 0))
            prepare_s = time.perf_counter() - start
            error = self._error(loss, engine.module, batch, arguments)
            start, others = time.perf_counter(), range(1, accumulation) or range(1)
            for index in others:
                micro_step(batch, index)
            synchronize()
            step_ms = (time.perf_counter() - start) / len(others) * accumulation * 1e3

            passes = Passes(engine.module, micro_step.cache_weights, batch)
            # ZeRO 3 gathers weights in hooks that only the engine's own backward calls all
            alone = engine.zero_optimization_stage() < 3
            laps, times = Laps(), times_in(self.seconds, step_ms, self.steps, max(self.steps, MAX_STEPS))
            for number in range(as_rank_0(times)):
                if micro_step.main_grads:
                    micro_step.main_grads.zero()  # the passes added to them
                laps.mark()
                for index in range(accumulation):
                    start = time.perf_counter()
                    micro_step(batch, index)
                    if number == index == 0:  # the GPU was idle
                        launch_ms = (time.perf_counter() - start) * 1e3
                laps.mark("step")
                for index in range(PASSES_AFTER_A_STEP if alone else 0):
                    passes(index)
                    laps.mark(passes.kind(index))
            visit = Visit(laps.ms(), launch_ms, prepare_s, None, loss, error, micro_step.notes)
            self.look(visit, key, lambda: passes(1) if alone else micro_step(batch, 0))
        finally:
            release(engine)  # which DeepSpeed's tables would keep, with its model
        return visit


def as_rank_0(count: int) -> int:
    """What rank 0 has; every rank calls it."""
    told = [count]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(told, src=0)
    return told[0]


def free_memory() -> None:
    """Give back what earlier visits held: their models, compiled code and graphs, and what TE keeps of them."""
    te_backend.forget_models()
    torch._dynamo.reset()
    gc.collect()  # the engine's own clean-up lets go of more, which is collected in release_memory
    release_memory()


def optimizer_ms(weights: Mapping[str, Tensor], arguments: TrainingArguments, samples: int) -> list[float]:
    """Milliseconds of the optimizer of a step without DeepSpeed, `samples` times, in plain torch: the norm of the
    float32 gradients, clipping, AdamW on float32 masters (fused on a GPU), the copy back to bf16, zeroed gradients."""
    free_memory()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parameters = [weight.to(device, copy=True) for weight in weights.values()]  # they are stepped
    masters = nn.ParameterList(nn.Parameter(weight.float()) for weight in parameters)
    for master in masters:
        master.grad = torch.randn_like(master)
    optimizer = build_optimizer(masters, replace(arguments, optim="adamw"))
    gradients = [master.grad for master in masters]

    @torch.no_grad()
    def step() -> None:
        nn.utils.clip_grad_norm_(masters, arguments.max_grad_norm)
        optimizer.step()
        torch._foreach_copy_(parameters, list(masters))
        torch._foreach_zero_(gradients)

    step()  # allocates AdamW's moments
    return [timed_ms(step) for _ in range(samples)]
