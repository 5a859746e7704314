"""Further sets that a run is evaluated on (data.eval_sources)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.runs import curve, metrics, run
from train.data.format import DataError


def test_additional_evaluation_sets(trained: Path, settings: dict, data: Path, other: Path) -> None:
    settings["data"]["eval_sources"] = {"same": str(data), "other": str(other)}
    output_dir = run(settings)
    assert curve(output_dir) == curve(trained)
    last = metrics(output_dir)[-1]
    assert last["eval_loss/same"] == last["eval_loss"] != last["eval_loss/other"]
    settings["data"]["eval_sources"] = None  # which a resume may change
    assert run(settings, max_steps=6) == output_dir


def test_evaluation_set_with_other_tokenizer_raises(settings: dict, shards: Path) -> None:
    settings["data"]["eval_sources"] = {"held_out": str(shards)}
    with pytest.raises(DataError) as error:
        run(settings)
    assert "'text'" in str(error.value) and "'held_out'" in str(error.value)
    assert not Path(settings["output_dir"]).exists()
