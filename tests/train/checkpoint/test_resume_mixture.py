"""A resume with another mixture: what it says of the order of samples, and that the stages which it advises keep it."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test_fp8.common.folders import make_folder
from tests.conftest import refused
from train.checkpoint.files import CheckpointError, RunState
from train.checkpoint.resume import resume_state
from train.config.arguments import TrainingArguments
from train.data.stream import SampleStream, open_stream

LENGTH, SEEN = 16, 120
Run = tuple[RunState, SampleStream]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root, rng = tmp_path_factory.mktemp("mixture"), np.random.default_rng(0)
    sizes = {"a": 300, "b": 200, "c": 250}
    return {
        name: str(make_folder(root / name, {"train": [rng.integers(3, 400, LENGTH * windows + 1)]}))
        for name, windows in sizes.items()
    }


def run_of(folders: dict[str, str], names: str, weights: Any, length: int = LENGTH) -> Run:
    """A run that has seen SEEN samples of these sources."""
    data = {"sources": {name: folders[name] for name in names}, "weights": weights}
    raw = {"model": {"config": "tiny"}, "data": data, "max_steps": 100, "max_seq_length": length}
    args = TrainingArguments.from_dict(raw).resolve(1)
    stream = open_stream(args.data.sources, args.data.weights, length, args.seed)
    return RunState(15, SEEN, SEEN * LENGTH, 1, 1, args.to_dict(), {}, stream.fingerprint()), stream


def windows(stream: SampleStream, start: int, count: int) -> Counter[tuple[str, int]]:
    return Counter(
        (stream.sources[source].name, window) for source, window in stream.sample_ids(start, count)
    )


def again(before: SampleStream, after: SampleStream) -> Counter[str]:
    """By source, samples that come again among the next ones."""
    return Counter(name for name, _ in windows(before, 0, SEEN) & windows(after, SEEN, 150))


def resumed(new: RunState, saved: RunState, allow: bool) -> list[str]:
    return resume_state(new, saved, Path("run/checkpoints/step-00000015"), allow)


def advice(lines: list[str]) -> list[str]:
    """Return the stages of data.weights that are advised."""
    return [line for line in lines if re.search(r"data\.weights \[", line)]


TWO = {"a": 0.8, "b": 0.2}
STAGES = [{"until_tokens": 50 * LENGTH, "weights": TWO}, {"weights": {"a": 0.5, "b": 0.5}}]


@pytest.mark.parametrize(
    ("former", "names", "weights"),
    [
        (TWO, "ab", {"a": 0.2, "b": 0.8}),
        (STAGES, "ab", {"a": 0.9, "b": 0.1}),
        ([{**STAGES[0], "until_tokens": SEEN * LENGTH}, STAGES[1]], "ab", {"a": 0.1, "b": 0.9}),  # ends here
        (None, "ab", TWO),  # by size
        (TWO, "abc", {"a": 0.2, "b": 0.2, "c": 0.6}),  # a source comes
        (None, "abc", None),
    ],
)
def test_the_stages_that_are_advised_leave_what_was_seen_as_it_was(
    folders: dict[str, str], former: Any, names: str, weights: Any
) -> None:
    saved, before = run_of(folders, "ab", former)
    other, at_once = run_of(folders, names, weights)
    with refused(CheckpointError, code="change_not_allowed") as error:
        resumed(other, saved, False)
    assert {*error.value.keys} <= {"data.weights", "data.sources"}
    said = resumed(other, saved, True)
    assert said[-1] in str(error.value).splitlines()
    (advised,) = re.findall(r"data\.weights (\[.*)", said[-1])
    stages = json.loads(advised.replace("...", json.dumps(weights or dict.fromkeys(names, 1.0))))
    new, staged = run_of(folders, names, stages)
    assert not advice(resumed(new, saved, True))
    assert max(again(before, staged).values(), default=0) <= 1 < max(again(before, at_once).values())
    unseen = windows(before, 0, SEEN) - windows(staged, 0, SEEN)
    assert max(Counter(name for name, _ in unseen).values(), default=0) <= 1


def test_a_later_stage_that_changes_alone_is_no_alarm(folders: dict[str, str]) -> None:
    saved, _ = run_of(folders, "ab", STAGES)
    later = [*STAGES[:1], {**STAGES[1], "until_tokens": 500 * LENGTH}, {"weights": TWO}]
    assert not advice(resumed(run_of(folders, "ab", later)[0], saved, True))


@pytest.mark.parametrize(("names", "weights", "length"), [("ac", None, LENGTH), ("ab", TWO, 2 * LENGTH)])
def test_nothing_is_advised_where_nothing_helps(
    folders: dict[str, str], names: str, weights: Any, length: int
) -> None:
    """A source that is gone, another length."""
    saved, _ = run_of(folders, "ab", None)
    assert not advice(resumed(run_of(folders, names, weights, length)[0], saved, True))


def test_a_checkpoint_that_knows_no_order_is_refused_without_advice(folders: dict[str, str]) -> None:
    saved, _ = run_of(folders, "ab", None)
    saved.data_fingerprint = {}
    with refused(CheckpointError, key="data.weights") as error:
        resumed(run_of(folders, "ab", TWO)[0], saved, False)
    assert not advice(str(error.value).splitlines())
