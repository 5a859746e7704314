"""Prepared data that is damaged or does not fit, as training meets it: found, named, and never trained on."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import numbers, refused
from tests.folders import make_folder
from tests.train.runs import run
from train.data.format import DataError
from train.data.stream import open_stream
from train.files import sha256_file

T = 32


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 400, count)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three train shards of 1,000 tokens and an eval shard."""
    return make_folder(
        tmp_path / "data", {"train": [tokens(1000, seed=s) for s in range(3)], "eval": [tokens(500)]}
    )


@pytest.mark.parametrize("name", ["train_00001.ds", "train_00001.ds.index"])
@pytest.mark.parametrize("change", [-1, -8, 8, None])
def test_wrong_file_size_raises(folder, name, change):
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if change is not None:
        (folder / name).write_bytes(content[:change] if change < 0 else content + b"\0" * change)
    code = "file_missing" if change is None else "wrong_size"
    with refused(DataError, code=code, key=str(folder / name)) as error:
        open_stream({"a": folder}, None, T, seed=1)
    assert change is None or {len(content) + change, len(content)} <= {*numbers(error.value)}


def test_shard_truncated_during_training(folder):
    """An error, where a memory map would kill the process."""
    stream = open_stream({"a": folder}, None, T, seed=1)
    stream.batch(0, stream.num_samples)  # all shards are open
    with open(folder / "train_00001.ds", "r+b") as file:
        file.truncate(1000)
    with refused(DataError, code="wrong_size", key=str(folder / "train_00001.ds")):
        stream.batch(0, stream.num_samples)


@pytest.mark.parametrize("name", ["train_00001.ds", "train_00001.ds.index"])
def test_verify_detects_a_bit_flip(folder, name):
    content = bytearray((folder / name).read_bytes())
    content[40] ^= 1
    (folder / name).write_bytes(content)
    open_stream({"a": folder}, None, T, seed=1)  # sizes alone do not show it
    for parts in (1, 2, 3):  # shared among ranks, exactly one of them finds it
        stream, found = open_stream({"a": folder}, None, T, seed=1), []
        for part in range(parts):
            try:
                stream.verify(part, parts)
            except DataError as error:
                found.append((error.code, error.key))
        assert found == [("wrong_sha256", str(folder / name))]


def test_evaluation_data_may_change(folder, tmp_path):
    """A run goes on with them."""
    train = [tokens(1000, seed=s) for s in range(3)]
    other = make_folder(tmp_path / "other", {"train": train, "eval": [tokens(500, seed=9)]})
    for split, same in (("train", True), ("eval", False)):
        one, two = (open_stream({"a": each}, None, T, 1, split).fingerprint() for each in (folder, other))
        assert (one == two) is same


@pytest.mark.parametrize("where", [0, 70, 500, -1])
def test_token_id_beyond_the_vocabulary(folder, where):
    """Also in a file whose hash is the manifest's: what was prepared is wrong, not what was copied. In whichever of
    the parts that are read at a time, where a sample spans two shards, and in the last token, which is only a label."""
    path = folder / "train_00001.ds"
    ids = np.fromfile(path, "<u2")
    ids[where] = 400
    ids.tofile(path)
    values = json.loads((folder / "manifest.json").read_text())
    values["shards"][1]["sha256"] = sha256_file(path)
    (folder / "manifest.json").write_text(json.dumps(values))
    stream = open_stream({"a": folder}, None, T, seed=1)
    with refused(DataError, code="token_beyond_vocabulary", key=str(path)) as error:
        stream.batch(0, stream.num_samples)
    assert numbers(error.value)[-3:] == [where % len(ids), 400, 400]
    with refused(DataError, code="token_beyond_vocabulary", key=str(path)):
        stream.verify()


# ---------------------------------------------------------------- whole runs


def test_data_verify_runs_before_any_output(settings, own_shards):
    path = next(own_shards.glob("eval_*.ds"))
    content = path.read_bytes()
    path.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    with refused(DataError, code="wrong_sha256", key=str(path)):
        run(settings, data={"sources": {"text": str(own_shards)}, "verify": True})
    assert not Path(settings["output_dir"]).exists()
