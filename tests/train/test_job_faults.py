"""train/job.py where the file system fails: it says what and whether it may pass, and waits out a moment."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from train import job


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of a run that no program is started for."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "NNODES", "HOSTFILE"))]:
        monkeypatch.delenv(name)
    sources = {"x": str(tmp_path / "x")}
    config = {"model": {"config": "tiny"}, "data": {"sources": sources}, "max_steps": 10}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(job.signals, "install", lambda handler: None)
    monkeypatch.setattr(job, "set_environment", lambda processes: None)
    return [str(tmp_path / "config.json"), "--output_dir", str(tmp_path / "run")]


def fails(number: int) -> Any:
    def raises(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number), "there")

    return raises


@pytest.mark.parametrize(("name", "slurm"), [("unlink", ""), ("write_text", "41234")])
@pytest.mark.parametrize(
    ("number", "status", "advice"),
    [(errno.EROFS, 2, "; have it made writable, or give another place"), (errno.EIO, 1, "")],
)
def test_a_folder_that_cannot_be_written_is_named(
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    slurm: str,
    number: int,
    status: int,
    advice: str,
) -> None:
    """Without a traceback, which says nothing of what to do."""
    monkeypatch.setenv("SLURM_JOB_ID", slurm)
    monkeypatch.setattr(Path, name, fails(number))
    assert job.main(command) == status
    said = capsys.readouterr().err
    assert said == f"run_training.sh: [Errno {number}] {os.strerror(number)}: 'there'{advice}\n"


@pytest.mark.parametrize("of", ["read_bytes", "listdir"])
def test_a_moment_in_which_nothing_can_be_read_ends_no_job(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    """It may be what a rank has just crashed of; a file that is not there is waited for by nobody."""
    slept, faults, starts = list[float](), list[int](), list[int]()
    monkeypatch.setattr("train.files.time.sleep", slept.append)
    monkeypatch.setattr(job.Job, "wait", lambda *_: True)
    (tmp_path / "run/checkpoints/step-00000003").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step-00000003/manifest.json").touch()
    right = {"read_bytes": Path.read_bytes, "listdir": os.listdir}[of]

    def moment(place: Any) -> Any:
        if faults:
            fails(faults.pop())()
        return right(place)

    def starts_and_crashes(self: job.Job, command: list[str]) -> int:
        starts.append(1)
        faults.append(errno.ESTALE)
        return 0 if len(starts) == 2 else 1

    monkeypatch.setattr(*((Path, of) if of == "read_bytes" else (os, "listdir")), moment)
    monkeypatch.setattr(job.Job, "call", starts_and_crashes)
    its = job.Job(command)
    its.arguments, its.folder = job.load_arguments(command), job.RunFolder(tmp_path / "run")
    assert its.train([]) == 0 and len(starts) == 2 and slept == [30.0]
