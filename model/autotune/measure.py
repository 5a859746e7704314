"""Measuring, and the choice: attention backends, then whole steps.

Candidates come in the order of preference: FP8, which was asked for, before bf16; no CUDA graphs before CUDA graphs;
cuDNN's attention, which needs no further package, first.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from model.autotune.choice import Choice, Record, Way, choose
from model.autotune.task import Task
from model.autotune.timing import Deadline, Timer, cuda_ms, one_line, release_memory, undisturbed
from model.build import choose_attention
from model.config import GIB
from model.fp8 import te_backend
from model.fp8.precision import Precision
from model.fp8.recipes import Compute
from model.fp8.state import load_fp8_state, snapshot_fp8_state
from model.graphs import use_cuda_graphs
from model.proof import ATTENTION_TOLERANCE, attention_errors, proving_fp8, random_attention

SECONDS = 60.0
COMPUTE: tuple[Compute, ...] = ("fp8", "bf16")
# A GPU that warms up gets slower: FP8 is measured before and after bf16, so that neither has the cooler one.
VISITS: tuple[Compute, ...] = ("fp8", "bf16", "fp8")
ATTENTION_CANDIDATES = ("fused", "flash")
# What NCCL, cuBLAS workspaces and fragmentation may take of the memory.
SLACK = 0.95
ROUNDS = 5  # of which the median counts
QUEUED_PASSES = 4  # of an attention, timed together
ATTENTION_SHARE = 0.5  # of the time, after which no further attention is begun: the steps matter most
WARMUP_STEPS = 3
WINDOW_MS = 300.0  # steps timed together
STEP_MS = 3000.0  # after which the timing of one way to run a step ends
# Passes computed again are the same bits where kernels are deterministic. Where they are not, a graph may be so many
# times as far from a launched pass as the largest difference of any gradient between two launched ones; or as sums in
# another order are, since two launches may agree by chance: on an H200 1.4e-7 in a float32 buffer and 3.6e-4 in the
# bf16 gradient of a norm were seen. A graph that computes something else is off by a hundredth or more, each time; one
# that is right may be once: with delayed scaling a last bit of a first pass's largest value changes the scale of the
# second, and codes all over a tensor (3.4e-3 was seen where launched passes differed by 8.5e-5).
GRAPH_NOISE = 4.0
GRAPH_TRIES = 3
SUMS_IN_ANOTHER_ORDER = {torch.float32: 1e-6, torch.bfloat16: 2.0**-10}
OUT_OF_TIME = "not measured: out of time"
BEFORE_ONLY = "measured before the other only, on a cooler GPU: out of time"


def autotune(
    task: Task,
    say: Callable[[str], None] = print,
    seconds: float = SECONDS,
    timer: Timer = cuda_ms,
    clock: Callable[[], float] = time.monotonic,
) -> Record:
    """Measure and choose; `say` gets the lines for the log. Runs on the current GPU and leaves its memory, the random
    generators and Transformer Engine's state as they were. Nothing is begun that is not expected to end within
    `seconds`.

    Raises PrecisionError: what `Precision` or its `apply` refuse. Whatever else fails is no candidate.
    """
    deadline = Deadline(seconds, clock)
    say(f"precision.auto: measuring, at most {seconds:.0f} s")
    task.resolved("fp8")  # refused here, not after a minute
    plain = task.resolved("bf16")
    with undisturbed(plain.te, task.attention_backend):
        memory_gib = _memory_gib(task)
        attention = measure_attention(task, plain, timer, deadline)
        choice, why = choose(attention)
        backend = choice.get("attention_backend", task.attention_backend)
        runs = choose_attention(backend, task.variant, plain, task.config, task.document_mask)
        if task.document_mask:
            backend = runs
        steps = measure_steps(task, timer, deadline)
    step, why_step = choose(steps, memory_gib)
    if not step:
        step = {"compute": "fp8", "cuda_graphs": task.speed.cuda_graphs}
        why_step = ["no step was measured that fits into memory; precision and graphs stay as configured"]
    record = Record(
        **task.made_for(),
        choice=Choice(attention_backend=backend, **step),
        why=why + why_step,
        seconds=round(deadline.elapsed(), 1),
        measured=attention + steps,
    )
    memory = "" if math.isinf(memory_gib) else f"; the run leaves {memory_gib:.1f} GiB"
    say(f"forward + backward of {task.batch_size} x {task.seq_length} tokens{memory}")
    for line in [*map(Way.line, record.measured), *record.why, record.summary()]:
        say(line)
    return record


def _memory_gib(task: Task) -> float:
    """GPU memory that weights, gradients and activations of the run can have; infinite without a GPU."""
    if not torch.cuda.is_available():
        return math.inf
    release_memory()
    free, _ = torch.cuda.mem_get_info()
    return (free + torch.cuda.memory_reserved()) / GIB * SLACK - task.other_memory_gib


def measure_attention(task: Task, precision: Precision, timer: Timer, deadline: Deadline) -> list[Way]:
    """Each attention backend that is here and right under the run's settings (deterministic or not). None where the
    user chose one, and in the reference, which has but one."""
    if task.attention_backend != "auto" or precision.te.name == "reference":
        return []
    offered = te_backend.document_backends() if task.document_mask else ATTENTION_CANDIDATES
    results = [Way({"attention_backend": name}) for name in ATTENTION_CANDIDATES if name in offered]
    allowed = ATTENTION_TOLERANCE["bf16"]
    for result in [*results, *results[-2::-1]]:  # there and back: neither has the cooler GPU
        if result.note:
            continue
        if not deadline.allows((1 - ATTENTION_SHARE) * deadline.seconds):
            result.note = OUT_OF_TIME if result.ms is None else BEFORE_ONLY
            continue
        backend = result.choice["attention_backend"]
        te_backend.choose_attention_backend(backend)
        try:
            c, within = task.config, task.document_mask
            errors = attention_errors(c, precision, task.seq_length, document_mask=within)
            error = float(torch.tensor(errors).max())  # NaN if one is, unlike Python's max
            used = te_backend.attention_backend_in_use(precision.te)
            if not used.startswith(backend):
                result.note = f"Transformer Engine ran {used}"
            elif not error <= allowed:
                result.note = f"differs from SDPA by {error:.1e}, allowed {allowed:.0e}"
            else:
                result.mean_with(_milliseconds_of_attention(task, precision, timer))
        except (
            Exception
        ) as failure:  # each package has its own for what it cannot do here; then it is no candidate
            result.note = f"not available: {one_line(failure)}"
    return results


def _milliseconds_of_attention(task: Task, precision: Precision, timer: Timer) -> float:
    """Of one forward and backward at the run's shape."""
    c, shape = task.config, (task.batch_size, task.seq_length)
    generator = torch.Generator().manual_seed(0)
    mean_length = task.mean_document_tokens if task.document_mask else None
    forward, qkv, upstream, _ = random_attention(c, precision, shape, mean_length, generator)
    for tensor in qkv:
        tensor.requires_grad_()

    def run() -> None:
        for _ in range(QUEUED_PASSES):
            torch.autograd.grad(forward(*qkv), qkv, upstream)

    run()
    return statistics.median(timer(run, queued=True) for _ in range(ROUNDS)) / QUEUED_PASSES


