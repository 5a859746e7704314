"""train/export.py in the place of an older export: whatever fails or is killed meanwhile, one of the two is whole."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from train import export


@pytest.fixture
def exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """exports(what) -> hf/, whose weights are `what`."""
    state = SimpleNamespace(
        train_config={"data": {"sources": {}}}, step=1, consumed_tokens=1, changes=[], began_at={}
    )
    (tmp_path / "tokenizer.json").touch()
    monkeypatch.setattr(export, "read_state", lambda path: state)
    monkeypatch.setattr(export, "write_card", lambda *_: None)
    monkeypatch.setattr(export, "identity", lambda path: "identity")

    def write(what: str) -> Path:
        def write_model(path: Path, out: Path, *_: object) -> list[str]:
            out.mkdir()
            (out / "config.json").touch()
            (out / "model.safetensors").write_text(what)
            return []

        monkeypatch.setattr(export, "_write_model", write_model)
        export.export(tmp_path, tmp_path / "hf", tmp_path)
        return tmp_path / "hf"

    return write


def weights(out: Path) -> str:
    return (out / "model.safetensors").read_text()


def left(out: Path) -> list[str]:
    return sorted(path.name for path in out.parent.iterdir())


@pytest.mark.parametrize("which", ["hf", "hf.partial"])
def test_what_cannot_be_replaced_stays_and_the_next_export_works(
    exports: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """As a mount point, or another user's folder in one with a sticky bit; gigabytes beside it would stay for ever."""
    out, rename = exports("old"), Path.rename

    def fails(self: Path, to: Path) -> Path:
        if self.name == which:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(self))
        return rename(self, to)

    with monkeypatch.context() as busy:
        busy.setattr(Path, "rename", fails)
        with pytest.raises(OSError) as found:
            exports("new")
    assert found.value.errno == errno.EBUSY and str(out) in str(found.value)
    assert weights(out) == "old" and left(out) == ["hf", "tokenizer.json"]
    assert weights(exports("new")) == "new" and left(out) == ["hf", "tokenizer.json"]


def test_an_old_export_that_cannot_be_removed_is_told_and_hinders_nothing(
    exports: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one of which a server has a file open on NFS: half of it would be no export that may be replaced."""
    out, rmtree = exports("old"), shutil.rmtree

    def fails(folder: Path) -> None:
        (folder / "exported_from.json").unlink()
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(folder))

    with monkeypatch.context() as in_use:
        in_use.setattr(shutil, "rmtree", fails)
        assert weights(exports("new")) == "new"
    _, aside, _ = left(out)
    assert aside.startswith("hf.discarded-")
    assert capsys.readouterr().err.endswith(f"rm -r {out.parent / aside}\n")
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert weights(exports("newer")) == "newer" and left(out) == ["hf", aside, "tokenizer.json"]


def test_of_an_export_that_was_killed_nothing_gets_into_the_next(
    exports: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    partial = tmp_path / "hf.partial"
    partial.mkdir()
    (partial / "model-00001-of-00002.safetensors").touch()
    with monkeypatch.context() as closed:
        closed.setattr(shutil, "rmtree", lambda folder: os.rmdir(folder))
        with pytest.raises(OSError, match="hf.partial"):
            exports("new")
    assert not (tmp_path / "hf").exists()
    assert not list(exports("new").glob("model-*")) and left(tmp_path / "hf") == ["hf", "tokenizer.json"]

    (tmp_path / "elsewhere").mkdir()
    partial.symlink_to("elsewhere")
    assert weights(exports("newer")) == "newer" and not list((tmp_path / "elsewhere").iterdir())
