"""Optimizer states in host memory (zero_optimization.offload_optimizer): the same training and checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reliability.launching import write_small_config
from tests.reliability.test_world_size import Runs
from tests.train.engine.test_packed_adamw import FLOAT32, Trained, equal
from tests.train.runs import PRECISIONS
from tests.train.test_training import check_resume
from train.config.load import load_deepspeed
from train.engine import zero

GPU = torch.cuda.is_available()


def offload(stage: int, **more: Any) -> dict[str, Any]:
    """Return the configuration keys for optimizer offload with a shipped DeepSpeed configuration."""
    deepspeed = load_deepspeed(f"ds_config_zero{stage}.json")
    deepspeed["zero_optimization"]["offload_optimizer"] = {"device": "cpu", **more}
    return {"deepspeed": deepspeed}


@pytest.mark.skipif(GPU, reason="test_gpu_run_resumes_bit_exactly is the form of this test for GPUs")
@pytest.mark.process
@pytest.mark.parametrize(("stage", "precision"), [(2, {}), (3, {"fp8_weight_gather": True})])
def test_two_ranks_train_and_resume(data: Path, tmp_path: Path, stage: int, precision: dict) -> None:
    """As without offloading; also on one rank, and when offloading is switched on or off."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    base = {
        "model": {"config": write_small_config(tmp_path, **sizes)},
        "data": {"sources": {"text": str(data)}},
        "precision": precision,
        "max_seq_length": 32,
        "per_device_train_batch_size": 1,
        "max_eval_samples": 1,
        "logging_steps": 1,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
    }
    plain = {"deepspeed": f"ds_config_zero{stage}.json"}
    runs = Runs(tmp_path, base)
    runs.whole("plain", 2, 4, **plain)
    runs.whole("two", 2, 4, **offload(stage))
    runs.resumed("again", 2, "two", **offload(stage, pin_memory=False))
    runs.resumed("on", 2, "plain", **offload(stage))
    runs.resumed("off", 2, "two", **plain)
    runs.resumed("one", 1, "two")
    runs.start()
    for name, of in (("again", "two"), ("on", "plain"), ("off", "two"), ("one", "two")):
        loaded, kept = runs.state(name, "loaded"), runs.state(of, "kept")
        assert loaded.keys() == kept.keys()
        # the first row of an amax history is that of a rank
        assert [key for key in kept if "amax" not in key and not torch.equal(loaded[key], kept[key])] == []
    assert runs.losses("again") == runs.losses("two")
    for name in ("two", "on", "off", "one"):
        assert runs.losses(name) == pytest.approx(runs.losses("plain"), rel=1e-3)
    for step in (1, 2):
        assert runs.first_losses("two", step) == pytest.approx(runs.first_losses("plain", step), rel=1e-5)


@pytest.mark.skipif(GPU, reason="test_gpu_run_resumes_bit_exactly is the form of this test for GPUs")
@pytest.mark.parametrize("stage", [2, 3])
def test_run_resumes_bit_exactly(settings: dict, stage: int) -> None:
    """With the check of the gradients, which compares their norm."""
    check_resume(settings | offload(stage) | {"preflight": True}, "te_layer", PRECISIONS["delayed"])


@pytest.mark.gpu
@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("stage", [2, 3])
def test_gpu_run_resumes_bit_exactly(settings: dict, stage: int, pin_memory: bool) -> None:
    settings |= offload(stage, pin_memory=pin_memory) | {"preflight": True}
    check_resume(settings, "te_layer", PRECISIONS["delayed"])


@pytest.mark.parametrize("stage", [2, 3])
def test_skipped_step_changes_nothing(settings: dict, stage: int) -> None:
    """DeepSpeed kept the gradients of a skipped step at ZeRO 2, and then skipped all later steps."""
    plain, skipping = (Trained(settings, FLOAT32, **offload(stage)) for _ in range(2))

    def spoil(_: Any, __: Any, output: Any) -> None:
        output.loss = output.loss * math.nan

    hook = skipping.engine.module.register_forward_hook(spoil)
    skipping.steps(1)
    hook.remove()
    assert skipping.engine.skipped_steps == 1 and not any(
        map(len, zero.base_optimizer(skipping.engine).state.values())
    )
    assert equal(skipping.steps(2).whole(), plain.steps(2).whole())
    assert skipping.engine.skipped_steps == 1
