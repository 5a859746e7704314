"""train/import_megatron.py on datasets and options that are wrong in each way: named, and nothing is written."""

import os
import struct

import pytest

from tests.train.prepare.megatron_datasets import (
    BOS,
    EOS,
    content_of,
    framed,
    imported,
    index_bytes,
    random_documents,
    whole,
    write_dataset,
)
from train.data.format import DataError, read_manifest
from train.import_megatron import main as import_megatron
from train.import_megatron import parse_arguments
from train.prepare.megatron import open_dataset, read_documents
from train.prepare.output import WORK_NAME

LENGTHS, BOUNDS = [3, 2, 4], [0, 2, 3]  # of a good index, here of int32
IDX_BYTES = 34 + 12 * len(LENGTHS) + 8 * len(BOUNDS)


def index(lengths: list[int] = LENGTHS, bounds: list[int] = BOUNDS, code: int = 4, **more: object) -> bytes:
    return index_bytes(lengths, bounds, 4, code, **more)  # type: ignore[arg-type]


def with_int64(content: bytes, place: int, value: int) -> bytes:
    return content[:place] + struct.pack("<q", value) + content[place + 8 :]


POINTERS = 34 + 4 * len(LENGTHS)
APART, BOUNDS_WRONG = (
    "its sequences do not stand one behind the other",
    "its document indices do not go from 0 to 3",
)
BAD_INDEXES = {  # .idx, what the message says beside its path
    "magic": (index(magic=b"TNTIDX\x00\x00\x00"), "begins with b'TNTIDX"),
    "no content": (b"", "begins with b''"),
    "a text": (b"hello", "not the index of a Megatron indexed dataset"),
    "version": (index(version=2), "is of version 2, this program reads 1"),
    "unknown type": (index(code=9), "has ids of type 9; token ids are integers: 1 uint8"),
    "float64": (index(code=6), "has ids of type 6; "),
    "float32": (index(code=7), "has ids of type 7; "),
    "header cut": (index()[:30], "has 30 bytes, the header alone has 34"),
    "cut": (index()[:-1], f"has {IDX_BYTES - 1} bytes; with the 3 sequences and 2 documents"),
    "too long": (index() + b"\0", f"has {IDX_BYTES + 1} bytes"),
    "sequence count": (index()[:18] + struct.pack("<Q", 1 << 60) + index()[26:], f"has {IDX_BYTES} bytes"),
    "negative length": (index([3, -2, 8]), APART),
    "pointer": (with_int64(index(), POINTERS + 8, 16), APART),
    "first pointer": (with_int64(index(), POINTERS, 4), APART),
    "negative pointer": (with_int64(index(), POINTERS + 16, -8), APART),
    "pointer beyond": (with_int64(index(), POINTERS + 16, 400), APART),
    "no document index": (index(bounds=[]), "0 document indices"),
    "first document": (index(bounds=[1, 2, 3]), BOUNDS_WRONG),
    "decreasing": (index(bounds=[0, 3, 2, 3]), BOUNDS_WRONG),
    "negative document": (index(bounds=[0, -1, 3]), BOUNDS_WRONG),
    "overflowing document": (index(bounds=[0, 2**63 - 1, -(2**63), 3]), BOUNDS_WRONG),
    "documents end early": (index(bounds=[0, 1, 2]), BOUNDS_WRONG),
    "documents end late": (index(bounds=[0, 2, 4]), BOUNDS_WRONG),
    "multimodal": (index(modes=[0, 1, 0]), "multimodal data, of which only text"),
}  # fmt: skip


@pytest.mark.parametrize("blocks", [1, 1 << 19])
@pytest.mark.parametrize("kind", BAD_INDEXES)
def test_bad_index_is_named(tmp_path, run_import, kind, blocks, monkeypatch):
    monkeypatch.setattr("train.prepare.megatron.BLOCK_ENTRIES", blocks)
    content, message = BAD_INDEXES[kind]
    good = write_dataset(tmp_path / "good", random_documents(5))
    (tmp_path / "bad.idx").write_bytes(content)
    (tmp_path / "bad.bin").write_bytes(struct.pack("<9i", *range(3, 12)))
    status, _, errors = run_import(tmp_path / "out", good, tmp_path / "bad")
    error = errors.splitlines()[-1]
    assert status == 2 and error.startswith(f"error: {tmp_path / 'bad.idx'}") and message in error
    assert not (tmp_path / "out").exists()  # everything is checked before anything is written


