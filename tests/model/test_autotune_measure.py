"""model/autotune: what is measured, how long, and in which units, with stand-ins for the GPU and its clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model.autotune import measure, timing
from model.autotune.choice import Choice, Record, Way
from model.autotune.measure import BEFORE_ONLY, OUT_OF_TIME, autotune, measure_attention
from model.autotune.task import Task
from model.autotune.timing import Deadline, cuda_ms, one_line, undisturbed
from model.config import GIB
from model.fp8 import te_backend
from model.fp8.precision import Precision
from model.fp8.recipes import PrecisionConfig
from model.variants import SpeedConfig
from tests.conftest import small_config
from tests.scripted_timer import Script


def task_of(variant: str = "te_linear", recipe: str = "delayed", **values: Any) -> Task:
    precision = PrecisionConfig(auto=True, recipe=recipe)
    return Task(small_config(num_hidden_layers=1), variant, precision, batch_size=2, seq_length=32, **values)


# ---------------------------------------------------------------- the clock


def test_a_time_is_that_of_the_events_and_queued_of_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is kept busy for twice as long as launching takes, so that it never waits for a launch."""
    order: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("record")

        def synchronize(self) -> None:
            order.append("wait")

        def elapsed_time(self, other: Event) -> float:
            return 12.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("all done"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append(cycles), raising=False)
    seconds = iter([10.0, 10.25])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(seconds))
    assert cuda_ms(lambda: order.append("run")) == 12.5
    assert order == ["all done", 0, "record", "run", "record", "wait"]
    order.clear()
    assert cuda_ms(lambda: order.append("run"), queued=True) == 12.5
    assert order == ["run", "all done", int(2 * 0.25 * 2e9), "record", "run", "record", "wait"]


def test_a_deadline_allows_what_ends_before_it() -> None:
    now = [100.0]
    deadline = Deadline(10.0, lambda: now[0])
    assert deadline.allows(9.9) and not deadline.allows(10.0)
    now[0] = 104.0
    assert deadline.elapsed() == 4.0 and deadline.allows(5.9) and not deadline.allows(6.0)


def test_after_an_error_the_run_has_its_random_numbers_and_its_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[str] = []
    released: list[bool] = []
    state: list[str] = []

    @contextmanager
    def own_fp8_state(te: Any) -> Iterator[None]:
        state.append("own")
        try:
            yield
        finally:
            state.append("of before")

    monkeypatch.setattr(te_backend, "choose_attention_backend", chosen.append)
    monkeypatch.setattr(te_backend, "own_fp8_state", own_fp8_state)
    monkeypatch.setattr(timing, "release_memory", lambda: released.append(True))
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), undisturbed(None, "flash"):
        torch.rand(3)
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), before)
    assert (chosen, released, state) == (["flash"], [True], ["own", "of before"])


def test_an_error_is_a_line_of_the_log() -> None:
    assert one_line(RuntimeError("CUDA out\n  of memory")) == "CUDA out of memory"
    assert one_line(KeyError()) == "KeyError"
    assert one_line(RuntimeError("x" * 200)) == "x" * 200
    assert one_line(RuntimeError("x" * 201)) == "x" * 197 + "..."


# ---------------------------------------------------------------- attention


