"""A checkpoint of an earlier state of this code is read, and training goes on from it with the same losses."""

from __future__ import annotations

import json

import pytest
import torch

from tests.reliability.stored_checkpoint import FOLDER, NEXT_STEPS, SAVED_STEP, Stored
from train.checkpoint import load as checkpoint
from train.engine.step import without_prints

# The losses were recorded on one kind of CPU; another one, or torch, may round a bf16 product differently.
TOLERANCE = 1e-2


@pytest.mark.usefixtures("process_group")
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs a machine without CUDA, as the one that recorded it"
)
def test_the_next_losses_are_those_of_the_run_that_saved() -> None:
    path = checkpoint.choose(FOLDER, "auto", print)
    assert path is not None and path.name == checkpoint.name_of(SAVED_STEP)
    assert checkpoint.read_state(path).step == SAVED_STEP
    stored = Stored()
    with without_prints():
        checkpoint.load(stored.engine, path, stored.precision)
    expected = json.loads((FOLDER / "losses.json").read_text())["losses"]
    losses = stored.losses(SAVED_STEP + 1, NEXT_STEPS)
    assert losses == pytest.approx(expected, rel=TOLERANCE)
    assert checkpoint.problems(path) == []  # it was only read
