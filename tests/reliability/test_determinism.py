"""Tests that repeated runs and resumed runs are bit-identical.

Loss, gradient norm, weights and optimizer state are compared. The runs use two gloo ranks and the CPU reference
implementation. The full form tests every recipe with every ZeRO stage.
"""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.reliability.launching import run_cases, training_case
from tests.train.runs import PRECISIONS, curve, tensors
from train import run as training

SHORT = [("delayed", 1)]  # tests/train/test_training.py has the others with one rank
FULL = list(itertools.product(PRECISIONS, range(4)))


@pytest.mark.parametrize("full_determinism", [True, False])
def test_random_states_differ_by_rank(monkeypatch: pytest.MonkeyPatch, full_determinism: bool) -> None:
    """Check the random generators of Python, NumPy and torch with the largest seed that all three accept."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    settings: Any = SimpleNamespace(seed=2**32 - 1, full_determinism=full_determinism)
    draws = []
    for rank in (0, 1, 0):
        monkeypatch.setattr(training.dist, "get_rank", lambda rank=rank: rank)
        training.seed_generators(settings)
        draws.append([random.random(), float(np.random.rand()), float(torch.rand(1))])
    assert draws[0] == draws[2] and all(a != b for a, b in zip(draws[0], draws[1], strict=True))
    assert torch.are_deterministic_algorithms_enabled() == full_determinism
    assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == full_determinism  # without it cuBLAS is an error then


@pytest.mark.parametrize(
    ("combinations", "steps"),
    [
        pytest.param(SHORT, 4, id="short", marks=pytest.mark.slow),
        pytest.param(FULL, 100, id="full", marks=[pytest.mark.reliability, pytest.mark.timeout(3600)]),
    ],
)
@pytest.mark.process
def test_full_determinism(
    data: Path, small_model: Path, tmp_path: Path, combinations: list[tuple[str, int]], steps: int
) -> None:
    """Compare two runs with the same seed, and a run that is stopped by a signal to one rank and then resumed."""
    chance = random.Random(1)
    cases, stopped_after = [], []
    for precision, stage in combinations:
        stop = chance.randint(2, 3 + steps // 10)
        stopped_after.append(stop)
        settings = {
            "model": {"config": str(small_model)},
            "data": {"sources": {"text": str(data)}},
            "precision": PRECISIONS[precision],
            "deepspeed": f"ds_config_zero{stage}.json",
            "max_seq_length": 32,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 2,
            "warmup_steps": 2,
            "max_eval_samples": 2,
            "logging_steps": 1,
            "max_steps": stop + steps,
        }
        folder = tmp_path / f"{precision}-{stage}"
        cases += [training_case(2, settings, folder / name) for name in ("one", "two")]
        cases.append(training_case(2, settings, folder / "stopped", {str(stop): "stop"}))
        cases.append(training_case(2, settings, folder / "stopped"))
    found = run_cases(tmp_path / "results", cases)
    for index, ((precision, stage), stop) in enumerate(zip(combinations, stopped_after, strict=True)):
        errors = [ranks[0]["error"] for ranks in found[4 * index : 4 * index + 4]]
        assert [error for error in errors if error] == [errors[2]]
        assert f"stopped on request after step {stop};" in errors[2]
        one, *others = (tmp_path / f"{precision}-{stage}" / name for name in ("one", "two", "stopped"))
        assert len(curve(one)) == stop + steps and None not in {entry[2] for entry in curve(one)}
        assert len(list((one / f"checkpoints/step-{stop + steps:08d}").glob("*.pt"))) >= 3
        for other in others:
            assert curve(other) == curve(one), other
            assert tensors(other, stop + steps) == tensors(one, stop + steps), other