def test_bad_index_cases_differ_from_a_good_one(tmp_path, run_import):
    (tmp_path / "good.idx").write_bytes(index())
    (tmp_path / "good.bin").write_bytes(struct.pack("<9i", *range(3, 12)))
    assert run_import(tmp_path / "out", tmp_path / "good")[0] == 0
    assert imported(tmp_path / "out", "train") == [[1, 3, 4, 5, 6, 7, 2], [1, 8, 9, 10, 11, 2]]


@pytest.mark.parametrize(
    "change, message", [(-1, "truncated"), (-4, "truncated"), (4, "not the file of this index")]
)
def test_bin_of_another_size(tmp_path, run_import, change, message):
    prefix = write_dataset(tmp_path / "a", [[[5, 6, 7]]])
    content = (tmp_path / "a.bin").read_bytes() + bytes(4)
    (tmp_path / "a.bin").write_bytes(content[: 12 + change])
    status, _, errors = run_import(tmp_path / "out", prefix)
    assert status == 2 and f"error: {tmp_path / 'a.bin'} has {12 + change} bytes, its index says 12" in errors
    assert message in errors


def test_type_of_another_width(tmp_path, run_import):
    """An index that says uint16 over ids of int32 would read each as two."""
    write_dataset(tmp_path / "a", [[[5, 6, 7]]], "i")
    write_dataset(tmp_path / "b", [[[5, 6, 7]]], "H")
    os.replace(tmp_path / "b.idx", tmp_path / "a.idx")
    status, _, errors = run_import(tmp_path / "out", tmp_path / "a")
    assert status == 2 and "a.bin has 12 bytes, its index says 6 (3 tokens of uint16)" in errors


@pytest.mark.parametrize("documents", [[], [[]], [[[]], []]])
def test_empty_dataset(tmp_path, run_import, documents):
    prefix = write_dataset(tmp_path / "a", documents)
    status, _, errors = run_import(tmp_path / "out", prefix)
    assert (
        status == 2
        and f"{prefix}.idx is of an empty dataset ({len(documents)} documents, 0 tokens)" in errors
    )


@pytest.mark.parametrize("letter, token", [("i", -1), ("h", -7), ("i", 400), ("H", 65535), ("q", 1 << 40)])
def test_bad_token_id(tmp_path, run_import, tokenizer_dir, letter, token, monkeypatch):
    monkeypatch.setattr("train.prepare.megatron.BLOCK_TOKENS", 100)
    documents = whole(random_documents(30))
    documents[20][3] = token
    prefix = write_dataset(tmp_path / "a", [[tokens] for tokens in documents], letter)
    good = write_dataset(tmp_path / "good", random_documents(5))
    status, _, errors = run_import(tmp_path / "out", good, prefix)
    what = f"error: {prefix}.bin has the id {token}, which is not in the vocabulary of {tokenizer_dir}, 0 to 399; "
    assert status == 2 and what in errors and ("--eod_id" in errors) == (token > 0)
    assert list((tmp_path / "out").iterdir()) == []  # no manifest, and no shard that could be taken for data


def test_inputs_that_are_not_there(tmp_path, run_import):
    prefix = write_dataset(tmp_path / "a", [[[5, 6]]])
    for given, message in (
        (
            tmp_path / "nowhere",
            f"{tmp_path}/nowhere.idx does not exist; a dataset is PREFIX.idx and PREFIX.bin",
        ),
        (tmp_path / "a.bin", f"a.bin.idx does not exist; give the prefix of both, {prefix}"),
        (tmp_path / "a.idx", f"a.idx.idx does not exist; give the prefix of both, {prefix}"),
    ):
        status, _, errors = run_import(tmp_path / "out", given)
        assert status == 2 and message in errors
    (tmp_path / "b").symlink_to(tmp_path)
    status, _, errors = run_import(tmp_path / "out", prefix, tmp_path / "b" / "a")
    assert status == 2 and "is given twice" in errors
    (tmp_path / "a.bin").unlink()
    assert f"{prefix}.bin does not exist" in run_import(tmp_path / "out", prefix)[2]
    assert "no tokenizer.model" in run_import(tmp_path / "out", prefix, tokenizer=tmp_path)[2]
    assert not (tmp_path / "out").exists()


