"""What tests of several rooms share, made once a worker: a corpus with a tokenizer, prepared data, a trained run."""

import argparse
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from deepspeed.runtime import bf16_optimizer

from model.config import load_config
from tests.train import runs
from train.prepare_data import main as prepare_data
from train.train_tokenizer import main as train_tokenizer

# It collects garbage to print how much memory is in use, four times an engine
bf16_optimizer.see_memory_usage = lambda *_, **__: None

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


# The text, and the ids of a document between BOS and EOS, whose hashes are below HELD_OUT_FRACTION of all.
HELD_OUT, HELD_OUT_IDS, HELD_OUT_FRACTION = "document 2079086 is held out\n", [1, 387, 235, 4, 2], 1e-6


@pytest.fixture(scope="session")
def prepare(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., int]:
    """prepare(output, *inputs, **options) -> exit status of prepare_data, in this process unless workers are given.
    all_train: all documents of the inputs are in the train split, and another one is in the eval split."""
    held_out = tmp_path_factory.mktemp("held_out") / "held_out.txt"
    held_out.write_text(HELD_OUT)

    def run(output: Path, *inputs: Path | str, all_train: bool = False, **options: object) -> int:
        options = {"tokenizer": tokenizer_dir, "workers": 1, **options}
        if all_train:
            inputs, options["eval_fraction"] = (*inputs, held_out), HELD_OUT_FRACTION
        arguments = ["--input", *map(str, inputs), "--output", str(output)]
        for key, value in options.items():
            arguments += [f"--{key}"] if value is True else [f"--{key}", str(value)]
        return prepare_data(arguments)

    return run


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and prepared data, by the project's own tools, from the standard library's sources."""
    folder = tmp_path_factory.mktemp("data")
    source = [
        "--input",
        os.path.dirname(json.__file__),
        argparse.__file__,
    ]
    tokenizer = str(folder / "tokenizer")
    assert train_tokenizer([*source, "--vocab_size", "512", "--output", tokenizer]) == 0
    split = ["--eval_fraction", "0.2", "--workers", "1"]
    assert prepare_data([*source, "--tokenizer", tokenizer, "--output", str(folder / "text"), *split]) == 0
    return folder / "text"


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration that every recipe takes on every backend."""
    path = tmp_path_factory.mktemp("model") / "config.json"
    config = load_config("tiny")
    config.vocab_size, config.num_hidden_layers, config.intermediate_size = 512, 2, 256
    path.write_text(json.dumps(config.to_dict()))
    return path


def settings_of(data: Path, small_model: Path, output_dir: Path) -> dict:
    return {
        "model": {"config": str(small_model)},
        "data": {"sources": {"text": str(data)}},
        "precision": {},
        "output_dir": str(output_dir),
        "max_steps": 6,
        "max_seq_length": 64,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 5e-3,
        "warmup_steps": 2,
        "logging_steps": 1,
        "max_eval_samples": 5,
    }


@pytest.fixture
def settings(data: Path, small_model: Path, tmp_path: Path, process_group: None) -> dict:
    """A run of six steps of a tiny model; change and give to runs.run."""
    return settings_of(data, small_model, tmp_path / "run")


@pytest.fixture(scope="session")
def trained(
    data: Path,
    small_model: Path,
    only_process_group: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """What the run of `settings` leaves, with checkpoints of steps 3 and 6; not to be changed."""
    torch.set_num_threads(1)  # as in all tests; sums depend on it
    with pytest.MonkeyPatch.context() as patch:
        for key, value in only_process_group.items():
            patch.setenv(key, value)
        return runs.run(
            settings_of(data, small_model, tmp_path_factory.mktemp("trained") / "run"), save_steps=3
        )


@pytest.fixture
def own_trained(trained: Path, settings: dict) -> Path:
    """A copy of it where `settings` have their output_dir."""
    return shutil.copytree(trained, Path(settings["output_dir"]))
