"""train/inspect_data.py on data that prepare_data.py wrote, whole and damaged in each way."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from tests.fixtures import corpus_texts, write_jsonl
from tests.train.prepare.megatron_datasets import imported
from train.data.encoder import TextEncoder
from train.data.format import read_manifest, write_manifest
from train.data.source import TokenSource
from train.files import sha256_file
from train.inspect_data import find_damage, sample_text
from train.inspect_data import main as inspect_data

SAMPLE = re.compile(
    r"^== sample \d+ of \d+: window ([\d,]+) of ([\d,]+), \w+ tokens ([\d,]+) to ([\d,]+)$", re.M
)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """run(folder, *options) -> (exit status, stdout, stderr)."""

    def call(folder: Path, *options: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = inspect_data([str(folder), *map(str, options)])
        return status, *capsys.readouterr()

    return call


def number(text: str) -> int:
    return int(text.replace(",", ""))


def printed(ids: list[int], model: sentencepiece.SentencePieceProcessor) -> str:
    """Return how a part of a document is printed, which has a BOS or EOS at most at its ends."""
    lines = ["-- document", *["<BOS>"] * (ids[0] == 1)]
    if text := model.decode([token for token in ids if token not in (1, 2)]):
        lines += [f"| {line}" for line in text.split("\n")]
    return "\n".join([*lines, *["<EOS>"] * (ids[-1] == 2)])


def rehash(folder: Path, name: str) -> None:
    """Make the manifest agree with a shard's changed content: what a faulty preparation would have committed."""
    hashes = {"sha256": sha256_file(folder / name), "index_sha256": sha256_file(folder / f"{name}.index")}
    manifest = read_manifest(folder)
    shards = [dataclasses.replace(s, **hashes) if s.name == name else s for s in manifest.shards]
    write_manifest(folder, dataclasses.replace(manifest, shards=shards))


def test_intact_data(own_shards, run):
    """With the counts of the splits."""
    manifest = read_manifest(own_shards)
    status, output, errors = run(own_shards, "--verify", "--samples", 0)
    assert (status, errors) == (0, "") and "== sample" not in output
    values, _ = json.JSONDecoder().raw_decode(output, output.index("{"))
    assert values == {name: value for name, value in dataclasses.asdict(manifest).items() if name != "shards"}
    rows = {line.split()[0]: line.split()[1:] for line in output.splitlines() if line}
    for split in ("train", "eval"):
        documents = imported(own_shards, split)
        tokens = sum(map(len, documents))
        found = [number(word) for word in rows[f"{split}:"] if word[0].isdigit()]
        assert found == [len(documents), tokens, len(manifest.split_shards(split))]


@pytest.mark.parametrize("split, seq_length", [("train", 512), ("eval", 100), ("train", 10), ("eval", 10**6)])
def test_printed_samples(own_shards, run, split, seq_length):
    documents = imported(own_shards, split)
    tokens, ends = np.concatenate(documents), np.cumsum([len(document) for document in documents])
    model = sentencepiece.SentencePieceProcessor(model_file=str(own_shards / "tokenizer" / "tokenizer.model"))
    status, output, errors = run(own_shards, "--samples", 3, "--seq_length", seq_length, "--split", split)
    assert (status, errors) == (0, "")
    seq_length = min(seq_length, len(tokens) - 1)  # one sample of a short split
    windows = (len(tokens) - 1) // seq_length
    headers = [list(map(number, header.groups())) for header in SAMPLE.finditer(output)]
    texts = re.split("\n== sample .*\n", output)[1:]
    assert len(headers) == min(3, windows)
    for (window, *header), text in zip(headers, texts, strict=True):
        start, stop = window * seq_length, (window + 1) * seq_length
        assert header == [windows, start, stop - 1]
        parts = np.split(tokens[start:stop], ends[(start < ends) & (ends < stop)] - start)
        assert text.rstrip("\n") == "\n".join(printed(part.tolist(), model) for part in parts)


def test_tiny_data(tmp_path, prepare, run):
    path = write_jsonl(tmp_path / "a.jsonl", corpus_texts(5))
    assert prepare(tmp_path / "out", path, eval_fraction=1) == 0
    status, output, errors = run(tmp_path / "out", "--verify")
    assert (status, errors) == (0, "") and not SAMPLE.search(output)  # its train split is empty
    assert SAMPLE.search(run(tmp_path / "out", "--split", "eval")[1])


