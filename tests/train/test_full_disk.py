"""Commands on a full disk, of which /dev/full is one, or with an output that they may not write."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from test_fp8.common.options import Options
from train import evaluate, plan
from train.files import write_durably


@pytest.mark.parametrize(("number", "is_ignored"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_file_system_without_fsync_of_folders(
    number: int, is_ignored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CIFS and shared folders of virtual machines answer EINVAL; a real error is still one."""
    fsync = os.fsync

    def refuses(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuses)
    with contextlib.nullcontext() if is_ignored else pytest.raises(OSError):
        write_durably(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"


def test_full_disk_during_plan(tmp_path: Path) -> None:
    (tmp_path / "full.json.tmp").symlink_to("/dev/full")
    assert plan.main(["tiny", "--output", str(tmp_path / "full.json")]) == 2
    assert not (tmp_path / "full.json").exists()


def benchmark(words: list[str]) -> None:
    Options("test_fp8/x.py", "What it does.", []).parse_args(words)


@pytest.mark.parametrize(
    ("command", "words", "places"),
    [
        (evaluate.parse_arguments, ["no-such-run"], ["closed/out.json"]),
        (benchmark, [], ["closed/out.json", "closed/new/out.json", "file/out.json", "folder.json"]),
    ],
)
def test_unwritable_output_raises_before_work(
    command: Any, words: list[str], places: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere, so that the system is not asked."""
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "closed").mkdir()
    (tmp_path / "file").touch()
    access = os.access
    monkeypatch.setattr("os.access", lambda place, mode: place != tmp_path / "closed" and access(place, mode))
    for place in places:
        with pytest.raises(SystemExit) as ended:
            raise SystemExit(command([*words, "--output", str(tmp_path / place)]))
        assert ended.value.code == 2
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["closed", "file", "folder.json"]
