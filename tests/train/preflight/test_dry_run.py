"""--dry_run: all that precedes the first step happens, and output_dir stays as it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.train.runs import run
from train import train


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_dry_run_of_a_new_run(settings: dict) -> None:
    assert not run(settings, dry_run=True).exists()


def test_dry_run_of_a_resumed_run(settings: dict, own_trained: Path) -> None:
    shutil.rmtree(own_trained / "checkpoints/step-00000006")
    (own_trained / "stopped.json").write_text("{}")
    before = content(own_trained)
    run(settings, dry_run=True)
    assert content(own_trained) == before


def test_dry_run_takes_no_lock(settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would make the folder, or write into that of another run."""
    config, ran = tmp_path / "config.json", []
    config.write_text(json.dumps(settings))
    monkeypatch.setattr("train.engine.process_group.init_distributed", lambda: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr("train.run.run_training", lambda args, _: ran.append(Path(args.output_dir).exists()))
    assert train.main([str(config), "--dry_run"]) == 0
    assert train.main([str(config), "--max_steps", "5", "--dry_run", "false"]) == 0
    assert ran == [False, True]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_out_of_memory_is_transient(
    settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(settings))

    def runs_out(*_: object) -> None:
        raise error

    monkeypatch.setattr("train.engine.process_group.init_distributed", lambda: None)
    monkeypatch.setattr("train.run.run_training", runs_out)
    assert train.main([str(config)]) == 1
