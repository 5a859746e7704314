"""precision.auto: time training steps with each candidate setting on the current GPU, and choose the fastest.

A candidate combines an attention backend, FP8 or bf16, and execution with or without CUDA graphs. On a GPU that does
not support FP8, only bf16 candidates are timed. train/phase.py creates the task for a training run.

Candidates are ordered by preference. cuDNN attention comes first, because it needs no additional package (with a
document mask, the order is that of `te_backend.document_backends`). FP8, which the user configured, comes before bf16.
Execution without CUDA graphs comes before CUDA graphs.
"""

from __future__ import annotations

import gc
import logging
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import nn
from transformers import MistralConfig

from model.build import build_model, choose_attention
from model.checks.startup import verify_attention, verify_fp8
from model.config import GIB
from model.documents import random_documents
from model.fp8 import te_backend
from model.fp8.modules import use_main_grads
from model.fp8.precision import Precision, PrecisionError
from model.fp8.recipes import Compute, PrecisionConfig
from model.graphs import use_cuda_graphs
from model.variants import GradientCheckpointing, SpeedConfig

logger = logging.getLogger(__name__)
Timer = Callable[[Callable[[], Any]], float]
COMPUTE: tuple[Compute, ...] = ("fp8", "bf16")
ATTENTION = ("fused", "flash")
MEMORY_SHARE = 0.95  # the rest is for NCCL, cuBLAS workspaces and fragmentation
ROUNDS = 5  # timed windows; the median is used
WARMUP_STEPS = 3
WINDOW_MS = 300.0
TIE = 0.01  # relative; repeated medians on one GPU agree within it
# The first micro-batch of a step quantizes the weights. Beyond 4 micro-batches the mean changes by less than 0.2 %.
LONGEST_CYCLE = 4


def cuda_ms(run: Callable[[], Any]) -> float:
    """Measure the time in ms from the call to `run` until its last kernel finishes, including launch time."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


@contextmanager
def undisturbed(te: Any, attention_backend: str) -> Iterator[None]:
    """Context manager that restores random generators, FP8 state and attention backend, and frees unused GPU memory."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices), te_backend.isolated_fp8_state(te):
            yield
    finally:
        te_backend.choose_attention_backend(attention_backend)
        release_memory()


