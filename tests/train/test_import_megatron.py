"""train/import_megatron.py on datasets written here from the format's definition, whole and wrong in each way."""

import hashlib
import json
import os
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from tests.train.conftest import corpus_texts
from tests.train.runs import ROOT
from train.data_format import DataError, Manifest, read_manifest, write_manifest
from train.dataset import open_stream
from train.files import sha256_file
from train.import_megatron import main as import_megatron
from train.inspect_data import main as inspect_data
from train.megatron_documents import add_edges
from train.megatron_index import open_dataset, read_blocks
from train.shard_writer import WORK_NAME
from train.text_encoder import TextEncoder

BOS, EOS, VOCABULARY = 1, 2, 400  # of the fixture's tokenizer
CODES = {
    "B": 1,
    "b": 2,
    "h": 3,
    "i": 4,
    "q": 5,
    "d": 6,
    "f": 7,
    "H": 8,
}  # struct's letter -> the format's number

Documents = list[list[list[int]]]  # documents of sequences of ids


def index_bytes(
    lengths: list[int],
    documents: list[int],
    itemsize: int,
    code: int,
    modes: Iterable[int] | None = None,
    **header: bytes | int,
) -> bytes:
    """An .idx: sequence lengths, the sequences before each document and the total, the type's size and number."""
    pointers, end = [], 0
    for length in lengths:
        pointers.append(end)
        end += length * itemsize
    parts = [
        header.get("magic", b"MMIDIDX\x00\x00"),
        struct.pack("<Q", header.get("version", 1)),
        struct.pack("<B", code),
        struct.pack("<Q", len(lengths)),
        struct.pack("<Q", len(documents)),
        struct.pack(f"<{len(lengths)}i", *lengths),
        struct.pack(f"<{len(pointers)}q", *pointers),
        struct.pack(f"<{len(documents)}q", *documents),
    ]
    if modes is not None:
        parts.append(struct.pack(f"<{len(lengths)}b", *modes))
    return b"".join(parts)  # type: ignore[arg-type]


def write_dataset(prefix: Path, documents: Documents, letter: str = "i", modes: bool = False) -> Path:
    """PREFIX.bin and PREFIX.idx; `letter` is struct's for the type of the ids."""
    sequences = [sequence for document in documents for sequence in document]
    bounds = [0]
    for document in documents:
        bounds.append(bounds[-1] + len(document))
    ids = [token for sequence in sequences for token in sequence]
    Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{len(ids)}{letter}", *ids))
    index = index_bytes(
        [len(sequence) for sequence in sequences],
        bounds,
        struct.calcsize(f"<{letter}"),
        CODES[letter],
        [0] * len(sequences) if modes else None,
    )
    Path(f"{prefix}.idx").write_bytes(index)
    return prefix


def random_documents(count: int, seed: int = 0, longest: int = 60) -> Documents:
    """Documents of one to four sequences, without special ids."""
    rng = np.random.default_rng(seed)

    def sequence() -> list[int]:
        return rng.integers(3, VOCABULARY, rng.integers(1, longest)).tolist()

    return [[sequence() for _ in range(rng.integers(1, 5))] for _ in range(count)]


def whole(documents: Documents) -> list[list[int]]:
    return [[token for sequence in document for token in sequence] for document in documents]


def framed(documents: Documents) -> list[list[int]]:
    return [[BOS, *tokens, EOS] for tokens in whole(documents)]


def imported(folder: Path, split: str) -> list[list[int]]:
    """The ids of each document, read in the plainest way."""
    manifest = read_manifest(folder)
    letter, documents = {"uint16": "H", "uint32": "I"}[manifest.dtype], []
    for shard in manifest.split_shards(split):
        content, index = (folder / shard.name).read_bytes(), (folder / f"{shard.name}.index").read_bytes()
        tokens = struct.unpack(f"<{shard.tokens}{letter}", content)
        ends = struct.unpack(f"<{shard.documents}Q", index)
        documents += [list(tokens[a:b]) for a, b in zip((0, *ends), ends, strict=False)]
    return documents


