"""Data of other text than the run's, and the command in this process."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fixtures import corpus_texts, write_jsonl
from train.evaluate import main


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory, prepare: Callable[..., int], data: Path) -> Path:
    """Data of other text, short and long, by the tokenizer of `data`, in shards of a few documents."""
    folder = tmp_path_factory.mktemp("other")
    texts = [f"{i} \u6771\u4eac{text[: i * 37 % 400]}" for i, text in enumerate(corpus_texts(120))]
    source = write_jsonl(tmp_path_factory.mktemp("texts") / "texts.jsonl", texts)
    assert prepare(folder, source, tokenizer=data / "tokenizer", eval_fraction=0.2, shard_tokens=1000) == 0
    return folder


@pytest.fixture
def evaluated(tmp_path: Path, process_group: None) -> Callable[..., dict]:
    """evaluated(MODEL, *arguments) -> the report."""

    def call(*arguments: object) -> dict:
        report = tmp_path / "report.json"
        assert main([*map(str, arguments), "--output", str(report)]) == 0
        return json.loads(report.read_text())

    return call


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], process_group: None) -> Callable[..., str]:
    """refused(MODEL, *arguments) -> the one line that says why there is no result."""

    def call(*arguments: object) -> str:
        capsys.readouterr()
        try:
            status = main(list(map(str, arguments)))
        except SystemExit as stop:
            status = stop.code  # type: ignore[assignment]
        told = capsys.readouterr()
        assert status == 2 and not told.out
        return told.err.splitlines()[-1]

    return call
