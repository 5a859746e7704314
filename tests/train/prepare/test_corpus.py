"""Shares of files: the shares of all tasks are what one task reads, in every format, wherever they are cut."""

import errno
import json
import os
from pathlib import Path
from unittest.mock import Mock

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from tests.conftest import refused
from train.data.format import DataError
from train.prepare.corpus import list_sources, read_share
from train.prepare.readers import Items, Text

TEXTS = [f"document {i} " + "x" * (i * 37 % 90) for i in range(120)]


def write_lines(path: Path, texts: list[str] = TEXTS, end: str = "\n") -> Path:
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts) + end, encoding="utf-8")
    return path


def read_documents(inputs: list[str], text_key: str = "text", split_on: str | None = None) -> Items:
    return read_share(list_sources(inputs, split_on), text_key, split_on=split_on)


def shares(inputs: list[Path], tasks: int, split_on: str | None = None) -> list[list]:
    sources = list_sources(map(str, inputs))
    return [list(read_share(sources, "text", task, tasks, split_on)) for task in range(tasks)]


def texts_of(items) -> list[str]:
    items = list(items)
    assert all(isinstance(item, Text) for item in items), items
    return [item.text for item in items]


@pytest.mark.parametrize("tasks", [1, 2, 3, 7, 50])
def test_shares_cover_all_documents(tmp_path, tasks):
    (tmp_path / "a.txt").write_text("one file, one document")
    write_lines(tmp_path / "b.jsonl", end="")  # no newline at the end
    write_lines(tmp_path / "c.jsonl", ["only one"])
    table = pyarrow.table({"text": TEXTS})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet", row_group_size=11)
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / "e"), num_shards=3)
    inputs = [tmp_path / name for name in ("a.txt", "b.jsonl", "c.jsonl", "d.parquet", "e")]
    expected = ["one file, one document", *TEXTS, "only one", *TEXTS, *TEXTS]
    assert [text for share in shares(inputs, tasks) for text in texts_of(share)] == expected


def test_linked_input_is_read_once(tmp_path):
    path, link = write_lines(tmp_path / "a.jsonl"), tmp_path / "b.jsonl"
    link.symlink_to(path)
    for inputs in ([path, link], [tmp_path]):
        with refused(DataError, code="given_twice", key=str(link)):
            list_sources(map(str, inputs))


def test_linked_folder_is_read_once(tmp_path):
    """Hidden files and files of an unfinished preparation are skipped, so that a resume has the same inputs."""
    inputs, elsewhere = tmp_path / "inputs", tmp_path / "elsewhere"
    (inputs / "out/prepare_data.unfinished/notes").mkdir(parents=True), elsewhere.mkdir()
    write_lines(inputs / "out/prepare_data.unfinished/notes/a.txt")
    write_lines(inputs / "a.jsonl", ["here"]), write_lines(elsewhere / "b.jsonl", ["there"])
    (inputs / "link").symlink_to(elsewhere), (elsewhere / "back").symlink_to(inputs)
    (inputs / ".c.jsonl").symlink_to("nowhere")  # hidden, as a lock of Emacs
    (inputs / "__pycache__").mkdir()
    write_lines(inputs / "__pycache__/a.jsonl", ["cached"])
    assert texts_of(read_documents([str(inputs)])) == ["here", "there"]


@pytest.mark.parametrize(
    "make", [lambda path: path.symlink_to("nowhere"), lambda path: path.symlink_to(path.name), os.mkfifo]
)
def test_special_file_in_folder_raises(tmp_path, make):
    """It is not left out in silence: it may be most of the corpus."""
    write_lines(tmp_path / "a.jsonl", ["here"])
    (tmp_path / "picture.png").symlink_to("nowhere")  # of a suffix that is not read
    assert len(list_sources([str(tmp_path)])) == 1
    (tmp_path / "sub").mkdir()
    make(tmp_path / "sub" / "b.txt")
    for number in range(5):  # of which some may be folders
        (tmp_path / f"sub/link{number}").symlink_to("nowhere")
    with refused(DataError, code="unreadable", key=str(tmp_path / "sub/b.txt")):
        list_sources([str(tmp_path)])


def test_unreadable_input_raises_before_reading(tmp_path, monkeypatch):
    """By stand-ins for the system's calls, as root may read everything."""
    (tmp_path / "sub").mkdir()
    closed = write_lines(tmp_path / "sub" / "a.jsonl", ["here"])
    for call, path in (("open", closed), ("listdir", tmp_path)):
        with monkeypatch.context() as patch, refused(DataError, code="unreadable", key=str(path)):
            patch.setattr(os, call, Mock(side_effect=PermissionError(errno.EACCES, "denied", str(path))))
            list_sources([str(tmp_path)])


def test_damaged_files_are_counted_once(tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really" * 100)
    (tmp_path / "empty.jsonl").write_bytes(b"")
    pyarrow.parquet.write_table(pyarrow.table({"other": TEXTS}), tmp_path / "key.parquet", row_group_size=10)
    no_rows = pyarrow.table({"text": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(no_rows, tmp_path / "rows.parquet")
    for tasks in (1, 5):
        damaged, *dropped = (item for share in shares([tmp_path], tasks) for item in share)
        assert (damaged.path, damaged.lost_rows) == (str(tmp_path / "bad.parquet"), 0)
        assert [(item.where, item.reason, item.count) for item in dropped] == [
            (str(tmp_path / "empty.jsonl"), "empty document", 1),
            (str(tmp_path / "key.parquet"), "missing key", 120),
            (str(tmp_path / "rows.parquet"), "empty document", 1),
        ]


def test_document_locations(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' * 10 + b'{"text": null}\n' + b'{"text": "good"}\n' * 2)
    *_, bad, _, _ = shares([path], 2)[1]
    assert path.read_bytes()[int(bad.where.rpartition("byte ")[2]) :].startswith(b'{"text": null}')
    *_, bad, _, _ = read_documents([str(path)])
    assert bad.where == f"{path}:11"


def test_saved_datasets(tmp_path):
    data = datasets.Dataset.from_dict({"text": ["a", None, "c"], "id": [1, 2, 3]})
    picked = tmp_path / "picked"
    data.select([2, 0]).save_to_disk(str(picked))
    assert texts_of(read_documents([str(picked)])) == ["c", "a"]
    assert [item.count for item in read_documents([str(picked)], "body")] == [2]
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(str(tmp_path / "splits"))
    with refused(DataError, code="nothing_to_read"):
        list_sources([str(tmp_path / "splits")])
    items = list(read_documents([str(tmp_path / "splits" / "train")]))
    assert [getattr(item, "reason", None) for item in items] == [None, "null text", None]
    (file,) = picked.glob("*.arrow")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert [item.reason for item in read_documents([str(picked)])] == ["unreadable .arrow"]
    file.unlink()
    with refused(DataError, code="unreadable", key=str(file)):
        list_sources([str(picked)])


def test_hub_datasets(tmp_path, monkeypatch):
    """datasets loads a folder of files by the same call as a data set of the hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    write_lines(tmp_path / "set" / "train.jsonl")
    write_lines(tmp_path / "set" / "test.jsonl", ["held out"])
    assert texts_of(read_documents([f"hf:{tmp_path / 'set'}"])) == TEXTS
    assert texts_of(read_documents([f"hf:{tmp_path / 'set'}::test"])) == ["held out"]
    with refused(DataError, code="part_of_split"):
        list_sources([f"hf:{tmp_path / 'set'}::train[:90%]"])
    with refused(DataError, code="dataset_unavailable"):
        list_sources([f"hf:{tmp_path / 'set'}::nosplit"])