def measure_steps(task: Task, timer: Timer, deadline: Deadline) -> list[Way]:
    """Forward and backward of the whole model in FP8 and bf16, with and without CUDA graphs; of what is visited twice
    the mean."""
    modes = task.graph_modes()
    ways = {(c, graphs): Way({"compute": c, "cuda_graphs": graphs}) for c in COMPUTE for graphs in modes}
    took_s: dict[tuple[Compute, bool], float] = {}
    for visit, compute in enumerate(VISITS):
        again = [way for (c, _), way in ways.items() if c == compute and way.ms is not None]
        if again and not deadline.allows(sum(s for (c, _), s in took_s.items() if c == compute)):
            between = any(way.ms is not None for (c, _), way in ways.items() if c != compute)
            for way in again if between else []:
                way.note = BEFORE_ONLY
            break
        precision = task.resolved(compute)
        step: _Step | None = None
        for graphs in modes:
            way = ways[compute, graphs]
            if way.note:
                continue
            # a second way to launch waits until time for both precisions is sure
            to_come = len(COMPUTE) - visit - 1 if graphs != modes[0] and not again else 0
            if not deadline.allows(max(took_s.values(), default=0.0) * (1 + to_come)):
                way.note = OUT_OF_TIME
                continue
            began = deadline.elapsed()
            try:
                step = step or _Step(task, precision)
                if graphs:
                    step.capture()
                way.mean_with(step.milliseconds(timer))
                way.peak_gib = step.peak_gib()
            except RuntimeError as error:  # out of memory, something that cannot be captured or runs no FP8
                way.ms, way.note = None, f"failed: {one_line(error)}"
                step = None
            took_s[compute, graphs] = deadline.elapsed() - began
        step = None
        te_backend.forget_models()
        release_memory()
    return list(ways.values())


