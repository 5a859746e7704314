"""precision.auto: what is fastest for this model, batch and GPU, by measurement in at most a minute.

    modules by shape, FP8 against bf16  ->  attention backends, checked, then timed  ->
    whole steps: FP8, FP8 where it was faster, bf16, each launched normally and as CUDA graphs  ->  the fastest step

`decide` has the rules, `measure` the measuring, `record` what is printed and saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from model.autotune.decide import about_modules, choose_attention, choose_step, plans
from model.autotune.measure import GIB, measure_attention, measure_modules, measure_steps
from model.autotune.record import Choice, Record, asked_of, circumstances_of, differences, table, versions_of
from model.autotune.task import Task
from model.autotune.timing import CudaTimer, Deadline, Timer, release_memory, undisturbed
from model.fp8 import te_backend

__all__ = [
    "Choice",
    "Record",
    "Task",
    "asked_of",
    "autotune",
    "circumstances_of",
    "differences",
    "versions_of",
]

SECONDS = 60.0
# What NCCL, cuBLAS workspaces and fragmentation may take of the memory.
SLACK = 0.95


def autotune(
    task: Task,
    say: Callable[[str], None] = print,
    seconds: float = SECONDS,
    timer: Timer | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Record:
    """Measure and choose; `say` gets the lines for the log. Runs on the current GPU and leaves its memory, the random
    generators and Transformer Engine's state as they were. Nothing is begun that is not expected to end within
    `seconds`.

    Raises PrecisionError: what `Precision` or its `apply` refuse. Whatever else fails is no candidate.
    """
    deadline = Deadline(seconds, clock)
    say(f"precision.auto: measuring, at most {seconds:.0f} s")
    with undisturbed(task.resolved("bf16").te, task.attention_backend):
        memory_gib = _memory_gib(task)
        timer = timer or CudaTimer()
        modules = measure_modules(task, timer, deadline)
        attention = measure_attention(task, timer, deadline)
        backend, why_attention = choose_attention(attention, task.attention_backend)
        if task.document_mask:
            plain = task.resolved("bf16")
            backend = te_backend.document_attention(backend, plain.te, plain.dtype)
        te_backend.choose_attention_backend(backend)
        ways = plans(modules, task.precision.bf16_modules)
        steps = measure_steps(task, ways, timer, deadline)
    step, why_step = choose_step(steps, memory_gib)
    plan = step.plan if step else next(iter(ways))
    record = Record(
        asked=asked_of(task),
        circumstances=circumstances_of(task),
        versions=versions_of(task),
        choice=Choice(
            compute="bf16" if plan == "bf16" else "fp8",
            bf16_modules=ways[plan],
            cuda_graphs=task.speed.cuda_graphs or (step is not None and step.cuda_graphs),
            attention_backend=backend,
        ),
        why=[*about_modules(modules, task.precision.bf16_modules), why_attention, *why_step],
        seconds=round(deadline.elapsed(), 1),
        measurements={
            name: [_rounded(asdict(time)) for time in times]
            for name, times in (("modules", modules), ("attention", attention), ("steps", steps))
        },
    )
    for line in [*table(task, modules, attention, steps, memory_gib), *record.why, record.summary()]:
        say(line)
    return record


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 5) if isinstance(value, float) else value for key, value in values.items()}


def _memory_gib(task: Task) -> float | None:
    """GPU memory that weights, gradients and activations of the run can have; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    release_memory()
    free, _ = torch.cuda.mem_get_info()
    return (free + torch.cuda.memory_reserved()) / GIB * SLACK - task.other_memory_gib
