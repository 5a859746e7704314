"""train/export.py: what it answers to a path that is no checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from train import export
from train.checkpoint.files import MANIFEST, name_of

ROOT = Path(__file__).resolve().parents[3]


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: Path) -> str:
    monkeypatch.setattr(sys, "argv", ["export.py", str(path), str(path.parent / "out")])
    with pytest.raises(SystemExit) as stop:
        export.main()
    assert stop.value.code == 1
    return capsys.readouterr().err


@pytest.mark.parametrize("given", ["", "checkpoints", "checkpoints/step-00000011", "step-00000003"])
def test_the_committed_checkpoints_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    root = tmp_path / "run" / "checkpoints"
    for step in range(3, 10):
        (root / name_of(step)).mkdir(parents=True)
        (root / name_of(step) / MANIFEST).touch()
    (root / name_of(9) / MANIFEST).unlink()
    message = refusal(monkeypatch, capsys, tmp_path / "run" / given)
    assert "give the folder of a committed checkpoint, RUN/checkpoints/step-NNNNNNNN" in message
    newest = ", ".join(name_of(step) for step in range(4, 9))
    assert message.endswith(f"; committed in {root}: {newest}\n")


def test_nothing_is_listed_where_there_is_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal(monkeypatch, capsys, tmp_path / "nowhere" / "run")
    assert message.endswith(
        "run is not a folder; give the folder of a committed checkpoint, RUN/checkpoints/step-NNNNNNNN\n"
    )


@pytest.mark.interpreter
def test_libraries_do_not_talk_over_the_answer(tmp_path: Path) -> None:
    """transformers imports torchao, which warns on a machine without its CUDA libraries."""
    command = [sys.executable, str(ROOT / "train/export.py"), str(tmp_path / "no"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.splitlines()[0].startswith(
        f"error: {tmp_path / 'no'} is not a folder"
    )
