"""Whole runs, and what is in their folders afterwards."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch

from tests.train.runs import metrics, run
from train.checkpoint.files import committed, parse_step
from train.record.history import read_history
from train.record.provenance import read_starts
from train.record.run_folder import RunFolder


def test_run_folder_files(settings: dict, capsys: pytest.CaptureFixture) -> None:
    output_dir = run(settings, plots=True, save_steps=1, save_total_limit=2, keep_every_steps=3)
    said = capsys.readouterr().out
    assert str(output_dir.resolve()) in said.splitlines()[0]
    log = (output_dir / "train.log").read_text()
    assert all(line in log for line in said.splitlines())
    assert (output_dir / "loss.png").exists()
    assert [parse_step(path) for path in committed(output_dir / "checkpoints")] == [3, 5, 6]
    resolved = json.loads((output_dir / "train_config.json").read_text())
    assert resolved["train_batch_size_tokens"] == 2 * 2 * 64
    last = metrics(output_dir)[-1]
    assert last["tokens"] == 6 * 256 and last["unigram_loss"] > 0 and last["eval_loss"] > 0


def test_run_json_keeps_every_start(settings: dict, tmp_path: Path) -> None:
    """The first ends by an error, in the middle."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("train.trainer.held_out_losses", lambda *_: 1 / 0)
        run(settings, save_steps=2, eval_steps=3)
    output_dir = run(settings, save_steps=2)
    first, second = read_starts(RunFolder(output_dir))
    assert [(s["step"], s["resumed_from"] is None, s["ended"]["how"]) for s in (first, second)] == [
        (0, True, "failed"),
        (2, False, "done"),
    ]
    assert (first["ended"]["step"], second["ended"]["tokens"]) == (3, 6 * 256)
    assert second["fp8"].startswith("6/7 delayed") and second["hosts"] == {socket.gethostname(): [0]}
    assert "FP8: 6 of 7 GEMM modules ran FP8 (delayed scaling)" in second["startup_checks"]
    assert 0.01 < first["initial_gradient_error"] < 0.1 and second["initial_gradient_error"] is None
    assert list(second["attention"].values()) == [[0]] and second["versions"]["torch"] == torch.__version__
    assert (output_dir / "train.log").read_text().count("========") == 2
    assert "ZeroDivisionError: division by zero" in first["ended"]["why"]
    assert read_history(output_dir).marks() == [(2 * 256, "resumed")]
