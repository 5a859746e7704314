"""Short whole runs in this process, for tests; the fixture `settings` (conftest.py) has what they need."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from tests.model.conftest import without_fp8
from train import run as training
from train.config.load import build_arguments, open_inputs, resolve_arguments

ROOT = Path(__file__).resolve().parent.parent.parent


def run(settings: dict, plots: bool = False, **changes: object) -> Path:
    """Train in this process, with a model and an engine of its own. Without its plots, of loss and health, which take
    longer than a short run, unless it `plots`."""
    merged = {**settings, **changes}
    arguments = resolve_arguments(build_arguments(merged), dist.get_world_size())
    with ExitStack() as stack:
        if not plots:
            stack.enter_context(mock.patch("train.record.plots.draw"))
            stack.enter_context(mock.patch("train.record.plots.draw_health", return_value=False))
        training.run_training(arguments, open_inputs(arguments))
    return Path(merged["output_dir"])


def metrics(output_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def curve(output_dir: Path) -> list[tuple]:
    """What must be equal, bit for bit, of two runs with the same numbers."""
    return [
        (m["step"], m["loss"], m["grad_norm"], m["learning_rate"], m.get("eval_loss"))
        for m in metrics(output_dir)
        if "loss" in m
    ]


def tensors(output_dir: Path, step: int) -> list[Any]:
    """Return all numbers in a checkpoint: weights, optimizer state, FP8 state and states of random generators."""
    files = sorted((output_dir / f"checkpoints/step-{step:08d}").glob("*.pt"))
    found = tree_leaves([torch.load(file, weights_only=False) for file in files])
    found = [leaf.flatten().tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in found]
    return [leaf for leaf in found if isinstance(leaf, int | float | list)]


PRECISIONS = {
    "bf16": {"compute": "bf16"},
    "delayed": {"recipe": "delayed", "amax_history_len": 4},
    "current": {"recipe": "current"},
    "block": {"recipe": "block"},
}


def gradients_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference's weight gradients in bf16 from now on; its forward is as before."""
    without_fp8(monkeypatch, "tn")