def content_of(folder: Path) -> dict[str, str]:
    """The hash of every file in a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): sha256_file(path) for path in files}


@pytest.fixture
def run(
    tmp_path: Path, tokenizer_dir: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """run(output, *prefixes, **options) -> (exit status, stdout, stderr); no source may change."""

    def sources() -> dict[str, tuple[str, int]]:
        files = [path for path in tmp_path.iterdir() if path.suffix in (".bin", ".idx")]
        return {path.name: (sha256_file(path), path.stat().st_mtime_ns) for path in files}

    def call(output: Path, *prefixes: Path, **options: object) -> tuple[int, str, str]:
        options = {"tokenizer": tokenizer_dir, "eval_fraction": 0, **options}
        arguments = ["--input", *map(str, prefixes), "--output", str(output)]
        for key, value in options.items():
            arguments += [f"--{key}"] if value is True else [f"--{key}", str(value)]
        before = sources()
        capsys.readouterr()
        status = import_megatron(arguments)
        assert sources() == before
        return status, *capsys.readouterr()

    return call


@pytest.mark.parametrize("letter", ["H", "h", "i", "q"])
def test_round_trip(tmp_path, run, letter, tokenizer_dir):
    documents = random_documents(300)
    prefix = write_dataset(tmp_path / "a", documents, letter)
    status, output, _ = run(tmp_path / "out", prefix, eval_fraction=0.2, shard_tokens=5000)
    assert status == 0
    limit, expected = 0.2 * 2**64, {"train": [], "eval": []}
    for document in framed(documents):
        digest = hashlib.blake2b(struct.pack(f"<{len(document)}H", *document), digest_size=8).digest()
        expected["eval" if int.from_bytes(digest, "little") < limit else "train"].append(document)
    assert len(expected["eval"]) > 20
    for split in ("train", "eval"):
        assert imported(tmp_path / "out", split) == expected[split]
    manifest = read_manifest(tmp_path / "out")
    assert len(manifest.split_shards("train")) > 3
    assert all(s.tokens <= 5000 for s in manifest.shards)
    assert (manifest.dtype, manifest.vocab_size, manifest.bos_id, manifest.eos_id) == (
        "uint16",
        VOCABULARY,
        BOS,
        EOS,
    )
    assert (manifest.inputs, manifest.text_key, manifest.text_bytes) == ([str(prefix)], None, None)
    assert manifest.documents == {
        "in": 300, "out": 300, "dropped": {}, "removed": {}, "bos_added": 300, "eos_added": 300, "bos_inside": 0,
        "eos_inside": 0, "eod_replaced": 0,
    }  # fmt: skip
    counts = {s: np.bincount(np.concatenate(expected[s]), minlength=VOCABULARY) for s in expected}
    p = (counts["train"] + 1) / (counts["train"].sum() + VOCABULARY)
    assert manifest.unigram_loss == pytest.approx(-(counts["eval"] @ np.log(p)) / counts["eval"].sum())
    assert f"eval: {len(expected['eval'])} documents" in output
    for name in manifest.tokenizer_files:
        assert (tmp_path / "out" / "tokenizer" / name).read_bytes() == (tokenizer_dir / name).read_bytes()


def test_folder_opens_verifies_and_says_what_it_is(tmp_path, run, capsys):
    documents = random_documents(100)
    prefix = write_dataset(tmp_path / "a", [*documents, []], "H")
    assert run(tmp_path / "out", prefix, eval_fraction=0.1)[0] == 0
    for split in ("train", "eval"):
        stream = open_stream({"a": tmp_path / "out"}, None, 16, seed=3, split=split, verify=True)
        tokens = [token for document in imported(tmp_path / "out", split) for token in document]
        windows = {tuple(tokens[i : i + 16]) for i in range(0, len(tokens) - 16, 16)}
        input_ids = stream.batch(0, 8)[0]
        assert {tuple(row) for row in input_ids.tolist()} <= windows
    assert inspect_data([str(tmp_path / "out"), "--verify", "--seq_length", "50"]) == 0
    output = capsys.readouterr().out
    assert "\nverified: " in output and str(prefix) in output
    assert "token ids that were imported from the inputs" in output
    assert "101 in, 100 out, 1 dropped\n            1  empty document\n          100  bos_added\n" in output
    assert "  text_bytes        none\n" in output


def test_text_comes_back(tmp_path, run, tokenizer_dir):
    """As Megatron-LM's preprocess_data.py does it with --append-eod."""
    encoder, texts = TextEncoder(tokenizer_dir), corpus_texts(50)
    prefix = write_dataset(tmp_path / "a", [[[*encoder.encode(text), EOS]] for text in texts], "H")
    status, output, errors = run(tmp_path / "out", prefix)
    assert status == 0 and "BOS: added to 50 documents" in output and "EOS: added to 0" in output
    assert "warning" not in errors
    assert [encoder.decode(document[1:-1]) for document in imported(tmp_path / "out", "train")] == texts


