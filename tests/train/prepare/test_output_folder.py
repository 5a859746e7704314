"""The folder of a preparation: what is there stays until the new data are whole; what is stopped goes on."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import numbers, refused
from tests.fixtures import HELD_OUT, corpus_texts, write_jsonl
from tests.train.prepare.megatron_datasets import contents, interrupted_move
from tests.train.prepare.test_prepare_data import GOOD, TEXTS, decoded
from train.data.format import DataError
from train.data.stream import open_stream
from train.prepare.corpus import WORK_NAME, read_share
from train.prepare.preparation import Preparation, load_encoder
from train.prepare_data import parse_arguments


def test_existing_data_is_kept_without_overwrite(tmp_path, prepare, corpus, reported, tokenizer_dir):
    """Then nothing of it stays, such as a tokenizer.model of other ids, which would be the one that counts."""
    out, no_model = tmp_path / "out", shutil.copytree(tokenizer_dir, tmp_path / "tokenizer")
    (no_model / "tokenizer.model").unlink()
    assert prepare(out, corpus, tasks=2) == 0 and (out / "tokenizer/tokenizer.model").exists()
    (out / "notes.txt").write_text("mine")
    before = contents(out)
    assert prepare(out, corpus) == 2
    assert reported.pop().code == "already_there" and contents(out) == before
    other = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    for folder in (out, tmp_path / "new"):
        assert prepare(folder, other, tokenizer=no_model, overwrite=True, all_train=True) == 0
    assert contents(out) == contents(tmp_path / "new") | {"notes.txt": b"mine"}


@pytest.mark.parametrize(
    "manifest",
    ['{"schema": 2, "step": 10, "files": []}', '{"schema": 2, "shards": []}', '{"name": "mine"}', "[1]"],
)
def test_foreign_manifest_is_not_overwritten(tmp_path, prepare, corpus, reported, manifest):
    """A checkpoint, which is none without its manifest, the data of a newer version, and files of other programs."""
    out = tmp_path / "step-00000010"
    out.mkdir()
    (out / "manifest.json").write_text(manifest)
    for more in ({}, {"overwrite": True}):
        assert prepare(out, corpus, **more) == 2
        assert (reported[-1].code, reported[-1].key) == ("foreign_manifest", f"{out}/manifest.json")
        assert "--overwrite" not in str(reported.pop())
    assert contents(out) == {"manifest.json": manifest.encode()}


@pytest.mark.parametrize("count, split", [(5, "eval"), (0, "train")])
def test_unusable_data_are_not_committed(tmp_path, prepare, reported, count, split):
    inputs = write_jsonl(tmp_path / "a.jsonl", corpus_texts(count) if count else [HELD_OUT])
    assert prepare(tmp_path / "out", inputs, eval_fraction=1e-6) == 2
    assert (reported[-1].code, reported.pop().key) == ("empty_split", split)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_evaluation_only_data(tmp_path, prepare):
    """A single text, too, which is not cut then."""
    text = tmp_path / "text.txt"
    text.write_text("".join(corpus_texts(20)))
    assert prepare(tmp_path / "out", text, eval_fraction=1, eval_by="position") == 0
    assert decoded(tmp_path / "out", "eval") == [text.read_text()]
    assert open_stream({"a": tmp_path / "out"}, None, 16, seed=0, split="eval").num_samples > 3
    with refused(DataError, code="too_few_tokens"):
        open_stream({"a": tmp_path / "out"}, None, 16, seed=0)


def test_tokenizer_in_output_folder(tmp_path, prepare, corpus, tokenizer_dir):
    inside = shutil.copytree(tokenizer_dir, tmp_path / "tokenizer")
    for overwrite in (False, True):
        assert prepare(tmp_path, corpus, tokenizer=inside, **({"overwrite": True} if overwrite else {})) == 0
    assert contents(inside) == contents(tokenizer_dir)


@pytest.mark.parametrize(
    "name", ["train_00007.ds", "tokenizer/added_tokens.json", "tokenizer/tokenizer_config.json"]
)
def test_unknown_files_are_kept(tmp_path, prepare, corpus, reported, name):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / name).write_bytes(b"{}")
    assert prepare(tmp_path, corpus) == 2
    assert (reported[-1].code, reported[-1].key) == ("foreign_file", str(tmp_path / name))
    assert contents(tmp_path) == {name: b"{}"}


def test_old_data_stays_until_new_data_is_complete(tmp_path, prepare, corpus, reported):
    """The same command goes on, and another one is refused or begins anew."""
    out, bad = tmp_path / "out", tmp_path / "bad.txt"
    assert prepare(out, corpus, eval_fraction=0.1) == 0
    before = contents(out)
    bad.write_bytes(b"caf\xe9")
    other = write_jsonl(tmp_path / "other.jsonl", corpus_texts(40))
    options = {"eval_fraction": 0.2, "tasks": 2}
    assert prepare(out, other, bad, **options, overwrite=True) == 2
    with pytest.MonkeyPatch.context() as patch:  # nothing is read again
        patch.setattr("train.prepare.preparation.read_share", None)
        assert prepare(out, other, bad, **options, overwrite=True) == 2
    assert prepare(out, other, bad, tasks=3) == 2
    assert (reported[-1].code, reported.pop().key) == ("other_preparation", "eval_fraction")
    assert {name: data for name, data in contents(out).items() if not name.startswith(WORK_NAME)} == before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.prepare.preparation.read_share", None)
        assert prepare(out, other, bad, **options, max_dropped=1) == 0  # what was allowed once goes on
    assert sorted(decoded(out) + decoded(out, "eval")) == sorted(corpus_texts(40))

    out = tmp_path / "mended"
    assert prepare(out, other, bad, **options) == 2
    bad.write_text("mended")
    assert prepare(out, other, bad, **options) == 2
    assert (reported[-1].code, reported.pop().key) == ("other_preparation", "sources")
    assert prepare(out, other, bad, **options, overwrite=True) == 0
    assert "mended" in decoded(out) + decoded(out, "eval") and not list(out.glob("prepare_data.*"))


@pytest.mark.parametrize("moves", [0, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4, 5))])
def test_interrupted_replacement_is_finished(tmp_path, prepare, corpus, reported, moves):
    """Of files that have the names of the old, and of others."""
    out, fresh = tmp_path / "out", tmp_path / "fresh"
    other = write_jsonl(tmp_path / "other.jsonl", corpus_texts(40))
    assert prepare(out, corpus, tasks=2) == 0
    assert prepare(fresh, other, eval_fraction=0.2, shard_tokens=2000) == 0
    with interrupted_move(out, moves):
        assert prepare(out, other, eval_fraction=0.2, shard_tokens=2000, overwrite=True) == 1
    assert not (out / "manifest.json").exists()
    assert prepare(out, corpus) == 2 and reported[-1].code == "other_preparation"
    assert prepare(out, other, eval_fraction=0.2, shard_tokens=2000) == 0
    assert contents(out) == contents(fresh)


@pytest.mark.parametrize(
    ("words", "another"),
    [
        (["--text_key", "body"], True), (["--eval_fraction", "0.2"], True), (["--eval_by", "position"], True),
        (["--split_on", "|"], True), (["--shard_tokens", "7"], True),
        (["--tasks", "2"], True), (["--dedup", "exact"], True),
        (["--decontaminate", "a.txt"], True), (["--decontaminate_ngram", "5"], True),
        (["--decontaminate_key", "question"], True),
        (["--quality_language", "de"], True),
        (["--workers", "2"], False), (["--max_dropped", "3"], False),
        (["--executor", "slurm"], False), (["--overwrite"], False), (["--output", "other"], False),
    ],
)  # fmt: skip
def test_identity_covers_all_options(tmp_path, tokenizer_dir, monkeypatch, words, another):
    """What only runs it goes on with the one that was begun."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt"):
        Path(name).write_text("some text")
    given = ["--input", "a.txt", "b.txt", "--tokenizer", str(tokenizer_dir), "--output", "out"]
    usual, other = (
        Preparation.from_arguments(parse_arguments([*given, *more])).identity() for more in ([], words)
    )
    assert (usual != other) is another


