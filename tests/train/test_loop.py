"""train/loop.py: what was proven at the start holds in the steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from model.fp8 import te_backend
from model.proof import ProofError
from tests.train.runs import gradients_without_fp8, run
from train.engine.step import MicroStep
from train.loop import TrainingError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="takes the reference's GEMMs out of FP8")


def after_step(monkeypatch: pytest.MonkeyPatch, number: int, change: Callable[[], None]) -> None:
    """Have `change` made after that many optimizer steps."""
    take, steps = MicroStep.__call__, []

    def counted(self, batch, index):  # type: ignore[no-untyped-def]
        if index == 0:
            steps.append(index)
            if len(steps) == number + 1:
                change()
        return take(self, batch, index)

    monkeypatch.setattr(MicroStep, "__call__", counted)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_that_leave_fp8_end_the_run(
    settings: dict, monkeypatch: pytest.MonkeyPatch, accumulation: int
) -> None:
    """One GEMM of a step in bf16 is enough; the forward is as before."""
    after_step(monkeypatch, 2, lambda: gradients_without_fp8(monkeypatch))
    with pytest.raises(TrainingError, match="step 4: the backward of 6 FP8 modules ran .* FP8 GEMMs, not"):
        run(
            settings,
            max_steps=6,
            logging_steps=2,
            save_strategy="no",
            gradient_accumulation_steps=accumulation,
        )


def test_another_attention_than_the_proven_one_ends_the_run(
    settings: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = ["fused (cuDNN)"]
    monkeypatch.setattr(te_backend, "attention_backend_in_use", lambda te: used[0])
    after_step(monkeypatch, 0, lambda: used.insert(0, "flash (2.8)"))
    with pytest.raises(
        ProofError, match=r"attention fused \(cuDNN\) was proven, and the first step ran flash"
    ):
        run(settings, max_steps=3, save_strategy="no")
