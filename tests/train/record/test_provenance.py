"""train/record/provenance.py: run.json, hashes of the configuration and the sources, the commit, the files of a run."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tests.train.runs import metrics, run
from train.checkpoint.files import committed, parse_step
from train.record import provenance
from train.record.history import read_history
from train.record.provenance import RunRecord, read_starts
from train.record.run_folder import RunFolder


def record(folder: RunFolder, step: int = 0, **known: object) -> RunRecord:
    return RunRecord(
        folder, {"time": 1.0, "step": step, **known}, lambda: (7, 70), {KeyboardInterrupt: "stopped"}
    )


def test_starts_are_recorded(tmp_path):
    folder = RunFolder(tmp_path)
    with record(folder, a=1) as first:
        (running,) = read_starts(folder)
        assert running["ended"] is None and running["a"] == 1
        first.add_phase({"step": 3, "fp8": "a"})
        assert read_starts(folder)[0]["phases"] == [{"step": 3, "fp8": "a"}]
    for step, error in ((7, KeyboardInterrupt), (8, ValueError)):
        with pytest.raises(error), record(folder, step):
            raise error
    ends = [
        (start["step"], *[start["ended"][key] for key in ("how", "step", "tokens")])
        for start in read_starts(folder)
    ]
    assert ends == [(0, "done", 7, 70), (7, "stopped", 7, 70), (8, "failed", 7, 70)]


def test_full_disk_warns(tmp_path, monkeypatch, logged):
    error = OSError(28, "No space left on device")
    monkeypatch.setattr(provenance, "write_durably", Mock(side_effect=error))
    with record(RunFolder(tmp_path)) as its:
        its.add_phase({"step": 3})
    assert len(logged) == 3


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({"output_dir": "b", "resume_from_checkpoint": "never", "run_name": "r"}, True),
        ({"report_to": "wandb", "wandb_project": "p"}, True),
        ({"learning_rate": 2e-3}, False),
        ({"data": {"sources": {}}}, False),
    ],
)
def test_config_hash(monkeypatch, change, is_same):
    monkeypatch.setattr(provenance, "commit", lambda: "c")
    config = {"learning_rate": 1e-3, "output_dir": "a", "resume_from_checkpoint": "auto"}
    hashes = {provenance.origin(values)["config_sha256"] for values in (config, config | change)}
    assert len(hashes) == (1 if is_same else 2)


def test_commit_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance.commit() == "unknown"
    monkeypatch.setenv("GIT_COMMIT", "abc")
    assert provenance.commit() == "abc"


def test_changed_sources_are_marked(monkeypatch, tmp_path):
    monkeypatch.setattr(provenance, "REPOSITORY", tmp_path)
    files = [tmp_path / name for name in ("train/trainer.py", "test_fp8/rows.py", "test_fp8/results/a.json")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("1")
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    whole, sources, found = provenance.commit(), provenance.sources_sha256("train"), []
    for file in files:
        file.write_text("2")
        found.append((provenance.commit() == whole, provenance.sources_sha256("train") == sources))
        file.write_text("1")
    assert len(whole) == 40 and found == [(False, False), (False, True), (True, True)]


def test_keys_of_earlier_versions_are_read(tmp_path: Path) -> None:
    stage = {"step": 2, "stage": "phase 2 of 2", "new_stage": True, "proof": ["FP8: 6 of 7"]}
    (tmp_path / "run.json").write_text(json.dumps({"starts": [{"proof": [], "stages": [stage]}]}))
    (start,) = read_starts(RunFolder(tmp_path))
    phase = {"step": 2, "phase": "phase 2 of 2", "new_phase": True, "startup_checks": ["FP8: 6 of 7"]}
    assert start == {"startup_checks": [], "phases": [phase]}


# ---------------------------------------------------------------- whole runs


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
