"""test_fp8/zero/ranks.py with gradients that several ranks reduce wrong, as KIND of the environment says: left_out, the
second rank's of every second micro-batch are zero; factor, all are twice as large. Losses are told as they are. crash:
the second rank raises what nothing expects."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from model import mistral_base
from test_fp8.zero import ranks

RIGHT, CALLS = mistral_base.causal_lm_loss, [0]


def wrong(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = RIGHT(logits, labels)
    if os.environ["WORLD_SIZE"] == "1" or not torch.is_grad_enabled():
        return loss
    CALLS[0] += 1
    if os.environ["KIND"] == "crash" and os.environ["RANK"] == "1":
        raise AssertionError("as the test wants it")
    gradient = loss - loss.detach()
    if os.environ["KIND"] == "factor":
        return loss + gradient
    return loss - gradient * float(os.environ["RANK"] == "1" and CALLS[0] % 2 == 0)


if __name__ == "__main__":
    mistral_base.causal_lm_loss = wrong
    sys.exit(ranks.main(sys.argv[1:]))
