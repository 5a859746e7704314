"""The times that a choice is made by: of single modules, of attention backends, of whole steps.

Shape suffixes: B batch, T tokens, N query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import copy
import fnmatch
import statistics
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from model.autotune.decide import ATTENTION_CANDIDATES, AttentionTime, ModuleTime, StepTime, name_patterns
from model.autotune.task import Task
from model.autotune.timing import (
    OUT_OF_TIME,
    ROUNDS,
    Deadline,
    Timer,
    one_line,
    release_memory,
    take_turns,
)
from model.config import head_dim
from model.documents import attend
from model.fp8 import te_backend
from model.fp8.precision import Precision, gemm_modules, matrices
from model.fp8.recipes import FP8_FEATURE_MULTIPLE
from model.fp8.state import load_fp8_state, snapshot_fp8_state
from model.graphs import use_cuda_graphs
from model.mistral_base import causal_attention
from model.proof import ATTENTION_TOLERANCE, attention_errors

GIB = 2**30
LAYER = "model.layers.0."
QUEUED_PASSES = 4  # of a module or an attention, timed together
# Shares of the time after which no further module or attention is begun: the steps matter most.
MODULE_SHARE, ATTENTION_SHARE = 0.3, 0.5
WARMUP_STEPS = 3
WINDOW_MS = 300.0  # steps timed together
STEP_MS = 3000.0  # after which the timing of one way to run a step ends
GRAPH_TOLERANCE = 1e-2  # relative; graphs that lose an update or a gradient are off by far more


# ---------------------------------------------------------------- modules


def describe_modules(task: Task, layer: nn.Module, precision: Precision) -> dict[str, ModuleTime]:
    """The GEMM modules that the user does not keep in bf16, an entry a shape: the name of one of them in `layer` (the
    model with one layer) -> what there is to measure."""

    def in_full_model(name: str) -> list[str]:
        if not name.startswith(LAYER):
            return [name]
        layers = range(task.config.num_hidden_layers)
        return [f"model.layers.{i}.{name.removeprefix(LAYER)}" for i in layers]

    names = [full for name, _ in layer.named_modules() if name for full in in_full_model(name)]
    kept = {name for pattern in task.precision.bf16_modules for name in fnmatch.filter(names, pattern)}
    parents = {name: [name[:i] for i, c in enumerate(name + ".") if c == "."] for name in names}
    free = [name for name in names if kept.isdisjoint(parents[name])]

    shapes: dict[Any, list[str]] = {}
    for name, module in gemm_modules(layer, precision).items():
        shapes.setdefault((type(module).__name__, *(w.shape for w in matrices(module))), []).append(name)
    found = {}
    for (kind, *sizes), members in shapes.items():
        mine = [full for name in members for full in in_full_model(name) if full in free]
        if mine:
            possible = all(size % FP8_FEATURE_MULTIPLE == 0 for shape in sizes for size in shape)
            found[members[0]] = ModuleTime(
                kind,
                [list(shape) for shape in sizes],
                len(mine),
                name_patterns(mine, free),
                note="" if possible else f"an FP8 GEMM needs multiples of {FP8_FEATURE_MULTIPLE}",
                fp8_possible=possible,
            )
    return found


def measure_modules(task: Task, timer: Timer, deadline: Deadline) -> list[ModuleTime]:
    """FP8 against bf16 for each shape of GEMM module, weights cached as in training."""
    config = copy.deepcopy(task.config)
    config.num_hidden_layers = 1
    precisions = {"fp8": task.resolved("fp8"), "bf16": task.resolved("bf16")}
    layer = task.build(precisions["bf16"], config)
    found = describe_modules(task, layer, precisions["bf16"])
    for name, result in found.items():
        if not result.fp8_possible:
            continue
        if not deadline.allows(share=MODULE_SHARE):
            result.note = OUT_OF_TIME
            continue
        try:
            times = _module_times(layer.get_submodule(name), task, precisions, timer)
            result.fp8_ms, result.bf16_ms = times["fp8"], times["bf16"]
        except torch.OutOfMemoryError as error:
            result.note = f"not measured: {one_line(error)}"
        te_backend.forget_models()  # this module has run for the last time
    return list(found.values())


def _module_times(
    module: nn.Module, task: Task, precisions: Mapping[str, Precision], timer: Timer
) -> dict[str, float]:
    """Milliseconds of one forward and backward on random data, by precision."""
    weight = matrices(module)[0]
    generator = torch.Generator(weight.device).manual_seed(0)

    def random_like(shape: Any) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=weight.device, dtype=weight.dtype)

    x = random_like((task.batch_size, task.seq_length, weight.shape[1])).requires_grad_()
    with torch.no_grad():
        upstream = random_like(module(x).shape)
    leaves = [x, *module.parameters()]

    def run(precision: Precision) -> None:
        cycle = task.cycle(precision)
        # one autocast for all, as in the model: at its end the scales of delayed scaling move
        with precision.autocast():
            outputs = [
                module(x, is_first_microbatch=i % cycle == 0 if cycle else None) for i in range(QUEUED_PASSES)
            ]
        while outputs:
            torch.autograd.grad(outputs.pop(), leaves, upstream, allow_unused=True)

    times = take_turns({name: lambda p=p: run(p) for name, p in precisions.items()}, timer)  # type: ignore[misc]
    return {name: ms / QUEUED_PASSES for name, ms in times.items()}


# ---------------------------------------------------------------- attention


def measure_attention(task: Task, timer: Timer, deadline: Deadline) -> list[AttentionTime]:
    """Each attention backend that is here and right under the run's settings (deterministic or not). None where the
    user chose one, and in the reference, which has but one."""
    precision = task.resolved("bf16")
    if task.attention_backend != "auto" or precision.te.name == "reference":
        return []
    offered = te_backend.document_backends() if task.document_mask else ATTENTION_CANDIDATES
    return [
        _attention_time(backend, task, precision, timer, deadline)
        for backend in ATTENTION_CANDIDATES
        if backend in offered
    ]


def _attention_time(
    backend: str, task: Task, precision: Precision, timer: Timer, deadline: Deadline
) -> AttentionTime:
    result = AttentionTime(backend)
    if not deadline.allows(share=ATTENTION_SHARE):
        result.note = OUT_OF_TIME
        return result
    te_backend.choose_attention_backend(backend)
    try:
        result.error = max(attention_errors(task.config, precision, document_mask=task.document_mask))
        used, allowed = te_backend.attention_backend_in_use(precision.te), ATTENTION_TOLERANCE["bf16"]
        if not used.startswith(backend):
            result.note = f"Transformer Engine ran {used}"
        elif not result.error <= allowed:
            result.note = f"differs from SDPA by {result.error:.1e}, allowed {allowed:.0e}"
        else:
            result.ms = _milliseconds_of_attention(task, precision, timer)
    except Exception as error:  # each package has its own for what it cannot do here; then it is no candidate
        result.note = f"not available: {one_line(error)}"
    return result


def _milliseconds_of_attention(task: Task, precision: Precision, timer: Timer) -> float:
    """Of one forward and backward at the run's shape."""
    c, D = task.config, head_dim(task.config)
    N, K = c.num_attention_heads, c.num_key_value_heads
    attention = causal_attention(c, precision.te)
    generator = torch.Generator(precision.device).manual_seed(0)

    def random_tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=precision.device, dtype=precision.dtype)

    documents = task.documents()
    BT = (task.batch_size, task.seq_length)
    if documents is not None:
        documents, BT = documents.to(precision.device), (1, task.batch_size * task.seq_length)
    qkv = [random_tensor(*BT, heads, D).requires_grad_() for heads in (N, K, K)]
    q, k, v = qkv
    upstream = random_tensor(*BT, N * D)

    def run() -> None:
        for _ in range(QUEUED_PASSES):
            torch.autograd.grad(attend(attention, q, k, v, documents), qkv, upstream)

    return take_turns({"": run}, timer)[""] / QUEUED_PASSES


