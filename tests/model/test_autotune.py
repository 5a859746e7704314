"""model/autotune: what follows from times, and that measuring leaves no trace."""

from __future__ import annotations

import itertools
import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from model.autotune import measure
from model.autotune.choice import Choice, Record, Way, choose
from model.autotune.measure import BEFORE_ONLY, OUT_OF_TIME, autotune
from model.autotune.task import Task
from model.autotune.timing import Deadline
from model.build import build_model
from model.fp8 import te_backend
from model.fp8.precision import Precision, PrecisionError
from model.fp8.recipes import PrecisionConfig
from model.proof import attention_errors
from model.te_reference import quantize
from tests.conftest import random_ids, small_config
from tests.model.fp8.test_gemms import without_fp8
from tests.scripted_timer import Script

# ---------------------------------------------------------------- decisions


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({"fused": 6.0, "flash": 5.5}, "flash"),
        ({"fused": 5.54, "flash": 5.5}, "fused"),  # a tie: no further package
        ({"fused": None, "flash": 5.5}, "flash"),
        ({"fused": None, "flash": None}, None),
        ({}, None),
    ],
)
def test_the_fastest_right_attention(times: dict, chosen: str | None) -> None:
    ways = [Way({"attention_backend": name}, ms, note="" if ms else "x") for name, ms in times.items()]
    choice, why = choose(ways)
    assert choice.get("attention_backend") == chosen and len(why) == bool(choice)
    assert chosen is None or chosen in why[0]
    assert all(way.line().endswith(" x") for way in ways if way.ms is None)


def step(compute: str, graphs: bool, ms: float | None, peak_gib: float | None = None) -> Way:
    return Way({"compute": compute, "cuda_graphs": graphs}, ms, peak_gib)


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({("fp8", False): 10.0, ("fp8", True): 9.95, ("bf16", False): 9.95}, ("fp8", False)),
        (
            {("fp8", False): 10.0, ("fp8", True): 9.0, ("bf16", False): 9.5, ("bf16", True): 9.4},
            ("fp8", True),
        ),
        ({("fp8", True): 10.0, ("bf16", False): 9.46, ("bf16", True): 9.4}, ("bf16", False)),
        ({("fp8", False): 10.0, ("fp8", True): 9.6, ("bf16", False): 9.5}, ("bf16", False)),
        ({("fp8", False): None, ("bf16", False): 9.5}, ("bf16", False)),
        ({("fp8", False): 9.5, ("bf16", False): None}, ("fp8", False)),
    ],
)
def test_the_fastest_step_and_in_a_tie_the_simpler(times: dict, chosen: tuple) -> None:
    choice, why = choose([step(*way, ms) for way, ms in times.items()])
    assert (choice["compute"], choice["cuda_graphs"]) == chosen
    text = " ".join(why)
    if len({compute for (compute, _), ms in times.items() if ms}) == 1:
        assert "not measured" in text
    elif chosen[0] == "bf16":
        assert "FP8 does not pay" in text and "becomes bf16" in text
    else:
        assert "FP8 pays" in text or "no faster than bf16" in text


def test_what_needs_more_memory_than_there_is_is_not_chosen() -> None:
    steps = [step("fp8", False, 10.0, 40.0), step("fp8", True, 5.0, 70.0)]
    assert choose(steps, 80.0)[0] == choose(steps, 70.0)[0] == steps[1].choice
    assert choose(steps, 50.0)[0] == steps[0].choice
    assert choose(steps, 30.0) == ({}, [])


@pytest.mark.parametrize(
    ("bf16", "words"),
    [
        (10.04, "FP8 is no faster than bf16 here; it stays because it was asked for: compute bf16, cuda_graphs true, "
                "10.04 ms, takes 1.00 times as long"),
        (10.2, "FP8 pays: compute bf16, cuda_graphs true, 10.20 ms, takes 1.02 times as long"),
    ],
)  # fmt: skip
def test_fp8_is_compared_with_the_fastest_in_bf16(bf16: float, words: str) -> None:
    _, (first, second) = choose(
        [step("fp8", False, 10.0), step("bf16", False, 15.0), step("bf16", True, bf16)]
    )
    assert first == "compute fp8, cuda_graphs false, 10.00 ms: the fastest" and second == words
    _, (first, _) = choose([step("fp8", False, 10.0), step("bf16", True, 9.95)])
    assert first.endswith("10.00 ms: within 1% of compute bf16, cuda_graphs true, 9.95 ms, and preferred")


# ---------------------------------------------------------------- measuring, in small, on the reference


