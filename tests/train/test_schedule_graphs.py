"""Tests of precision.schedule with speed.cuda_graphs.

Each phase captures its own graphs. The results equal those without graphs, and those of a run that is stopped and
resumed, bit for bit.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from model.graphs import _Captured
from tests.train.engine.test_speed import graphs_on_tapes
from tests.train.runs import PRECISIONS, curve, run, tensors
from train import phase
from train.monitor import signals
from train.trainer import Trainer

GPU = torch.cuda.is_available()
CHANGES, STEPS = (2, 5), 7  # after steps 2 and 5: two steps in bf16, three in FP8, two in bf16


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


@pytest.mark.skipif(GPU, reason="test_speed.py compares graphs with none there")
@pytest.mark.slow
@pytest.mark.parametrize(("variant", "recipe"), [("te_layer", "delayed"), ("te_linear", "current")])
def test_graphs_in_each_phase_are_bit_equal(
    settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, recipe: str
) -> None:
    """So are resumes from a checkpoint in each phase. On a CPU, tapes stand in for graphs."""
    graphs_on_tapes(monkeypatch)
    plain, whole = tmp_path / "plain", tmp_path / "whole"
    without = with_schedule(settings, variant, recipe, False) | {"output_dir": str(plain)}
    run(without)
    with_graphs = with_schedule(settings, variant, recipe, True) | {"save_steps": 1, "save_total_limit": 10}
    run(with_graphs, output_dir=str(whole))
    assert curve(whole) == curve(plain) and tensors(whole, STEPS) == tensors(plain, STEPS)
    for saved in (1, 4):
        folder = tmp_path / f"from-{saved}"
        start = str(whole / f"checkpoints/step-{saved:08d}")
        run(with_graphs, output_dir=str(folder), save_steps=STEPS, resume_from_checkpoint=start)
        assert curve(folder) == curve(whole)[saved:] and tensors(folder, STEPS) == tensors(whole, STEPS)


# The CPU reference, with tapes for graphs, and Transformer Engine on a GPU.
CPU = pytest.param("cpu", marks=pytest.mark.skipif(GPU, reason="the GPU form of this test runs there"))
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("variant", ["te_layer", "te_linear"])
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_resume_in_fp8_phase_is_bit_exact(
    settings: dict,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
    variant: str,
    cuda_graphs: bool,
) -> None:
    """Losses, gradient norms and what is saved at the end."""
    settings, stop, take = with_schedule(settings, variant, recipe, cuda_graphs), 4, Trainer.take_step
    whole, folder = tmp_path / "whole", Path(settings["output_dir"])
    run(settings, output_dir=str(whole))

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
    run(settings)
    assert all(norm > 0 for _, _, norm, *_ in curve(whole))
    assert curve(folder) == curve(whole) and tensors(folder, STEPS) == tensors(whole, STEPS)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_phase_change_releases_graphs(settings: dict, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """The memory of both stages' graphs, and with them both models, would not fit."""
    if device == "cpu":
        graphs_on_tapes(monkeypatch)
    held, alive = list[weakref.ref](), list[tuple[int, int]]()
    capture, build = _Captured.__init__, phase.build_model_and_precision

    def captured(self: _Captured, *of_passes: Any) -> None:
        held.append(weakref.ref(self))
        capture(self, *of_passes)

    def made(*of_run: Any) -> Any:
        alive.append((len(held), sum(each() is not None for each in held)))
        return build(*of_run)

    monkeypatch.setattr(_Captured, "__init__", captured)
    monkeypatch.setattr(phase, "build_model_and_precision", made)
    run(with_schedule(settings, "te_layer", "delayed", True))
    # by a stage: one for all micro-batches, in FP8 one for the first of a step, one for the others, one for health
    assert alive == [(0, 0), (1, 0), (4, 0)]
