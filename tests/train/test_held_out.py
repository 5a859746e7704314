"""train/trainer.py: every held-out sample counts once, on whatever rank, and training is as before."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.folders import make_folder
from train.data.source import open_held_out
from train.data.stream import NO_LABEL, Batch, SampleStream, open_stream
from train.trainer import held_out_losses


class Engine:
    """The loss of a token is its id, and sample n has n for all ids, times the FP8 scale, which each forward raises."""

    def __init__(self, growth: int = 1) -> None:
        self.device, self.module, self.forwards = "cpu", None, 0
        self.scale, self.growth = torch.ones(1), growth
        self.modes: list[str] = []
        self.eval, self.train = (partial(self.modes.append, mode) for mode in ("eval", "train"))

    def __call__(self, ids: torch.Tensor, labels: torch.Tensor, documents: None) -> Any:
        self.forwards += 1
        self.scale.add_(self.growth)
        return SimpleNamespace(
            loss=torch.nan_to_num(labels[labels != NO_LABEL].float().mean()) * self.scale[0]
        )

    def evaluate(self, stop_after: int = 0, **samples: int) -> dict[str, float] | None:
        """With two rows a forward; asked to stop after so many forwards."""
        streams: Any = {n: SimpleNamespace(parts={n: range(k)}, batch=_batch) for n, k in samples.items()}
        return self.evaluate_streams(streams, stop_after)

    def evaluate_streams(self, streams: Any, stop_after: int = 0) -> dict[str, float] | None:
        precision: Any = SimpleNamespace(has_state=False)
        return held_out_losses(self, precision, streams, 2, lambda: self.forwards == stop_after)


def _batch(start: int, count: int, rows: int) -> Batch:
    ids = torch.arange(start, start + count).repeat(rows)[:rows, None].expand(-1, 4)
    return Batch(ids, ids.clone())


@pytest.mark.parametrize("samples", range(1, 10))
def test_more_ranks_than_samples(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with two rows each: the last of their forwards may have fewer samples than rows, or none."""
    totals: list[torch.Tensor] = []
    forwards = []
    for rank in range(2):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(dist, "all_reduce", totals.append)
        engine = Engine(growth=0)
        engine.evaluate(own=samples)
        forwards.append(engine.forwards)
    assert forwards[0] == forwards[1] == -(-samples // 4)
    assert sum(totals).tolist() == [4 * sum(range(samples)), 4 * samples]


def test_held_out_sets_are_separate(process_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the FP8 state that training left, which is there again afterwards."""
    engine = Engine()
    monkeypatch.setattr("train.trainer.fp8_state", lambda *_: {"scale": engine.scale})
    monkeypatch.setattr("train.trainer.snapshot_fp8_state", lambda *_: {"scale": engine.scale.clone()})
    # samples 0 and 1 with a scale of 2, sample 2 with one of 3; then sample 0, and a row without labels
    assert engine.evaluate(own=3, short=1, same=3) == {"own": (1 * 2 + 2 * 3) / 3, "short": 0, "same": 8 / 3}
    assert engine.scale == 1
    # or no step after it would recompute activations, or replay a CUDA graph
    assert engine.modes == ["eval", "train"]


def test_each_source_has_a_loss(process_group: None, tmp_path: Path) -> None:
    """The total is the mean over all tokens, so a source counts by the size of its eval split."""
    tokens = {"a": np.full(20 * 4 + 1, 3), "b": np.full(60 * 4 + 1, 7)}
    folders = {n: make_folder(tmp_path / n, {"train": [t], "eval": [t]}) for n, t in tokens.items()}
    train = open_stream(folders, {"a": 0.9, "b": 0.1}, 4, seed=1)
    for most, total in ((None, 6), (8, 6), (4, 6), (1, 5)):
        held_out = open_held_out(train.sources, folders, {"other": folders["a"]}, 4)
        streams = {loss: SampleStream(each, None, 1, max_samples=most) for loss, each in held_out.items()}
        losses = Engine(growth=0).evaluate_streams(streams)
        assert losses == {"eval_loss": total, "eval_loss/a": 3, "eval_loss/b": 7, "eval_loss/other": 3}


@pytest.mark.parametrize("batches", [1, 2, 3, 4])
def test_stopped_evaluation_returns_no_loss(process_group: None, batches: int) -> None:
    engine = Engine()
    assert engine.evaluate(stop_after=batches, own=3, other=3) is None and engine.forwards == batches
    assert engine.modes == ["eval", "train"]
