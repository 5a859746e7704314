"""The choice among measured candidates, and that measuring times what it names and leaves no trace."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model import autotune as module
from model.autotune import Candidate, Choice, Task, autotune, choose, measure_steps
from model.build import build_model
from model.checks import startup
from model.checks.startup import attention_errors
from model.fp8 import te_backend
from model.fp8.precision import Precision, PrecisionError
from model.fp8.recipes import PrecisionConfig
from model.variants import SpeedConfig
from tests.conftest import small_config
from tests.model.conftest import backward, without_fp8

FP8, FP8_GRAPHS = Choice("fp8", False, "auto"), Choice("fp8", True, "auto")
BF16, BF16_GRAPHS = Choice("bf16", False, "auto"), Choice("bf16", True, "auto")


def task_of(variant: str = "te_linear", **changes: Any) -> Task:
    precision = PrecisionConfig(auto=True, amax_history_len=4, **changes.pop("precision", {}))
    values = {"accumulation": 1, "graphs_allowed": False, **changes}
    config = values.pop("config", None) or small_config(num_hidden_layers=1)
    return Task(config, variant, precision, batch_size=2, seq_length=16, **values)


class Script:
    """A timer that runs everything and returns the given times, one per visit of a candidate."""

    def __init__(self, *visits: float) -> None:
        # each visit times one cycle to size its windows, then the windows
        self.times = iter([ms for ms in visits for _ in range(module.ROUNDS + 1)])

    def __call__(self, run: Callable[[], Any]) -> float:
        run()
        return next(self.times)


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({FP8: 10.0, FP8_GRAPHS: 9.95, BF16: 9.95}, FP8),  # a tie: the first is preferred
        ({FP8: 10.0, FP8_GRAPHS: 9.0, BF16: 9.5, BF16_GRAPHS: 9.4}, FP8_GRAPHS),
        ({FP8: 10.0, FP8_GRAPHS: 9.6, BF16: 9.5}, BF16),
        ({FP8: math.inf, BF16: 9.5}, BF16),
        ({FP8: 9.5, BF16: math.inf}, FP8),
        ({FP8: math.inf}, None),
        ({}, None),
    ],
)
def test_fastest_candidate_is_chosen(times: dict[Choice, float], chosen: Choice | None) -> None:
    assert choose([Candidate(choice, [ms]) for choice, ms in times.items()]) == chosen


def test_failed_or_too_large_candidate_is_not_chosen() -> None:
    candidates = [Candidate(FP8, [10.0], 40.0), Candidate(FP8_GRAPHS, [5.0], 70.0)]
    for gib, chosen in ((80.0, FP8_GRAPHS), (70.0, FP8_GRAPHS), (50.0, FP8), (30.0, None)):
        assert choose(candidates, gib) == chosen
    candidates[1].note = "failed on its second visit"
    assert choose(candidates, 80.0) == FP8


@pytest.mark.parametrize(
    "recipe", ["delayed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("current", "block"))]
)
def test_bf16_is_chosen_if_faster(recipe: Any) -> None:
    task = replace(task_of("te_layer", accumulation=8), precision=PrecisionConfig(auto=True, recipe=recipe))
    assert autotune(task, timer=Script(4 * 330.0, 300.0, 4 * 330.0)) == BF16


def test_gpu_slowdown_does_not_bias_the_choice() -> None:
    """bf16 is 3 % faster, and each visit takes 3 % longer than the one before."""
    fp8, bf16 = measure_steps(task_of(), ["auto"], Script(300.0, 291 * 1.03, 300 * 1.06))
    assert bf16.ms / fp8.ms == pytest.approx(0.97, abs=1e-3)


def test_unmatched_pattern_raises() -> None:
    with pytest.raises(PrecisionError):
        autotune(task_of(precision={"bf16_modules": ["lm_haed"]}), timer=Script(300.0))


def test_fp8_without_fp8_gradients_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    without_fp8(monkeypatch, "tn")
    assert autotune(task_of(), timer=Script(310.0)) == BF16


def test_candidate_failing_later_is_rejected() -> None:
    script, calls = Script(200.0, 300.0, 200.0), itertools.count()

    def timer(run: Callable[[], Any]) -> float:
        if next(calls) == 12:
            raise RuntimeError("CUDA out of memory")
        return script(run)

    assert autotune(task_of(), timer=timer) == BF16


def test_cuda_graphs_are_timed_if_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    replays = []

    def capture(model: Any, *_: Any) -> None:
        eager = model.forward
        model.forward = lambda *ids, **options: replays.append(model) or eager(*ids, **options)

    monkeypatch.setattr(module, "use_cuda_graphs", capture)
    task = task_of(graphs_allowed=True)
    candidates = measure_steps(task, ["auto"], Script(*[300.0, 240.0] * 3))
    assert len(replays) > 3 * module.ROUNDS, "the graphs are timed"
    assert [c.choice for c in candidates] == [FP8, FP8_GRAPHS, BF16, BF16_GRAPHS]
    assert [round(c.ms) for c in candidates] == [300, 240, 300, 240]


@pytest.mark.parametrize(
    ("fused", "offered"),
    [
        ((0.0, 0.02), ["fused", "flash"]),
        (ValueError("no such kernel"), ["flash"]),
        ((0.0, math.nan), ["flash"]),
        ((0.0, 0.0201), ["flash"]),
    ],
)
def test_missing_or_wrong_attention_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, fused: Any, offered: list[str]
) -> None:
    chosen: list[str] = []

    def errors(*_: Any, **__: Any) -> tuple[float, float]:
        if chosen[-1] == "fused" and isinstance(fused, Exception):
            raise fused
        return fused if chosen[-1] == "fused" else (0.0, 0.0)

    monkeypatch.setattr(te_backend, "choose_attention_backend", chosen.append)
    monkeypatch.setattr(te_backend, "attention_backend_in_use", lambda te: chosen[-1])
    monkeypatch.setattr(te_backend, "document_backends", lambda: ("flash",))
    monkeypatch.setattr(startup, "attention_errors", errors)
    gpu: Any = SimpleNamespace(
        te=SimpleNamespace(name="transformer_engine"), config=PrecisionConfig(compute="bf16")
    )
    assert module.attention_backends(task_of(), gpu) == offered
    assert module.attention_backends(task_of(document_mask=True), gpu) == ["flash"]
    assert module.attention_backends(task_of(attention_backend="fused"), gpu) == ["fused"]


def test_optimizer_memory_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_memory_gib", lambda task: 8.5)
    monkeypatch.setattr(module, "measure_steps", lambda *_: [Candidate(BF16, [2.0], 9.0)])
    task = task_of(speed=SpeedConfig(cuda_graphs=True), attention_backend="flash")
    assert autotune(task) == Choice("fp8", True, "flash")  # as configured


@pytest.mark.parametrize(
    ("compute", "accumulation", "cycle"), [("fp8", 1, 1), ("fp8", 2, 2), ("fp8", 8, 4), ("bf16", 8, 1)]
)
def test_fp8_weight_cache_within_a_step(compute: Any, accumulation: int, cycle: int) -> None:
    task = task_of(accumulation=accumulation)
    assert task.cycle(task.resolved(compute)) == cycle


def losses(task: Task) -> list[float]:
    precision = Precision(replace(task.precision, auto=False))
    model = build_model(task.config, task.variant, precision, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = []
    for _ in range(3):
        out.append(float(backward(model)))
        optimizer.step()
        optimizer.zero_grad()
    return out


def test_measurement_leaves_no_state() -> None:
    task = task_of("te_layer", precision={"recipe": "delayed"})
    before, state = losses(task), torch.get_rng_state()
    assert autotune(task, timer=Script(300.0, 360.0, 300.0)) == FP8
    assert torch.equal(torch.get_rng_state(), state)
    assert losses(task) == before


def test_unresolved_auto_raises() -> None:
    with pytest.raises(PrecisionError):
        Precision(PrecisionConfig(auto=True))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["te_linear", "te_layer"])
def test_autotune_on_gpu(variant: str, monkeypatch: pytest.MonkeyPatch, logged: list[str]) -> None:
    monkeypatch.setattr(module, "WINDOW_MS", 20.0)
    task = task_of(variant, graphs_allowed=True, accumulation=4, main_grad=True)
    # embedding and head of 32 MiB each: no model can stay in memory unnoticed
    sizes = dict(vocab_size=32768, hidden_size=512, intermediate_size=1024, num_attention_heads=16)
    task = replace(task, config=small_config(num_key_value_heads=4, **sizes), seq_length=256)
    te_backend.choose_attention_backend("auto")
    before = losses(task)
    attention_errors(task.config, task.resolved("bf16"))  # cuBLAS allocates its workspace
    cpu, cuda, allocated = torch.get_rng_state(), torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
    began = time.monotonic()
    choice = autotune(task)
    assert time.monotonic() - began < 60
    assert torch.cuda.memory_allocated() <= allocated + 2**24
    assert torch.equal(torch.get_rng_state(), cpu) and torch.equal(torch.cuda.get_rng_state(), cuda)
    assert losses(task) == before
    assert sum(" ms, " in line for line in logged) == 8, logged
    assert choice.attention_backend in ("fused", "flash")