def task_of(variant: str = "te_linear", **changes: Any) -> Task:
    precision = PrecisionConfig(auto=True, amax_history_len=4, **changes.pop("precision", {}))
    values = {"accumulation": 1, "graphs_allowed": False, **changes}
    config = values.pop("config", None) or small_config(num_hidden_layers=1)
    return Task(config, variant, precision, batch_size=2, seq_length=16, **values)


@pytest.mark.parametrize(("recipe", "recompute"), [("delayed", True), ("current", False), ("block", False)])
def test_where_bf16_is_faster_it_is_chosen_and_said(recipe: str, recompute: bool) -> None:
    values: dict[str, Any] = {"recipe": recipe}
    task = task_of("te_layer", gradient_checkpointing=recompute, accumulation=8)
    task = replace(task, precision=PrecisionConfig(auto=True, **values))
    lines: list[str] = []
    record = autotune(task, lines.append, timer=Script(4 * 330.0, 300.0, 4 * 330.0))
    assert record.choice == Choice("bf16", False, "auto")
    assert any("compute bf16, cuda_graphs false, 300.00 ms: the fastest" in line for line in lines)
    assert any("FP8 does not pay here" in line and "1.10 times" in line for line in lines)
    precision, _ = record.choice.apply(task.precision, task.speed)
    assert precision == replace(task.precision, auto=False, compute="bf16")


def test_a_wrong_pattern_is_refused_as_ever() -> None:
    task = task_of(precision={"bf16_modules": ["lm_haed"]})
    with pytest.raises(PrecisionError, match="'lm_haed' matches no module"):
        autotune(task, lambda _: None, timer=Script(300.0, 300.0))


def test_a_gpu_that_gets_slower_while_it_warms_up_favours_nobody() -> None:
    """bf16 is 3 % faster, and each sample takes 0.5 % longer than the one before."""
    truth = [300.0] * 6 + [291.0] * 6 + [300.0] * 6
    record = autotune(
        task_of(), lambda _: None, timer=Script(samples=[ms * (1 + 0.005 * i) for i, ms in enumerate(truth)])
    )
    assert record.choice.compute == "bf16"
    fp8, bf16 = record.measured
    assert fp8.ms is not None and bf16.ms is not None and bf16.ms / fp8.ms == pytest.approx(0.97, abs=1e-3)


def test_no_attention_is_favoured_by_a_cool_gpu_and_none_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """flash is 3 % faster, and each measurement takes 2 % longer than the one before."""
    chosen, calls = ["none"], itertools.count()
    monkeypatch.setattr(te_backend, "choose_attention_backend", lambda name: chosen.append(name))
    monkeypatch.setattr(te_backend, "attention_backend_in_use", lambda _: f"{chosen[-1]} 1.0")
    monkeypatch.setattr(measure, "attention_errors", lambda *_, **__: (0.0, 0.0))
    truth = {"fused": 100.0, "flash": 97.0}
    timed = lambda *_: truth[chosen[-1]] * (1 + 0.02 * next(calls))  # noqa: E731
    monkeypatch.setattr(measure, "_milliseconds_of_attention", timed)
    precision: Any = SimpleNamespace(te=SimpleNamespace(name="transformer_engine"))
    fused, flash = measure.measure_attention(task_of(), precision, Script(), Deadline(60.0))
    assert (fused.ms, flash.ms) == (pytest.approx(102.0), pytest.approx(97 * 1.02))

    errors = {"fused": (0.0, float("nan")), "flash": (0.0, 0.03)}
    monkeypatch.setattr(measure, "attention_errors", lambda *_, **__: errors[chosen[-1]])
    wrong = measure.measure_attention(task_of(), precision, Script(), Deadline(60.0))
    assert [way.ms for way in wrong] == [None, None]
    assert [way.note.split(",")[0] for way in wrong] == [
        "differs from SDPA by nan",
        "differs from SDPA by 3.0e-02",
    ]


def test_no_amax_is_shared_with_ranks_that_do_not_measure() -> None:
    """They would have to reduce along; the run itself shares them."""
    task = task_of()
    assert task.precision.reduce_amax and not task.resolved("fp8").recipe.reduce_amax


def test_fp8_measured_only_while_the_gpu_was_cool_is_said() -> None:
    # each way takes a second, and a third visit would not end in time
    record = autotune(task_of(), lambda _: None, seconds=8.0, timer=Script(300.0, 300.0), clock=Clock(1.0))
    fp8, bf16 = record.measured
    assert (fp8.ms, fp8.note, bf16.ms, bf16.note) == (300.0, BEFORE_ONLY, 300.0, "")


