"""Prepared data in several shards, imports of Megatron's, and runs that are to be refused."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fixtures import HELD_OUT_FRACTION, HELD_OUT_IDS
from tests.train.mistakes import World
from tests.train.prepare.megatron_datasets import write_dataset
from train import launch
from train.files import sha256_file
from train.import_megatron import main as import_megatron
from train.preflight import check


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory, prepare: Callable[..., int], corpus: Path) -> Path:
    """The corpus in several shards."""
    folder = tmp_path_factory.mktemp("shards")
    assert prepare(folder, corpus, eval_fraction=0.1, shard_tokens=3000) == 0
    return folder


@pytest.fixture
def own_shards(tmp_path: Path, shards: Path) -> Path:
    """A copy of the shards, which may be damaged."""
    return shutil.copytree(shards, tmp_path / "data")


@pytest.fixture
def run_import(
    tmp_path: Path,
    tokenizer_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., int]:
    """run_import(output, *prefixes, **options) -> exit status; no source may change. Without
    eval_fraction all documents are in the train split, and another one is in the eval split."""
    held_out = write_dataset(tmp_path_factory.mktemp("held_out") / "held_out", [[HELD_OUT_IDS]])

    def sources() -> dict[str, tuple[str, int]]:
        files = [path for path in tmp_path.iterdir() if path.suffix in (".bin", ".idx")]
        return {path.name: (sha256_file(path), path.stat().st_mtime_ns) for path in files}

    def call(output: Path, *prefixes: Path, **options: object) -> int:
        if "eval_fraction" not in options:
            prefixes, options["eval_fraction"] = (*prefixes, held_out), HELD_OUT_FRACTION
        options = {"tokenizer": tokenizer_dir, **options}
        arguments = ["--input", *map(str, prefixes), "--output", str(output)]
        for key, value in options.items():
            arguments += [f"--{key}"] if value is True else [f"--{key}", str(value)]
        before = sources()
        status = import_megatron(arguments)
        assert sources() == before
        return status

    return call


@pytest.fixture
def world(tmp_path: Path, data: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A run on a machine without CUDA, which starts no ranks."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", check.CHECKED):
        monkeypatch.delenv(name, raising=False)

    def goes_on(*_: object) -> None:
        raise AssertionError("the mistake was not seen")

    monkeypatch.setattr("train.engine.process_group.init_distributed", goes_on)
    monkeypatch.setattr(launch.signals, "install", lambda *_: None)  # of this process
    monkeypatch.setattr(launch.Children, "run_ranks", goes_on)
    found = World(tmp_path, data, small_model, monkeypatch)
    found.devices()
    return found
