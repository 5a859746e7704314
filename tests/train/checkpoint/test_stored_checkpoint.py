"""A checkpoint that an earlier state of this code wrote is read, and training goes on from it with the same losses.

tests/data/stored_checkpoint is of one rank, ZeRO 1, FP8 with delayed scaling on the CPU reference, a model of 0.01 M
parameters; batches are random, so that no data is needed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.conftest import random_ids
from tests.reliability.launching import build_micro_step
from train.checkpoint.files import checkpoint_name, problems, read_state
from train.checkpoint.load import choose_checkpoint, load_checkpoint
from train.data.stream import Batch
from train.engine.process_group import suppress_prints

FOLDER = Path(__file__).resolve().parents[2] / "data/stored_checkpoint"
SAVED_STEP, NEXT_STEPS = 5, 20
# The losses were recorded on one kind of CPU; another one, or torch, may round a bf16 product differently.
TOLERANCE = 1e-2


@pytest.mark.usefixtures("process_group")
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs a machine without CUDA, as the one that recorded it"
)
def test_stored_checkpoint_resumes_with_recorded_losses() -> None:
    path = choose_checkpoint(FOLDER, "auto")
    assert path is not None and path.name == checkpoint_name(SAVED_STEP)
    assert read_state(path).step == SAVED_STEP
    precision = {"recipe": "delayed", "fp8_format": "hybrid", "amax_history_len": 16, "backend": "reference"}
    steps = {"max_steps": SAVED_STEP + NEXT_STEPS, "learning_rate": 1e-2}
    micro_step, _ = build_micro_step(str(FOLDER / "config.json"), precision=precision, **steps)
    with suppress_prints():
        load_checkpoint(micro_step.engine, path, micro_step.precision)
    losses = []
    for step in range(SAVED_STEP + 1, SAVED_STEP + NEXT_STEPS + 1):
        ids = random_ids(micro_step.engine.module.config, 2, 16, step % 3)
        losses.append(float(micro_step(Batch(ids, ids), 0)))
    expected = json.loads((FOLDER / "losses.json").read_text())["losses"]
    assert losses == pytest.approx(expected, rel=TOLERANCE)
    assert problems(path) == []  # it was only read
