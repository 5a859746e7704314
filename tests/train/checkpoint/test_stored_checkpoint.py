"""A checkpoint that an earlier state of this code wrote is read, and training goes on from it with the same losses.

tests/data/stored_checkpoint is of one rank, ZeRO 1, FP8 with delayed scaling on the CPU reference, a model of 0.01 M
parameters; batches are random, so that no data is needed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from model.build import build_model
from model.config import load_config
from model.fp8.precision import Precision
from train.checkpoint.files import checkpoint_name, problems, read_state
from train.checkpoint.load import choose_checkpoint, load_checkpoint
from train.config.ds_config import resolve_ds_config
from train.config.load import build_arguments, resolve_arguments
from train.data.stream import Batch
from train.engine.process_group import suppress_prints
from train.engine.step import MicroStep, build_engine

FOLDER = Path(__file__).resolve().parents[2] / "data/stored_checkpoint"
SAVED_STEP, NEXT_STEPS = 5, 20
# The losses were recorded on one kind of CPU; another one, or torch, may round a bf16 product differently.
TOLERANCE = 1e-2


class Stored:
    """The engine of the stored run, before its first step."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        precision = {
            "recipe": "delayed",
            "fp8_format": "hybrid",
            "amax_history_len": 16,
            "backend": "reference",
        }
        raw = {
            "model": {"config": str(FOLDER / "config.json")},
            "data": {"sources": {"none": "none"}},
            "precision": precision,
            "max_steps": SAVED_STEP + NEXT_STEPS,
            "max_seq_length": 16,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
        }
        args = resolve_arguments(build_arguments(raw), 1)
        self.config, self.precision = load_config(args.model.config), Precision(args.precision)
        model = build_model(self.config, args.model.variant, self.precision, seed=1)
        self.engine = build_engine(model, args, resolve_ds_config(args, self.config, 1))
        self.micro_step = MicroStep(self.engine, self.precision, args)

    def losses(self, first: int, count: int) -> list[float]:
        """Take `count` steps from step `first` on."""
        found = []
        for step in range(first, first + count):
            generator = torch.Generator().manual_seed(step % 3)
            ids = torch.randint(self.config.vocab_size, (2, 16), generator=generator)
            found.append(float(self.micro_step(Batch(ids, ids), 0)))
        return found


@pytest.mark.usefixtures("process_group")
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs a machine without CUDA, as the one that recorded it"
)
def test_stored_checkpoint_resumes_with_recorded_losses() -> None:
    path = choose_checkpoint(FOLDER, "auto")
    assert path is not None and path.name == checkpoint_name(SAVED_STEP)
    assert read_state(path).step == SAVED_STEP
    stored = Stored()
    with suppress_prints():
        load_checkpoint(stored.engine, path, stored.precision)
    expected = json.loads((FOLDER / "losses.json").read_text())["losses"]
    losses = stored.losses(SAVED_STEP + 1, NEXT_STEPS)
    assert losses == pytest.approx(expected, rel=TOLERANCE)
    assert problems(path) == []  # it was only read