class Attention:
    """Of Transformer Engine: which backend was chosen, how often each was timed, and a clock of the measurements."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, errors: dict[str, Any] | None = None) -> None:
        self.chosen, self.now, self.timed = "auto", 0.0, list[str]()
        self.names = {"fused": "fused (cuDNN, 1)", "flash": "flash (4)"}
        errors = errors or {}

        def attention_errors(
            c: Any, precision: Any, tokens: int, *, document_mask: bool
        ) -> tuple[float, float]:
            found = errors.get(self.chosen, (0.0, 0.0))
            if isinstance(found, Exception):
                raise found
            return found

        def milliseconds(*_: Any) -> float:
            self.timed.append(self.chosen)
            self.now += 10.0
            return 5.0

        monkeypatch.setattr(
            te_backend, "choose_attention_backend", lambda name: setattr(self, "chosen", name)
        )
        monkeypatch.setattr(te_backend, "attention_backend_in_use", lambda te: self.names[self.chosen])
        monkeypatch.setattr(measure, "attention_errors", attention_errors)
        monkeypatch.setattr(measure, "_milliseconds_of_attention", milliseconds)
        self.precision: Any = SimpleNamespace(te=SimpleNamespace(name="transformer_engine"))

    def measured(self, seconds: float = 1e3, **task: Any) -> list[tuple[Any, Any, str]]:
        deadline = Deadline(seconds, lambda: self.now)
        ways = measure_attention(task_of(**task), self.precision, Script(), deadline)
        return [(way.choice["attention_backend"], way.ms, way.note) for way in ways]


def test_an_attention_that_is_not_there_or_is_another_is_no_candidate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attention = Attention(monkeypatch, {"fused": ValueError("no such\nkernel")})
    attention.names["flash"] = "fused (cuDNN, 1)"
    assert attention.measured() == [
        ("fused", None, "not available: no such kernel"),
        ("flash", None, "Transformer Engine ran fused (cuDNN, 1)"),
    ]
    assert not attention.timed
    # up to what bf16 is allowed, an attention is right
    assert [ms for _, ms, _ in Attention(monkeypatch, {"fused": (0.0, 0.02)}).measured()] == [5.0, None][
        :1
    ] + [5.0]
    assert [ms for _, ms, _ in Attention(monkeypatch, {"fused": (0.0201, 0.0)}).measured()] == [None, 5.0]


@pytest.mark.parametrize(
    ("seconds", "timed", "notes"),
    [
        (1e3, ["fused", "flash", "fused"], ["", ""]),
        (40.0, ["fused", "flash"], [BEFORE_ONLY, ""]),
        (20.0, ["fused"], [BEFORE_ONLY, OUT_OF_TIME]),
    ],
)
def test_attention_is_timed_there_and_back_in_half_of_the_time(
    monkeypatch: pytest.MonkeyPatch, seconds: float, timed: list[str], notes: list[str]
) -> None:
    """Each takes ten seconds. None is begun where half of the time is over: the steps matter most."""
    attention = Attention(monkeypatch)
    assert [note for *_, note in attention.measured(seconds)] == notes
    assert attention.timed == timed


def test_no_attention_is_measured_where_there_is_none_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = Attention(monkeypatch)
    assert attention.measured(attention_backend="flash") == []
    monkeypatch.setattr(te_backend, "document_backends", lambda: ("flash",))
    assert [name for name, *_ in attention.measured(document_mask=True)] == ["flash"]
    attention.precision = SimpleNamespace(te=SimpleNamespace(name="reference"))
    assert attention.measured() == []


@pytest.mark.parametrize("document_mask", [False, True])
def test_the_time_of_an_attention_is_that_of_one_pass_at_the_runs_shape(
    monkeypatch: pytest.MonkeyPatch, document_mask: bool
) -> None:
    """Four are launched together, and of five such times the median counts."""
    asked, real = [], measure.random_attention
    monkeypatch.setattr(measure, "random_attention", lambda *given: asked.append(given) or real(*given))
    times = iter([40.0, 44.0, 400.0, 36.0, 48.0])
    passes: list[int] = []
    grad = torch.autograd.grad

    def timer(run: Callable[[], None], queued: bool = False) -> float:
        assert queued
        passes.append(0)
        run()
        return next(times)

    def counted(*arguments: Any) -> Any:
        if passes and torch._C._current_graph_task_id() == -1:  # not within a backward
            passes[-1] += 1
        return grad(*arguments)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    task = task_of(document_mask=document_mask)
    precision = Precision(PrecisionConfig(compute="bf16", backend="reference"))
    assert measure._milliseconds_of_attention(task, precision, timer) == 44.0 / 4
    assert passes == [4] * 5
    assert asked[0][2:4] == ((2, 32), 16.0 if document_mask else None)


# ---------------------------------------------------------------- steps


@pytest.mark.parametrize(
    ("cycle", "pass_ms", "timed"),
    [
        (4, 12.0, [4, *[24] * 5]),  # 6.25 times 48 ms are 300 ms
        (4, 100.0, [4, *[4] * 5]),
        (None, 10.0, [1, *[30] * 5]),
        (4, 250.0, [4, 4, 4, 4]),  # after three seconds it is enough
        (None, 4000.0, [1, 1]),
    ],
)
def test_the_time_of_a_step_is_that_of_one_pass_however_many_are_timed_together(
    monkeypatch: pytest.MonkeyPatch, cycle: int | None, pass_ms: float, timed: list[int]
) -> None:
    """Whole steps, for 300 ms."""
    indices: list[int] = []
    warmed: list[tuple[int, int]] = []

    class Step(measure._Step):
        def __init__(self) -> None:
            self.model, self.precision, self.cycle = None, None, cycle  # type: ignore[assignment]

        def __call__(self, index: int) -> Any:
            indices.append(index)

    counts: list[int] = []

    def timer(run: Callable[[], None]) -> float:
        indices.clear()
        run()
        counts.append(len(indices))
        assert indices == list(range(len(indices)))
        return pass_ms * len(indices)

    @contextmanager
    def proving_fp8(model: Any, precision: Any, passes: int) -> Iterator[None]:
        yield
        warmed.append((passes, len(indices)))

    monkeypatch.setattr(measure, "proving_fp8", proving_fp8)
    assert Step().milliseconds(timer) == pass_ms
    assert counts == timed and warmed == [(3, 3)]


@pytest.mark.parametrize(("captured", "peak"), [(False, 3.0), (True, 5.0)])
def test_the_memory_of_a_graph_is_that_of_its_pool(
    monkeypatch: pytest.MonkeyPatch, captured: bool, peak: float
) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 5 * GIB)
    for device, expected in (("cuda", peak), ("cpu", None)):
        step: Any = SimpleNamespace(captured=captured, precision=SimpleNamespace(device=torch.device(device)))
        assert measure._Step.peak_gib(step) == expected


def test_what_the_optimizer_takes_is_left_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is free, and what torch holds and would give back, a twentieth stays for others, too."""
    assert measure._memory_gib(task_of()) == float("inf")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measure, "release_memory", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 20 * GIB)
    assert measure._memory_gib(task_of(other_memory_gib=30.0)) == pytest.approx(0.95 * 80 - 30)


