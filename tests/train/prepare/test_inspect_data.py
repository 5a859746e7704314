"""train/inspect_data.py on data that prepare_data.py wrote, whole and damaged in each way."""

import dataclasses
import json
import re
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from tests.fixtures import corpus_texts, write_jsonl
from tests.train.prepare.megatron_datasets import imported
from train.data.format import read_manifest, write_manifest
from train.files import sha256_file
from train.inspect_data import count_lengths, examine, histogram_table
from train.inspect_data import main as inspect_data

BOUNDARY = "-- document"
SAMPLE = re.compile(
    r"== sample \d+ of \d+: window ([\d,]+) of ([\d,]+), (?:train|eval) tokens ([\d,]+) to ([\d,]+)"
)


@pytest.fixture
def data(own_shards: Path) -> Path:
    """300 documents."""
    return own_shards


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


def samples_in(output: str) -> list[tuple[re.Match[str], list[list[str]]]]:
    """Each sample's header and the lines of each of its documents."""
    samples: list[tuple[re.Match[str], list[list[str]]]] = []
    for line in output[output.index("== sample") :].splitlines():
        if header := SAMPLE.fullmatch(line):
            samples.append((header, []))
        elif line == BOUNDARY:
            samples[-1][1].append([])
        elif line:
            assert line in ("<BOS>", "<EOS>") or line.startswith("| "), line
            samples[-1][1][-1].append(line)
    return samples


def rehash(folder: Path, name: str) -> None:
    """Make the manifest agree with a shard's changed content: what a faulty preparation would have committed."""
    hashes = {"sha256": sha256_file(folder / name), "index_sha256": sha256_file(folder / f"{name}.index")}
    manifest = read_manifest(folder)
    shards = [dataclasses.replace(s, **hashes) if s.name == name else s for s in manifest.shards]
    write_manifest(folder, dataclasses.replace(manifest, shards=shards))


def test_intact_data(data, run):
    """With the counts of the splits, and every document in the histogram."""
    manifest = read_manifest(data)
    status, output, errors = run(data, "--verify", "--samples", 0)
    assert (status, errors) == (0, "") and "== sample" not in output
    values, _ = json.JSONDecoder().raw_decode(output, output.index("{"))
    assert values == {name: value for name, value in dataclasses.asdict(manifest).items() if name != "shards"}
    rows = {line.split()[0]: line.split()[1:] for line in output.splitlines() if line}
    lengths = []
    for split in ("train", "eval"):
        documents = imported(data, split)
        tokens = sum(map(len, documents))
        found = [number(word) for word in rows[f"{split}:"] if word[0].isdigit()]
        assert found == [len(documents), tokens, len(manifest.split_shards(split))]
        lengths += map(len, documents)
    bins = re.findall(r"^ *([\d,]+) to ([\d,]+) +([\d,]+) +[\d.]+%  +[\d.]+%$", output, re.MULTILINE)
    assert len(bins) > 1 and sum(number(count) for _, _, count in bins) == len(lengths) == 300
    for low, high, count in bins:
        assert number(count) == sum(number(low) <= length <= number(high) for length in lengths)


def test_histogram_bin_edges():
    total = count_lengths(np.array([1, 2, 3, 4, 7, 8, 2**20 - 1, 2**20], dtype=np.int64))
    bins = {int(k): total[:, k].tolist() for k in np.flatnonzero(total[0])}  # documents and tokens
    assert bins == {0: [1, 1], 1: [2, 5], 2: [2, 11], 3: [1, 8], 19: [1, 2**20 - 1], 20: [1, 2**20]}
    assert histogram_table(total).count("\n") == 6 and histogram_table(0 * total)


@pytest.mark.parametrize("split, seq_length", [("train", 512), ("eval", 100), ("train", 10), ("eval", 10**6)])
def test_printed_samples(data, run, corpus, split, seq_length):
    documents = imported(data, split)
    stream = [token for document in documents for token in document]
    starts = np.cumsum([0, *map(len, documents)]).tolist()
    texts = {json.loads(line)["text"] for line in corpus.read_text().splitlines()}
    model = sentencepiece.SentencePieceProcessor(model_file=str(data / "tokenizer" / "tokenizer.model"))
    status, output, errors = run(data, "--samples", 3, "--seq_length", seq_length, "--split", split)
    assert (status, errors) == (0, "")
    seq_length = min(seq_length, len(stream) - 1)  # one sample of a short split
    samples = samples_in(output)
    assert len(samples) == min(3, (len(stream) - 1) // seq_length)
    whole_documents = 0
    for header, found in samples:
        window, windows, start, last = map(number, header.groups())
        assert windows == (len(stream) - 1) // seq_length and start == window * seq_length
        assert last == start + seq_length - 1
        position = start
        for lines in found:
            index = bisect_right(starts, position) - 1
            ids = stream[position : min(starts[index + 1], start + seq_length)]
            first = position == starts[index]
            assert ("<BOS>" in lines, "<EOS>" in lines) == (first, position + len(ids) == starts[index + 1])
            text = "\n".join(line[2:] for line in lines if line.startswith("| "))
            assert text == model.decode(ids)
            if lines[0] == "<BOS>" and lines[-1] == "<EOS>":
                assert text in texts
                whole_documents += 1
            position += len(ids)
        assert position == start + seq_length
    assert whole_documents or seq_length < 100


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
    _, output, _ = run(tmp_path / "out", "--seq_length", 10, "--samples", 10**6)
    first = next(found for header, found in samples_in(output) if header[1] == "0")
    assert len(first) == 1 and first[0].index("<EOS>") == 2  # <BOS>, text, <EOS>, text


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
def test_damaged_data(data, run, kind):
    change, suffix, code, always_shows = (DAMAGES | COMMITTED)[kind]
    shards = read_manifest(data).shards
    damaged = [shards[1], shards[-1]]  # of both splits
    for shard in damaged:
        damage(data / (shard.name + suffix), change)
        if kind in COMMITTED:
            rehash(data, shard.name)
    files = [str(data / (shard.name + suffix)) for shard in damaged]
    _, found = examine(data, read_manifest(data), verify=True, workers=2)
    assert [(error.code, error.key) for error in found] == [(code, file) for file in files]
    status, output, errors = run(data, "--verify")
    assert status == 1 and not SAMPLE.search(output)
    assert [line.split()[1].rstrip(":") for line in errors.splitlines()] == files
    status, _, errors = run(data, "--samples", 0)
    assert (status, len(errors.splitlines())) == ((1, 2) if always_shows else (0, 0))


def test_user_errors_exit_with_status_2(data, run, tmp_path):
    status, _, errors = run(tmp_path / "nowhere")
    assert status == 2 and str(tmp_path / "nowhere") in errors and errors.count("\n") == 1
    tokenizer = data / "tokenizer" / "tokenizer.model"
    tokenizer.write_bytes(tokenizer.read_bytes() + b" ")
    status, _, errors = run(data, "--verify")
    assert status == 1 and str(tokenizer) in errors
    tokenizer.unlink()
    status, output, errors = run(data)
    assert status == 2 and str(tokenizer) in errors and "300" in output
    assert run(data, "--samples", 0)[0] == 0  # nothing to decode
    (data / "manifest.json").write_text("{}")
    assert run(data)[0] == 2
