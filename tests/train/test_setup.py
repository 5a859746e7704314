"""train/run.py and train/phase.py: what a run is built from, by rank and by checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from train import phase
from train import run as training
from train.checkpoint.files import RunState
from train.config.arguments import TrainingArguments
from train.config.load import build_arguments, open_inputs, resolve_arguments
from train.record.run_folder import RunFolder


def arguments(**changes: Any) -> TrainingArguments:
    raw: dict[str, Any] = {
        "model": {"config": "tiny", "variant": "te_linear", "init_from": "other/hf"},
        "data": {"sources": {"a": "data/a"}},
        "seed": 7,
        "max_steps": 5,
        "max_seq_length": 64,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
    }
    return resolve_arguments(build_arguments(raw | changes), 1)


def state_of(**known: Any) -> RunState:
    position = {"step": 4, "consumed_samples": 24, "consumed_tokens": 1536, "world_size": 1}
    return RunState(**position | known, zero_stage=1, train_config={}, model_config={})


@pytest.fixture(autouse=True)
def rank(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of one process, which may take itself for another one."""
    found = [0]
    monkeypatch.setattr(dist, "get_rank", lambda: found[0])
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    return found


def test_each_rank_verifies_its_share(
    settings: dict, data: Path, monkeypatch: pytest.MonkeyPatch, rank: list[int]
) -> None:
    """Terabytes would take each of them hours; that of held-out data is among them."""
    shares: list[tuple[str, int, int]] = []
    verify = phase.SampleStream.verify
    monkeypatch.setattr(
        phase.SampleStream,
        "verify",
        lambda self, *share: shares.append((self.split, *share)) or verify(self),
    )
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    rank[0] = 3
    args = resolve_arguments(build_arguments({**settings, "data": {**settings["data"], "verify": True}}), 8)
    watchdog: Any = SimpleNamespace(phase=lambda *_, **__: None)
    inputs = open_inputs(args)
    training.open_run(args, inputs, phase.SampleStream(inputs.train, None, args.seed), watchdog)
    assert shares == [("train", 3, 8), ("eval", 3, 8)]


def test_calibration_uses_the_first_batch_of_the_rank(
    monkeypatch: pytest.MonkeyPatch, rank: list[int]
) -> None:
    rank[0] = 1
    asked: list[tuple] = []
    row = SimpleNamespace(to=lambda device: (row, row, None))
    stream: Any = SimpleNamespace(batch=lambda *its: asked.append(its) or row)
    monkeypatch.setattr(phase, "calibrate", lambda *its: asked.append(its[-2:]) or {})
    config = SimpleNamespace(calibration_passes=2)
    precision: Any = SimpleNamespace(device="cpu", fp8=True, torchao=False, has_state=True, config=config)
    run: Any = SimpleNamespace(train=stream)
    phase.calibrate_scales(run, arguments(), nn.Identity(), precision, state_of(), None)
    assert asked == [(26, 2), (3, None)]
    precision.has_state = False  # this rank has nothing to calibrate or to compare
    phase.calibrate_scales(run, arguments(), nn.Identity(), precision, state_of(), None)
    precision.has_state, config.calibration_passes = True, 0
    rank[0] = 0
    assert phase.calibrate_scales(run, arguments(), nn.Identity(), precision, state_of(), None) is None
    assert len(asked) == 2


def test_start_records_only_its_changes(tmp_path: Path) -> None:
    """With what makes a run out of a checkpoint of another one."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.stopped.write_text("{}")
    other = tmp_path / "other/checkpoints/step-00000004"
    changes = [{"step": step, "key": "learning_rate", "old": 1, "new": step} for step in (2, 4)]
    state = state_of(changes=changes, began_at={"path": "there"})
    args = arguments(output_dir=str(folder.path))
    run: Any = SimpleNamespace(args=args, folder=folder, ds_config={})
    training.open_run_folder(run, state, other).close()
    (line,) = map(json.loads, folder.metrics.read_text().splitlines())
    assert (line["step"], line["tokens"]) == (4, 1536)
    assert (line["changes"], line["began_at"]) == (changes[1:], {"path": "there"})
    assert not folder.stopped.exists()
    assert json.loads(folder.train_config.read_text()) == args.to_dict()
    state.changes = changes[:1]
    training.open_run_folder(run, state, folder.checkpoints / "step-00000004").close()
    assert folder.metrics.read_text() == ""  # of the start before it, which has saved nothing
