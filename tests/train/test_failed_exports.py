"""A run whose training ended well and whose export did not: what it says of itself, and what the next start does."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from model.errors import UserError
from tests.train.runs import curve, run
from train import export
from train.monitor.signals import Interrupted
from train.record.provenance import read_starts
from train.record.run_folder import RunFolder


def ended(output_dir: Path) -> list[dict[str, Any]]:
    return [start["ended"] for start in read_starts(RunFolder(output_dir))]


def test_failed_export_is_repeated(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not "done", which nobody would look into; and not only "failed", as if there were nothing to export."""
    output_dir, fault = Path(settings["output_dir"]), OSError(errno.EIO, "Input/output error", "hf.partial")
    with monkeypatch.context() as broken:
        broken.setattr(export, "_write_model", lambda *_: (_ for _ in ()).throw(fault))
        with pytest.raises(OSError):
            run(settings, resume_from_checkpoint="never")
    (first,) = ended(output_dir)
    assert (first["how"], first["step"]) == ("export failed", 6)
    assert first["why"] == "OSError: [Errno 5] Input/output error: 'hf.partial'"

    before = curve(output_dir)
    run(settings)
    assert json.loads((output_dir / "hf/exported_from.json").read_text())["checkpoint"] == "step-00000006"
    assert [each["how"] for each in ended(output_dir)] == ["export failed", "done"]
    assert curve(output_dir) == before


@pytest.mark.parametrize(
    ("error", "how"), [(Interrupted(), "export interrupted"), (UserError("no tokenizer"), "export failed")]
)
def test_export_result_is_in_run_json(
    own_trained: Path, settings: dict, monkeypatch: pytest.MonkeyPatch, error: BaseException, how: str
) -> None:
    """Also of a start that had no step to take."""
    (own_trained / "hf/exported_from.json").write_text("of another checkpoint")
    monkeypatch.setattr("train.run.export", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(type(error)):
        run(settings)
    last = ended(own_trained)[-1]
    assert last["how"] == how and last.get("why") == (None if "int" in how else "UserError: no tokenizer")


def test_failed_training_is_in_run_json(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.trainer.Trainer.take_step", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(settings)
    (last,) = ended(Path(settings["output_dir"]))
    assert (last["how"], last["why"], last["step"]) == ("failed", "ZeroDivisionError: division by zero", 0)
