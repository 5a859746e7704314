"""train/import_megatron.py on datasets written here from the format's definition."""

import hashlib
import re
import struct
import types
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import numbers, refused
from tests.folders import write_word_tokenizer
from tests.train.prepare.megatron_datasets import (
    BOS,
    EOS,
    VOCABULARY,
    Documents,
    contents,
    framed,
    imported,
    index_bytes,
    interrupted_move,
    random_documents,
    whole,
    write_dataset,
)
from train.data.format import DataError, read_manifest
from train.data.stream import open_stream
from train.import_megatron import Framing, open_dataset, parse_arguments
from train.inspect_data import main as inspect_data
from train.prepare.corpus import WORK_NAME


@pytest.mark.parametrize("letter", ["H", "h", "i", "q"])
def test_round_trip(tmp_path, run_import, letter, tokenizer_dir):
    documents = random_documents(300)
    prefix = write_dataset(tmp_path / "a", documents, letter)
    assert run_import(tmp_path / "out", prefix, eval_fraction=0.2, shard_tokens=5000) == 0
    limit, expected = 0.2 * 2**64, {"train": [], "eval": []}
    for document in framed(documents):
        digest = hashlib.blake2b(struct.pack(f"<{len(document)}H", *document), digest_size=8).digest()
        expected["eval" if int.from_bytes(digest, "little") < limit else "train"].append(document)
    assert len(expected["eval"]) > 20
    for split in ("train", "eval"):
        assert imported(tmp_path / "out", split) == expected[split]
        open_stream({"a": tmp_path / "out"}, None, 16, seed=3, split=split).verify()
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
    assert contents(tmp_path / "out/tokenizer") == contents(tokenizer_dir)


def test_bos_and_eos_are_added_once(tmp_path, run_import):
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
    assert run_import(tmp_path / "out", prefix) == 0
    assert imported(tmp_path / "out", "train") == [result for _, result in cases if result]
    assert read_manifest(tmp_path / "out").documents == {
        "in": 14, "out": 10, "dropped": {"empty document": 4}, "removed": {}, "bos_added": 5, "eos_added": 5,
        "bos_inside": 3, "eos_inside": 4, "eod_replaced": 0,
    }  # fmt: skip


def test_tokenizer_with_equal_bos_and_eos():
    documents = [[9], [9, 5], [5, 9], [9, 5, 9], [], [9, 9], [5]]
    ids = np.array([token for document in documents for token in document], dtype="<u2")
    encoder = types.SimpleNamespace(bos_id=9, eos_id=9, vocab_size=10, folder="")
    framing = Framing(encoder, eod_id=9)
    ends = np.cumsum([len(document) for document in documents])
    result = framing.frame(ids, ends, Path("a.bin"))
    assert [document.tolist() for document in result] == [[9, 5, 9]] * 4
    assert framing.counts == {"in": 7, "empty": 3, "bos_added": 2, "eos_added": 2}
    result += framing.frame(np.array([5, 9, 6], dtype="<u2"), np.array([3]), Path("a.bin"))
    counts = {"train": np.bincount(np.concatenate(result), minlength=10), "eval": np.zeros(10, np.int64)}
    said = framing.documents(counts)
    assert (said["in"], said["out"], said["bos_inside"], said["eos_inside"]) == (8, 5, 0, 1)


@pytest.mark.parametrize("eod", [399, 400, 70000])  # Megatron-LM puts <EOD> behind a vocabulary that lacks it
def test_eod_is_replaced_by_eos(tmp_path, run_import, eod, reported):
    documents = [[[*(min(token, 398) for token in d), eod]] for d in whole(random_documents(20))]
    documents.append([[5, eod, 6], [7, eod]])
    prefix = write_dataset(tmp_path / "a", documents)
    assert run_import(tmp_path / "out", prefix, eod_id=eod) == 0
    expected = [[BOS, *(EOS if token == eod else token for token in d)] for d in whole(documents)]
    assert imported(tmp_path / "out", "train") == expected
    counts = read_manifest(tmp_path / "out").documents
    assert (counts["eos_added"], counts["eos_inside"], counts["eod_replaced"]) == (0, 1, 22)

    status = run_import(tmp_path / "other", prefix)
    assert status == (0 if eod < VOCABULARY else 2)
    assert status == 0 or reported.pop().code == "token_beyond_vocabulary"
    assert (tmp_path / "other" / "manifest.json").exists() == (status == 0)


def test_sequences_are_joined_to_documents(tmp_path, run_import):
    documents: Documents = [[[5], [6, 7], [8]], [], [[9, 9]], [[], [10], []], [[]], [[11]], []]
    prefix = write_dataset(tmp_path / "a", documents, "H")
    assert run_import(tmp_path / "out", prefix) == 0
    assert imported(tmp_path / "out", "train") == [[1, 5, 6, 7, 8, 2], [1, 9, 9, 2], [1, 10, 2], [1, 11, 2]]
    assert read_manifest(tmp_path / "out").documents["dropped"] == {"empty document": 3}


def test_several_datasets_of_different_types(tmp_path, run_import):
    parts = [random_documents(40, seed) for seed in (1, 2)]
    a, b = (
        write_dataset(tmp_path / "a", parts[0], "H"),
        write_dataset(tmp_path / "b", parts[1], "i", modes=True),
    )
    again = write_dataset(tmp_path / "c", parts[0], "q")
    assert run_import(tmp_path / "out", b, a, again, eval_fraction=0.3) == 0
    manifest = read_manifest(tmp_path / "out")
    assert manifest.inputs == [str(b), str(a), str(again)]
    eval_, train = imported(tmp_path / "out", "eval"), imported(tmp_path / "out", "train")
    everything = framed(parts[1] + parts[0] + parts[0])
    assert train == [d for d in everything if d not in eval_] and eval_ == [
        d for d in everything if d in eval_
    ]
    assert 10 < len(eval_) < 60  # equal documents on one side, whatever the type they come in


def test_output_is_independent_of_block_size(tmp_path, run_import, monkeypatch):
    documents = [*random_documents(200), [], *random_documents(3, 5, longest=2000), [[]]]
    prefix = write_dataset(tmp_path / "a", documents, "H")
    for name in ("one", "other"):
        assert run_import(tmp_path / name, prefix, eval_fraction=0.2, shard_tokens=4000) == 0
        monkeypatch.setattr("train.import_megatron.BLOCK_TOKENS", 50)
    assert contents(tmp_path / "one") == contents(tmp_path / "other")


def test_large_vocabulary(tmp_path, run_import):
    words = {"<s>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, 70000)}}
    folder = write_word_tokenizer(tmp_path / "large", words)
    documents = [[69999, 65536, 5, 1], *([65535 + i] * 20 for i in range(10))]
    prefix = write_dataset(tmp_path / "a", [[document] for document in documents])
    assert run_import(tmp_path / "out", prefix, tokenizer=folder, eval_fraction=0.3) == 0
    assert read_manifest(tmp_path / "out").dtype == "uint32"
    found = imported(tmp_path / "out", "train") + imported(tmp_path / "out", "eval")
    assert sorted(found) == sorted([0, *document] + [1] * (document[-1] != 1) for document in documents)
    stream = open_stream({"a": tmp_path / "out"}, None, 4, seed=0, split="eval")
    expected = [token for document in imported(tmp_path / "out", "eval") for token in document]
    assert stream.batch(0, 5).input_ids.flatten().tolist() == expected[:20]
    assert inspect_data([str(tmp_path / "out"), "--verify", "--seq_length", "10"]) == 0


# ---------------------------------------------------------------- wrong datasets and options: nothing is written

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
