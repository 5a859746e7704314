"""precision.schedule with speed.cuda_graphs: each stage captures graphs of its own and makes its own FP8 copies of the
weights, with the numbers of the same schedule without graphs; and a run that is stopped in a stage goes on bit for bit.
"""

from __future__ import annotations

import weakref
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from model.graphs import _Captured
from tests.train.engine.test_speed import graphs_on_tapes
from tests.train.runs import PRECISIONS, curve, run
from tests.train.test_schedule import tensors
from train import trainer
from train.engine import step
from train.engine.step import MicroStep
from train.monitor import signals
from train.trainer import Trainer

GPU = torch.cuda.is_available()
CHANGES, STEPS = (2, 5), 7  # after steps 2 and 5: two steps in bf16, three in FP8, two in bf16


class MicroBatch(NamedTuple):
    """What a micro-batch ran on."""

    precision: str  # bf16 or the recipe
    first: bool | None  # whether FP8 copies of the weights are made (True) or used (False)
    captures: int  # for how many captures of the model's passes it waited
    launches: int  # of graphs


def with_schedule(settings: dict, variant: str, recipe: str, cuda_graphs: bool) -> dict:
    bf16 = PRECISIONS["bf16"]
    stages = [{"until_step": CHANGES[0], **bf16}, {"until_step": CHANGES[1], **PRECISIONS[recipe]}, bf16]
    return settings | {
        "model": {**settings["model"], "variant": variant},
        "precision": {"schedule": stages},
        "speed": {"cuda_graphs": cuda_graphs},
        "full_determinism": True,
        "max_steps": STEPS,
    }


def expected(recipe: str, cuda_graphs: bool, steps: range) -> list[MicroBatch]:
    """Of a start that takes these steps: a capture for it and for each stage that begins, then two launches a
    micro-batch, of which a step has two; copies of the weights in FP8 alone, made in the first of them."""
    found, last = [], None
    for number in steps:
        stage = sum(number > change for change in CHANGES)
        for index in (0, 1):
            precision, first = (recipe, index == 0) if stage == 1 else ("bf16", None)
            captures = int(cuda_graphs and stage != last)
            found.append(MicroBatch(precision, first, captures, 2 * cuda_graphs))
            last = stage
    return found


def observed(settings: dict, **changes: Any) -> list[MicroBatch]:
    """Train, and return what each micro-batch ran on."""
    seen, captures, launches = list[MicroBatch](), list[bool](), list[bool]()
    use_cuda_graphs, replay, take = step.use_cuda_graphs, torch.cuda.CUDAGraph.replay, MicroStep.__call__

    def captured(*of_run: Any) -> None:
        captures.append(True)
        use_cuda_graphs(*of_run)

    def launched(graph: Any) -> None:
        launches.append(True)
        replay(graph)

    def taken(self: MicroStep, batch: Any, index: int) -> torch.Tensor:
        firsts = list[bool | None]()
        hook = self.engine.register_forward_pre_hook(
            lambda _, ids, options: firsts.append(options["is_first_microbatch"]), with_kwargs=True
        )
        captures.clear()
        launches.clear()
        loss = take(self, batch, index)
        hook.remove()
        (first,), precision = firsts, self.precision
        name = precision.config.recipe if precision.fp8 else "bf16"
        seen.append(MicroBatch(name, first, len(captures), len(launches)))
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "use_cuda_graphs", captured)
        patch.setattr(torch.cuda.CUDAGraph, "replay", launched)
        patch.setattr(MicroStep, "__call__", taken)
        run(settings, **changes)
    return seen