class _Step:
    """Forward and backward of a model of its own on one batch of random tokens."""

    def __init__(self, task: Task, precision: Precision):
        release_memory()
        self.precision, self.cycle = precision, task.cycle(precision)
        self.model = task.build(precision)
        self.forward = self.model.forward
        self.captured = False
        generator = torch.Generator(precision.device).manual_seed(0)
        shape = (task.batch_size, task.seq_length + 1)
        vocabulary = task.config.vocab_size
        ids = torch.randint(vocabulary, shape, generator=generator, device=precision.device)
        self.ids, self.labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        documents = task.documents()
        self.within = {} if documents is None else {"documents": documents.to(precision.device)}

    def __call__(self, index: int) -> torch.Tensor:
        """Pass `index` (0 has to come first); returns the loss, detached. Its gradients stay until the next."""
        self.model.zero_grad(set_to_none=True)
        first = index % self.cycle == 0 if self.cycle else None
        loss = self.forward(self.ids, labels=self.labels, is_first_microbatch=first, **self.within).loss
        loss.backward()
        return loss.detach()

    def milliseconds(self, timer: Timer) -> float:
        """Of one pass: the median of up to ROUNDS windows of passes. Raises ProofError: see `proving_fp8`."""

        def passes(count: int) -> None:
            for index in range(count):
                self(index)

        with proving_fp8(self.model, self.precision, WARMUP_STEPS):
            passes(WARMUP_STEPS)
        cycle = self.cycle or 1
        once_ms = timer(lambda: passes(cycle))
        count = cycle * max(1, round(WINDOW_MS / once_ms))
        windows: list[float] = []
        while len(windows) < ROUNDS and sum(windows) < STEP_MS:
            windows.append(timer(lambda: passes(count)))
        return statistics.median(windows) / count

    def peak_gib(self) -> float | None:
        """GPU memory that it needs, None on a CPU. Graphs keep a pool of their own, also what is free in it."""
        if self.precision.device.type != "cuda":
            return None
        peak = torch.cuda.max_memory_reserved if self.captured else torch.cuda.max_memory_allocated
        return peak() / GIB

    def capture(self) -> None:
        """From now on with CUDA graphs. Raises RuntimeError: they compute something else."""
        self.model.zero_grad(set_to_none=True)
        cached, documents = self.cycle is not None, self.within.get("documents")
        use_cuda_graphs(self.model, self.precision, self.ids, self.labels, cached, documents)
        before = snapshot_fp8_state(self.model, self.precision)
        launched, replayed = self.forward, self.model.forward
        for index in range(2 if cached else 1):  # each kind of pass is a graph of its own
            expected = {name: t.clone() for name, t in self._results(launched, before, index).items()}
            noise = 0.0
            for _ in range(GRAPH_TRIES):
                again = _differences(expected, self._results(launched, before, index))
                noise = max(noise, *again.values())
                off = {
                    name: error
                    for name, error in _differences(expected, self._results(replayed, before, index)).items()
                    if not error <= max(GRAPH_NOISE * noise, _rounding(expected.get(name)))
                }
                if not off:
                    break
            else:
                name, error = next(iter(off.items()))
                raise RuntimeError(
                    f"with CUDA graphs {name} is off by {error:.1e} relative, launched again by at most {noise:.1e}"
                )
        del expected
        self.model.zero_grad(set_to_none=True)
        self.captured = True
        release_memory()

    def _results(
        self, forward: Callable[..., Any], before: dict[str, torch.Tensor], index: int
    ) -> dict[str, torch.Tensor]:
        """Loss and gradients of pass `index` of a step that begins with the FP8 state `before`; they stay until the
        next pass."""
        load_fp8_state(self.model, self.precision, before)
        self.forward = forward
        parameters = dict(self.model.named_parameters())
        buffers = {name: p.main_grad for name, p in parameters.items() if hasattr(p, "main_grad")}
        for number in range(index + 1):
            for buffer in buffers.values():
                buffer.zero_()
            loss = self(number)
        found = {"the loss": loss} | {name: p.grad for name, p in parameters.items() if p.grad is not None}
        return found | {f"{name}, the float32 buffer": buffer for name, buffer in buffers.items()}


def _rounding(tensor: torch.Tensor | None) -> float:
    return 0.0 if tensor is None else SUMS_IN_ANOTHER_ORDER[tensor.dtype]


def _differences(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> dict[str, float]:
    """By name |found - expected| / |expected|; infinite for what only one of them has."""
    errors = dict.fromkeys(expected.keys() ^ found.keys(), math.inf)
    for name in expected.keys() & found.keys():
        norm = float(expected[name].norm(dtype=torch.float32)) or 1.0
        errors[name] = float((found[name] - expected[name]).norm(dtype=torch.float32)) / norm
    return errors
