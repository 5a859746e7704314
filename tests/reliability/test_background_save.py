"""Tests of background saves.

Training changes its tensors while a background save writes them. The files must equal those of a blocking save, and an
error in the save thread must become an error of the run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reliability.conftest import assert_equal_runs, stop_when
from tests.train.runs import curve, metrics, run
from train import trainer
from train.checkpoint import save
from train.checkpoint.files import RUN_STATE, checkpoint_name, committed, problems, read_manifest
from train.checkpoint.save import HostBuffer, SaveError, Snapshot
from train.monitor import signals


@pytest.fixture
def slow_writes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Delay each file of a background save until training has taken another step or waits for the save.

    Returns the list of files written by background saves, which grows during the test.
    """
    right, names, changed, steps, waits = save.write_tensors, [], threading.Condition(), [0], []

    def write(path: Path, value: Any) -> dict:
        if threading.current_thread() is not threading.main_thread():
            with changed:
                begun = steps[0]
                assert changed.wait_for(lambda: steps[0] > begun or waits, timeout=250), (
                    "training stands still"
                )
            names.append(path.name)
        return right(path, value)

    def step(self: trainer.Trainer, take: Callable = trainer.Trainer.take_step) -> trainer.Step:
        taken = take(self)
        with changed:
            steps[0] += 1
            changed.notify_all()
        return taken

    def finish(self: save.Saver, wait: Callable = save.Saver.finish) -> save.Job | None:
        with changed:
            waits.append(self)
            changed.notify_all()
        try:
            return wait(self)
        finally:
            waits.clear()

    monkeypatch.setattr(save, "write_tensors", write)
    monkeypatch.setattr(trainer.Trainer, "take_step", step)
    monkeypatch.setattr(save.Saver, "finish", finish)
    return names


@pytest.mark.parametrize("stage", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_background_save_equals_blocking_save(
    settings: dict, tmp_path: Path, slow_writes: list[str], stage: int
) -> None:
    """The checkpoint files of an FP8 run on one rank are identical after 2, 4 and 6 steps."""
    settings |= {
        "deepspeed": f"ds_config_zero{stage}.json",
        "save_steps": 2,
        "save_total_limit": 9,
    }
    one, other = (
        run(settings, save_async=background, output_dir=str(tmp_path / str(background)))
        for background in (True, False)
    )
    # in the background, of one rank; the last save never is, and at ZeRO 0 there is no file for the optimizer
    assert len(slow_writes) == 2 * (3 if stage else 2)
    assert curve(one) == curve(other)
    for step in (2, 4, 6):
        paths = [folder / "checkpoints" / checkpoint_name(step) for folder in (one, other)]
        files, expected = map(read_manifest, paths)
        assert files.keys() == expected.keys()
        # the run's state has output_dir and save_async
        assert {name for name in files if files[name] != expected[name]} == {RUN_STATE}
        assert problems(paths[0]) == []


def test_stop_during_background_save(
    trained: Path,
    settings: dict,
    handlers: None,
    slow_writes: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If stop signals arrive during a background save, that save and the save at the stop are both committed.

    The resumed run is identical to an uninterrupted run.
    """
    with monkeypatch.context() as patch:
        stop_when(patch, save.Job, "run", 1, signals.SIGNALS[1])  # that of step 2
        with pytest.raises(signals.Stopped):
            run(settings, save_steps=2)
    root = Path(settings["output_dir"]) / "checkpoints"
    found = committed(root)
    assert found[0].name == "step-00000002" and len(found) == 2
    assert [problems(path) for path in found] == [[], []]
    signals.received.clear()
    run(settings, save_steps=2)
    assert_equal_runs(root.parent, trained)


@pytest.mark.parametrize("on_save_failure", ["stop", "continue"])
def test_background_save_error_ends_the_run(
    settings: dict, monkeypatch: pytest.MonkeyPatch, on_save_failure: str
) -> None:
    right, calls = save.write_tensors, []

    def write(path: Path, value: Any) -> dict:
        calls.append(path)
        return right(path, value) if len(calls) > 2 else 1 / 0

    monkeypatch.setattr(save, "write_tensors", write)
    settings |= {"save_steps": 2, "on_save_failure": on_save_failure}
    if on_save_failure == "stop":
        with pytest.raises(SaveError) as error:
            run(settings)
        assert "ZeroDivisionError" in str(error.value)
        folder = Path(settings["output_dir"])
        assert metrics(folder)[-1]["step"] <= 4, "the save that is due in step 4 waits for that of step 2"
        assert not list((folder / "checkpoints").iterdir())
        return
    output_dir = run(settings)
    names = [path.name for path in committed(output_dir / "checkpoints")]
    assert names == ["step-00000006"]
    assert [m["step"] for m in metrics(output_dir)] == [1, 2, 3, 4, 5, 6]


def test_missing_host_memory_error(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*arguments: object, **options: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(save.mmap, "mmap", none)
    with pytest.raises(SaveError):
        run(settings, save_steps=2)
    assert not list(Path(settings["output_dir"], "checkpoints").glob("*"))


def values() -> dict[str, Any]:
    """Return a dictionary with different kinds of tensors and other values.

    The tensors include views of a shared storage, an empty tensor, a parameter and an FP8 tensor.
    """
    flat = torch.arange(24.0)
    return {
        "parts": [flat[:12].view(3, 4).t(), flat[12:]],
        "none": torch.empty(0, dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "parameter": torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
        "fp8": torch.ones(5).to(torch.float8_e4m3fn),
        "again": flat,
        "rest": (1, "two", {3.0}, torch.Size([4]), torch.bfloat16, Path("five")),
    }


def test_snapshot_equals_torch_save(tmp_path: Path) -> None:
    buffer, places = HostBuffer(), []
    (tmp_path / "copy").mkdir()
    for _ in range(2):  # the second in the memory of the first
        given = values()
        torch.save(given, tmp_path / "value.pt")
        snapshot = Snapshot(given, buffer)
        places.append(snapshot.tensors[0].data_ptr())
        given["again"].fill_(-1), given["scalar"].fill_(-1), given["parameter"].data.fill_(-1)
        torch.save(snapshot.value(), tmp_path / "copy/value.pt")
        assert (tmp_path / "copy/value.pt").read_bytes() == (tmp_path / "value.pt").read_bytes()
    assert places[0] == places[1]