@pytest.mark.skipif(GPU, reason="test_speed.py compares graphs with none there")
@pytest.mark.slow
@pytest.mark.parametrize(("variant", "recipe"), [("te_layer", "delayed"), ("te_linear", "current")])
def test_graphs_in_each_phase_are_bit_equal(
    settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, recipe: str
) -> None:
    """Nor does a resume from a checkpoint in each stage. On tapes."""
    graphs_on_tapes(monkeypatch)
    plain, whole = tmp_path / "plain", tmp_path / "whole"
    without = with_schedule(settings, variant, recipe, False) | {"output_dir": str(plain)}
    assert observed(without) == expected(recipe, False, range(1, STEPS + 1))
    with_graphs = with_schedule(settings, variant, recipe, True) | {"save_steps": 1, "save_total_limit": 10}
    seen = observed(with_graphs, output_dir=str(whole))
    assert seen == expected(recipe, True, range(1, STEPS + 1))
    assert curve(whole) == curve(plain) and tensors(whole, STEPS) == tensors(plain, STEPS)
    for saved in (1, 4):
        folder = tmp_path / f"from-{saved}"
        start = str(whole / f"checkpoints/step-{saved:08d}")
        seen = observed(with_graphs, output_dir=str(folder), save_steps=STEPS, resume_from_checkpoint=start)
        assert seen == expected(recipe, True, range(saved + 1, STEPS + 1))
        assert curve(folder) == curve(whole)[saved:] and tensors(folder, STEPS) == tensors(whole, STEPS)


# The CPU reference, with tapes for graphs, and Transformer Engine on a GPU.
CPU = pytest.param("cpu", marks=pytest.mark.skipif(GPU, reason="the GPU form of this test runs there"))
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.mark.parametrize(
    ("device", "recipe", "variant", "cuda_graphs"),
    [
        pytest.param("cpu", "delayed", "te_linear", True, marks=[*CPU.marks, pytest.mark.slow]),
        pytest.param("cpu", "current", "te_layer", False, marks=[*CPU.marks, pytest.mark.slow]),
    ]
    + [
        pytest.param("cuda", *case, marks=pytest.mark.gpu)
        for case in product(("delayed", "current"), ("te_layer", "te_linear"), (False, True))
    ],
)
def test_resume_in_fp8_phase_is_bit_exact(
    settings: dict,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    recipe: str,
    variant: str,
    cuda_graphs: bool,
) -> None:
    """Losses, gradient norms and what is saved at the end."""
    if device == "cpu":
        graphs_on_tapes(monkeypatch)
    settings, stop, take = with_schedule(settings, variant, recipe, cuda_graphs), 4, Trainer.take_step
    whole, folder = tmp_path / "whole", Path(settings["output_dir"])
    seen = observed(settings, output_dir=str(whole))
    assert seen == expected(recipe, cuda_graphs, range(1, STEPS + 1))

    def should_stop(self: Trainer) -> Any:
        if self.state.step + 1 == stop:
            signals.received.append("SIGTERM")
        return take(self)

    with monkeypatch.context() as patch:
        patch.setattr(signals, "received", [])
        patch.setattr(Trainer, "take_step", should_stop)
        with pytest.raises(signals.Stopped) as stopped:
            run(settings)
    assert stopped.value.step == stop
    assert curve(folder) == curve(whole)[:stop]
    assert observed(settings) == expected(recipe, cuda_graphs, range(stop + 1, STEPS + 1))
    assert all(norm > 0 for _, _, norm, *_ in curve(whole))
    assert curve(folder) == curve(whole) and tensors(folder, STEPS) == tensors(whole, STEPS)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_phase_change_releases_graphs(settings: dict, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """The memory of both stages' graphs, and with them both models, would not fit."""
    if device == "cpu":
        graphs_on_tapes(monkeypatch)
    held, alive = list[weakref.ref](), list[tuple[int, int]]()
    capture, build = _Captured.__init__, trainer.build_model_and_precision

    def captured(self: _Captured, *of_passes: Any) -> None:
        held.append(weakref.ref(self))
        capture(self, *of_passes)

    def made(*of_run: Any) -> Any:
        alive.append((len(held), sum(each() is not None for each in held)))
        return build(*of_run)

    monkeypatch.setattr(_Captured, "__init__", captured)
    monkeypatch.setattr(trainer, "build_model_and_precision", made)
    run(with_schedule(settings, "te_layer", "delayed", True))
    # by a stage: one for all micro-batches, in FP8 one for the first of a step, one for the others, one for health
    assert alive == [(0, 0), (1, 0), (4, 0)]
