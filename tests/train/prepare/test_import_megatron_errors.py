"""train/import_megatron.py on datasets and options that are wrong in each way: named, and nothing is written."""

import re
import struct

import pytest

from tests.conftest import numbers, refused
from tests.train.prepare.megatron_datasets import (
    BOS,
    EOS,
    contents,
    imported,
    index_bytes,
    interrupted_move,
    random_documents,
    whole,
    write_dataset,
)
from train.data.format import DataError
from train.import_megatron import open_dataset, parse_arguments
from train.prepare.corpus import WORK_NAME

LENGTHS, BOUNDS = [3, 2, 4], [0, 2, 3]  # of a good index, here of int32


def index(lengths: list[int] = LENGTHS, bounds: list[int] = BOUNDS, code: int = 4, **more: object) -> bytes:
    return index_bytes(lengths, bounds, 4, code, **more)  # type: ignore[arg-type]


def with_int64(content: bytes, place: int, value: int) -> bytes:
    return content[:place] + struct.pack("<q", value) + content[place + 8 :]


POINTERS = 34 + 4 * len(LENGTHS)
BAD_INDEXES = {  # .idx, the code of the error
    "magic": (index(magic=b"TNTIDX\x00\x00\x00"), "not_an_index"),
    "no content": (b"", "not_an_index"),
    "a text": (b"hello", "not_an_index"),
    "version": (index(version=2), "unknown_version"),
    "unknown type": (index(code=9), "not_token_ids"),
    "float64": (index(code=6), "not_token_ids"),
    "float32": (index(code=7), "not_token_ids"),
    "header cut": (index()[:30], "not_an_index"),
    "cut": (index()[:-1], "wrong_size"),
    "too long": (index() + b"\0", "wrong_size"),
    "sequence count": (index()[:18] + struct.pack("<Q", 1 << 60) + index()[26:], "wrong_size"),
    "negative length": (index([3, -2, 8]), "bad_sequences"),
    "pointer": (with_int64(index(), POINTERS + 8, 16), "bad_sequences"),
    "first pointer": (with_int64(index(), POINTERS, 4), "bad_sequences"),
    "negative pointer": (with_int64(index(), POINTERS + 16, -8), "bad_sequences"),
    "pointer beyond": (with_int64(index(), POINTERS + 16, 400), "bad_sequences"),
    "no document index": (index(bounds=[]), "bad_document_indices"),
    "first document": (index(bounds=[1, 2, 3]), "bad_document_indices"),
    "decreasing": (index(bounds=[0, 3, 2, 3]), "bad_document_indices"),
    "negative document": (index(bounds=[0, -1, 3]), "bad_document_indices"),
    "overflowing document": (index(bounds=[0, 2**63 - 1, -(2**63), 3]), "bad_document_indices"),
    "documents end early": (index(bounds=[0, 1, 2]), "bad_document_indices"),
    "documents end late": (index(bounds=[0, 2, 4]), "bad_document_indices"),
    "multimodal": (index(modes=[0, 1, 0]), "multimodal"),
}


@pytest.mark.parametrize("kind", BAD_INDEXES)
def test_invalid_index_raises(tmp_path, kind):
    content, code = BAD_INDEXES[kind]
    (tmp_path / "bad.idx").write_bytes(content)
    (tmp_path / "bad.bin").write_bytes(struct.pack("<9i", *range(3, 12)))
    with refused(DataError, code=code, key=str(tmp_path / "bad.idx")):
        open_dataset(str(tmp_path / "bad"))


def test_inputs_are_checked_before_writing(tmp_path, run_import, reported):
    """And the bad indexes differ from a good one in what is said to be bad."""
    for name, content in (("good", index()), ("bad", index()[:-1])):
        (tmp_path / f"{name}.idx").write_bytes(content)
        (tmp_path / f"{name}.bin").write_bytes(struct.pack("<9i", *range(3, 12)))
    assert run_import(tmp_path / "out", tmp_path / "good", tmp_path / "bad") == 2
    assert reported.pop().code == "wrong_size" and not (tmp_path / "out").exists()
    assert run_import(tmp_path / "out", tmp_path / "good") == 0
    assert imported(tmp_path / "out", "train") == [[1, 3, 4, 5, 6, 7, 2], [1, 8, 9, 10, 11, 2]]


@pytest.mark.parametrize("change", [-1, -4, 4])
def test_wrong_bin_size_raises(tmp_path, change):
    """Or of ids of another type: an index that says uint16 over ids of int32 would read each as two."""
    prefix = write_dataset(tmp_path / "a", [[[5, 6, 7]]])
    content = (tmp_path / "a.bin").read_bytes() + bytes(4)
    (tmp_path / "a.bin").write_bytes(content[: 12 + change])
    with refused(DataError, code="wrong_size", key=f"{prefix}.bin") as error:
        open_dataset(str(prefix))
    assert {12 + change, 12} <= {*numbers(error.value)}