def test_unwritable_output_raises(tmp_path, prepare, corpus, reported):
    (tmp_path / "file").write_text("mine")
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        assert prepare(output, corpus) == 2
        assert (reported[-1].code, reported.pop().key) == ("cannot_write", str(output))
    assert (tmp_path / "file").read_text() == "mine"


def test_changed_input_is_not_committed(tmp_path, prepare, reported, monkeypatch):
    """What grew behind a task's share would be left out, what was replaced would be half old and half new."""
    inputs = [write_jsonl(tmp_path / name, corpus_texts(50)) for name in ("a.jsonl", "b.jsonl", "c.jsonl")]

    def changing(*arguments):
        yield from read_share(*arguments)
        inputs[1].write_bytes(inputs[1].read_bytes() + GOOD)
        inputs[2].unlink()

    monkeypatch.setattr("train.prepare.preparation.read_share", changing)
    assert prepare(tmp_path / "out", *inputs, eval_fraction=0.2) == 2
    assert (reported[-1].code, reported[-1].key) == ("input_changed", str(inputs[1]))
    assert numbers(reported[-1])[0] == 2 and not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("tokenizer_config.json", '"eos_token": "</s>"', '"eos_token": "<unk>"'), ("tokenizer.json", "{", "{ ")],
)
def test_identity_covers_the_tokenizer(tmp_path, tokenizer_dir, name, old, new):
    """By its file, and by the special ids that tokenizer_config.json chooses: else a folder had ids of two."""
    tokenizer, found = shutil.copytree(tokenizer_dir, tmp_path / "tokenizer"), []
    (tokenizer / "tokenizer.model").unlink()
    (tmp_path / "a.txt").write_text("some text")
    given = ["--input", str(tmp_path / "a.txt"), "--tokenizer", str(tokenizer), "--output", "out"]
    content = (tokenizer / name).read_text()
    for text in (content, content.replace(old, new, 1)):
        (tokenizer / name).write_text(text)
        load_encoder.cache_clear()  # as in a process of its own
        found.append(Preparation.from_arguments(parse_arguments(given)).identity())
    assert [key for key in found[0] if found[0][key] != found[1][key]] == ["tokenizer"]


def test_tokenizer_replaced_during_preparation(tmp_path, prepare, corpus, tokenizer_dir, monkeypatch):
    """Ids of two tokenizers are not mixed, and the file beside the data is that of their ids."""
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    former = (tokenizer_dir / "tokenizer.model").read_bytes()
    (tokenizer / "tokenizer.model").write_bytes(former)
    assert prepare(tmp_path / "whole", corpus, tasks=2, tokenizer=tokenizer) == 0
    begin = Preparation.begin

    def begin_and_replace(*arguments: Any) -> None:
        begin(*arguments)
        (tokenizer / "tokenizer.model").write_bytes(former.replace(b"\xe2\x96\x81the", b"\xe2\x96\x81eht"))
        load_encoder.cache_clear()  # as in a task of a process of its own

    monkeypatch.setattr(Preparation, "begin", begin_and_replace)
    assert prepare(tmp_path / "out", corpus, tasks=2, tokenizer=tokenizer) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