def test_file_that_shrinks_while_it_is_read(tmp_path):
    write_dataset(tmp_path / "a", random_documents(50))
    dataset = open_dataset(str(tmp_path / "a"))
    os.truncate(tmp_path / "a.bin", dataset.tokens * 4 - 4)
    with pytest.raises(DataError, match=r"a\.bin became shorter while it was read"):
        list(read_documents(dataset))


def test_output_folder_is_protected(tmp_path, run_import):
    documents = random_documents(20)
    prefix = write_dataset(tmp_path / "a", documents)
    assert run_import(tmp_path / "out", prefix)[0] == 0
    before = content_of(tmp_path / "out")
    status, _, errors = run_import(tmp_path / "out", prefix, eod_id=7)
    assert status == 2 and "already holds prepared data" in errors and content_of(tmp_path / "out") == before
    assert run_import(tmp_path / "out", prefix, overwrite=True, shard_tokens=300)[0] == 0
    assert imported(tmp_path / "out", "train") == framed(documents)
    assert len(read_manifest(tmp_path / "out").shards) > 1

    (tmp_path / "begun" / WORK_NAME).mkdir(parents=True)
    (tmp_path / "begun" / WORK_NAME / "job.json").touch()
    status, _, errors = run_import(tmp_path / "begun", prefix)
    assert status == 2 and "unfinished preparation" in errors and (tmp_path / "begun" / WORK_NAME).is_dir()
    assert run_import(tmp_path / "begun", prefix, overwrite=True)[0] == 0

    killed = tmp_path / "killed" / WORK_NAME / "new"  # what a killed import leaves
    killed.mkdir(parents=True)
    for name in ("train_00000.ds", "train_00009.ds"):
        (killed / name).touch()
    assert run_import(tmp_path / "killed", prefix)[0] == 0
    assert content_of(tmp_path / "killed") == content_of(tmp_path / "begun")


def test_ctrl_c_leaves_what_was_there(tmp_path, run_import, monkeypatch):
    prefix = write_dataset(tmp_path / "a", random_documents(20))
    assert run_import(tmp_path / "out", prefix)[0] == 0
    before = content_of(tmp_path / "out")

    def stopped(dataset):
        yield from read_documents(dataset)
        raise KeyboardInterrupt

    monkeypatch.setattr("train.prepare.megatron.read_documents", stopped)
    status, _, errors = run_import(tmp_path / "out", prefix, shard_tokens=300, overwrite=True)
    assert status == 130 and errors.endswith("stopped; --output is as it was\n")
    assert content_of(tmp_path / "out") == before


def test_ctrl_c_while_the_new_data_take_the_place_of_the_old(tmp_path, run_import, monkeypatch):
    """Neither is lost: the next run finishes it."""
    out, fresh = tmp_path / "out", tmp_path / "fresh"
    old, new = (write_dataset(tmp_path / str(n), random_documents(60, seed=n)) for n in range(2))
    assert run_import(out, old, shard_tokens=300)[0] == run_import(fresh, new, shard_tokens=400)[0] == 0
    replace, moved = os.replace, []

    def stopped(source, target):
        moved.append(target)
        if len(moved) == 4:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("train.prepare.output.os.replace", stopped)
        status, _, errors = run_import(out, new, shard_tokens=400, overwrite=True)
    assert status == 130 and errors.endswith("run the same command again, which finishes that\n")
    assert not (out / "manifest.json").exists()
    status, _, errors = run_import(out, new, shard_tokens=400)
    assert status == 2 and "already holds prepared data" in errors
    assert content_of(out) == content_of(fresh)


def test_no_document_for_the_train_split(tmp_path, run_import):
    prefix = write_dataset(tmp_path / "a", [[[EOS]], [[BOS, EOS]]])
    status, _, errors = run_import(tmp_path / "out", prefix)
    assert (
        status == 2
        and "no document for the train split" in errors
        and list((tmp_path / "out").iterdir()) == []
    )


@pytest.mark.parametrize("option", ["eval_fraction=0.6", "eval_fraction=-0.1", "shard_tokens=0", "eod_id=-1"])
def test_bad_options(option):
    with pytest.raises(SystemExit) as error:
        import_megatron(["--input", "a", "--tokenizer", "b", "--output", "c", f"--{option}"])
    assert error.value.code == 2
    assert parse_arguments(["--input", "a", "--tokenizer", "b", "--output", "c", "--eod_id", "0"]).eod_id == 0
