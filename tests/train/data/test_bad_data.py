"""Prepared data that is damaged or does not fit, as training meets it: found, named, and never trained on."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from test_fp8.common.folders import make_folder
from tests.train.runs import metrics, run
from train.data import format
from train.data.format import DataError, read_manifest, verify_shard
from train.data.source import TokenSource, check_fit
from train.data.stream import SampleStream, open_stream
from train.files import sha256_file

T = 32


def tokens(count: int, below: int = 400, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, below, count)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three train shards of 1,000 tokens and an eval shard."""
    return make_folder(
        tmp_path / "data", {"train": [tokens(1000, seed=s) for s in range(3)], "eval": [tokens(500)]}
    )


def refused(folder: Path, verify: bool = False) -> str:
    with pytest.raises(DataError) as error:
        stream = open_stream({"a": folder}, None, T, seed=1)
        assert verify
        stream.verify()
    return str(error.value)


def test_a_source_too_small_to_be_mixed_by_tokens_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the way out: no weights were given that could be raised."""
    small = make_folder(folder.parent / "small", {"train": [tokens(40)], "eval": [tokens(40)]})
    sources = [TokenSource(name, path, "train", T) for name, path in (("large", folder), ("small", small))]
    sources[0].num_tokens, sources[0].num_windows = 10**12, 10**12 // T
    with pytest.raises(
        DataError, match=r"source small has 40 of 1,000,000,000,040 tokens.* Give data\.weights"
    ):
        SampleStream(sources, None, seed=1)


@pytest.mark.parametrize("name", ["train_00001.ds", "train_00001.ds.index"])
@pytest.mark.parametrize("change", [-1, -8, 8])
def test_a_truncated_or_longer_file_is_named_when_opened(folder, name, change):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:change] if change < 0 else content + b"\0" * change)
    message = refused(folder)
    assert (
        name in message and f"has {len(content) + change} bytes, the manifest says {len(content)}" in message
    )


def test_a_shard_that_is_cut_off_while_training_reads_it_is_named(folder):
    """An error, where a memory map would kill the process."""
    stream = open_stream({"a": folder}, None, T, seed=1)
    stream.batch(0, stream.num_samples)  # all shards are open
    with open(folder / "train_00001.ds", "r+b") as file:
        file.truncate(1000)
    with pytest.raises(
        DataError, match=r"train_00001.ds has 1000 bytes, the manifest says 2000: it was cut off"
    ):
        stream.batch(0, stream.num_samples)


@pytest.mark.parametrize("document_mask", [False, True])
def test_data_that_are_replaced_while_training_reads_them_are_noticed(
    folder, tmp_path, monkeypatch, document_mask
):
    """Shards of the same names and sizes, of which not all are open."""
    monkeypatch.setattr("train.data.source.OPEN_SHARDS", 1)
    stream = open_stream({"a": folder}, None, T, seed=1, document_mask=document_mask)
    before = stream.batch(0, 9)
    (folder / "manifest.json").touch()
    assert torch.equal(stream.batch(0, 9).input_ids, before.input_ids)
    replace(folder, tmp_path / "other")
    with pytest.raises(DataError, match="data has got other data since it was opened"):
        stream.batch(0, 9)


def replace(folder: Path, by: Path, in_place: bool = False) -> None:
    make_folder(by, {"train": [tokens(1000, seed=s) for s in range(5, 8)], "eval": [tokens(500)]})
    for path in by.iterdir():
        if path.is_file() and in_place:
            (folder / path.name).write_bytes(path.read_bytes())
        elif path.is_file():
            path.replace(folder / path.name)


@pytest.mark.parametrize("in_place", [False, True])
def test_documents_of_other_data_are_noticed(folder, tmp_path, in_place):
    """The tokens of a shard that is open are those of before; its index is opened only now."""
    source = TokenSource("a", folder, "train", T)
    source.read(0, *np.empty((2, T), dtype=np.int64))
    replace(folder, tmp_path / "other", in_place)
    with pytest.raises(DataError, match="data has got other data since it was opened"):
        source.document_ends(0)


@pytest.mark.parametrize("name", ["train_00001.ds", "train_00001.ds.index"])
def test_a_flipped_bit_is_found_by_verify(folder, name):
    content = bytearray((folder / name).read_bytes())
    content[40] ^= 1
    (folder / name).write_bytes(content)
    open_stream({"a": folder}, None, T, seed=1)  # sizes alone do not show it
    assert f"{folder / name} does not have the sha256 of the manifest" in refused(folder, verify=True)
    for parts in (1, 2, 3):  # shared among ranks, exactly one of them finds it
        stream, found = open_stream({"a": folder}, None, T, seed=1), 0
        for part in range(parts):
            try:
                stream.verify(part, parts)
            except DataError as error:
                assert name in str(error)
                found += 1
        assert found == 1


def test_verify_shares_all_shards_among_ranks(folder, monkeypatch):
    looked_at = []
    monkeypatch.setattr("train.data.stream.verify_shard", lambda _, __, shard: looked_at.append(shard.name))
    stream = open_stream({"a": folder}, None, T, seed=1)
    assert sum(stream.verify(rank, 2) for rank in range(2)) == 3
    assert sorted(looked_at) == [shard.name for shard in read_manifest(folder).split_shards("train")]


def test_other_evaluation_data_are_no_other_training_data(folder, tmp_path):
    """A run goes on with them."""
    train = [tokens(1000, seed=s) for s in range(3)]
    other = make_folder(tmp_path / "other", {"train": train, "eval": [tokens(500, seed=9)]})
    for split, same in (("train", True), ("eval", False)):
        one, two = (open_stream({"a": each}, None, T, 1, split).fingerprint() for each in (folder, other))
        assert (one == two) is same


def test_who_prepared_data_is_told_what_became_of_them(folder):
    counts = {"in": 2010, "out": 4, "dropped": {"bad UTF-8": 2, "missing key": 1001}, "removed": {"c4": 1003}}
    manifest = dataclasses.replace(read_manifest(folder), documents=counts, unigram_loss=5.43219)
    *others, last = manifest.summary().splitlines()
    assert others == [
        "documents: 2,010 in, 4 out, 1,003 dropped, 1,003 removed",
        "train: 30 documents, 3,000 tokens, 3 shards",
        "eval: 5 documents, 500 tokens, 1 shards",
    ]
    assert last == "unigram loss of the eval split: 5.4322 nats per token"
    assert dataclasses.replace(manifest, unigram_loss=None).summary().splitlines() == others


def test_a_shard_of_the_wrong_dtype_is_named(folder):
    """uint32 ids under a manifest of uint16, and the other way round: the size does not fit."""
    path = folder / "train_00002.ds"
    ids = np.fromfile(path, "<u2")
    ids.astype("<u4").tofile(path)
    assert "train_00002.ds has 4000 bytes, the manifest says 2000" in refused(folder)
    ids.astype(np.uint8).tofile(path)
    assert "train_00002.ds has 1000 bytes, the manifest says 2000" in refused(folder)


def test_files_that_the_manifest_does_not_list_are_never_opened(folder):
    stream = open_stream({"a": folder}, None, T, seed=1)
    before = stream.batch(0, stream.num_samples)[0]
    for name in ("train_00003.ds", "train_0000.ds", "eval_99999.ds"):
        (folder / name).mkdir()  # opening it would be an error
    again = open_stream({"a": folder}, None, T, seed=1)
    again.verify()
    assert again.num_tokens == stream.num_tokens and torch.equal(
        again.batch(0, stream.num_samples)[0], before
    )


def test_an_id_beyond_the_vocabulary_is_found_by_verify_and_when_read(folder, monkeypatch):
    """Also in a file whose hash is the manifest's: what was prepared is wrong, not what was copied; in whichever of
    the parts that are read at a time."""
    path = folder / "train_00001.ds"
    ids = np.fromfile(path, "<u2")
    ids[500] = 400
    ids.tofile(path)
    values = json.loads((folder / "manifest.json").read_text())
    values["shards"][1]["sha256"] = sha256_file(path)
    (folder / "manifest.json").write_text(json.dumps(values))
    stream = open_stream({"a": folder}, None, T, seed=1)
    with pytest.raises(
        DataError, match=r"train_00001.ds: token 500 has the id 400, beyond the vocabulary of 400"
    ):
        stream.batch(0, stream.num_samples)
    for size in (format.READ_BYTES, 64):
        monkeypatch.setattr(format, "READ_BYTES", size)
        assert "train_00001.ds holds token id 400, beyond the vocabulary of 400" in refused(
            folder, verify=True
        )


# ---------------------------------------------------------------- vocabularies beyond 16 bits

LARGE = 70_000


@pytest.fixture
def large(tmp_path: Path) -> Path:
    parts = {"train": [tokens(1000, LARGE, s) for s in range(3)], "eval": [tokens(500, LARGE)]}
    assert min(part.max() for part in parts["train"]) > 1 << 16
    return make_folder(tmp_path / "large", parts, vocab_size=LARGE)


def test_a_vocabulary_beyond_65_536_is_read_as_it_was_written(large):
    manifest = read_manifest(large)
    assert manifest.dtype == "uint32" and manifest.shards[0].bytes == 4 * manifest.shards[0].tokens
    stream = open_stream({"a": large}, None, T, seed=1)
    stream.verify()
    input_ids, labels, _ = stream.batch(0, stream.num_samples)
    written = np.concatenate([tokens(1000, LARGE, s) for s in range(3)])
    expected = sorted(written[i * T : i * T + T + 1].tolist() for i in range(stream.num_samples))
    found = [[*ids, label[-1]] for ids, label in zip(input_ids.tolist(), labels.tolist(), strict=True)]
    assert sorted(found) == expected
    with pytest.raises(DataError, match="vocabulary of 70000, the model one of 65536"):
        check_fit(stream.sources, 1 << 16, T)
    shard = manifest.shards[0]
    path = large / shard.name
    ids = np.fromfile(path, "<u4")
    ids[7] = LARGE
    ids.tofile(path)
    with pytest.raises(
        DataError, match=r"train_00000.ds: token 7 has the id 70000, beyond the vocabulary of 70000"
    ):
        stream.batch(0, stream.num_samples)
    with pytest.raises(DataError, match="sha256"):
        verify_shard(large, manifest, shard)


# ---------------------------------------------------------------- whole runs


@pytest.fixture
def short_run(tmp_path: Path, small_model: Path, process_group: None) -> dict:
    """Two steps of a model with one layer, which measure and save nothing; data and vocabulary are to be added."""
    config = json.loads(small_model.read_text()) | {
        "vocab_size": LARGE,
        "hidden_size": 64,
        "num_hidden_layers": 1,
    }
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return {
        "model": {"config": str(tmp_path / "config.json")},
        "precision": {"compute": "bf16"},
        "output_dir": str(tmp_path / "run"),
        "max_steps": 2,
        "max_seq_length": T,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "max_eval_samples": 2,
        "save_strategy": "no",
    }


def test_a_model_trains_on_a_vocabulary_beyond_65_536(short_run, large):
    output_dir = run(short_run, data={"sources": {"large": str(large)}})
    first, last = metrics(output_dir)
    assert first["loss"] == pytest.approx(np.log(LARGE), rel=0.05) and np.isfinite(last["eval_loss"])


def test_a_run_with_data_verify_refuses_a_flipped_bit_before_it_writes_anything(
    short_run, folder, capsys: pytest.CaptureFixture
):
    data = {"sources": {"text": str(folder)}, "verify": True}
    path = folder / "eval_00000.ds"
    content = path.read_bytes()
    path.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    with pytest.raises(DataError, match="eval_00000.ds does not have the sha256"):
        run(short_run, data=data)
    assert not Path(short_run["output_dir"]).exists()
    path.write_bytes(content)
    run(short_run, data=data)
    said = capsys.readouterr().out
    assert "data.verify: hashes and token ids hold in 4 shards, the share of rank 0 of 1" in said
