"""A small corpus and a tokenizer trained on it, made once a session."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from train.prepare_data import main as prepare_data
from train.train_tokenizer import main as train_tokenizer

WORDS = "the quick brown fox jumps over lazy dogs while seven wizards mix potions under a pale moon".split()


def corpus_texts(count: int) -> list[str]:
    """Different texts of 20 to 60 words with code-like lines between them."""
    return [
        " ".join(WORDS[(i * j + j * j) % len(WORDS)] for j in range(1, 20 + i % 41))
        + f"\n\n    def f_{i}(x):\n\treturn x  +  {i}\n"
        for i in range(count)
    ]


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .jsonl of 300 documents."""
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", corpus_texts(300))


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A tokenizer of 400 pieces."""
    folder = tmp_path_factory.mktemp("tokenizer")
    assert train_tokenizer(["--input", str(corpus), "--vocab_size", "400", "--output", str(folder)]) == 0
    return folder


@pytest.fixture
def prepare(tokenizer_dir: Path) -> Callable[..., int]:
    """prepare(output, *inputs, **options) -> exit status of prepare_data, in this process unless workers are given."""

    def run(output: Path, *inputs: Path | str, **options: object) -> int:
        options = {"tokenizer": tokenizer_dir, "workers": 1, **options}
        arguments = ["--input", *map(str, inputs), "--output", str(output)]
        for key, value in options.items():
            arguments += [f"--{key}"] if value is True else [f"--{key}", str(value)]
        return prepare_data(arguments)

    return run
