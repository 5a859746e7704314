"""Text with separators and .json, packed or not; a single text that is cut for its eval split."""

import argparse
import codecs
import errno
import gzip
import json
from pathlib import Path

import pyarrow.ipc
import pyarrow.parquet
import pytest

from tests.conftest import numbers, refused
from tests.fixtures import corpus_texts
from tests.train.prepare.megatron_datasets import contents
from tests.train.prepare.test_corpus import read_documents, shares, texts_of
from tests.train.prepare.test_prepare_data import decoded
from train.data.format import DataError, read_manifest
from train.prepare import readers
from train.prepare.corpus import list_sources, separator
from train.prepare.preparation import cut_for_eval
from train.prepare.readers import Damaged, Dropped

PACKED = {"": bytes, ".gz": gzip.compress, ".zst": lambda data: pyarrow.compress(data, "zstd", asbytes=True)}
PLAY = b"\xef\xbb\xbf\r\nFirst:\r\nSpeak.\r\n \t\r\n\r\nSecond:\n  Hear\xc3\xa9.\n\n\n\nThird:"
STORIES = b"One\nday.\n<|end|>\n\nTwo<|end|>Three<|end|><|end|>\nFour\n<|end|>\n"


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(PACKED[path.suffix if path.suffix in PACKED else ""](data))
    return path


def outcome(path: Path, text_key: str = "text") -> list[str]:
    """Texts, and of what was dropped the reason with the place behind the path, or "damaged"."""
    return [
        "damaged"
        if isinstance(item, Damaged)
        else f"{item.reason} {item.where.removeprefix(str(path))}"
        if isinstance(item, Dropped)
        else item.text
        for item in read_documents([str(path)], text_key)
    ]


@pytest.mark.parametrize("packing", PACKED)
def test_separator_splits_documents(tmp_path, packing):
    path = write(tmp_path / f"a.txt{packing}", PLAY)
    play = ["First:\r\nSpeak.", "Second:\n  Hearé.", "Third:"]
    assert texts_of(read_documents([str(path)], split_on="blank_line")) == play
    (whole,) = texts_of(read_documents([str(path)]))
    assert whole == PLAY.decode("utf-8-sig")
    write(path, STORIES)
    stories = ["One\nday.", "Two", "Three", "Four"]
    assert texts_of(read_documents([str(path)], split_on="<|end|>")) == stories


@pytest.mark.parametrize(
    "split_on, data",
    [
        ("blank_line", PLAY),
        ("<|end|>", STORIES),
        ("--", b"a-----b--c"),
        (None, b'{"text": "ab"}\n\n{"text": "c"}\r\n{"text": "d"}'),
    ],
)
def test_byte_ranges_cover_each_document_once(tmp_path, split_on, data):
    path = write(tmp_path / ("a.txt" if split_on else "a.jsonl"), data)
    expected = texts_of(read_documents([str(path)], split_on=split_on))
    assert len(expected) in (3, 4)
    for tasks in range(2, len(data)):
        found = shares([path], tasks, split_on)
        assert [text for share in found for text in texts_of(share)] == expected, tasks
    if split_on:
        write(path, (b"x" * 99 + b"\n\n" + b"y" * 99 + split_on.encode() + b"\n\n") * 20)
        first, second = shares([path], 2, split_on)
        assert abs(len(first) - len(second)) <= 2 and second  # each task does its part


def test_too_long_documents(tmp_path, monkeypatch):
    write(tmp_path / "a.txt", b"one\n\ntwo\n\nlo\nng\n\xff\n\nfour\n\n\xff\n")
    write(tmp_path / "b.py", b"x = 1\n\n\ny = 2\n")
    with refused(DataError, code="nothing_to_split", key="--split_on"):
        list_sources([str(tmp_path / "b.py")], "blank_line")
    *_, code = read_documents([str(tmp_path)], split_on="blank_line")
    assert code.text == "x = 1\n\n\ny = 2\n"
    monkeypatch.setattr(readers, "MAX_DOCUMENT_BYTES", 6)
    one, two, long, four, bad = read_documents([str(tmp_path / "a.txt")], split_on="blank_line")
    assert (one.text, two.text, four.text, bad.reason) == ("one", "two", "four", readers.BAD_UTF8)
    assert long.reason == readers.TOO_LONG and long.where.endswith("a.txt:4")
    (whole,) = read_documents([str(tmp_path / "a.txt")])
    assert whole.reason == readers.TOO_LONG and "--split_on" in whole.detail