def test_what_is_timed_as_fp8_runs_fp8_and_what_is_timed_as_bf16_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script, gemms, ran = Script(300.0, 300.0, 300.0), [0], []
    accumulate = quantize.accumulate

    def counted(a: torch.Tensor, *others: Any, **options: Any) -> Any:
        gemms[0] += a.dtype in quantize.FP8_MAX
        return accumulate(a, *others, **options)

    def timer(run: Callable[[], Any], **options: Any) -> float:
        gemms[0] = 0
        ms = script(run, **options)
        ran.append(gemms[0] > 0)
        return ms

    monkeypatch.setattr(quantize, "accumulate", counted)
    autotune(task_of(), lambda _: None, timer=timer)
    assert ran == [True] * 6 + [False] * 6 + [True] * 6


def test_fp8_whose_gradients_are_not_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    without_fp8(monkeypatch, "tn")
    record = autotune(task_of(), lambda _: None, timer=Script(310.0))
    fp8, bf16 = record.measured
    assert fp8.ms is None and "FP8 GEMMs, not" in fp8.note and bf16.ms == 310.0
    assert record.choice.compute == "bf16"


def test_what_fails_when_it_is_visited_again_is_no_candidate() -> None:
    script, calls = Script(200.0, 300.0, 200.0), itertools.count()

    def timer(run: Callable[[], Any], **options: Any) -> float:
        if next(calls) == 12:  # the first of the second visit of FP8
            raise RuntimeError("CUDA out of memory")
        return script(run, **options)

    record = autotune(task_of(), lambda _: None, timer=timer)
    fp8, bf16 = record.measured
    assert (fp8.ms, fp8.note, bf16.ms) == (None, "failed: CUDA out of memory", 300.0)
    assert record.choice.compute == "bf16"


SPOILED = "model.layers.0.self_attn.k_proj.weight"
# what a replay does to one weight's gradient: (weight, whether it is the first pass of a step)
FAULTS: dict[str, Callable[[nn.Parameter, bool], object]] = {
    "none": lambda weight, first: None,
    "lost": lambda weight, first: weight.grad.zero_(),  # type: ignore[union-attr]
    "in later passes": lambda weight, first: first or weight.grad.mul_(1.01),  # type: ignore[union-attr]
    "in the buffer": lambda weight, first: weight.main_grad.add_(1e-6),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("fault", FAULTS)
def test_graphs_that_compute_another_gradient_are_no_candidate(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any gradient, of any kind of pass; the loss and what comes last, the embedding's, are right."""

    def use_cuda_graphs(model: nn.Module, *_: Any) -> None:
        launched, weight, replayed = model.forward, model.get_parameter(SPOILED), list[bool]()

        def spoil(weight: nn.Parameter) -> None:
            if replayed:
                FAULTS[fault](weight, replayed.pop())

        weight.register_post_accumulate_grad_hook(spoil)

        def replay(ids: torch.Tensor, is_first_microbatch: bool, **others: Any) -> Any:
            replayed.append(is_first_microbatch)
            return launched(ids, is_first_microbatch=is_first_microbatch, **others)

        model.forward = replay  # type: ignore[method-assign]

    monkeypatch.setattr(measure, "use_cuda_graphs", use_cuda_graphs)
    monkeypatch.setattr(measure, "COMPUTE", ("fp8",))
    monkeypatch.setattr(measure, "VISITS", ("fp8",))
    task = task_of(accumulation=4, graphs_allowed=True, main_grad=True)
    record = autotune(task, lambda _: None, timer=Script(1200.0, 1000.0))
    _, graphs = record.measured
    if fault == "none":
        assert graphs.ms == 250.0 and record.choice.cuda_graphs
    else:
        assert graphs.ms is None and f"with CUDA graphs {SPOILED}" in graphs.note


class Clock:
    """A clock that moves by `tick` seconds each time it is read."""

    def __init__(self, tick: float):
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def test_when_time_runs_out_the_rest_is_left_out_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    # read once at the start, then around each step: FP8 takes one second, and bf16 would end at the fifth
    record = autotune(task_of(), seconds=5.0, timer=Script(300.0), clock=Clock(1.0))
    assert [(way.choice["compute"], way.ms, way.note) for way in record.measured] == [
        ("fp8", 300.0, ""),
        ("bf16", None, OUT_OF_TIME),
    ]
    assert OUT_OF_TIME in capsys.readouterr().out
    assert record.choice.compute == "fp8"


@pytest.mark.parametrize("attention", ["auto", "flash"])
def test_without_any_time_the_configuration_stays(attention: str) -> None:
    task = task_of(precision={"bf16_modules": ["lm_head", "*.down_proj"]}, attention_backend=attention)
    record = autotune(task, lambda _: None, seconds=0.0, timer=Script())
    assert record.choice == Choice("fp8", False, attention)
    precision, _ = record.choice.apply(task.precision, task.speed)
    assert precision == replace(task.precision, auto=False)
    assert any("stay as configured" in line for line in record.why)


def losses(task: Task, choice: Choice) -> list[float]:
    precision = Precision(choice.apply(task.precision, task.speed)[0])
    model = build_model(task.config, task.variant, precision, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = random_ids(task.config, 2, 17).to(precision.device)
    out = []
    for _ in range(3):
        loss = model(ids[:, :-1], labels=ids[:, 1:]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.item())
    return out


def test_measuring_leaves_no_trace() -> None:
    task = task_of("te_layer", precision={"recipe": "delayed"})
    choice = Choice("fp8", False, "auto")
    before = losses(task, choice)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    record = autotune(task, lambda _: None, timer=Script(300.0, 360.0, 300.0))
    assert record.choice == choice
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])
    assert losses(task, choice) == before


def test_the_state_of_other_models_is_back_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    class Manager:
        quantization_state: Any = "of other models"

        @classmethod
        def reset(cls) -> None:
            cls.quantization_state = "new"

    name = "transformer_engine.pytorch.quantization"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(FP8GlobalStateManager=Manager))
    with pytest.raises(KeyError), te_backend.own_fp8_state(SimpleNamespace(name="transformer_engine")):
        assert Manager.quantization_state == "new"
        raise KeyError
    assert Manager.quantization_state == "of other models"


