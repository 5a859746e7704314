"""Tests of resumed runs on two Hopper GPUs.

The runs use delayed scaling with Transformer Engine, and ZeRO 1 with float32 gradient accumulation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.reliability.launching import write_small_config
from tests.reliability.test_world_size import Runs, differing
from tests.train.runs import curve

pytestmark = pytest.mark.multi_gpu

TOKENS, MICRO_BATCH, SAVED, STEPS = 128, 4, 10, 20


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Train on two GPUs for STEPS steps, and resume from the checkpoint of step SAVED on two GPUs and on one GPU."""
    folder = tmp_path_factory.mktemp("gpu_runs")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}
    base: dict[str, Any] = {
        "model": {"config": write_small_config(folder, **sizes), "variant": "te_layer"},
        "data": {"sources": {"text": str(data)}},
        "precision": {"recipe": "delayed"},
        "full_determinism": True,
        "max_seq_length": TOKENS,
        "per_device_train_batch_size": MICRO_BATCH,
        "max_eval_samples": 8,
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
        "learning_rate": 1e-3,
    }
    runs = Runs(folder, base, SAVED, STEPS)
    runs.whole("two", 2, 2 * MICRO_BATCH)
    runs.resumed("two_to_two", 2, "two")
    runs.resumed("two_to_one", 1, "two")
    return runs.start()


@pytest.mark.process
def test_resume_on_two_gpus_is_bit_exact(runs: Runs) -> None:
    """The loss and gradient norm of each step after the resume are identical to those of the uninterrupted run."""
    whole, resumed = (curve(runs.folder / name / "run") for name in ("two", "two_to_two"))
    assert [step for step, *_ in resumed] == list(range(SAVED + 1, STEPS + 1))
    assert resumed == whole[SAVED:]
    assert differing(runs.state("two_to_two", "loaded"), runs.state("two", "kept")) == []


@pytest.mark.process
def test_resume_from_two_gpus_on_one(runs: Runs) -> None:
    assert any(key.startswith("FP8") for key in runs.state("two", "kept"))
    runs.check_state_and_samples("two", "two_to_one", 1e-4)
    losses, uninterrupted = runs.losses("two_to_one"), runs.losses("two")
    assert losses[0] == pytest.approx(uninterrupted[0], rel=1e-3)
    assert losses[-1] == pytest.approx(uninterrupted[-1], rel=3e-2)


@pytest.mark.process
def test_process_group_timeouts_exceed_the_watchdog(runs: Runs) -> None:
    runs.check_group_timeouts("two")
