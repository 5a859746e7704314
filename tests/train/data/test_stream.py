import hashlib
import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import refused
from tests.fixtures import corpus_texts, write_jsonl
from tests.folders import make_folder
from train.data import source as source_module
from train.data.format import DataError, read_manifest
from train.data.order import permutation_key, permute, spread
from train.data.source import check_fit, open_sources
from train.data.stream import (
    NO_LABEL,
    compute_unigram_loss,
    held_out_batches,
    open_held_out,
    open_stream,
)

T = 32


@pytest.fixture
def second(tmp_path: Path, prepare) -> Path:
    path = write_jsonl(tmp_path / "second.jsonl", [text.upper() for text in corpus_texts(120)])
    assert prepare(tmp_path / "second", path, eval_fraction=0.1) == 0
    return tmp_path / "second"


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


def test_fingerprint_covers_the_sample_order(own_shards, second):
    def fingerprint(sources=None, weights=None, seq_length=T, seed=1) -> str:
        sources = sources or {"a": own_shards, "b": second}
        return json.dumps(open_stream(sources, weights, seq_length, seed).fingerprint(), sort_keys=True)

    same = fingerprint()
    assert fingerprint() == same == fingerprint(sources={"b": second, "a": own_shards})
    others = [
        fingerprint(seed=2), fingerprint(seq_length=16), fingerprint(weights={"a": 1, "b": 1}),
        fingerprint(sources={"a": own_shards}), fingerprint(sources={"a": second, "b": own_shards}),
    ]  # fmt: skip
    assert len({same, *others}) == 6


@pytest.fixture
def graded(tmp_path: Path) -> dict[str, Path]:
    """Two sources of 96 and 48 evaluation windows; the tokens of a window are its number, from 200 on in b."""
    folders = {}
    for name, windows, offset in (("a", 96, 0), ("b", 48, 200)):
        tokens = np.repeat(np.arange(windows) + offset, T)
        shards = np.split(np.append(tokens, offset), [5 * T + 3, 20 * T])
        folders[name] = make_folder(tmp_path / name, {"train": shards, "eval": shards})
    return folders


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


def test_spread_is_centered():
    """Samples from window 0 on would favor the beginning of the split."""
    assert spread(5, 12).tolist() == [1, 3, 6, 8, 10]


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
    with refused(DataError, code="different_tokenizers"):
        open_stream({"a": own_shards, "b": own_shards, "c": other}, None, T, seed=1)
    with refused(DataError, code="different_tokenizers"):
        open_held_out(open_stream({"a": own_shards}, None, T, seed=1), {"a": own_shards}, {"b": other})


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
    train = open_stream({"a": own_shards}, None, T, seed=1)
    for names in ({"a": plain, "b": own_shards, "c": other}, {"a": other, "b": own_shards, "c": plain}):
        with nullcontext() if as_source else refused(DataError, code="different_eval_fractions"):
            open_stream(names, None, T, seed=1)
        open_stream(names, None, T, seed=1, split="eval")  # nothing is trained on
    with nullcontext() if as_set else refused(DataError, code="different_eval_fractions"):
        open_held_out(train, {"a": own_shards}, {"b": other})


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