def test_edges_are_added_where_missing_and_never_doubled(tmp_path, run):
    cases = [  # tokens of the source, of the result
        ([5, 6, 7], [1, 5, 6, 7, 2]),
        ([1, 5, 6], [1, 5, 6, 2]),
        ([5, 6, 2], [1, 5, 6, 2]),
        ([1, 5, 2], [1, 5, 2]),
        ([5], [1, 5, 2]),
        ([5, 2, 6, 1, 7], [1, 5, 2, 6, 1, 7, 2]),  # EOS and BOS inside
        ([1, 1, 5, 2, 2], [1, 1, 5, 2, 2]),  # one of each inside
        ([2, 5, 1], [1, 2, 5, 1, 2]),  # the other's place is inside
        ([], None),
        ([1], None),
        ([2], None),
        ([1, 2], None),
        ([1, 2, 2], [1, 2, 2]),
    ]
    prefix = write_dataset(tmp_path / "a", [[tokens] for tokens, _ in cases])
    status, output, _ = run(tmp_path / "out", prefix)
    assert status == 0
    assert imported(tmp_path / "out", "train") == [result for _, result in cases if result]
    assert read_manifest(tmp_path / "out").documents == {
        "in": 13, "out": 9, "dropped": {"empty document": 4}, "removed": {}, "bos_added": 5, "eos_added": 5,
        "bos_inside": 3, "eos_inside": 4, "eod_replaced": 0,
    }  # fmt: skip
    assert "13 in, 9 out, 4 dropped" in output
    assert (
        "BOS: added to 5 documents, 3 inside documents\nEOS: added to 5 documents, 4 inside documents\n"
        in output
    )


def test_edges_of_a_tokenizer_whose_bos_is_its_eos():
    documents = [[9], [9, 5], [5, 9], [9, 5, 9], [], [9, 9], [5]]
    ids = np.array([token for document in documents for token in document], dtype="<u2")
    ends = np.cumsum([len(document) for document in documents])
    result = add_edges(ids, ends, 9, 9)
    parts = [part.tolist() for part in np.split(result.tokens, result.ends[:-1])]
    assert parts == [[9, 9], [9, 5, 9], [9, 5, 9], [9, 5, 9], [9, 9], [9, 9], [9, 5, 9]]
    assert result.has_text.tolist() == [False, True, True, True, False, False, True]


@pytest.mark.parametrize("eod", [399, 400, 70000])  # Megatron-LM puts <EOD> behind a vocabulary that lacks it
def test_eod_of_the_source_becomes_eos(tmp_path, run, eod):
    documents = [[[*(min(token, 398) for token in d), eod]] for d in whole(random_documents(20))]
    documents.append([[5, eod, 6], [7, eod]])
    prefix = write_dataset(tmp_path / "a", documents)
    status, output, errors = run(tmp_path / "out", prefix, eod_id=eod)
    assert status == 0 and "warning" not in errors and "EOS in place of --eod_id: 22\n" in output
    expected = [[BOS, *(EOS if token == eod else token for token in d)] for d in whole(documents)]
    assert imported(tmp_path / "out", "train") == expected
    counts = read_manifest(tmp_path / "out").documents
    assert (counts["eos_added"], counts["eos_inside"], counts["eod_replaced"]) == (0, 1, 22)

    status, _, errors = run(tmp_path / "other", prefix)
    if eod < VOCABULARY:
        assert (
            status == 0
            and "warning: 21 of 21 documents end in the id 399" in errors
            and "--eod_id 399" in errors
        )
    else:
        assert (
            status == 1
            and f"--eod_id {eod}" in errors
            and not (tmp_path / "other" / "manifest.json").exists()
        )


