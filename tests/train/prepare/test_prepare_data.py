import gzip
import io
import itertools
import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import sentencepiece
import tokenizers

from tests.conftest import numbers
from tests.fixtures import HELD_OUT, corpus_texts, write_jsonl
from tests.train.prepare.megatron_datasets import imported
from tests.train.prepare.test_corpus import read_documents
from train.data.format import read_manifest
from train.files import sha256_file
from train.prepare.corpus import Source
from train.prepare.preparation import Preparation
from train.prepare.readers import Damaged, Dropped, Text
from train.prepare.tally import Tally
from train.prepare_data import parse_arguments
from train.train_tokenizer import main as train_tokenizer

TEXTS = ["first text", "second\ttext\n\n  indented", "</s> is not the end <s>", "dernière: é 😀"]


def decoded(folder: Path, split: str = "train") -> list[str]:
    """The documents of a split, checked for BOS and EOS and turned back into text."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer" / "tokenizer.model"))
    documents = imported(folder, split)
    assert all(ids[0] == 1 and ids[-1] == 2 and not {0, 1, 2} & set(ids[1:-1]) for ids in documents)
    return model.decode([ids[1:-1] for ids in documents])


def lines(texts: list[str], key: str = "text") -> bytes:
    return "".join(json.dumps({key: text}) + "\n" for text in texts).encode()


def zstd(texts: list[str]) -> bytes:
    return pyarrow.compress(lines(texts), "zstd", asbytes=True)


def write_parquet(path: Path, values: list, kind=None, key: str = "text") -> None:
    pyarrow.parquet.write_table(pyarrow.table({key: pyarrow.array(values, type=kind)}), path)


FORMATS = {
    "a.jsonl": lambda path: path.write_bytes(lines(TEXTS)),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines(TEXTS))),
    "a.jsonl.zst": lambda path: path.write_bytes(
        zstd(TEXTS[:2]) + zstd(TEXTS[2:])  # two frames
    ),
    "a.parquet": lambda path: write_parquet(path, TEXTS),
    "dictionary.parquet": lambda path: write_parquet(
        path, TEXTS, pyarrow.dictionary("int32", pyarrow.string())
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_record_formats(tmp_path, prepare, name):
    FORMATS[name](tmp_path / name)
    assert prepare(tmp_path / "out", tmp_path / name, all_train=True) == 0
    assert decoded(tmp_path / "out") == TEXTS
    manifest = read_manifest(tmp_path / "out")
    assert manifest.documents == {"in": 5, "out": 5, "dropped": {}, "removed": {}}
    assert manifest.text_bytes == sum(len(text.encode()) for text in [*TEXTS, HELD_OUT])


def test_standard_library_corpus():
    items = list(itertools.islice(read_documents(["python-stdlib"]), 300))
    assert all(isinstance(item, Text) for item in items) and len({item.where for item in items}) == 300


GOOD = lines(["good text"])
CUT_ZST = zstd([os.urandom(50).hex() for _ in range(2000)])[:-50]
CUT_GZ = gzip.compress(lines([os.urandom(50).hex() for _ in range(2000)]))[:-50]


def damaged_parquet() -> bytes:
    """40 rows in groups of 7, of which the first and the last, of 5 rows, cannot be read."""
    file = io.BytesIO()
    table = pyarrow.table({"text": [f"row {i}" for i in range(40)]})
    pyarrow.parquet.write_table(table, file, row_group_size=7)
    data, groups = bytearray(file.getvalue()), pyarrow.parquet.read_metadata(file)
    for group in (0, groups.num_row_groups - 1):
        column = groups.row_group(group).column(0)
        start = column.dictionary_page_offset or column.data_page_offset
        data[start : start + 8] = b"\xff" * 8
    return bytes(data)


BAD = {
    "utf8.txt": (b"caf\xe9", "bad UTF-8"),
    "utf16.txt": ("caf\xe9".encode("utf-16"), "bad UTF-8"),
    "utf16.json": ('[{"text": "caf\xe9"}]'.encode("utf-16"), "bad UTF-8"),
    "utf8.jsonl": (GOOD + b'{"text": "\xff"}\n', "bad UTF-8"),
    "surrogate.jsonl": (GOOD + b'{"text": "\\ud800"}\n', "bad UTF-8"),
    "json.jsonl": (GOOD + b'{"text": \n', "invalid JSON"),
    "digits.jsonl": (GOOD + b'{"text": "x", "n": ' + b"1" * 5000 + b"}\n", "invalid JSON"),
    "list.jsonl": (GOOD + b'["text"]\n', "invalid JSON"),
    "key.jsonl": (GOOD + b'{"content": "x"}\n', "missing key"),
    "null.jsonl": (GOOD + b'{"text": null}\n', "null text"),
    "number.jsonl": (GOOD + b'{"text": 5}\n', "text is not a string"),
    "empty.jsonl": (GOOD + b'{"text": " \\n"}\n', "empty document"),
    "nothing.jsonl": (b"", "empty document"),
    "nothing.txt": (b"", "empty document"),
    "cut.jsonl.gz": (CUT_GZ, "truncated or corrupt .gz"),
    "notgz.jsonl.gz": (GOOD, "truncated or corrupt .gz"),
    "empty.jsonl.gz": (b"", "truncated or corrupt .gz"),
    "cut.jsonl.zst": (CUT_ZST, "truncated or corrupt .zst"),
    "notzst.jsonl.zst": (GOOD, "truncated or corrupt .zst"),
    # a whole frame with a window of 256 MiB, and in it a block as it is
    "long.txt.zst": (
        bytes.fromhex("28b52ffd0090") + (4 << 3 | 1).to_bytes(3, "little") + b"text",
        ".zst with a window over 128 MiB; decompress the file with `zstd -d --long=31`",
    ),
    "bad.parquet": (b"PAR1 not really", "unreadable .parquet"),
    "groups.parquet": (damaged_parquet(), "unreadable .parquet"),
}
DAMAGED = (".gz", ".zst", ".parquet")


def test_bad_inputs_are_counted(tmp_path, prepare, monkeypatch, reported):
    inputs = [write_jsonl(tmp_path / "good.jsonl", TEXTS), *(tmp_path / name for name in BAD)]
    for name, (data, _) in BAD.items():
        (tmp_path / name).write_bytes(data)
    damaged = {str(tmp_path / name): 0 for name in BAD if name.endswith(DAMAGED)}
    damaged[str(tmp_path / "groups.parquet")] = 12  # the number of lost rows is known
    dropped = Counter(reason for name, (_, reason) in BAD.items() if not name.endswith(DAMAGED))
    assert prepare(tmp_path / "out", *inputs, all_train=True) == 2
    limits = {"max_dropped": dropped.total() - dropped["empty document"], "max_damaged_files": len(damaged)}
    monkeypatch.setattr("train.prepare.preparation.read_share", None)  # to accept that, nothing is read again
    for option, number in limits.items():
        assert f"--{option} {number}" in str(reported[0])
        assert prepare(tmp_path / "out", *inputs, all_train=True, **{**limits, option: number - 1}) == 2
        assert (reported[-1].code, reported[-1].key) == ("too_much_lost", f"--{option}")
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert prepare(tmp_path / "out", *inputs, all_train=True, **limits) == 0
    documents = read_manifest(tmp_path / "out").documents
    assert (documents["dropped"], documents["damaged_files"]) == (dropped, damaged)
    assert documents["in"] == documents["out"] + dropped.total()
    assert decoded(tmp_path / "out")[: len(TEXTS)] == TEXTS


def test_invalid_parquet_columns(tmp_path, prepare):
    write_parquet(tmp_path / "key.parquet", ["a", "b"], key="content")
    write_parquet(tmp_path / "null.parquet", ["a", None])
    write_parquet(tmp_path / "number.parquet", [1, 2, 3])
    raw = pyarrow.array([b"ok", b"\xff"]).cast(pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": raw}), tmp_path / "utf8.parquet")
    binary = pyarrow.binary()  # text as Impala writes it
    write_parquet(tmp_path / "binary.parquet", [b"fine", b"\xff"], binary)
    assert prepare(tmp_path / "out", tmp_path, all_train=True, max_dropped=99) == 0
    dropped = {"missing key": 2, "null text": 1, "text is not a string": 3, "bad UTF-8": 2}
    assert read_manifest(tmp_path / "out").documents["dropped"] == dropped
    assert "fine" in decoded(tmp_path / "out")


def test_damaged_file_whose_name_is_not_utf8(tmp_path, prepare, capsys):
    folder = tmp_path / "texts"
    folder.mkdir()
    write_jsonl(folder / "good.jsonl", TEXTS)
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.jsonl.gz")).write_bytes(CUT_GZ)
    assert prepare(tmp_path / "out", folder, all_train=True, max_damaged_files=1) == 0
    (path,) = read_manifest(tmp_path / "out").documents["damaged_files"]
    assert path == f"{folder}/\\udcff.jsonl.gz"


def test_wrong_text_key(tmp_path, prepare, reported, monkeypatch):
    """It ends before the work, and the message names the option and no limit that would accept it."""
    path, out = (
        write_jsonl(tmp_path / "a.jsonl", [f"text {index}" for index in range(5000)], key="content"),
        tmp_path / "out",
    )
    with monkeypatch.context() as patch:
        patch.setattr("train.prepare.preparation.run_local", None)
        patch.setattr("train.prepare.tokenizer.sample_texts", None)
        assert prepare(out, path, tasks=2) == 2
        words = ["--input", str(path), "--vocab_size", "300", "--output", str(tmp_path / "tokenizer")]
        assert train_tokenizer(words) == 2
    write_parquet(path := tmp_path / "a.parquet", TEXTS, key="content")
    assert prepare(out, path, tasks=2, max_dropped=len(TEXTS)) == 2
    for error in reported:
        assert (
            error.code == "nothing_left"
            and "--text_key" in str(error)
            and "--max_dropped 4" not in str(error)
            and numbers(error)[0] < 1000  # of 5000
        )
    assert prepare(out, path, tasks=2, all_train=True, text_key="content", overwrite=True) == 0
    assert decoded(out) == TEXTS


def test_manifest_describes_the_shards(tmp_path, prepare, corpus, tokenizer_dir):
    assert prepare(tmp_path, corpus, eval_fraction=0.1, shard_tokens=3000) == 0
    manifest = read_manifest(tmp_path)
    assert len(manifest.split_shards("train")) > 2
    assert all(shard.tokens <= 3000 for shard in manifest.shards)
    assert (manifest.vocab_size, manifest.bos_id, manifest.eos_id, manifest.dtype) == (400, 1, 2, "uint16")
    assert manifest.tokenizer_sha256 == sha256_file(tokenizer_dir / "tokenizer.model")
    assert manifest.tokenizer_sha256 == sha256_file(tmp_path / "tokenizer" / "tokenizer.model")
    for shard in manifest.shards:
        assert sha256_file(tmp_path / shard.name) == shard.sha256
        assert (tmp_path / shard.name).stat().st_size == shard.bytes
    shards = {name for shard in manifest.shards for name in (shard.name, f"{shard.name}.index")}
    assert {path.name for path in tmp_path.iterdir()} == {"manifest.json", "tokenizer", *shards}


def test_splits_are_disjoint_and_complete(tmp_path, prepare):
    texts = corpus_texts(300)
    path = write_jsonl(tmp_path / "a.jsonl", texts + texts[:50])
    assert prepare(tmp_path / "out", path, eval_fraction=0.2) == 0
    train, evaluation = decoded(tmp_path / "out"), decoded(tmp_path / "out", "eval")
    assert not set(train) & set(evaluation)
    assert sorted(train + evaluation) == sorted(texts + texts[:50])
    assert 30 < len(evaluation) < 110


def test_tokenizer_json_gives_the_same_tokens(tmp_path, prepare, corpus, tokenizer_dir):
    """Also if the training of another kind left it cutting and padding: documents are whole."""
    other = shutil.copytree(tokenizer_dir, tmp_path / "tokenizer")
    (other / "tokenizer.model").unlink()
    fast = tokenizers.Tokenizer.from_file(str(other / "tokenizer.json"))
    fast.enable_truncation(16), fast.enable_padding(pad_token="<unk>")
    fast.save(str(other / "tokenizer.json"))
    literal = write_jsonl(tmp_path / "literal.jsonl", TEXTS)
    for name, folder in (("a", tokenizer_dir), ("b", other)):
        assert prepare(tmp_path / name, corpus, literal, tokenizer=folder) == 0
    a, b = read_manifest(tmp_path / "a"), read_manifest(tmp_path / "b")
    assert a.shards == b.shards and a.tokenizer_sha256 != b.tokenizer_sha256
    (other / "tokenizer_config.json").unlink()  # nothing says which ids are BOS and EOS
    assert prepare(tmp_path / "c", corpus, tokenizer=other) == 2


@pytest.mark.parametrize(("size", "tasks"), [(0, 1), (1 << 24, 1), ((1 << 24) + 1, 2), (10**12, 1000)])
def test_number_of_tasks(tokenizer_dir, monkeypatch, size, tasks):
    """Whatever the machine is, as the bytes of the output depend on it."""
    source = Source("/a.jsonl", ".jsonl", size, 0)
    monkeypatch.setattr("train.prepare.preparation.list_sources", lambda *_: [source])
    given = ["--input", "a.jsonl", "--tokenizer", str(tokenizer_dir), "--output", "out"]
    assert Preparation.from_arguments(parse_arguments(given)).tasks == tasks
    assert Preparation.from_arguments(parse_arguments([*given, "--workers", "3", "--tasks", "7"])).tasks == 7


@pytest.mark.parametrize(
    "words",
    [
        "--eval_fraction 0", "--eval_fraction 0.6", "--dedup fuzzy", "--quality good", "--languages",
        "--decontaminate_ngram 0", "--language_model lid.bin", "--executor ray", "--input caf\udce9.txt",
        "--decontaminate caf\udce9.txt", "--text_key caf\udce9.txt",
    ],
    ids=ascii,
)  # fmt: skip
def test_invalid_options_raise(words):
    with pytest.raises(SystemExit) as stop:
        parse_arguments(["--input", "a.txt", "--tokenizer", "a", "--output", "out", *words.split()])
    assert stop.value.code == 2


def test_tallies_add_up():
    first = Tally(read=4, kept=3, text_bytes=7, by_step=Counter({"language": 1}))
    second = Tally(read=2, kept=2, text_bytes=7)
    for number in range(2):
        first.drop(Dropped("bad UTF-8", f"a:{number}"))
        second.drop(Dropped("bad UTF-8", f"b:{number}", "byte 5"))
    second.drop(Dropped("missing key", "c", count=50))
    second.damage(Damaged("d", "corrupt", "", 0))
    total = Tally()
    for tally in (first, second):
        total.add(Tally.from_json(json.loads(json.dumps(vars(tally)))))
    counts = {
        "dropped": {"bad UTF-8": 4, "missing key": 50},
        "removed": {"language": 1},
        "damaged_files": {"d": 0},
    }
    assert total.documents() == {"in": 60, "out": 5, **counts} and total.text_bytes == 14
    _, *lines = total.table().splitlines()
    first_words = ["1", "50", "c", "4", "a:0", "a:1", "b:0:", "unknown", "corrupt:"]
    assert [line.split()[0] for line in lines] == first_words
    with pytest.raises(AssertionError):  # a document is not counted
        Tally(read=5, kept=3, by_step=Counter({"language": 1})).documents()
