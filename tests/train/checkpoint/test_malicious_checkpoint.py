"""No program executes code in a file of a checkpoint, even if the manifest agrees with the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from tests.train.runs import ROOT, run
from train.checkpoint.files import CheckpointError, describe_file, read_manifest, write_manifest
from train.checkpoint.reshard import load_shard

MODEL, OPTIMIZER, RANK = "*model_states.pt", "*optim_states.pt", "rank_00000.pt"


class Payload:
    """Creates the file `mark` when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.mark), "w")


def poison(checkpoint: Path, pattern: str, mark: Path) -> Path:
    """Add a payload to a file of `checkpoint`, and commit the checkpoint again."""
    (file,) = checkpoint.glob(pattern)
    content = torch.load(file, weights_only=False)
    torch.save(content | {"more": Payload(mark)}, file)
    write_manifest(checkpoint, [describe_file(checkpoint / name) for name in read_manifest(checkpoint)])
    return file


@pytest.mark.parametrize("pattern", [MODEL, OPTIMIZER, RANK])
def test_pickle_payload_is_not_executed(
    pattern: str, settings: dict, own_trained: Path, tmp_path: Path
) -> None:
    """By a resume, which DeepSpeed or the resharding loads, and by what exports and evaluations load."""
    checkpoint, mark = own_trained / "checkpoints/step-00000006", tmp_path / "executed"
    file = poison(checkpoint, pattern, mark)
    settings |= {"max_steps": 7, "lr_scheduler_type": "constant", "allow_changes_on_resume": True}
    for changes in ({}, {"deepspeed": {"zero_optimization": {"stage": 2}}}):
        with pytest.raises(CheckpointError) as error:
            run(settings, **changes)
        assert file.name in str(error.value) or file.parent.name in str(error.value)
    with pytest.raises(CheckpointError):
        load_shard(file)
    assert not mark.exists()


class Attribute:
    """Pickled as a call of getattr, like a member of an enum in Python 3.11.2."""

    def __init__(self, name: str):
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (ZeroStageEnum, self.name)


def test_getattr_loads_only_enum_members(tmp_path: Path) -> None:
    file = tmp_path / "model_states.pt"
    torch.save({"stage": Attribute("weights")}, file)
    assert load_shard(file)["stage"] is ZeroStageEnum.weights
    torch.save({"stage": Attribute("mro")}, file)
    with pytest.raises(CheckpointError):
        load_shard(file)


def test_checkpoints_are_loaded_in_one_place() -> None:
    """`load_shard` allows only tensors and plain values."""
    sources = [
        path for folder in ("train", "model", "fp8_inference_demo") for path in (ROOT / folder).rglob("*.py")
    ]
    places = [path.relative_to(ROOT).as_posix() for path in sources if "torch.load(" in path.read_text()]
    assert places == ["train/checkpoint/reshard.py"]
