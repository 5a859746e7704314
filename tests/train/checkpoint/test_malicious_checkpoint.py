"""No program executes code that a file of a checkpoint holds, although the manifest agrees with the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.runs import run
from train import export
from train.checkpoint.files import CheckpointError, describe_file, read_manifest, write_manifest
from train.checkpoint.load import read_weights
from train.data.encoder import tokenizer_of
from train.evaluate import parse_arguments
from train.evaluation.evaluation import evaluate

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


def resume(settings: dict, checkpoint: Path, **changes: Any) -> None:
    run(settings, max_steps=7, lr_scheduler_type="constant", allow_changes_on_resume=True, **changes)


def reshard(settings: dict, checkpoint: Path) -> None:
    resume(settings, checkpoint, deepspeed={"zero_optimization": {"stage": 2}})


def evaluate_it(settings: dict, checkpoint: Path) -> None:
    evaluate(parse_arguments([str(checkpoint), *settings["data"]["sources"].values()]), 0, 1)


def export_hf(settings: dict, checkpoint: Path, form: str = "hf") -> None:
    out = Path(settings["output_dir"]).with_name("out")
    export.export(checkpoint, out, tokenizer_of(settings["data"]["sources"]), form)


def export_fp8(settings: dict, checkpoint: Path) -> None:
    export_hf(settings, checkpoint, "hf-fp8")


@pytest.mark.parametrize(
    ("program", "pattern"),
    [
        (resume, MODEL),
        (resume, OPTIMIZER),
        (resume, RANK),
        (reshard, MODEL),
        (reshard, OPTIMIZER),
        (evaluate_it, MODEL),
        (evaluate_it, RANK),
        (export_hf, MODEL),
        (export_fp8, RANK),
    ],
)
def test_a_payload_is_not_executed(
    program: Callable[[dict, Path], None], pattern: str, settings: dict, own_trained: Path, tmp_path: Path
) -> None:
    checkpoint, mark = own_trained / "checkpoints/step-00000006", tmp_path / "executed"
    file = poison(checkpoint, pattern, mark)
    with pytest.raises(CheckpointError) as error:
        program(settings, checkpoint)
    assert file.name in str(error.value) and not mark.exists()


def test_a_payload_in_a_shard_of_zero_3_is_not_executed(settings: dict, tmp_path: Path) -> None:
    """Exports read the weights of ZeRO 3 from there."""
    folder = run(settings, max_steps=2, deepspeed={"zero_optimization": {"stage": 3}})
    checkpoint, mark = folder / "checkpoints/step-00000002", tmp_path / "executed"
    assert all(weight.dtype == torch.float32 for weight in read_weights(checkpoint).values())
    poison(checkpoint, OPTIMIZER, mark)
    with pytest.raises(CheckpointError):
        read_weights(checkpoint)
    assert not mark.exists()
