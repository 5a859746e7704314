import hashlib
import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import numbers, refused
from tests.folders import make_folder
from tests.train.runs import run
from train.data import source as source_module
from train.data.format import DataError, read_manifest
from train.data.order import permutation_key, permute
from train.data.source import check_fit, open_held_out, open_sources
from train.data.stream import (
    NO_LABEL,
    compute_unigram_loss,
    held_out_batches,
    open_stream,
)
from train.files import sha256_file

T = 32


def split_tokens(folder: Path, split: str) -> np.ndarray:
    shards = read_manifest(folder).split_shards(split)
    return np.concatenate([np.fromfile(folder / shard.name, "<u2") for shard in shards]).astype(np.int64)


def test_epoch_visits_every_window_once(own_shards):
    stream = open_stream({"a": own_shards}, None, T, seed=1)
    tokens = split_tokens(own_shards, "train")
    windows = (len(tokens) - 1) // T
    assert (
        stream.num_samples == windows
        and stream.num_tokens == len(tokens)
        and len(read_manifest(own_shards).shards) > 3
    )
    expected = [tokens[i * T : i * T + T + 1].tolist() for i in range(windows)]
    orders = []
    for epoch in range(2):
        input_ids, labels, _ = stream.batch(epoch * windows, windows)
        assert input_ids.dtype == labels.dtype == torch.int64 and input_ids.shape == labels.shape == (
            windows,
            T,
        )
        found = [ids + [label[-1]] for ids, label in zip(input_ids.tolist(), labels.tolist(), strict=True)]
        assert torch.equal(input_ids[:, 1:], labels[:, :-1])
        assert sorted(found) == sorted(expected) and found != expected
        orders.append(found)
    assert orders[0] != orders[1]


@pytest.mark.parametrize(("tokens", "samples"), [(3 * T, 2), (3 * T + 1, 3), (4 * T, 3)])
def test_last_token_is_only_a_label(tmp_path, tokens, samples):
    """A sample takes one token more than it has."""
    folder = make_folder(tmp_path / "a", {"train": [np.arange(T), np.arange(T, tokens)]})
    stream = open_stream({"a": folder}, None, T, seed=0)
    assert stream.num_samples == samples
    _, labels, _ = stream.batch(0, samples)
    assert sorted(labels.flatten().tolist()) == list(range(1, samples * T + 1))


def test_eval_stream_order(own_shards):
    stream = open_stream({"a": own_shards}, None, T, seed=1, split="eval")
    tokens = split_tokens(own_shards, "eval")
    input_ids, labels, _ = stream.batch(0, stream.num_samples)
    covered = stream.num_samples * T
    assert input_ids.flatten().tolist() == tokens[:covered].tolist()
    assert labels.flatten().tolist() == tokens[1 : covered + 1].tolist()
    with refused(DataError, code="samples_beyond_end"):
        stream.batch(stream.num_samples, 1)
    with refused(DataError, code="too_few_tokens", key=str(own_shards)):
        open_stream({"a": own_shards}, None, 1_000_000, seed=1, split="eval")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 65, 1000, 70_001])
def test_permutation(size):
    keys = [permutation_key(1, "a", epoch) for epoch in range(2)]
    orders = [permute(np.arange(size), size, key) for key in keys]
    for order in orders:
        assert np.array_equal(np.sort(order), np.arange(size))
    if size >= 64:
        assert not np.array_equal(*orders)
        assert abs(np.corrcoef(np.arange(size), orders[0])[0, 1]) < 4 / size**0.5
        assert abs(np.corrcoef(orders[0][:-1], orders[0][1:])[0, 1]) < 4 / size**0.5


@pytest.mark.parametrize(("size", "digest"), [(1000, "c754f582ea46627f"), (70_001, "5ccb1a468db20fd9")])
def test_epoch_order_is_stable(size, digest):
    """Another one would give a run that goes on samples again that it has seen."""
    order = permute(np.arange(size), size, permutation_key(7, "web", 2))
    assert hashlib.sha256(order.astype("<i8").tobytes()).hexdigest().startswith(digest)