# ---------------------------------------------------------------- saved choices


def test_a_record_survives_its_file() -> None:
    record = Record(
        {"model": {"hidden_size": 8}},
        {"GPU": "none"},
        {"torch": "2"},
        Choice("fp8", True, "flash"),
        ["because"],
        31.0,
        [step("fp8", True, 10.0, 40.0)],
    )
    assert Record.from_json(record.to_json()) == record
    other = record.to_json().replace('"why"', '"reasons"')
    for text in ("", "[]", "{}", other):
        with pytest.raises(ValueError, match="no saved choice of this version"):
            Record.from_json(text)
    for right, wrong in (
        ('"compute": "fp8"', '"compute": "fp4"'),
        ('"cuda_graphs": true', '"cuda_graphs": "false"'),
        ('"attention_backend": "flash"', '"attention_backend": "fast"'),
    ):
        assert right in record.to_json()
        with pytest.raises(
            ValueError, match=r"choice\.(compute|cuda_graphs|attention_backend)\S*: Input should be"
        ):
            Record.from_json(record.to_json().replace(right, wrong))


def test_auto_has_to_be_resolved_before_a_model_is_built() -> None:
    with pytest.raises(PrecisionError, match="only a training run measures"):
        Precision(PrecisionConfig(auto=True))


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["te_linear", "te_layer"])
def test_on_a_gpu_all_ways_are_measured_and_nothing_stays(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "WINDOW_MS", 20.0)
    task = task_of(variant, graphs_allowed=True, accumulation=4, main_grad=True)
    # embedding and head of 32 MiB each: no model can stay in memory unnoticed
    sizes = dict(vocab_size=32768, hidden_size=512, intermediate_size=1024, num_attention_heads=16)
    task = replace(task, config=small_config(num_key_value_heads=4, **sizes), seq_length=256)
    choice = Choice("fp8", False, "fused")
    te_backend.choose_attention_backend("auto")
    before = losses(task, choice)
    attention_errors(task.config, task.resolved("bf16"))  # for which cuBLAS gets its workspace
    cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state()
    allocated = torch.cuda.memory_allocated()
    began = time.monotonic()
    record = autotune(task)
    assert time.monotonic() - began < 60
    assert torch.cuda.memory_allocated() <= allocated + 2**24
    assert torch.equal(torch.get_rng_state(), cpu) and torch.equal(torch.cuda.get_rng_state(), cuda)
    assert losses(task, choice) == before
    steps = [way for way in record.measured if "compute" in way.choice]
    assert len(steps) == 4 and all(way.ms for way in steps), record.to_json()
    assert record.choice.attention_backend in ("fused", "flash")


def test_a_graph_differs_in_what_it_lacks_too() -> None:
    expected = {"loss": torch.tensor(2.0), "weight": torch.tensor([3.0, 4.0]), "zero": torch.zeros(2)}
    assert measure._differences(expected, expected) == {"loss": 0.0, "weight": 0.0, "zero": 0.0}
    found = {"weight": torch.tensor([3.0, 4.5]), "zero": torch.tensor([0.0, 0.1]), "more": torch.zeros(1)}
    differences = measure._differences(expected, found)
    assert differences == pytest.approx({"loss": math.inf, "more": math.inf, "weight": 0.1, "zero": 0.1})
