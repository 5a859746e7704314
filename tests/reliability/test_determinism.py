"""Tests that repeated runs and resumed runs are bit-identical.

Loss, gradient norm, weights and optimizer state are compared. The runs use two gloo ranks and the CPU reference
implementation. The full form tests every recipe with every ZeRO stage.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.reliability.launching import run_cases
from tests.reliability.number_ranks import tensors_in
from tests.train.runs import PRECISIONS, curve
from train import run as training

SHORT = [("delayed", 1)]  # tests/train/test_training.py has the others with one rank
FULL = list(itertools.product(PRECISIONS, range(4)))


def digests(checkpoint: Path) -> dict[str, str]:
    """Return a hash of the tensors in each file: weights, optimizer state and FP8 state."""
    found = {}
    for file in sorted(checkpoint.glob("*.pt")):
        whole = hashlib.sha256()
        for tensor in tensors_in(torch.load(file, weights_only=False)):
            whole.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        found[file.name] = whole.hexdigest()
    return found


def whole_run(settings: dict, output_dir: Path, spoiled: dict[str, str]) -> tuple[int, str, dict[str, Any]]:
    return 2, "whole_run", {"settings": {**settings, "output_dir": str(output_dir)}, "spoiled": spoiled}


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
        cases += [whole_run(settings, folder / name, {}) for name in ("one", "two")]
        cases += [whole_run(settings, folder / "stopped", spoiled) for spoiled in ({str(stop): "stop"}, {})]
    found = run_cases(tmp_path / "results", cases)
    for index, ((precision, stage), stop) in enumerate(zip(combinations, stopped_after, strict=True)):
        errors = [ranks[0]["error"] for ranks in found[4 * index : 4 * index + 4]]
        assert [error for error in errors if error] == [errors[2]]
        assert f"stopped on request after step {stop};" in errors[2]
        folder, last = tmp_path / f"{precision}-{stage}", f"checkpoints/step-{stop + steps:08d}"
        curves = {name: curve(folder / name) for name in ("one", "two", "stopped")}
        assert len(curves["one"]) == stop + steps and None not in {entry[2] for entry in curves["one"]}
        hashes = {name: digests(folder / name / last) for name in curves}
        assert len(hashes["one"]) >= 3
        for name in ("two", "stopped"):
            assert curves[name] == curves["one"], (name, precision, stage)
            assert hashes[name] == hashes["one"], (name, precision, stage)