@pytest.fixture
def graded(tmp_path: Path) -> dict[str, Path]:
    """Two sources of 96 and 48 evaluation windows; the tokens of a window are its number, from 200 on in b."""
    folders = {}
    for name, windows, offset in (("a", 96, 0), ("b", 48, 200)):
        tokens = np.repeat(np.arange(windows) + offset, T)
        shards = np.split(np.append(tokens, offset), [5 * T + 3, 20 * T])
        folders[name] = make_folder(tmp_path / name, {"train": shards, "eval": shards})
    return folders


def test_fingerprint_covers_the_sample_order(graded):
    a, b = graded.values()

    def fingerprint(sources=None, weights=None, seq_length=T, seed=1) -> str:
        sources = sources or graded
        return json.dumps(open_stream(sources, weights, seq_length, seed).fingerprint(), sort_keys=True)

    same = fingerprint()
    assert fingerprint() == same == fingerprint({"b": b, "a": a})
    others = [
        fingerprint(seed=2), fingerprint(seq_length=16), fingerprint(weights={"a": 1, "b": 1}),
        fingerprint({"a": a}), fingerprint({"a": b, "b": a}),
    ]  # fmt: skip
    assert len({same, *others}) == 6


@pytest.mark.parametrize("most", [1, 2, 3, 12, 72, 143, 144, 1000])
def test_evaluation_samples_are_evenly_spaced(graded: dict, most: int) -> None:
    stream = open_stream(graded, None, T, 0, "eval", max_samples=most)
    count = max(min(most, 144), 2)  # at least one of each source
    assert stream.num_samples == count
    found = set()
    for world in (1, 2, 3, 4):
        for size in (1, 5, 8):
            rows = [
                int(row[0])
                for rank in range(world)
                for samples in stream.parts.values()
                for _, own, batch in held_out_batches(stream, size, rank, world, samples)
                for row in batch.input_ids[:own]
            ]
            assert len(rows) == len(set(rows)) == count
            found.add(tuple(sorted(rows)))
    (chosen,) = found
    for first, windows in ((0, 96), (200, 48)):
        own = [number - first for number in chosen if first <= number < first + windows]
        assert own and abs(len(own) - count * windows / 144) < 1
        assert max(np.diff([-1, *own, windows])) <= windows / len(own) + 1