def release_memory() -> None:
    """Free unused GPU memory and reset the peak memory statistics."""
    gc.collect()  # modules and their hooks are reference cycles
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def one_line(error: BaseException) -> str:
    """Return the message of an error as one line of at most 200 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


@dataclass
class Task:
    """The training settings for which autotune chooses precision, CUDA graphs and attention backend.

    Attributes:
        precision: the configured precision, with compute fp8. speed and attention_backend are also the configured
            values.
        accumulation: number of micro-batches per step.
        main_grad: whether GEMMs add weight gradients directly to float32 buffers.
        graphs_allowed: whether training can use CUDA graphs.
        document_mask: whether attention is restricted to documents.
        other_memory_gib: GPU memory that training needs in addition to weights, gradients and activations, mainly for
            optimizer state.
    """

    config: MistralConfig
    variant: str
    precision: PrecisionConfig
    batch_size: int
    seq_length: int
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    attention_backend: str = "auto"
    gradient_checkpointing: GradientCheckpointing = False
    accumulation: int = 8
    main_grad: bool = False
    graphs_allowed: bool = True
    document_mask: bool = False
    other_memory_gib: float = 0.0

    def resolved(self, compute: Compute) -> Precision:
        """Return the configured precision with the given value of `compute`."""
        return Precision(replace(self.precision, auto=False, compute=compute))

    def cycle(self, precision: Precision) -> int:
        """Return the number of micro-batches that share one FP8 copy of the weights, at most LONGEST_CYCLE.

        Without FP8, the result is 1.
        """
        return min(self.accumulation, LONGEST_CYCLE) if precision.fp8 else 1

    def graph_modes(self) -> tuple[bool, ...]:
        """Return the values of speed.cuda_graphs to measure.

        If the key is set to true, only true is measured. If training cannot use CUDA graphs, only false is measured.
        """
        modes = (True,) if self.speed.cuda_graphs else (False, True)
        return modes if self.graphs_allowed else (False,)

    def build(self, precision: Precision) -> nn.Module:
        """Build the model exactly as training does."""
        model = build_model(
            self.config,
            self.variant,
            precision,
            gradient_checkpointing=self.gradient_checkpointing,
            speed=self.speed,
            document_mask=self.document_mask,
        ).train()
        if self.main_grad:
            use_main_grads(model, precision)
        return model


@dataclass(frozen=True)
class Choice:
    """The values to use for precision.compute, speed.cuda_graphs and model.attention_backend."""

    compute: Compute
    cuda_graphs: bool
    attention_backend: str

    def __str__(self) -> str:
        graphs = "with" if self.cuda_graphs else "without"
        return f"{self.compute} {graphs} CUDA graphs, attention {self.attention_backend}"


@dataclass
class Candidate:
    """A combination of settings that autotune measures, with the results.

    Attributes:
        times_ms: time for the forward and backward pass of one micro-batch in ms, one value per measurement round.
        peak_gib: peak GPU memory of the model in GiB.
        note: the reason why the candidate cannot be chosen, or "".
    """

    choice: Choice
    times_ms: list[float] = field(default_factory=list)
    peak_gib: float = 0.0
    note: str = ""

    @property
    def ms(self) -> float:
        """Return the mean time in ms over all measurement rounds, or infinity if the candidate cannot be chosen."""
        return sum(self.times_ms) / len(self.times_ms) if self.times_ms and not self.note else math.inf


def choose(candidates: Sequence[Candidate], memory_gib: float = math.inf) -> Choice | None:
    """Return the settings of the fastest candidate that fits into `memory_gib`, or None if no candidate can be chosen.

    Args:
        candidates: candidates in order of preference. The first candidate that is at most the fraction TIE slower than
            the fastest is chosen.
        memory_gib: GPU memory available to the model in GiB.
    """
    usable = [c for c in candidates if math.isfinite(c.ms) and c.peak_gib <= memory_gib]
    fastest = min((c.ms for c in usable), default=math.inf)
    return next((c.choice for c in usable if c.ms <= fastest * (1 + TIE)), None)


def autotune(task: Task, timer: Timer = cuda_ms) -> Choice:
    """Time the candidate settings on the current GPU, log the measurements, and return the chosen settings.

    This takes about a minute. Random generators and Transformer Engine's state are restored, and GPU memory is freed.
    Candidates that fail are skipped. If every candidate fails, the configured settings are returned, with bf16 if FP8
    is not available.

    Raises PrecisionError if the model or GPU does not support the configured precision.
    """
    logger.info("precision.auto: timing training steps with several settings. This takes about a minute")
    plain, computes = task.resolved("bf16"), COMPUTE
    try:
        task.resolved("fp8")
    except PrecisionError as error:
        if error.code not in ("gpu_without_fp8", "recipe_not_available"):
            raise
        logger.warning(f"precision.auto: FP8 is not available, so only bf16 is timed: {error}")
        computes = ("bf16",)
    with undisturbed(plain.te, task.attention_backend):
        memory_gib = _memory_gib(task)
        candidates = measure_steps(task, attention_backends(task, plain), timer, computes)
    logger.info(
        f"time for the forward and backward pass of {task.batch_size} x {task.seq_length} tokens "
        f"({memory_gib:.1f} GiB of GPU memory available):"
    )
    for c in candidates:
        logger.info(f"  {c.choice}: {c.note or f'{c.ms:.3f} ms, {c.peak_gib:.1f} GiB'}")
    choice = choose(candidates, memory_gib)
    if choice is None:
        logger.info(
            "precision.auto: every candidate failed to run or did not fit in GPU memory. Training uses "
            f"precision.compute {computes[0]} and the configured speed.cuda_graphs and model.attention_backend"
        )
        return Choice(computes[0], task.speed.cuda_graphs, task.attention_backend)
    logger.info(f"precision.auto: using {choice}")
    return choice


def _memory_gib(task: Task) -> float:
    """Return the GPU memory in GiB that is available for weights, gradients and activations, or infinity without a
    GPU.
    """
    if not torch.cuda.is_available():
        return math.inf
    release_memory()
    free, _ = torch.cuda.mem_get_info()
    return (free + torch.cuda.memory_reserved()) / GIB * MEMORY_SHARE - task.other_memory_gib


def attention_backends(task: Task, precision: Precision) -> list[str]:
    """Return the attention backends to time.

    The result is the configured backend. If the configured backend is "auto", the result is all backends that pass the
    startup check, or "auto" if no backend passes.
    """
    if task.attention_backend != "auto" or precision.te.name == "reference":
        return [task.attention_backend]
    right = []
    for name in te_backend.document_backends() if task.document_mask else ATTENTION:
        te_backend.choose_attention_backend(name)
        try:
            verify_attention(task.config, precision, name, task.seq_length, task.document_mask)
        except Exception as failure:  # each package raises its own errors
            logger.info(f"  attention backend {name} fails the startup check: {one_line(failure)}")
        else:
            right.append(name)
    return right or ["auto"]


def measure_steps(
    task: Task, backends: list[str], timer: Timer, computes: tuple[Compute, ...] = COMPUTE
) -> list[Candidate]:
    """Time the forward and backward pass for each attention backend, in FP8 and bf16, with and without CUDA graphs."""
    candidates = {
        (backend, compute, graphs): Candidate(Choice(compute, graphs, backend))
        for backend, compute, graphs in product(backends, computes, task.graph_modes())
    }
    models = list(product(backends, computes))
    # measure in both orders, because a GPU slows down while it warms up
    for backend, compute in [*models, *models[-2::-1]]:
        precision = task.resolved(compute)
        choose_attention(backend, task.variant, precision, task.config, task.document_mask)
        step: Step | None = None
        for graphs in task.graph_modes():
            candidate = candidates[backend, compute, graphs]
            if candidate.note:
                continue
            try:
                step = step or Step(task, precision)
                if graphs:
                    step.capture()
                candidate.times_ms.append(step.milliseconds(timer))
                candidate.peak_gib = step.peak_gib()
            except RuntimeError as error:  # out of memory, not capturable, or FP8 did not run
                candidate.note = f"failed: {one_line(error)}"
                step = None
        step = None
        te_backend.release_models()
        release_memory()
    return list(candidates.values())


class Step:
    """Forward and backward pass of a model on one batch of random tokens, for timing."""

    def __init__(self, task: Task, precision: Precision):
        release_memory()
        self.precision, self.cycle = precision, task.cycle(precision)
        self.model = task.build(precision)
        self.captured = False
        generator = torch.Generator(precision.device).manual_seed(0)
        B, T = task.batch_size, task.seq_length
        ids = torch.randint(task.config.vocab_size, (B, T + 1), generator=generator, device=precision.device)
        self.ids, self.labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        self.documents = None
        if task.document_mask:
            documents = random_documents(B, T, T / 2, torch.Generator().manual_seed(0))
            self.documents = documents.to(precision.device)

    def __call__(self, index: int) -> torch.Tensor:
        """Run forward and backward pass number `index`, counted from 0, and return the detached loss.

        Gradients are kept until the next call.
        """
        self.model.zero_grad(set_to_none=True)
        first = index % self.cycle == 0 if self.cycle > 1 else None
        loss = self.model(
            self.ids, labels=self.labels, is_first_microbatch=first, documents=self.documents
        ).loss
        loss.backward()
        return loss.detach()

    def milliseconds(self, timer: Timer) -> float:
        """Return the time for one forward and backward pass in ms, as the median of ROUNDS measurements.

        Raises StartupCheckError if FP8 did not run (see `verify_fp8`).
        """

        def run(count: int) -> None:
            for index in range(count):
                self(index)

        with verify_fp8(self.model, self.precision, WARMUP_STEPS):
            run(WARMUP_STEPS)
        count = self.cycle * max(1, round(WINDOW_MS / timer(lambda: run(self.cycle))))
        return statistics.median(timer(lambda: run(count)) for _ in range(ROUNDS)) / count

    def peak_gib(self) -> float:
        """Return the peak GPU memory in GiB, or 0 on a CPU.

        With CUDA graphs, the value includes memory that the graphs have reserved but do not use.
        """
        peak = torch.cuda.max_memory_reserved if self.captured else torch.cuda.max_memory_allocated
        return peak() / GIB

    def capture(self) -> None:
        """Capture the forward and backward pass as CUDA graphs, which all later calls replay."""
        self.model.zero_grad(set_to_none=True)
        use_cuda_graphs(self.model, self.precision, self.ids, self.labels, self.cycle > 1, self.documents)
        self.captured = True
        release_memory()
