"""train/inspect_data.py on data that prepare_data.py wrote, whole and damaged in each way."""

import dataclasses
import json
import os
import re
import sys
import tracemalloc
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from tests import programs
from tests.fixtures import corpus_texts, write_jsonl
from tests.train.runs import ROOT
from train.data.format import DataError, Manifest, Shard, read_manifest, write_manifest
from train.data.index import Lengths, open_index, read_lengths
from train.data.inspection import examine, histogram_table
from train.files import sha256_file
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


def documents_of(folder: Path, split: str) -> list[list[int]]:
    """The ids of each document, read in the plainest way."""
    documents = []
    for shard in read_manifest(folder).split_shards(split):
        tokens = np.fromfile(folder / shard.name, "<u2").tolist()
        ends = np.fromfile(folder / (shard.name + ".index"), "<u8").tolist()
        documents += [tokens[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    return documents


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


def change_manifest(folder: Path, change: Callable[[Manifest], dict]) -> None:
    manifest = read_manifest(folder)
    write_manifest(folder, dataclasses.replace(manifest, **change(manifest)))


def rehash(folder: Path, name: str) -> None:
    """Make the manifest agree with a shard's changed content: what a faulty preparation would have committed."""
    hashes = {"sha256": sha256_file(folder / name), "index_sha256": sha256_file(folder / f"{name}.index")}

    shards = [dataclasses.replace(s, **hashes) if s.name == name else s for s in read_manifest(folder).shards]
    change_manifest(folder, lambda _: {"shards": shards})


def test_whole_data_passes_and_is_described(data, run):
    manifest = read_manifest(data)
    status, output, errors = run(data, "--verify", "--samples", 0)
    assert (status, errors) == (0, "")
    assert "\nverified: " in output and "== sample" not in output
    for value in (
        manifest.tokenizer_sha256,
        manifest.inputs[0],
        "tokenizer.json",
        "300 in, 300 out, 0 dropped",
    ):
        assert value in output
    for name, value in (("schema", "1"), ("vocab_size", "400"), ("bos_id", "1"), ("eos_id", "2")):
        assert f'  "{name}": {value},\n' in output
    assert len(manifest.split_shards("train")) > 2
    table = output[output.index("\nsplit ") : output.index("\ndocument lengths")].strip().splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in table}
    total = [0, 0, 0, 0]
    for split in ("train", "eval"):
        documents = documents_of(data, split)
        tokens = sum(map(len, documents))
        expected = [len(manifest.split_shards(split)), len(documents), tokens, 2 * tokens]
        assert list(map(number, rows[split])) == expected
        total = [a + b for a, b in zip(total, expected, strict=True)]
    assert list(map(number, rows["all"])) == total


def test_dropped_documents_are_listed_with_their_reason(tmp_path, prepare, run):
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in" / "a.jsonl", corpus_texts(50))
    (tmp_path / "in" / "b.jsonl").write_text('{"text": null}\n{"text": null}\n{"other": "x"}\n')
    assert prepare(tmp_path / "out", tmp_path / "in", max_dropped=3, eval_fraction=0.3) == 0
    status, output, _ = run(tmp_path / "out", "--samples", 0)
    assert status == 0 and "53 in, 50 out, 3 dropped" in output
    assert '"null text": 2' in output and '"missing key": 1' in output


def test_histogram_counts_every_document_and_token(data, run):
    lengths = [len(document) for split in ("train", "eval") for document in documents_of(data, split)]
    _, output, _ = run(data, "--samples", 0)
    rows = re.findall(r"^ *([\d,]+) to ([\d,]+) +([\d,]+) +[\d.]+%  +[\d.]+%( +#+)?$", output, re.MULTILINE)
    assert len(rows) > 1 and sum(number(count) for _, _, count, _ in rows) == len(lengths) == 300
    for low, high, count, _ in rows:
        assert number(count) == sum(number(low) <= length <= number(high) for length in lengths)
    assert max(len(bar.strip()) for *_, bar in rows) == 40
    average = f"{sum(lengths) / 300:,.1f} tokens on average, {min(lengths):,} to {max(lengths):,}"
    assert re.search(rf"^ +all +300  {re.escape(average)}$", output, re.MULTILINE)


def test_lengths_at_the_edges_of_bins():
    lengths = np.array([1, 2, 3, 4, 7, 8, 2**20 - 1, 2**20], dtype=np.int64)
    total = Lengths.of(lengths[:3]) + Lengths.of(lengths[3:3]) + Lengths.of(lengths[3:])
    rows = [row for row in total.rows() if row[1]]
    assert rows == [
        ("1", 1, 1),
        ("2 to 3", 2, 5),
        ("4 to 7", 2, 11),
        ("8 to 15", 1, 8),
        ("524,288 to 1,048,575", 1, 2**20 - 1),
        ("1,048,576 to 2,097,151", 1, 2**20),
    ]
    assert (total.shortest, total.longest) == (1, 2**20) and len(total.rows()) == 21
    assert histogram_table(Lengths.of(lengths[:0])) == "no documents"


def test_index_is_read_in_blocks(data, monkeypatch):
    shard = read_manifest(data).shards[0]
    whole = read_lengths(data, shard)
    assert not open_index(data, shard).flags.writeable  # a shared folder may not be its reader's
    monkeypatch.setattr("train.data.index.BLOCK_DOCUMENTS", 7)
    in_blocks = read_lengths(data, shard)
    assert whole.rows() == in_blocks.rows() and shard.documents > 14
    assert (whole.shortest, whole.longest) == (in_blocks.shortest, in_blocks.longest)
    ends = np.fromfile(data / f"{shard.name}.index", "<u8")
    ends[13:15] = ends[14:12:-1]  # out of order across two blocks
    ends.tofile(data / f"{shard.name}.index")
    with pytest.raises(DataError, match="not increasing: document 14 ends"):
        read_lengths(data, shard)
    ends[14] = ends[13] = sorted(ends[13:15])[0]  # a document without tokens
    ends.tofile(data / f"{shard.name}.index")
    with pytest.raises(DataError, match="not increasing: document 14 ends"):
        read_lengths(data, shard)


def test_memory_does_not_grow_with_the_corpus(tmp_path, data):
    """A shard of 64 MB with an index of 32 MB, of which neither comes into memory as a whole."""
    documents = 4_000_000
    np.arange(8, 8 * documents + 1, 8, dtype="<u8").tofile(tmp_path / "a.ds.index")
    np.zeros(8 * documents, dtype="<u2").tofile(tmp_path / "a.ds")
    hashes = (sha256_file(tmp_path / "a.ds"), sha256_file(tmp_path / "a.ds.index"))
    shard = Shard("a.ds", "train", 8 * documents, documents, 16 * documents, *hashes)
    manifest = dataclasses.replace(read_manifest(data), shards=[shard])
    tracemalloc.start()
    try:
        lengths, problems = examine(tmp_path, manifest, verify=True, workers=1)
        checking = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert problems == [] and lengths.rows() == [("8 to 15", documents, 8 * documents)]
    assert checking < 40e6, checking


@pytest.mark.parametrize("split, seq_length", [("train", 512), ("train", 4000), ("eval", 100), ("train", 10)])
def test_samples_are_text_of_the_corpus_with_true_boundaries(data, run, corpus, split, seq_length):
    documents = documents_of(data, split)
    stream = [token for document in documents for token in document]
    starts = np.cumsum([0, *map(len, documents)]).tolist()
    texts = {json.loads(line)["text"] for line in corpus.read_text().splitlines()}
    model = sentencepiece.SentencePieceProcessor(model_file=str(data / "tokenizer" / "tokenizer.model"))
    status, output, errors = run(data, "--samples", 3, "--seq_length", seq_length, "--split", split)
    assert (status, errors) == (0, "")
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


def test_samples_follow_the_seed_and_do_not_repeat(data, run):
    def windows(*options: object) -> list[str]:
        return [header[1] for header, _ in samples_in(run(data, "--seq_length", 200, *options)[1])]

    assert windows("--samples", 5, "--seed", 1) == windows("--samples", 5, "--seed", 1)
    assert windows("--samples", 5, "--seed", 1) != windows("--samples", 5, "--seed", 2)
    every = windows("--samples", 10**6)
    total = read_manifest(data).split_tokens("train")
    assert sorted(map(number, every)) == list(range((total - 1) // 200))


@pytest.mark.parametrize("split", ["train", "eval"])
def test_of_a_short_split_there_is_one_sample_and_of_an_empty_one_the_other_split(data, run, split):
    other = "eval" if split == "train" else "train"
    tokens = read_manifest(data).split_tokens(split)
    status, output, errors = run(data, "--verify", "--seq_length", 10**6, "--split", split)
    assert (status, errors) == (0, "")
    assert (
        f"\nthe {split} split has {tokens:,} tokens: a sample of {tokens - 1:,}, not of 1,000,000" in output
    )
    ((header, _),) = samples_in(output)
    assert header[0].endswith(f"window 0 of 1, {split} tokens 0 to {tokens - 2:,}")

    shards = read_manifest(data).split_shards(split)
    documents = {"out": sum(shard.documents for shard in shards)}
    documents |= {"in": documents["out"], "dropped": {}, "removed": {}}
    change_manifest(data, lambda _: {"shards": shards, "documents": documents})
    status, output, errors = run(data, "--verify", "--seq_length", 100, "--split", other)
    assert (status, errors) == (0, "")
    assert f"\nthe {other} split has 0 tokens: samples of the {split} split\n" in output
    assert [f", {split} tokens " in header[0] for header, _ in samples_in(output)] == [True, True]


def test_data_for_evaluation_alone_and_data_without_two_tokens_pass(tmp_path, prepare, run):
    path = write_jsonl(tmp_path / "a.jsonl", corpus_texts(5))
    assert prepare(tmp_path / "out", path, eval_fraction=1) == 0
    status, output, errors = run(tmp_path / "out", "--verify")
    assert (status, errors) == (0, "") and "samples of the eval split" in output
    assert SAMPLE.search(output) and output.index("verified: ") < output.index("== sample 1 of 1")
    documents = {"in": 0, "out": 0, "dropped": {}, "removed": {}}
    change_manifest(tmp_path / "out", lambda _: {"shards": [], "documents": documents})
    status, output, errors = run(tmp_path / "out")
    assert (status, errors) == (0, "") and "no samples: no split has two tokens" in output


def test_special_ids_in_the_middle_and_control_characters_are_visible(tmp_path, prepare, run):
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


def test_tokenizer_json_decodes_too(tmp_path, prepare, corpus, tokenizer_dir, run):
    other = tmp_path / "tokenizer"
    other.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_bytes((tokenizer_dir / name).read_bytes())
    outputs = []
    for name, folder in (("a", tokenizer_dir), ("b", other)):
        assert prepare(tmp_path / name, corpus, tokenizer=folder) == 0
        output = run(tmp_path / name, "--seq_length", 3000, "--seed", 4)[1]
        outputs.append(output[output.index("== sample") :])
    assert outputs[0] == outputs[1]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 2)


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def widen(path: Path) -> None:
    np.fromfile(path, "<u2").astype("<u4").tofile(path)


def swap_ends(path: Path) -> None:
    ends = np.fromfile(path, "<u8")
    ends[[3, 4]] = ends[[4, 3]]
    ends.tofile(path)


def move_last_end(path: Path) -> None:
    ends = np.fromfile(path, "<u8")
    ends[-1] += 1
    ends.tofile(path)


DAMAGES = {  # what is done to which file, the message, whether it shows without --verify
    "truncated": (truncate, "", "truncated or not the file", True),
    "bit-flipped": (flip_bit, "", "sha256", False),
    "other dtype": (widen, "", "bytes, the manifest says", True),
    "missing": (Path.unlink, "", "is missing", True),
    "index missing": (Path.unlink, ".index", "is missing", True),
    "index truncated": (truncate, ".index", "truncated or not the file", True),
    "index unsorted": (swap_ends, ".index", "not increasing: document 4 ends", True),
    "index too long": (move_last_end, ".index", "tokens", True),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_each_damage_is_named(data, run, kind):
    damage, suffix, message, always_shows = DAMAGES[kind]
    shards = read_manifest(data).shards
    damaged = [shards[1], shards[-1]]  # of both splits
    for shard in damaged:
        damage(data / (shard.name + suffix))
    status, output, errors = run(data, "--verify")
    assert status == 1 and "no samples of damaged data" in output and "verified:" not in output
    lines = errors.splitlines()
    assert len(lines) == 2 and "without 2 damaged shards" in output
    for line, shard in zip(lines, damaged, strict=True):
        assert line.startswith(f"damaged: {data / (shard.name + suffix)} ") and message in line
    status, _, errors = run(data, "--samples", 0)
    assert (status, len(errors.splitlines())) == ((1, 2) if always_shows else (0, 0))


def test_bit_flip_in_an_index_is_found(data, run):
    name = read_manifest(data).shards[0].name
    ends = np.fromfile(data / f"{name}.index", "<u8")
    ends[2] += 1  # still increasing
    ends.tofile(data / f"{name}.index")
    status, _, errors = run(data, "--verify")
    assert status == 1 and f"{name}.index does not have the sha256" in errors


def test_what_a_faulty_preparation_committed_is_found_despite_its_hash(data, run):
    first, second = (shard.name for shard in read_manifest(data).shards[:2])
    tokens = np.fromfile(data / first, "<u2")
    tokens[77] = 400
    tokens.tofile(data / first)
    swap_ends(data / f"{second}.index")
    for name in (first, second):
        rehash(data, name)
    status, _, errors = run(data, "--verify")
    lines = errors.splitlines()
    assert status == 1 and len(lines) == 2
    assert f"{first} holds token id 400, beyond the vocabulary of 400" in lines[0]
    assert f"{second}.index is not increasing" in lines[1]


def test_another_tokenizer_is_found(data, run):
    flip_bit(data / "tokenizer" / "tokenizer.model")
    status, _, errors = run(data, "--verify")
    assert status == 1 and "tokenizer.model is not the tokenizer that made the data" in errors


def test_a_manifest_that_does_not_add_up_is_refused(data, run):
    change_manifest(data, lambda manifest: {"documents": {**manifest.documents, "out": 301}})
    status, _, errors = run(data)
    assert status == 2 and "301 documents out, 300 in the shards" in errors


def test_mistakes_are_one_message_and_status_2(data, run, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "stray").mkdir()
    (tmp_path / "stray" / "train_00000.ds").write_bytes(b"12")
    for arguments, message in (
        ([tmp_path / "nowhere"], "does not exist"),
        ([tmp_path / "file"], "is a file, not a folder; name a folder"),
        ([tmp_path / "empty"], "is empty"),
        ([tmp_path / "stray"], "has no manifest.json"),
    ):
        status, _, errors = run(*arguments)
        assert status == 2 and message in errors and errors.startswith("error: ") and errors.count("\n") == 1
    (data / "tokenizer" / "tokenizer.model").unlink()
    status, output, errors = run(data)
    assert status == 2 and "tokenizer.model is missing" in errors and "300 out" in output
    assert run(data, "--samples", 0)[0] == 0  # nothing to decode
    write = (data / "manifest.json").write_text
    write(json.dumps({**json.loads((data / "manifest.json").read_text()), "documents": [1, 2]}))
    status, _, errors = run(data)
    assert status == 2 and "'documents' is [1, 2]" in errors


@pytest.mark.parametrize("options", [["--samples", "-1"], ["--seq_length", "0"], ["--workers", "0"]])
def test_bad_options(tmp_path, options):
    with pytest.raises(SystemExit) as error:
        inspect_data([str(tmp_path), *options])
    assert error.value.code == 2


@pytest.mark.process
def test_as_a_command_on_a_terminal_without_unicode(tmp_path, prepare):
    path = write_jsonl(tmp_path / "a.jsonl", ["dernière 日本 😀 " * 30])
    assert prepare(tmp_path / "out", path, all_train=True) == 0
    command = [
        sys.executable,
        str(ROOT / "train" / "inspect_data.py"),
        str(tmp_path / "out"),
        "--seq_length",
        "50",
    ]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = programs.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "derni\\xe8re \\u65e5" in done.stdout
