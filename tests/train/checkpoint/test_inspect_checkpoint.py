"""inspect_checkpoint.py: its exit status, and what it knows of each folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.checkpoint.test_checkpoint import make
from train.checkpoint.files import MANIFEST, ROLLBACK, checkpoint_name, record_rollback
from train.inspect_checkpoint import describe, find_damage, main


def status(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_intact_checkpoints(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    changes = [{"step": 4, "key": "learning_rate", "old": 3e-4, "new": 1e-4}]
    first = make(root, 10, changes=changes, began_at={"path": "old/step-00000002", "manifest_sha256": "0"})
    newest = make(root, 20)
    for given in (tmp_path, root, newest):
        assert status(given, "--verify") == 0
    assert status(newest.rename(tmp_path / "best")) == 0
    about = "\n".join(describe(first))
    for value in ("640 tokens", "1 ranks,", "ZeRO 1", "0.0 MB", "old/step-00000002", "0.0003 -> 0.0001"):
        assert value in about


@pytest.mark.parametrize(
    ("damage", "file", "needs_verify"),
    [
        (lambda p: (p / "weights.pt").unlink(), "weights.pt", False),
        (lambda p: os.truncate(p / "weights.pt", 9), "weights.pt", False),
        (lambda p: (p / "weights.pt").write_bytes(bytes(5120)), "weights.pt", True),
        (lambda p: (p / MANIFEST).write_text((p / MANIFEST).read_text() + " "), MANIFEST, False),
        (lambda p: (p.parent / ROLLBACK).write_text("{"), ROLLBACK, False),
    ],
)
def test_damaged_checkpoint_exits_with_status_1(
    tmp_path: Path, damage: Callable[[Path], object], file: str, needs_verify: bool
) -> None:
    make(tmp_path, 10)
    newest = make(tmp_path, 20)
    record_rollback(newest, [[4, 8]])
    assert find_damage(newest, True) == []
    damage(newest)
    (found,) = find_damage(newest, True) or []
    assert file in found
    assert status(tmp_path, "--verify") == 1 and status(tmp_path) == (0 if needs_verify else 1)


def test_uncommitted_checkpoint_is_ignored(tmp_path: Path) -> None:
    make(tmp_path, 20)
    (make(tmp_path, 30) / MANIFEST).unlink()
    (tmp_path / checkpoint_name(40)).mkdir()
    assert (
        find_damage(tmp_path / checkpoint_name(30), True)
        is find_damage(tmp_path / checkpoint_name(40), True)
        is None
    )
    assert status(tmp_path, "--verify") == 0 and status(tmp_path / checkpoint_name(40)) == 1


def test_missing_folder(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"schema": 1, "shards": []}')  # prepared data have one, too
    assert status(tmp_path / "nowhere") == status(tmp_path) == 2
