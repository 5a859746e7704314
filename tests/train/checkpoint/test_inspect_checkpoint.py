"""inspect_checkpoint.py says of each folder what a resume would think of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.train.runs import ROOT
from train import inspect_checkpoint
from train.checkpoint.files import (
    MANIFEST,
    RUN_STATE,
    RunState,
    describe_file,
    discard_old,
    name_of,
    note_rollback,
    write_manifest,
)

TAKES = 'a resume with "auto" takes step-{:08}'


def make(root: Path, step: int, ranks: int = 2, **state: Any) -> Path:
    """A committed checkpoint of two files."""
    path = root / name_of(step)
    path.mkdir(parents=True)
    (path / "weights.pt").write_bytes(bytes(range(256)) * step)
    (path / RUN_STATE).write_text(
        json.dumps(asdict(RunState(step, 8 * step, 640 * step, ranks, 1, {}, {}, **state)))
    )
    write_manifest(path, [describe_file(file) for file in sorted(path.iterdir())])
    return path


def inspect(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str]:
    status = inspect_checkpoint.main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_good_ones_at_each_level(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    first, root = make(tmp_path / "checkpoints", 10), tmp_path / "checkpoints"
    newest = make(root, 20, ranks=1)
    noon = datetime(2026, 1, 2, 12, 5).timestamp()
    for hours, file in enumerate(first.iterdir()):
        os.utime(file, (noon - 3600 * hours,) * 2)  # the last one that was written counts
    status, out = inspect(capsys, tmp_path, "--verify")
    assert status == 0
    lines = {line.split()[0]: line for line in out.splitlines() if line.startswith("step-")}
    assert lines.keys() == {name_of(10), name_of(20)}
    for value in ("6,400 ", "2 ranks", "ZeRO 1", "0.0 MB", "2026-01-02 12:05"):
        assert value in lines[name_of(10)]
    assert "12,800 " in lines[name_of(20)] and TAKES.format(20) in out
    assert inspect(capsys, root, "--verify")[1].splitlines()[:4] == out.splitlines()[:4]
    status, out = inspect(capsys, newest)
    assert status == 0 and "--verify" in out and "00000010" not in out


def test_of_one_that_is_not_the_newest_auto_is_not_said_to_take_it(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    first = make(tmp_path / "checkpoints", 10)
    make(tmp_path / "checkpoints", 20)
    copy = first.rename(tmp_path / "best")
    for one in (tmp_path / "checkpoints" / name_of(20), copy):
        status, out = inspect(capsys, one)
        assert status == 0 and one.name in out and "auto" not in out


def test_prepared_data_are_no_damaged_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """They have a manifest.json, too."""
    (tmp_path / MANIFEST).write_text('{"schema": 1, "shards": []}')
    assert inspect(capsys, tmp_path)[0] == 2


def test_what_resumes_changed_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    changes = [{"step": 4, "key": "learning_rate", "old": 3e-4, "new": 1e-4}]
    make(tmp_path, 10, changes=changes, began_at={"path": "old/step-00000002", "manifest_sha256": "0"})
    out = inspect(capsys, tmp_path)[1]
    assert "old/step-00000002" in out and "learning_rate: 0.0003 -> 0.0001" in out


@pytest.mark.parametrize(
    "damage,file,needs_verify",
    [
        (lambda p: (p / "weights.pt").unlink(), "weights.pt", False),
        (lambda p: os.truncate(p / "weights.pt", 9), "weights.pt", False),
        (lambda p: (p / "weights.pt").write_bytes(bytes(5120)), "weights.pt", True),
        (lambda p: (p / MANIFEST).write_text((p / MANIFEST).read_text() + " "), MANIFEST, False),
    ],
)
def test_damage_is_named_and_the_status_is_1(
    tmp_path: Path, capsys: pytest.CaptureFixture, damage, file: str, needs_verify: bool
) -> None:
    make(tmp_path, 10)
    damage(make(tmp_path, 20))
    status, out = inspect(capsys, tmp_path, "--verify")
    assert status == 1 and str(tmp_path / name_of(20) / file) in out and TAKES.format(10) in out
    assert inspect(capsys, tmp_path)[0] == (0 if needs_verify else 1)


@pytest.mark.parametrize("when", ["before it is looked at", "while its hashes are computed"])
def test_one_that_its_run_removes_meanwhile_is_not_called_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A run that goes on keeps save_total_limit of them, and hashing takes minutes where they are large."""
    old, *_ = (make(tmp_path, step) for step in (10, 20))
    right = inspect_checkpoint.problems

    def problems(path: Path, hashes: bool) -> list[str]:
        discard_old(tmp_path / "step-00000020", keep=1)
        return right(path, hashes=hashes)

    listed = inspect_checkpoint.folders_of
    if when == "before it is looked at":  # as the second
        monkeypatch.setattr(inspect_checkpoint, "folders_of", lambda given: [*reversed(listed(given))])
    monkeypatch.setattr(inspect_checkpoint, "problems", problems)
    status, out = inspect(capsys, tmp_path, "--verify")
    assert not old.exists() and "damaged" not in out
    assert status == 0 and TAKES.format(20) in out


def test_a_damaged_note_of_a_rollback_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    note_rollback(make(tmp_path, 10), [[4, 8]])
    assert inspect(capsys, tmp_path)[0] == 0
    (tmp_path / "rollback.json").write_text("{")
    status, out = inspect(capsys, tmp_path)
    assert status == 1 and "rollback.json" in out


def test_the_size_is_that_of_all_files(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    os.truncate(make(tmp_path, 10) / "weights.pt", 2_500_000)
    assert " 2.5 MB" in inspect(capsys, tmp_path)[1]


def test_what_was_never_committed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    make(tmp_path, 10)
    (make(tmp_path, 20) / MANIFEST).unlink()
    (tmp_path / "step-00000030").mkdir()
    (tmp_path / "latest").write_text("step-00000030")
    status, out = inspect(capsys, tmp_path, "--verify")
    assert status == 0  # the newest committed one is that of step 10
    assert name_of(20) in out and name_of(30) in out and TAKES.format(10) in out
    assert inspect(capsys, tmp_path / "step-00000030")[0] == 1


def test_nothing_there(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert inspect(capsys, tmp_path / "nowhere")[0] == inspect(capsys, tmp_path)[0] == 2
    for name in ("b", "a"):  # as in output/
        (tmp_path / name / "checkpoints").mkdir(parents=True)
    assert inspect(capsys, tmp_path)[1].endswith(" a, b\n")


@pytest.mark.interpreter
def test_the_command_needs_no_torch(tmp_path: Path) -> None:
    make(tmp_path, 10)
    program = (
        "import runpy, sys; sys.argv = sys.argv[1:]\ntry: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    program += (
        "except SystemExit as end: assert end.code == 0 and not {'torch', 'deepspeed'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", program, str(ROOT / "train/inspect_checkpoint.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
