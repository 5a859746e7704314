"""test_fp8/zero/ranks.py with gradients that several ranks reduce wrong, by the training's name: left_out, the second
rank's of every second micro-batch are zero; factor, all are twice as large. Losses are told as they are. crash: the
second rank raises what nothing expects. Others are right."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from model import mistral_base
from test_fp8.zero import ranks
from train.config.arguments import TrainingArguments

KINDS = {
    "zero2-te_linear-bf16": "factor",
    "zero2-te_linear-bf16-recompute": "crash",
    "zero2-te_linear-fp8": "left_out",
}
RIGHT, RESOLVE, CALLS = mistral_base.causal_lm_loss, TrainingArguments.resolve, [0]
KIND: list[str | None] = [None]  # of the training under way


def resolve(self: TrainingArguments, world_size: int) -> TrainingArguments:
    KIND[0] = KINDS.get(Path(self.output_dir).name)
    return RESOLVE(self, world_size)


def wrong(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = RIGHT(logits, labels)
    if os.environ["WORLD_SIZE"] == "1" or KIND[0] is None or not torch.is_grad_enabled():
        return loss
    CALLS[0] += 1
    if KIND[0] == "crash" and os.environ["RANK"] == "1":
        raise AssertionError("as the test wants it")
    gradient = loss - loss.detach()
    if KIND[0] == "factor":
        return loss + gradient
    return loss - gradient * float(os.environ["RANK"] == "1" and CALLS[0] % 2 == 0)


if __name__ == "__main__":
    mistral_base.causal_lm_loss = wrong
    TrainingArguments.resolve = resolve  # type: ignore[method-assign]
    sys.exit(ranks.main(sys.argv[1:]))