@pytest.mark.parametrize("split_on", [None, "--"])
@pytest.mark.parametrize(("text", "fits"), [("123456", True), ("1234567", False), ("12345é", False)])
def test_document_size_limit(tmp_path, monkeypatch, split_on, text, fits):
    monkeypatch.setattr(readers, "MAX_DOCUMENT_BYTES", 6)
    first = "ab--" if split_on else ""
    write(tmp_path / "a.txt", f"{first}{text}".encode())
    write(tmp_path / "b.jsonl", json.dumps({"text": text}).encode())
    items = [item for share in shares([tmp_path], 1, split_on) for item in share]
    found = [item.reason if isinstance(item, Dropped) else item.text for item in items]
    assert found == ["ab"] * bool(split_on) + [text if fits else readers.TOO_LONG] * 2


RECORDS = {
    "a.json": (b'\xef\xbb\xbf[{"text": "one"},\n {"i": 2},\n {"text": "2"}]', ["one", "missing key :record 2", "2"]),
    "a.json.gz": (b'\n{"text": "one"}\n\n{"text": \n{"text": "two"}', ["one", "invalid JSON :4", "two"]),
    "object.json": (b'{\n "text": "one"\n}\n', ["one"]),
    "number.json": (b"[1]", ["invalid JSON :record 1"]),
    "cut.json": (b'[{"text": "one"},', ["invalid JSON :1"]),
    "first.json": (b'{"text": \n{"text": "two"}', ["invalid JSON :1", "two"]),
    "array.jsonl": (b'[{"text": "one"}, {"text": "two"}]\n', ["invalid JSON :1"]),
    "none.json": (b"[]", ["empty document "]),
    "mark.jsonl": (b'\xef\xbb\xbf{"text": "one"}\n{"text": "two"}', ["one", "two"]),
    "none.jsonl": (b"", ["empty document "]),
    "wrapped.json": (b'{"data": [{"text": "one"}]}', ["missing key :record 1"]),
    "mark.txt": (codecs.BOM_UTF8, ["empty document "]),
    "cut.txt.gz": (b"", ["damaged"]),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_invalid_records_are_named(tmp_path, name):
    data, expected = RECORDS[name]
    path = write(tmp_path / name, data)
    if name == "cut.txt.gz":
        path.write_bytes(gzip.compress(b"some text" * 99)[:-9])
    assert outcome(path) == expected


def test_read_errors_are_not_dropped_documents():
    """They are there: another start reads them."""
    assert (
        readers.describe_damage(Path("a"), "corrupt", "nothing was read", OSError("Truncated"), 2).lost_rows
        == 2
    )
    with pytest.raises(OSError):
        readers.describe_damage(
            Path("a"), "corrupt", "nothing was read", OSError(errno.EIO, "Input/output error")
        )


def test_row_numbers_across_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "BATCH_ROWS", 2)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["1", "2", "3", None, "5"]}), tmp_path / "a.parquet")
    found = outcome(tmp_path / "a.parquet")
    assert found == ["1", "2", "3", "null text :4", "5"]


def test_duplicate_column_raises(tmp_path):
    """Which of them is the text nobody said: not the first in silence."""
    both = pyarrow.table([["one", "three"], ["two", "four"]], names=["text", "text"])
    pyarrow.parquet.write_table(both, tmp_path / "a.parquet")
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", both.schema) as stream:
        stream.write_table(both)
    for kind in (".parquet", ".arrow"):
        (item,) = readers.read_table(tmp_path / f"a{kind}", kind, "text", 0, 1)
        assert (item.reason, item.where, item.count) == ("missing key", str(tmp_path / f"a{kind}"), 2)