def test_sequences_belong_to_their_documents(tmp_path, run):
    documents: Documents = [[[5], [6, 7], [8]], [], [[9, 9]], [[], [10], []], [[]], [[11]], []]
    prefix = write_dataset(tmp_path / "a", documents, "H")
    assert run(tmp_path / "out", prefix)[0] == 0
    assert imported(tmp_path / "out", "train") == [[1, 5, 6, 7, 8, 2], [1, 9, 9, 2], [1, 10, 2], [1, 11, 2]]
    assert read_manifest(tmp_path / "out").documents["dropped"] == {"empty document": 3}


def test_several_datasets_of_different_types(tmp_path, run):
    parts = [random_documents(40, seed) for seed in (1, 2)]
    a, b = (
        write_dataset(tmp_path / "a", parts[0], "H"),
        write_dataset(tmp_path / "b", parts[1], "i", modes=True),
    )
    again = write_dataset(tmp_path / "c", parts[0], "q")
    assert run(tmp_path / "out", b, a, again, eval_fraction=0.3)[0] == 0
    manifest = read_manifest(tmp_path / "out")
    assert manifest.inputs == [str(b), str(a), str(again)]
    eval_, train = imported(tmp_path / "out", "eval"), imported(tmp_path / "out", "train")
    everything = framed(parts[1] + parts[0] + parts[0])
    assert train == [d for d in everything if d not in eval_] and eval_ == [
        d for d in everything if d in eval_
    ]
    assert 10 < len(eval_) < 60  # equal documents on one side, whatever the type they come in


def test_bytes_do_not_depend_on_the_run_or_on_the_blocks(tmp_path, run, monkeypatch):
    documents = [*random_documents(200), [], *random_documents(3, 5, longest=2000), [[]]]
    prefix = write_dataset(tmp_path / "a", documents, "H")
    options = {"eval_fraction": 0.2, "shard_tokens": 4000}
    assert run(tmp_path / "one", prefix, **options)[0] == 0
    assert run(tmp_path / "two", prefix, **options)[0] == 0
    monkeypatch.setattr("train.megatron_index.BLOCK_ENTRIES", 7)
    monkeypatch.setattr("train.megatron_index.BLOCK_TOKENS", 50)
    assert run(tmp_path / "three", prefix, **options)[0] == 0
    assert content_of(tmp_path / "one") == content_of(tmp_path / "two") == content_of(tmp_path / "three")


