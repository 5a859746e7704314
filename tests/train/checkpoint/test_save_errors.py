"""Which failed save is worth another start: what the fault is by the system's number, on all ranks that have one; and a
checkpoint that cannot be read for a moment."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.checkpoint.test_checkpoint import make
from tests.train.runs import run
from train.checkpoint import files as checkpoint_files
from train.checkpoint import load
from train.checkpoint.files import CheckpointError
from train.checkpoint.save import Ranks, SaveError
from train.files import may_pass

PASSES = [errno.EIO, errno.ESTALE, errno.ETIMEDOUT]
LASTS = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES]


def fault(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize("number", PASSES + LASTS)
def test_a_save_says_whether_its_fault_may_pass_and_what_to_do(
    settings: dict, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A night is lost where a passing fault ends the run; a full disk is as full after another start."""

    def save(what: Any, file: Any, **options: Any) -> None:
        raise fault(number)

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(SaveError) as found:
        run(settings, save_steps=2)
    assert os.strerror(number) in str(found.value)
    assert found.value.may_pass == (number in PASSES)
    assert not list(Path(settings["output_dir"], "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("numbers", "passes"),
    [
        ([errno.EIO, None], True),
        ([None, errno.ESTALE], True),
        ([errno.EIO, errno.ENOSPC], False),
        ([errno.ENOSPC, None], False),
    ],
)
def test_it_passes_where_it_does_on_all_ranks(
    process_group: None, monkeypatch: pytest.MonkeyPatch, numbers: list[int | None], passes: bool
) -> None:
    ranks, found = Ranks(), list[tuple]()

    def action(number: int | None) -> Callable[[], None]:
        def act() -> None:
            if number:
                raise fault(number)

        return act

    monkeypatch.setattr(ranks, "all_gather", lambda value: found.append(value) or [(None, None, True)])
    for number in numbers:
        ranks.run(action(number))
    monkeypatch.setattr(ranks, "all_gather", lambda value: found)
    with pytest.raises(SaveError) as error:
        ranks.run(lambda: None)
    assert error.value.may_pass == passes


def test_the_cause_counts_and_what_is_no_fault_of_the_system_lasts() -> None:
    try:
        raise OSError("a could not be written") from fault(errno.EIO)
    except OSError as error:
        assert may_pass(error)
    assert may_pass(TimeoutError("no answer"))
    no_faults = OSError("the disk has not the room"), MemoryError("no host memory"), ValueError("5")
    for error in (*no_faults, fault(errno.ENOENT), fault(errno.EEXIST)):
        assert not may_pass(error)
    assert not may_pass(OSError(errno.EIO, "I/O error: No space left on device (os error 28)"))


def test_a_file_that_cannot_be_read_is_no_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that is about to fail. A fault that passes within half a minute costs no checkpoint."""
    path, slept, faults = make(tmp_path, 1), list[float](), list[int]()

    def fails(file: Path, right: Any = checkpoint_files.sha256_file) -> str:
        if faults and file.name == "weights.pt":
            raise OSError(faults.pop(), "of the system", str(file))
        return right(file)

    monkeypatch.setattr(checkpoint_files, "sha256_file", fails)
    monkeypatch.setattr("train.files.time.sleep", slept.append)
    for numbers, waits in (([5, 5], 1), ([13], 0), ([2], 0)):
        faults[:] = numbers
        (problem,) = checkpoint_files.problems(path)
        assert str(path) in problem and "of the system" in problem
        assert slept == [30.0] * waits
        slept.clear()
    faults[:] = [116]
    assert checkpoint_files.problems(path) == [] and slept == [30.0]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES])
def test_a_folder_that_does_not_answer_is_worth_another_start(
    tmp_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """On all ranks alike, though rank 0 alone looks for a checkpoint."""

    def fails(root: Path) -> Path | None:
        raise fault(number)

    monkeypatch.setattr(load, "newest_good", fails)
    with pytest.raises(CheckpointError) as found:
        load.choose_checkpoint(tmp_path, "auto")
    assert found.value.may_pass == (number in PASSES)