# ---------------------------------------------------------------- steps


def measure_steps(
    task: Task, plans: Mapping[str, list[str]], timer: Timer, deadline: Deadline
) -> list[StepTime]:
    """Forward and backward of the whole model, by plan (name -> bf16_modules) and with or without CUDA graphs."""
    results: list[StepTime] = []
    longest_s = 0.0
    for index, (plan, bf16_modules) in enumerate(plans.items()):
        precision = task.resolved("bf16" if plan == "bf16" else "fp8", bf16_modules)
        step: _Step | None = None
        for number, graphs in enumerate(task.graph_modes()):
            result = StepTime(plan, graphs)
            results.append(result)
            # a second way to launch waits until time for each plan is sure
            plans_to_come = len(plans) - index - 1 if number else 0
            if not deadline.allows(longest_s * (1 + plans_to_come)):
                result.note = OUT_OF_TIME
                continue
            began = deadline.elapsed()
            try:
                step = step or _Step(task, precision)
                if graphs:
                    step.capture()
                result.ms, result.peak_gib = step.milliseconds(timer), step.peak_gib()
            except RuntimeError as error:  # out of memory, or something that cannot be captured
                result.note = f"failed: {one_line(error)}"
                step = None
            longest_s = max(longest_s, deadline.elapsed() - began)
        step = None
        te_backend.forget_models()
        release_memory()
    return results