@pytest.mark.parametrize("documents", [[], [[]], [[[]], []]])
def test_empty_dataset_raises(tmp_path, documents):
    prefix = write_dataset(tmp_path / "a", documents)
    with refused(DataError, code="empty_dataset", key=f"{prefix}.idx"):
        open_dataset(str(prefix))


@pytest.mark.parametrize("letter, token", [("i", -1), ("h", -7), ("i", 400), ("H", 65535), ("q", 1 << 40)])
def test_invalid_token_id_raises(tmp_path, run_import, reported, letter, token, monkeypatch):
    monkeypatch.setattr("train.import_megatron.BLOCK_TOKENS", 100)
    documents = whole(random_documents(30))
    documents[20][3] = token
    prefix = write_dataset(tmp_path / "a", [[tokens] for tokens in documents], letter)
    good = write_dataset(tmp_path / "good", random_documents(5))
    assert run_import(tmp_path / "out", good, prefix) == 2
    error = reported.pop()
    assert (error.code, error.key) == ("token_beyond_vocabulary", f"{prefix}.bin") and token in numbers(error)
    assert ("--eod_id" in str(error)) == (token > 0)
    assert list((tmp_path / "out").iterdir()) == []  # no manifest, and no shard that could be taken for data


def test_missing_inputs_raise(tmp_path, run_import, reported):
    prefix = write_dataset(tmp_path / "a", [[[5, 6]]])
    (tmp_path / "b").symlink_to(tmp_path)
    for given, code, key in (
        (["a", "b/a"], "given_twice", "--input"),
        (["nowhere"], "file_missing", f"{tmp_path}/nowhere.idx"),
        (["a.bin"], "file_missing", f"{tmp_path}/a.bin.idx"),
    ):
        assert run_import(tmp_path / "out", *(tmp_path / name for name in given)) == 2
        assert (reported[-1].code, reported.pop().key) == (code, key)
    assert run_import(tmp_path / "out", prefix, tokenizer=tmp_path) == 2
    assert reported.pop().code == "no_tokenizer" and not (tmp_path / "out").exists()
    (tmp_path / "a.bin").unlink()
    assert run_import(tmp_path / "out", prefix) == 2 and reported.pop().key == f"{prefix}.bin"


def test_output_folder_is_protected(tmp_path, run_import, reported):
    prefix, out = write_dataset(tmp_path / "a", random_documents(20)), tmp_path / "out"
    (out / WORK_NAME / "new").mkdir(parents=True)
    (out / WORK_NAME / "new/train_00009.ds").touch()  # what a killed import leaves
    assert run_import(out, prefix) == 0
    before = contents(out)
    assert run_import(out, prefix, eod_id=7) == 2 and reported.pop().code == "already_there"
    assert contents(out) == before and len(before) < 10
    (out / WORK_NAME).mkdir()
    (out / WORK_NAME / "job.json").touch()
    assert run_import(out, prefix) == 2 and reported.pop().code == "unfinished_preparation"
    assert run_import(out, prefix, overwrite=True) == 0 and contents(out) == before


@pytest.mark.parametrize(("moves", "overwrite"), [(0, False), (4, True)])
def test_interrupted_move_loses_nothing(tmp_path, run_import, reported, moves, overwrite):
    """All new files are in one of the two folders, and --overwrite is needed to replace them."""
    prefix, out, fresh = (
        write_dataset(tmp_path / "a", random_documents(40)),
        tmp_path / "out",
        tmp_path / "fresh",
    )
    assert run_import(fresh, prefix, shard_tokens=200) == 0
    options = {"overwrite": True} if overwrite else {}
    if overwrite:
        assert run_import(out, write_dataset(tmp_path / "old", random_documents(30, seed=1))) == 0
    with interrupted_move(out, moves):
        assert run_import(out, prefix, shard_tokens=200, **options) == 1
    assert not (out / "manifest.json").exists()
    new, complete = contents(out / WORK_NAME / "new"), contents(fresh)
    assert all((contents(out) | new)[name] == complete[name] for name in complete.keys() - {"manifest.json"})
    assert run_import(out, prefix, shard_tokens=200) == 2 and reported[-1].code == "unfinished_preparation"
    assert contents(out / WORK_NAME / "new") == new
    assert run_import(out, prefix, shard_tokens=200, overwrite=True) == 0 and contents(out) == complete


def test_empty_train_split_raises(tmp_path, run_import, reported):
    prefix = write_dataset(tmp_path / "a", [[[EOS]], [[BOS, EOS]]])
    assert run_import(tmp_path / "out", prefix) == 2
    error = reported.pop()
    assert (error.code, error.key) == ("empty_split", "train") and list((tmp_path / "out").iterdir()) == []
    given = {"input": "a", "tokenizer": "a", "output": "a"}
    options = vars(parse_arguments([word for name, value in given.items() for word in (f"--{name}", value)]))
    assert set(re.findall(r"--(\w+)", str(error))) <= set(options)