def test_control_characters_in_names_are_escaped(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"\\u001b[31m": 1, "plain name": 2, "\\udcff": 3}')
    (item,) = read_documents([str(path)])
    assert item.detail == r"the record has no key 'text'; its keys are '\x1b[31m', plain name, '\udcff'"


def test_other_files_in_folder_are_counted(tmp_path, caplog):
    for name in ("a.png", "sub/b.png", "package.json", "LICENSE", "table.csv", "c.txt", "d.TXT.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, b"text")
    found = list_sources([str(tmp_path), str(tmp_path / "package.json")])
    assert [Path(source.path).name for source in found] == ["c.txt", "d.TXT.gz", "package.json"]
    (line,) = caplog.messages
    assert numbers(line.replace(str(tmp_path), "")) == [5, 2, 1, 1, 1]
    for name in ("sub", "table.csv"):
        with refused(DataError, code="nothing_to_read", key=str(tmp_path / name)):
            list_sources([str(tmp_path / name)])


def test_single_text_file(tmp_path, prepare, reported):
    """tinyshakespeare's input.txt: its end is the eval split, as much of it as asked."""
    text = "".join(corpus_texts(200))
    path = write(tmp_path / "input.txt", text.encode())
    assert prepare(tmp_path / "out", path, eval_fraction=0.1) == 0
    (train,), (held_out,) = decoded(tmp_path / "out"), decoded(tmp_path / "out", "eval")
    assert train + held_out == text and train.endswith("\n") and 0.1 <= len(held_out) / len(text) < 0.11
    manifest = read_manifest(tmp_path / "out")
    assert manifest.documents == {"in": 2, "out": 2, "dropped": {}, "removed": {}}
    assert manifest.steps["eval_by"] == "position" and "split_on" not in manifest.steps

    assert prepare(tmp_path / "hash", path, eval_by="hash") == 2  # as asked
    assert reported.pop().code == "empty_split"
    options = {"split_on": "blank_line", "eval_fraction": 0.1}
    assert prepare(tmp_path / "many", path, **options) == 0
    assert prepare(tmp_path / "named", path, **options, eval_by="hash") == 0
    assert contents(tmp_path / "many") == contents(tmp_path / "named")
    manifest = read_manifest(tmp_path / "many")
    assert manifest.documents["out"] == 201 and manifest.steps["split_on"] == "blank_line"
    assert "eval_by" not in manifest.steps

    texts = corpus_texts(60)  # the end of each of several documents, by request
    write(tmp_path / "a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    by_position = {"eval_by": "position", "eval_fraction": 0.2, "tasks": 3}
    assert prepare(tmp_path / "ends", tmp_path / "a.jsonl", **by_position) == 0
    train, held_out = decoded(tmp_path / "ends"), decoded(tmp_path / "ends", "eval")
    assert [a + b for a, b in zip(train, held_out, strict=True)] == texts


@pytest.mark.parametrize(
    "text, fraction, end",
    [
        ("line\n" * 100, 0.1, "line\n" * 11),
        ("word " * 100, 0.1, "word " * 11),  # no line end near: between words
        ("x" * 100 + "\n\n\n", 0.1, "x" * 10 + "\n\n\n"),  # what is blank counts for nothing
        ("x" * 79 + "\n" + "y" * 20, 0.1, "y" * 20),  # twice as much as asked, but no more
        ("x" * 78 + "\n" + "y" * 21, 0.1, "y" * 10),
        ("\n" + "y" * 9, 0.5, "y" * 5),  # a beginning without text is none
        ("ab", 1e-6, "b"),
        ("a", 0.5, ""),
    ],
)
def test_cut_for_eval(text, fraction, end):
    assert cut_for_eval(text, fraction) == (text[: len(text) - len(end)], end)


@pytest.mark.parametrize("text", ["", "\n\n", r"a\nb", "\udce9"])
def test_invalid_separators(text):
    with pytest.raises(argparse.ArgumentTypeError):
        separator(text)
