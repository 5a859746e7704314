"""A checkpoint that an earlier state of this code wrote, in tests/data, and the losses of its next steps.

    python tests/reliability/stored_checkpoint.py CODE     records it anew, with the code in the folder CODE

CODE is a checkout of the state that shall have written it, one that has train/checkpoint/save.py:
`git archive COMMIT | tar x -C CODE`. What lies in tests/data was written by 2f2a9a1. One rank, ZeRO 1, FP8 with delayed
scaling on the CPU reference, a model of 0.01 M parameters; batches are random, so that no data is needed.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "data/stored_checkpoint"
CODE = sys.argv[1] if __name__ == "__main__" else Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(CODE))

import torch
from transformers import MistralConfig

from model.build import build_model
from model.config import load_config
from model.fp8.precision import Precision
from train.checkpoint import load as checkpoint
from train.config.arguments import TrainingArguments
from train.config.ds_config import resolve_ds_config
from train.data.stream import Batch
from train.engine.step import MicroStep, build_engine

SAVED_STEP, NEXT_STEPS = 5, 20
CONFIG = MistralConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=64,
    sliding_window=None,
    tie_word_embeddings=False,
)


class Stored:
    """The engine of the stored run, before its first step."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        raw = {
            "model": {"config": str(FOLDER / "config.json")},
            "data": {"sources": {"none": "none"}},
            "precision": {
                "recipe": "delayed",
                "fp8_format": "hybrid",
                "amax_history_len": 16,
                "backend": "reference",
            },
            "max_steps": SAVED_STEP + NEXT_STEPS,
            "max_seq_length": 16,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
        }
        args = TrainingArguments.from_dict(raw).resolve(1)
        self.config, self.precision = load_config(args.model.config), Precision(args.precision)
        model = build_model(self.config, args.model.variant, self.precision, seed=1)
        self.engine = build_engine(model, args, resolve_ds_config(args, 1)[0])
        self.micro_step = MicroStep(self.engine, self.precision, args)

    def losses(self, first: int, count: int) -> list[float]:
        """Take `count` steps from step `first` on."""
        return [self._step(step) for step in range(first, first + count)]

    def _step(self, step: int) -> float:
        ids = torch.randint(
            self.config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(step % 3)
        )
        return float(self.micro_step(Batch(ids, ids), 0))


def record() -> None:
    from train.checkpoint.save import Saver
    from train.engine.distributed import init_distributed

    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    (FOLDER / "config.json").write_text(json.dumps(CONFIG.to_dict(), indent=1) + "\n")
    init_distributed()
    stored = Stored()
    stored.losses(1, SAVED_STEP)
    state: dict[str, Any] = {"step": SAVED_STEP, "consumed_samples": 2 * SAVED_STEP, "world_size": 1}
    state |= {"consumed_tokens": 32 * SAVED_STEP, "zero_stage": 1, "train_config": {}, "model_config": {}}
    saver = Saver(stored.engine, FOLDER, stored.precision, 0, print)
    saver.begin(checkpoint.RunState(**state), background=False)
    saver.finish()
    for script in FOLDER.glob("*.py"):
        script.unlink()
    losses = stored.losses(SAVED_STEP + 1, NEXT_STEPS)
    (FOLDER / "losses.json").write_text(json.dumps({"torch": torch.__version__, "losses": losses}) + "\n")


if __name__ == "__main__":
    record()