class _Step:
    """Forward and backward of a model of its own on one batch of random tokens; gradients are dropped."""

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
        """Pass `index` (0 has to come first); returns the loss, detached."""
        first = index % self.cycle == 0 if self.cycle else None
        loss = self.forward(self.ids, labels=self.labels, is_first_microbatch=first, **self.within).loss
        loss.backward()
        self.model.zero_grad(set_to_none=True)
        return loss.detach()

    def passes(self, count: int) -> None:
        for index in range(count):
            self(index)

    def milliseconds(self, timer: Timer) -> float:
        """Of one pass: the median of up to ROUNDS windows of passes."""
        self.passes(WARMUP_STEPS)
        cycle = self.cycle or 1
        once_ms = timer.elapsed_ms(lambda: self.passes(cycle))
        count = cycle * max(1, round(WINDOW_MS / once_ms))
        windows: list[float] = []
        while len(windows) < ROUNDS and sum(windows) < STEP_MS:
            windows.append(timer.elapsed_ms(lambda: self.passes(count)))
        return statistics.median(windows) / count

    def peak_gib(self) -> float | None:
        """GPU memory that it needs, None on a CPU. Graphs keep a pool of their own, also what is free in it."""
        if self.precision.device.type != "cuda":
            return None
        peak = torch.cuda.max_memory_reserved if self.captured else torch.cuda.max_memory_allocated
        return peak() / GIB

    def capture(self) -> None:
        """From now on with CUDA graphs. Raises RuntimeError: they compute something else."""
        cache_weights = self.cycle is not None
        use_cuda_graphs(
            self.model, self.precision, self.ids, self.labels, cache_weights, self.within.get("documents")
        )
        eager, graphed = self.forward, self.model.forward
        before = snapshot_fp8_state(self.model, self.precision)
        results = []
        for forward in (eager, graphed):
            load_fp8_state(self.model, self.precision, before)
            loss = forward(
                self.ids,
                labels=self.labels,
                is_first_microbatch=True if cache_weights else None,
                **self.within,
            ).loss
            loss.backward()
            # the gradient that comes last depends on the whole backward
            results.append((float(loss.detach()), float(self.model.model.embed_tokens.weight.grad.norm())))
            self.model.zero_grad(set_to_none=True)
        for name, a, b in zip(("loss", "gradient norm of the embedding"), *results, strict=True):
            if not abs(a - b) <= GRAPH_TOLERANCE * abs(a):
                raise RuntimeError(f"with CUDA graphs the {name} is {b:.5g}, without {a:.5g}")
        self.forward, self.captured = graphed, True
        release_memory()
