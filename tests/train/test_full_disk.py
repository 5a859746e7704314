"""Where the disk is full, a command names what it could not write, and says what to do. /dev/full is such a disk. Where
its result may not be written at all, it says so before its work."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from fp8_inference_demo import fp8_inference
from test_fp8.common.options import Options
from train import evaluate, export, plan, train_tokenizer
from train.checkpoint.files import RunState
from train.files import naming, reason

REMEDY = "make room there, or give a place on another disk\n"


def fail(error: Exception | None = None) -> Any:
    def raises(*given: Any, **options: Any) -> None:
        raise error or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return raises


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A file that there is no room for."""
    (tmp_path / "full.json.tmp").symlink_to("/dev/full")
    return tmp_path / "full.json"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_quota_that_is_used_up_is_a_full_disk(tmp_path: Path, number: int) -> None:
    """As homes of a cluster have one. The system says neither of which file it is, nor what to do."""
    with pytest.raises(OSError) as found, naming(tmp_path / "a.json"):
        raise OSError(number, os.strerror(number))
    assert found.value.filename == str(tmp_path / "a.json")
    assert f"{reason(found.value)}\n".endswith(REMEDY)


def test_a_plan(full: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["tiny", "--output", str(full)]) == 2
    error = capsys.readouterr().err
    assert error == f"error: [Errno 28] No space left on device: '{full}'; {REMEDY}"
    assert not list(full.parent.iterdir())


def test_an_evaluation(
    full: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluate, "evaluate", lambda *_: {"loss": 1.0})
    assert evaluate.main([str(full.parent), "--output", str(full)]) == 2
    assert f"No space left on device: '{full}'; {REMEDY}" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["pathlib.Path.write_bytes", "pathlib.Path.write_text"])
def test_a_tokenizer(
    part: str, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(part, fail())
    words = ["--input", str(corpus), "--vocab_size", "400", "--output", str(tmp_path)]
    assert train_tokenizer.main(words) == 1
    assert capsys.readouterr().err == f"error: [Errno 28] No space left on device: '{tmp_path}'; {REMEDY}"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [None, SafetensorError("I/O error: No space left on device (os error 28)")])
def test_an_export(
    error: Exception | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "tokenizer.json").touch()
    state = RunState(0, 0, 0, 1, 0, {"data": {"sources": {}}}, {})
    for name, value in (
        ("checkpoint_of", lambda given: given),
        ("read_state", lambda path: state),
        ("check_tokenizer", lambda *_: None),
        ("_write_model", fail(error)),
    ):
        monkeypatch.setattr(export, name, value)
    words = [str(tmp_path), str(tmp_path / "out"), "--tokenizer", str(tmp_path)]
    assert export.main(words) == 1
    said = capsys.readouterr().err
    assert str(tmp_path / "out") in said and said.endswith(REMEDY)


def benchmark(words: list[str]) -> None:
    Options("test_fp8/x.py", "What it does.", []).parse_args(words)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (plan.main, ["no-such-model"]),
        (evaluate.parse_arguments, ["no-such-run"]),
        (benchmark, []),
        (fp8_inference.parse_arguments, ["--model", "no-such-folder", "--prompts", "in.jsonl"]),
    ],
)
def test_an_output_that_cannot_be_written_is_told_before_the_work(
    command: Any,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """Root may write everywhere, so that the system is not asked."""

    def told(output: Path) -> str:
        try:
            assert command([*words, "--output", str(output)]) == 2
        except SystemExit as ended:
            assert ended.code == 2
        return capsys.readouterr().err.split(f"{output} ")[-1].strip()

    (tmp_path / "folder.json").mkdir()
    (tmp_path / "closed").mkdir()
    access = os.access
    monkeypatch.setattr("os.access", lambda place, mode: place != tmp_path / "closed" and access(place, mode))
    closed = tmp_path / "closed"
    why = f"cannot be written: {closed} is not this user's to write to; choose another folder"
    assert told(closed / "out.json") == why
    if command in (benchmark, fp8_inference.parse_arguments):  # which make a folder
        assert told(closed / "new/out.json") == why
        (tmp_path / "file").touch()
        assert told(tmp_path / "file/out.json") == (
            f"cannot be written: {tmp_path}/file is no folder; choose another place"
        )
        assert told(tmp_path / "folder.json") == "is a folder; name a file"