@pytest.mark.parametrize(
    ("compute", "accumulation", "cycle"),
    [("fp8", 1, None), ("fp8", 2, 2), ("fp8", 4, 4), ("fp8", 8, 4), ("bf16", 8, None)],
)
def test_micro_batches_of_a_step_share_the_fp8_weights(
    compute: Any, accumulation: int, cycle: int | None
) -> None:
    task = task_of(accumulation=accumulation)
    assert task.cycle(task.resolved(compute)) == cycle


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("document_mask", [False, True])
def test_the_model_that_is_measured_is_the_runs(
    main_grad: bool, recompute: bool, document_mask: bool
) -> None:
    speed = SpeedConfig(fused_swiglu=False, fused_cross_entropy=False)
    task = task_of(
        main_grad=main_grad, gradient_checkpointing=recompute, document_mask=document_mask, speed=speed
    )
    model = task.build(task.resolved("fp8"))
    assert model.training and model.speed == speed
    assert (
        isinstance(model.model.layers[0].forward, partial) == recompute
        and model.document_mask == document_mask
    )
    projection = model.model.layers[0].mlp.up_proj
    buffer = getattr(projection.weight, "main_grad", None)
    assert (buffer is not None) == main_grad == getattr(projection, "fuse_wgrad_accumulation", False)
    if buffer is not None:
        assert (buffer.dtype, buffer.shape) == (torch.float32, projection.weight.shape) and not buffer.any()
    assert not hasattr(model.model.norm.weight, "main_grad")


def test_a_backend_for_documents_is_chosen_before_the_steps_and_the_users_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(te_backend, "choose_attention_backend", chosen.append)
    monkeypatch.setattr(te_backend, "document_attention", lambda name, te, dtype: f"{name} for documents")
    monkeypatch.setattr(measure, "Choice", lambda **choice: choice)
    monkeypatch.setattr(measure, "Record", lambda **record: SimpleNamespace(**record, summary=str))

    def measure_steps(*_: Any) -> list[Way]:
        chosen.append("the steps")
        return [Way({"compute": "fp8", "cuda_graphs": True}, 2.0, 9.0)]

    monkeypatch.setattr(measure, "measure_steps", measure_steps)
    lines: list[str] = []
    record: Any = autotune(task_of(document_mask=True), lines.append, seconds=30.0)
    assert chosen == ["auto for documents", "the steps", "auto"]
    assert record.choice == {"attention_backend": "auto for documents", "compute": "fp8", "cuda_graphs": True}
    assert lines[:2] == [
        "precision.auto: measuring, at most 30 s",
        "forward + backward of 2 x 32 tokens",
    ]
    # without room for it the way is none, and what was asked for stays, graphs too
    monkeypatch.setattr(measure, "_memory_gib", lambda task: 8.5)
    record = autotune(task_of(speed=SpeedConfig(cuda_graphs=True)), lines.append)
    assert record.choice == {"attention_backend": "auto", "compute": "fp8", "cuda_graphs": True}
    assert record.why == [
        "no step was measured that fits into memory; precision and graphs stay as configured"
    ]
    # steps run the attention that "auto" is in the run, which decides that itself
    chosen.clear()
    monkeypatch.setattr(
        te_backend, "fastest_attention", lambda name, te, dtype, head_dim: f"{name}: {head_dim}"
    )
    record = autotune(task_of(), lines.append)
    assert chosen == ["auto: 32", "the steps", "auto"] and record.choice["attention_backend"] == "auto"
    assert "forward + backward of 2 x 32 tokens; the run leaves 8.5 GiB" in lines


# ---------------------------------------------------------------- what is said


def test_the_lines_of_ways_and_of_the_choice() -> None:
    way = Way({"compute": "fp8", "cuda_graphs": True}, peak_gib=12.34)
    way.mean_with(10.0)
    way.mean_with(11.0)
    assert way.line() == f"  {'compute fp8, cuda_graphs true':<32} {'10.500 ms':>12}  12.3 GiB"
    assert Way(way.choice, note=OUT_OF_TIME).line().split("  ")[-1] == OUT_OF_TIME
    record = Record({}, {}, {}, Choice("bf16", True, "flash"), [], 31.6, [way])
    assert record.summary() == (
        "precision.auto: precision.compute bf16, speed.cuda_graphs true, model.attention_backend flash; "
        "measured in 32 s"
    )
    precision, speed = record.choice.apply(
        PrecisionConfig(auto=True, margin=2), SpeedConfig(fused_rope=False)
    )
    assert precision == PrecisionConfig(compute="bf16", margin=2)
    assert speed == SpeedConfig(fused_rope=False, cuda_graphs=True)