def test_unigram_loss(graded: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also across shards; of a large split the frequencies are those of a part of it, spread over it."""
    train = open_stream(graded, None, T, 0)
    for most in (3, 50, 144):
        held_out = open_stream(graded, None, T, 0, "eval", max_samples=most)
        expected = []
        for (source, _), labels in zip(
            held_out.sample_ids(0, most), held_out.batch(0, most).labels, strict=True
        ):
            counts = np.bincount(split_tokens(train.sources[source].folder, "train"), minlength=400) + 1
            expected += (-np.log(counts / counts.sum())[labels]).tolist()
        assert compute_unigram_loss(train, held_out) == pytest.approx(np.mean(expected), rel=1e-12)
    monkeypatch.setattr(source_module, "PIECE_TOKENS", T)
    monkeypatch.setattr(source_module, "COUNTED_TOKENS", 24 * T)
    counts = train.sources[0].token_counts()
    assert counts.sum() == 20 * T and np.flatnonzero(counts).tolist() == list(range(0, 96, 5))


def test_last_batch_is_padded(own_shards):
    """Of three samples in batches of two, the second of two ranks has one sample and a row to fill."""
    stream = open_stream({"a": own_shards}, None, T, 0, "eval", document_mask=True, max_samples=3)
    ((start, rows, batch),) = held_out_batches(stream, 2, 1, 2, range(3))
    expected = stream.batch(2, 1)
    assert (start, rows) == (2, 1) and len(batch.documents.positions) == 2
    assert torch.equal(batch.input_ids, expected.input_ids.expand(2, -1))
    assert torch.equal(batch.labels[0], expected.labels[0]) and (batch.labels[1] == NO_LABEL).all()


def test_vocabulary_must_fit_the_model(own_shards):
    sources = open_sources({"a": own_shards}, "train", T)
    check_fit(sources, 400, T)
    with refused(DataError, code="vocabulary_too_large", key="model.config"):
        check_fit(sources, 399, T)
    with refused(DataError, code="sequence_too_long", key="max_seq_length"):
        check_fit(sources, 400, T - 1)


def test_different_tokenizer_raises(tmp_path, own_shards):
    other = shutil.copytree(own_shards, tmp_path / "b")
    (other / "tokenizer/tokenizer.model").write_bytes(b"other")
    path, digest = other / "manifest.json", hashlib.sha256(b"other").hexdigest()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_sha256": digest}))
    ends = shutil.copytree(own_shards, tmp_path / "ends")  # the same tokenizer.model, and another EOS
    (ends / "manifest.json").write_text(
        json.dumps(json.loads((ends / "manifest.json").read_text()) | {"eos_id": 0})
    )
    with refused(DataError, code="different_tokenizers"):
        open_stream({"a": own_shards, "b": ends}, None, T, seed=1)
    with refused(DataError, code="different_tokenizers"):
        open_stream({"a": own_shards, "b": own_shards, "c": other}, None, T, seed=1)
    with refused(DataError, code="different_tokenizers"):
        open_held_out(open_sources({"a": own_shards}, "train", T), {"a": own_shards}, {"b": other}, T)


@pytest.mark.parametrize(
    ("changes", "as_source", "as_set"),
    [
        ({}, True, True),
        ({"eval_fraction": 0.3}, False, False),
        ({"eval_fraction": 0.05}, False, True),  # its eval split is in the eval split of the others
        ({"eval_fraction": 1.0}, True, True),  # all of it is for evaluation
        ({"eval_fraction": 0.3, "steps": {"eval_by": "position"}}, True, True),
    ],
)
def test_leaked_document_raises(tmp_path, own_shards, changes, as_source, as_set):
    """`data` has the eval fraction 0.1."""
    other, plain = (
        shutil.copytree(own_shards, tmp_path / "other"),
        shutil.copytree(own_shards, tmp_path / "plain"),
    )
    path = other / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    train = open_sources({"a": own_shards}, "train", T)
    for names in ({"a": plain, "b": own_shards, "c": other}, {"a": other, "b": own_shards, "c": plain}):
        with nullcontext() if as_source else refused(DataError, code="different_eval_fractions"):
            open_stream(names, None, T, seed=1)
        open_stream(names, None, T, seed=1, split="eval")  # nothing is trained on
    with nullcontext() if as_set else refused(DataError, code="different_eval_fractions"):
        open_held_out(train, {"a": own_shards}, {"b": other}, T)


@pytest.mark.parametrize(
    "change, key",
    [
        (lambda m: m.pop("dtype"), "dtype"),
        (lambda m: m["shards"][0].pop("sha256"), "shards.0.sha256"),
        (lambda m: m.update(vocab_size="400"), "vocab_size"),
        (lambda m: m.update(shards=None), "shards"),
        (lambda m: m["shards"][0].update(name="../x.ds"), "shards.0.name"),
        (lambda m: m["shards"][0].update(tokens=0), "shards.0.tokens"),
        (lambda m: m.update(documents=[1, 2]), "documents"),
        (lambda m: m["documents"].update(dropped={"x": "y"}), "documents.dropped.int"),
        (lambda m: m.update(tokenizer_files=[]), "tokenizer_files"),
        (lambda m: m.update(tokenizer_files=["../x"]), "tokenizer_files.0"),
        (lambda m: m.update(text_key=3), "text_key"),
        (lambda m: m.update(text_bytes="many"), "text_bytes"),
        (None, None),  # half of it: no JSON
    ],
)
def test_corrupt_manifest(own_shards, change, key):
    path = own_shards / "manifest.json"
    if change:
        values = json.loads(path.read_text())
        change(values)
    path.write_text(json.dumps(values) if change else path.read_text()[:500])
    with refused(DataError, code="manifest_corrupt", key=key):
        open_stream({"a": own_shards}, None, T, seed=1)


# ---------------------------------------------------------------- data that is damaged or does not fit


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
    """A resume accepts other evaluation data, but not other training data."""
    train = [tokens(1000, seed=s) for s in range(3)]
    other = make_folder(tmp_path / "other", {"train": train, "eval": [tokens(500, seed=9)]})
    for split, same in (("train", True), ("eval", False)):
        one, two = (open_stream({"a": each}, None, T, 1, split).fingerprint() for each in (folder, other))
        assert (one == two) is same


@pytest.mark.parametrize("where", [0, 70, 500, -1])
def test_token_id_beyond_the_vocabulary(folder, where):
    """It is found although the hash matches the manifest: in each part that is read at a time, where a sample spans two
    shards, and in the last token, which is only a label."""
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