def test_special_tokens_and_control_characters_are_visible(tmp_path, prepare, run):
    texts = ["one </s> two\n| not a boundary\n-- document 9", "colour \x1b[31m red\r\nnext"]
    path = write_jsonl(tmp_path / "a.jsonl", [*texts, *corpus_texts(30)])
    assert prepare(tmp_path / "out", path, all_train=True) == 0
    _, output, _ = run(tmp_path / "out", "--seq_length", 1000, "--samples", 99)
    assert "<BOS>\n| one </s> two\n| | not a boundary\n| -- document 9\n<EOS>\n" in output
    assert "| colour \\x1b[31m red\\r\n| next\n" in output and "\x1b" not in output

    name = read_manifest(tmp_path / "out").shards[0].name
    tokens = np.fromfile(tmp_path / "out" / name, "<u2")
    tokens[3] = 2  # an EOS inside the first document
    tokens.tofile(tmp_path / "out" / name)
    source = TokenSource("out", tmp_path / "out", "train", 10)
    document, bos, _, eos, *_ = sample_text(source, TextEncoder(tmp_path / "out/tokenizer"), 0).splitlines()
    assert (document, bos, eos) == ("-- document", "<BOS>", "<EOS>")


def plus(place: int, number: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(values: np.ndarray) -> np.ndarray:
        values[place] += number
        return values

    return change


DAMAGES = {  # (function of the values, file, error code, whether it is found without --verify)
    "truncated": (lambda values: values[:-1], "", "wrong_size", True),
    "other number": (plus(7, 1), "", "wrong_sha256", False),
    "missing": (None, "", "file_missing", True),
    "index missing": (None, ".index", "file_missing", True),
    "index truncated": (lambda values: values[:-1], ".index", "wrong_size", True),
    "index unsorted": (plus(3, 10**6), ".index", "index_not_increasing", True),
    "index too long": (plus(-1, 1), ".index", "index_not_increasing", True),
    "index moved": (plus(2, 1), ".index", "wrong_sha256", False),
}
COMMITTED = {  # by a faulty preparation: the hashes of the manifest are those of the files
    "id": (plus(7, 400), "", "token_beyond_vocabulary", False),
    "index": (plus(3, 10**6), ".index", "index_not_increasing", True),
}


def damage(path: Path, change: Callable[[np.ndarray], np.ndarray] | None) -> None:
    values = np.fromfile(path, "<u8" if path.suffix == ".index" else "<u2")
    path.unlink()
    if change:
        change(values).tofile(path)


@pytest.mark.parametrize("kind", [*DAMAGES, *COMMITTED])
def test_damaged_data(own_shards, run, kind):
    change, suffix, code, always_shows = (DAMAGES | COMMITTED)[kind]
    shards = read_manifest(own_shards).shards
    damaged = [shards[1], shards[-1]]  # of both splits
    for shard in damaged:
        damage(own_shards / (shard.name + suffix), change)
        if kind in COMMITTED:
            rehash(own_shards, shard.name)
    files = [str(own_shards / (shard.name + suffix)) for shard in damaged]
    found = find_damage(own_shards, read_manifest(own_shards), verify=True, workers=2)
    assert [(error.code, error.key) for error in found] == [(code, file) for file in files]
    status, output, errors = run(own_shards, "--verify")
    assert status == 1 and not SAMPLE.search(output)
    assert [line.split()[1].rstrip(":") for line in errors.splitlines()] == files
    status, _, errors = run(own_shards, "--samples", 0)
    assert (status, len(errors.splitlines())) == ((1, 2) if always_shows else (0, 0))


def test_user_errors_exit_with_status_2(own_shards, run, tmp_path):
    status, _, errors = run(tmp_path / "nowhere")
    assert status == 2 and str(tmp_path / "nowhere") in errors and errors.count("\n") == 1
    tokenizer = own_shards / "tokenizer" / "tokenizer.model"
    tokenizer.write_bytes(tokenizer.read_bytes() + b" ")
    status, _, errors = run(own_shards, "--verify")
    assert status == 1 and str(tokenizer) in errors
    tokenizer.unlink()
    status, output, errors = run(own_shards)
    assert status == 2 and str(tokenizer) in errors and "300" in output
    assert run(own_shards, "--samples", 0)[0] == 0  # nothing to decode
    (own_shards / "manifest.json").write_text("{}")
    assert run(own_shards)[0] == 2
