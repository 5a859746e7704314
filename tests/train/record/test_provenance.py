"""train/record/provenance.py: run.json, hashes of the configuration and the sources, the commit."""

from __future__ import annotations

import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest

from train.record import provenance
from train.record.provenance import RunRecord, read_starts
from train.record.run_folder import RunFolder


def record(folder: RunFolder, step: int = 0, **known: object) -> RunRecord:
    return RunRecord(
        folder, {"time": 1.0, "step": step, **known}, lambda: (7, 70), {KeyboardInterrupt: "stopped"}
    )


def test_starts_are_added_with_their_ends(tmp_path):
    folder = RunFolder(tmp_path)
    with record(folder, a=1) as first:
        (running,) = read_starts(folder)
        assert running["ended"] is None and running["a"] == 1
        first.add_stage({"step": 3, "fp8": "a"})
        assert read_starts(folder)[0]["stages"] == [{"step": 3, "fp8": "a"}]
    for step, error in ((7, KeyboardInterrupt), (8, ValueError)):
        with pytest.raises(error), record(folder, step):
            raise error
    starts = read_starts(folder)
    ends = [(0, "done"), (7, "stopped"), (8, "failed")]
    assert [(start["step"], start["ended"]["how"]) for start in starts] == ends
    assert all((start["ended"]["step"], start["ended"]["tokens"]) == (7, 70) for start in starts)


def test_a_full_disk_is_reported_and_does_not_end_the_run(tmp_path, monkeypatch, logged):
    error = OSError(28, "No space left on device")
    monkeypatch.setattr(provenance, "write_durably", Mock(side_effect=error))
    with record(RunFolder(tmp_path)) as its:
        its.add_stage({"step": 3})
    assert len(logged) == 3


def test_the_hash_of_a_configuration_is_of_what_changes_a_run(monkeypatch):
    monkeypatch.setattr(provenance, "commit", lambda: "c")
    config = {"learning_rate": 1e-3, "output_dir": "a", "resume_from_checkpoint": "auto"}

    def hashed(**change: object) -> str:
        return provenance.origin(config | change)["config_sha256"]

    elsewhere = {"output_dir": "b", "resume_from_checkpoint": "never", "run_name": "r", "wandb_project": "p"}
    assert {hashed(**{key: value}) for key, value in elsewhere.items()} == {hashed()}
    assert hashed(report_to="wandb") == hashed() != hashed(learning_rate=2e-3)
    assert hashed(seed=1) != hashed(seed=2) and hashed(data={"sources": {}}) != hashed()


def test_the_commit_is_that_of_the_sources_or_of_the_environment(monkeypatch, tmp_path):
    def run(words: list[str], **_: object) -> object:
        raise OSError(2, "no git")

    monkeypatch.setattr(provenance.subprocess, "run", run)
    assert provenance.commit() == "unknown"
    monkeypatch.setenv("GIT_COMMIT", "abc")
    assert provenance.commit() == "abc"


def test_the_commit_of_changed_sources_says_so(monkeypatch, tmp_path):
    """Those of test_fp8/, too, but not what it has measured."""
    monkeypatch.setattr(provenance, "REPOSITORY", tmp_path)
    files = [tmp_path / name for name in ("train/trainer.py", "test_fp8/rows.py", "test_fp8/results/a.json")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("1")
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    whole = provenance.commit()
    assert len(whole) == 40
    for file, changed in zip(files, (", changed since", ", changed since", ""), strict=True):
        file.write_text("2")
        assert provenance.commit() == whole + changed
        file.write_text("1")


def test_sources_are_known_by_the_python_files_of_their_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "REPOSITORY", tmp_path)
    found = []
    for name, text in ("a/b/c.py", "x = 1"), ("a/b/c.py", "x = 2"), ("a/notes.md", "x"), ("other/c.py", "x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        found.append(provenance.sources_sha256("a"))
    assert found[0] != found[1] == found[2] == found[3] != provenance.sources_sha256("a", "other")