def test_memory_does_not_grow_with_the_dataset(tmp_path):
    """A .bin of 80 MB with an .idx of 40 MB, of which neither comes into memory as a whole."""
    sequences, length = 2_000_000, 10
    lengths = np.full(sequences, length, dtype="<i4")
    with open(tmp_path / "a.idx", "wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, sequences, sequences + 1))
        lengths.tofile(file)
        (np.arange(sequences, dtype="<i8") * length * 4).tofile(file)
        np.arange(sequences + 1, dtype="<i8").tofile(file)
    np.arange(sequences * length, dtype="<i4").tofile(tmp_path / "a.bin")
    del lengths
    tracemalloc.start()
    try:
        dataset, documents, next_id = open_dataset(str(tmp_path / "a")), 0, 0
        for block in read_blocks(dataset):
            assert block.first_document == documents and block.first_token == next_id == int(block.tokens[0])
            documents += len(block.ends)
            next_id = int(block.tokens[-1]) + 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (documents, next_id) == (sequences, sequences * length)
    assert peak < 40e6, peak


def test_large_vocabulary(tmp_path, run):
    folder = tmp_path / "large"
    folder.mkdir()
    vocabulary = {"<s>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, 70000)}}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="w2")
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    prefix = write_dataset(tmp_path / "a", [[[69999, 65536, 5, 1]], [[65535] * 20]])
    assert run(tmp_path / "out", prefix, tokenizer=folder)[0] == 0
    assert read_manifest(tmp_path / "out").dtype == "uint32"
    assert imported(tmp_path / "out", "train") == [[0, 69999, 65536, 5, 1], [0, *[65535] * 20, 1]]
    assert inspect_data([str(tmp_path / "out"), "--verify", "--seq_length", "10"]) == 0


LENGTHS, BOUNDS = [3, 2, 4], [0, 2, 3]  # of a good index, here of int32
IDX_BYTES = 34 + 12 * len(LENGTHS) + 8 * len(BOUNDS)


def index(lengths: list[int] = LENGTHS, bounds: list[int] = BOUNDS, code: int = 4, **more: object) -> bytes:
    return index_bytes(lengths, bounds, 4, code, **more)  # type: ignore[arg-type]


def with_int64(content: bytes, place: int, value: int) -> bytes:
    return content[:place] + struct.pack("<q", value) + content[place + 8 :]


POINTERS = 34 + 4 * len(LENGTHS)
BAD_INDEXES = {  # .idx, what the message says beside its path
    "magic": (index(magic=b"TNTIDX\x00\x00\x00"), "begins with b'TNTIDX"),
    "no content": (b"", "begins with b''"),
    "a text": (b"hello", "not the index of a Megatron indexed dataset"),
    "version": (index(version=2), "byte 9 says version 2, this program reads 1"),
    "unknown type": (index(code=9), "byte 17 says ids of type 9; token ids are integers: 1 uint8"),
    "float64": (index(code=6), "ids of type 6 (float64)"),
    "float32": (index(code=7), "ids of type 7 (float32)"),
    "header cut": (index()[:30], "has 30 bytes, the header alone has 34"),
    "cut": (index()[:-1], f"has {IDX_BYTES - 1} bytes; with the 3 sequences and 2 documents"),
    "too long": (index() + b"\0", f"has {IDX_BYTES + 1} bytes"),
    "sequence count": (index()[:18] + struct.pack("<Q", 1 << 60) + index()[26:], f"has {IDX_BYTES} bytes"),
    "negative length": (index([3, -2, 8]), "sequence 1 has the negative length -2"),
    "pointer": (with_int64(index(), POINTERS + 8, 16), "sequence 1 begins at byte 16; the sequences before it end at"),
    "first pointer": (with_int64(index(), POINTERS, 4), "sequence 0 begins at byte 4; "),
    "negative pointer": (with_int64(index(), POINTERS + 16, -8), "sequence 2 begins at byte -8; "),
    "pointer beyond": (with_int64(index(), POINTERS + 16, 400), "sequence 2 begins at byte 400, beyond the 36 bytes"),
    "no document index": (index(bounds=[]), "0 document indices"),
    "first document": (index(bounds=[1, 2, 3]), "document index 0 is 1, it has to be 0"),
    "decreasing": (index(bounds=[0, 3, 2, 3]), "document index 2 is 2, less than the one before it, 3"),
    "negative document": (index(bounds=[0, -1, 3]), "document index 1 is -1, less than"),
    "overflowing document": (index(bounds=[0, 2**63 - 1, -(2**63), 3]), "document index 2 is -92233720368547758"),
    "documents end early": (index(bounds=[0, 1, 2]), "index, 2, is 2; it has to be the number of sequences, 3"),
    "documents end late": (index(bounds=[0, 2, 4]), "the last document index, 2, is 4"),
    "multimodal": (index(modes=[0, 1, 0]), "sequence 1 has the mode 1: multimodal"),
}  # fmt: skip


@pytest.mark.parametrize("blocks", [1, 1 << 19])
@pytest.mark.parametrize("kind", BAD_INDEXES)
def test_bad_index_is_named(tmp_path, run, kind, blocks, monkeypatch):
    monkeypatch.setattr("train.megatron_index.BLOCK_ENTRIES", blocks)
    content, message = BAD_INDEXES[kind]
    good = write_dataset(tmp_path / "good", random_documents(5))
    (tmp_path / "bad.idx").write_bytes(content)
    (tmp_path / "bad.bin").write_bytes(struct.pack("<9i", *range(3, 12)))
    status, _, errors = run(tmp_path / "out", good, tmp_path / "bad")
    error = errors.splitlines()[-1]
    assert status == 1 and error.startswith(f"error: {tmp_path / 'bad.idx'}") and message in error
    assert not (tmp_path / "out").exists()  # everything is checked before anything is written


def test_bad_index_cases_differ_from_a_good_one(tmp_path, run):
    (tmp_path / "good.idx").write_bytes(index())
    (tmp_path / "good.bin").write_bytes(struct.pack("<9i", *range(3, 12)))
    assert run(tmp_path / "out", tmp_path / "good")[0] == 0
    assert imported(tmp_path / "out", "train") == [[1, 3, 4, 5, 6, 7, 2], [1, 8, 9, 10, 11, 2]]


@pytest.mark.parametrize(
    "change, message", [(-1, "truncated"), (-4, "truncated"), (4, "not the file of this index")]
)
def test_bin_of_another_size(tmp_path, run, change, message):
    prefix = write_dataset(tmp_path / "a", [[[5, 6, 7]]])
    content = (tmp_path / "a.bin").read_bytes() + bytes(4)
    (tmp_path / "a.bin").write_bytes(content[: 12 + change])
    status, _, errors = run(tmp_path / "out", prefix)
    assert status == 1 and f"error: {tmp_path / 'a.bin'} has {12 + change} bytes, its index says 12" in errors
    assert message in errors


def test_type_of_another_width(tmp_path, run):
    """An index that says uint16 over ids of int32 would read each as two."""
    write_dataset(tmp_path / "a", [[[5, 6, 7]]], "i")
    write_dataset(tmp_path / "b", [[[5, 6, 7]]], "H")
    os.replace(tmp_path / "b.idx", tmp_path / "a.idx")
    status, _, errors = run(tmp_path / "out", tmp_path / "a")
    assert status == 1 and "a.bin has 12 bytes, its index says 6 (3 tokens of uint16)" in errors


@pytest.mark.parametrize("documents", [[], [[]], [[[]], []]])
def test_empty_dataset(tmp_path, run, documents):
    prefix = write_dataset(tmp_path / "a", documents)
    status, _, errors = run(tmp_path / "out", prefix)
    assert (
        status == 1
        and f"{prefix}.idx is of an empty dataset ({len(documents)} documents, 0 tokens)" in errors
    )


@pytest.mark.parametrize(
    "letter, token, problem",
    [("i", -1, "which is negative"), ("h", -7, "which is negative"), ("i", 400, "beyond the vocabulary"),
     ("H", 65535, "beyond the vocabulary"), ("q", 1 << 40, "beyond the vocabulary")],
)  # fmt: skip
def test_bad_token_id(tmp_path, run, letter, token, problem, monkeypatch):
    monkeypatch.setattr("train.megatron_index.BLOCK_TOKENS", 100)
    documents = whole(random_documents(30))
    documents[20][3] = token
    place = sum(map(len, documents[:20])) + 3
    prefix = write_dataset(tmp_path / "a", [[tokens] for tokens in documents], letter)
    good = write_dataset(tmp_path / "good", random_documents(5))
    status, _, errors = run(tmp_path / "out", good, prefix)
    where = f"error: {prefix}.bin: token 3 of document 20 (token {place} of the file) has the id {token}, {problem}"
    assert status == 1 and where in errors and ("--eod_id" in errors) == (token > 0)
    assert list((tmp_path / "out").iterdir()) == []  # no manifest, and no shard that could be taken for data


def test_inputs_that_are_not_there(tmp_path, run):
    prefix = write_dataset(tmp_path / "a", [[[5, 6]]])
    for given, message in (
        (
            tmp_path / "nowhere",
            f"{tmp_path}/nowhere.idx does not exist; a dataset is PREFIX.idx and PREFIX.bin",
        ),
        (tmp_path / "a.bin", f"a.bin.idx does not exist; give the prefix of both, {prefix}"),
        (tmp_path / "a.idx", f"a.idx.idx does not exist; give the prefix of both, {prefix}"),
    ):
        status, _, errors = run(tmp_path / "out", given)
        assert status == 1 and message in errors
    (tmp_path / "b").symlink_to(tmp_path)
    status, _, errors = run(tmp_path / "out", prefix, tmp_path / "b" / "a")
    assert status == 1 and "is given twice" in errors
    (tmp_path / "a.bin").unlink()
    assert f"{prefix}.bin does not exist" in run(tmp_path / "out", prefix)[2]
    assert "no tokenizer.model" in run(tmp_path / "out", prefix, tokenizer=tmp_path)[2]
    assert not (tmp_path / "out").exists()


def test_file_that_shrinks_while_it_is_read(tmp_path):
    write_dataset(tmp_path / "a", random_documents(50))
    dataset = open_dataset(str(tmp_path / "a"))
    os.truncate(tmp_path / "a.bin", dataset.tokens * 4 - 4)
    with pytest.raises(DataError, match=r"a\.bin became shorter while it was read"):
        list(read_blocks(dataset))


def test_output_folder_is_protected(tmp_path, run):
    documents = random_documents(20)
    prefix = write_dataset(tmp_path / "a", documents)
    assert run(tmp_path / "out", prefix)[0] == 0
    before = content_of(tmp_path / "out")
    status, _, errors = run(tmp_path / "out", prefix, eod_id=7)
    assert status == 1 and "already holds prepared data" in errors and content_of(tmp_path / "out") == before
    assert run(tmp_path / "out", prefix, overwrite=True, shard_tokens=300)[0] == 0
    assert imported(tmp_path / "out", "train") == framed(documents)
    assert len(read_manifest(tmp_path / "out").shards) > 1

    (tmp_path / "begun" / WORK_NAME).mkdir(parents=True)
    status, _, errors = run(tmp_path / "begun", prefix)
    assert status == 1 and "unfinished preparation" in errors and (tmp_path / "begun" / WORK_NAME).is_dir()
    assert run(tmp_path / "begun", prefix, overwrite=True)[0] == 0

    killed = tmp_path / "killed"  # what a killed import leaves
    killed.mkdir()
    for name in ("prepare_data.unfinished", "train_00000.ds", "train_00009.ds"):
        (killed / name).touch()
    assert run(killed, prefix)[0] == 0
    assert content_of(killed) == content_of(tmp_path / "begun")


def test_no_document_for_the_train_split(tmp_path, run):
    prefix = write_dataset(tmp_path / "a", [[[EOS]], [[BOS, EOS]]])
    status, _, errors = run(tmp_path / "out", prefix)
    assert (
        status == 1
        and "no document for the train split" in errors
        and list((tmp_path / "out").iterdir()) == []
    )


@pytest.mark.parametrize("option", ["eval_fraction=0.6", "eval_fraction=-0.1", "shard_tokens=0", "eod_id=-1"])
def test_bad_options(option):
    with pytest.raises(SystemExit) as error:
        import_megatron(["--input", "a", "--tokenizer", "b", "--output", "c", f"--{option}"])
    assert error.value.code == 2


@pytest.mark.parametrize("key, value", [("text_key", 3), ("text_bytes", "many"), ("text_bytes", True)])
def test_manifest_without_text_is_still_checked(tmp_path, run, key, value):
    assert run(tmp_path / "out", write_dataset(tmp_path / "a", [[[5, 6]]]))[0] == 0
    path = tmp_path / "out" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(DataError, match=f"'{key}' is {value!r}, not"):
        read_manifest(tmp_path / "out")


def test_counts_in_a_manifest_are_checked(tmp_path, run):
    assert run(tmp_path / "out", write_dataset(tmp_path / "a", [[[5, 6]]]))[0] == 0
    manifest = read_manifest(tmp_path / "out")
    for bad in ({"in": 1, "out": 1}, {"dropped": {"x": "y"}}, {"bos_added": "1"}, {"removed": {"x": None}}):
        documents = bad if "in" in bad else {**manifest.documents, **bad}
        write_manifest(tmp_path / "out", Manifest(**{**vars(manifest), "documents": documents}))
        with pytest.raises(DataError, match="'documents' is "):
            read_manifest(tmp_path / "out")


def test_as_a_command_without_the_packages_of_preparation(tmp_path, tokenizer_dir):
    prefix = write_dataset(tmp_path / "a", random_documents(20))
    script = ROOT / "train" / "import_megatron.py"
    blocked = "import runpy, sys; sys.modules['datatrove'] = sys.modules['torch'] = None; "
    arguments = ["--input", str(prefix), "--tokenizer", str(tokenizer_dir), "--output", str(tmp_path / "out")]
    code = f"{blocked}sys.argv = {[str(script), *arguments]!r}; runpy.run_path({str(script)!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "documents: 20 in, 20 out, 0 dropped" in done.stdout and "M tokens/s" in done.stderr
