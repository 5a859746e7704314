import gzip
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import sentencepiece
import tokenizers
from transformers import AutoTokenizer

from model.config import MODEL_TYPES
from tests.conftest import numbers, refused
from tests.fixtures import corpus_texts, write_jsonl
from tests.train.prepare.megatron_datasets import contents
from train.data.encoder import HARD_STRINGS, TextEncoder, compare_ids, load_exported
from train.data.format import DataError
from train.prepare.corpus import list_sources
from train.prepare.readers import Text
from train.prepare.tokenizer import (
    check_tokenizer,
    copy_tokenizer,
    sample_sources,
    sample_texts,
    train_model,
    training_sentences,
)
from train.train_tokenizer import main


def test_fast_tokenizer_equals_sentencepiece(tokenizer_dir):
    """And the special ids are Mistral's; text stays text, in both directions."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer_dir / "tokenizer.model"))
    fast = AutoTokenizer.from_pretrained(tokenizer_dir)
    assert fast.is_fast and len(fast) == model.vocab_size() == 400
    assert (model.unk_id(), model.bos_id(), model.eos_id(), model.pad_id()) == (0, 1, 2, -1)
    assert (fast.unk_token_id, fast.bos_token_id, fast.eos_token_id, fast.pad_token_id) == (0, 1, 2, None)
    for text in [*HARD_STRINGS, *corpus_texts(20)]:
        ids = model.encode(text)
        assert not {0, 1, 2} & set(ids) and model.decode(ids).removeprefix(" ") == text.replace(
            "▁", " "
        ).removeprefix(" ")
        assert fast(text)["input_ids"] == [1, *ids], text
        assert fast.decode([1, *ids, 2], skip_special_tokens=True) == model.decode(ids)
    assert [piece for piece in model.encode("2024", out_type=str) if piece != "▁"] == list("2024")


def sentencepiece_folder(folder: Path, **options: Any) -> Path:
    """A folder with a tokenizer.model alone, at sentencepiece's own defaults but for `options`."""
    folder.mkdir()
    options = {"vocab_size": 330, "byte_fallback": True, "minloglevel": 2, "model_type": "bpe"} | options
    sentences = iter(corpus_texts(100))
    prefix = str(folder / "tokenizer")
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=sentences, model_prefix=prefix, **options)
    (folder / "tokenizer.vocab").unlink()
    return folder


KEPT = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}


def converted(folder: Path, new: Path) -> Path:
    """The folder that the message about a tokenizer.model names."""
    AutoTokenizer.from_pretrained(folder).save_pretrained(new)
    (new / "tokenizer.model").unlink(missing_ok=True)
    return new


def refined(folder: Path, tokenizer_dir: Path, change: Callable[[tokenizers.Tokenizer], object]) -> Path:
    """A folder whose tokenizer.json differs from the tokenizer.model beside it."""
    shutil.copytree(tokenizer_dir, folder)
    fast = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    change(fast)
    fast.save(str(folder / "tokenizer.json"))
    return folder


def use_metaspace(fast: tokenizers.Tokenizer) -> None:
    """What transformers' LlamaTokenizer saves: no space before a text that begins with one."""
    fast.normalizer = tokenizers.normalizers.Sequence([])
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)


def edited(folder: Path, tokenizer_dir: Path, **config: Any) -> Path:
    shutil.copytree(tokenizer_dir, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


UNIGRAM = {"model_type": "unigram", "vocab_size": 310, **KEPT}
REFUSED = {  # what is wrong: the code, the tokenizer
    "user-defined symbols": (
        "tokenizer_ids_differ",
        lambda new, own: sentencepiece_folder(new, user_defined_symbols=["<|im_start|>"], **KEPT),
    ),
    "unigram": ("tokenizer_ids_differ", lambda new, own: sentencepiece_folder(new, **UNIGRAM)),
    "normalized text": ("tokenizer_ids_differ", lambda new, own: sentencepiece_folder(new)),
    "EOS out of text": (
        "special_id_from_text",
        lambda new, own: converted(sentencepiece_folder(new.with_name("unigram"), **UNIGRAM), new),
    ),
    "more ids": (
        "tokenizer_ids_differ",
        lambda new, own: refined(
            new, own, lambda fast: fast.add_special_tokens(["<|end|>", "<|user|>", "<pad>"])
        ),
    ),
    "two EOS": ("tokenizer_ids_differ", lambda new, own: edited(new, own, eos_token="<unk>")),
    "a token more": ("tokenizer_ids_differ", lambda new, own: edited(new, own, pad_token="<pad>")),
    "leading spaces": ("tokenizer_ids_differ", lambda new, own: refined(new, own, use_metaspace)),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_inconsistent_tokenizer_raises(tmp_path, tokenizer_dir, kind):
    """One that gives a model's export other ids than its training, or that ends a document in its middle."""
    code, make = REFUSED[kind]
    with refused(DataError, code=code):
        check_tokenizer(TextEncoder(make(tmp_path / "tokenizer", tokenizer_dir)), corpus_texts(100))


TAKEN = {  # tokenizer.json is written for models with other names of the special pieces and without a dummy prefix
    "symbols": lambda new: converted(
        sentencepiece_folder(new / "a", user_defined_symbols=["<|im_start|>"], **KEPT), new / "b"
    ),
    "converted": lambda new: converted(
        sentencepiece_folder(new / "a", add_dummy_prefix=False, **KEPT), new / "b"
    ),
    "names": lambda new: sentencepiece_folder(
        new / "a", bos_piece="<bos>", control_symbols=["<pad>"], add_dummy_prefix=False, **KEPT
    ),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_other_tokenizers_are_accepted(tmp_path, kind):
    texts, encoder = corpus_texts(20), TextEncoder(TAKEN[kind](tmp_path))
    check = check_tokenizer(encoder, texts)
    assert check == {"texts": 20, "texts_changed": 0, "unknown_tokens": 0, "tokens": check["tokens"]}
    copy_tokenizer(encoder, tmp_path / "copy")
    fast = AutoTokenizer.from_pretrained(tmp_path / "copy")
    assert fast(texts, add_special_tokens=False)["input_ids"] == encoder.encode_batch(texts)
    assert fast.bos_token_id == encoder.bos_id


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_copy_gives_every_model_type_the_same_ids(tmp_path, model_type):
    """transformers has a tokenizer class for each of them, which may change what tokenizer.json does."""
    folder, copy = TAKEN["converted"](tmp_path), tmp_path / "copy"
    config = folder / "tokenizer_config.json"
    for named in ({}, {"tokenizer_class": "LlamaTokenizer"}):
        others = {k: v for k, v in json.loads(config.read_text()).items() if k != "tokenizer_class"}
        config.write_text(json.dumps(others | named))
        encoder = TextEncoder(folder)
        copy_tokenizer(encoder, copy)
        (copy / "config.json").write_text(json.dumps({"model_type": model_type}))
        compare_ids(encoder, load_exported(copy, encoder, encoder.vocab_size), HARD_STRINGS)


def test_lost_text_and_unknown_tokens_are_counted(tmp_path):
    texts = [text + "\u6771" * (i % 3 == 0) for i, text in enumerate(corpus_texts(90))]
    encoder = TextEncoder(
        sentencepiece_folder(tmp_path / "model", byte_fallback=False, vocab_size=100, **KEPT)
    )
    check, encoded = check_tokenizer(encoder, texts), encoder.encode_batch(texts)
    changed = sum(encoder.decode(ids) != text for text, ids in zip(texts, encoded, strict=True))
    assert (check["texts"], check["texts_changed"]) == (90, changed)
    ids = sum(encoded, [])
    assert (check["tokens"], check["unknown_tokens"]) == (len(ids), ids.count(0)) and ids.count(0) >= 30

    without_line_ends = converted(sentencepiece_folder(tmp_path / "other"), tmp_path / "new")
    check = check_tokenizer(TextEncoder(without_line_ends), texts)
    before, after = check["first_change"]
    assert check["texts_changed"] == 90 and "\n" in before and "\n" not in after


def test_sample_covers_all_sources(tmp_path):
    one = [write_jsonl(tmp_path / f"{name}.jsonl", [f"{name} {i}" for i in range(2000)]) for name in "abc"]
    (tmp_path / "long.txt").write_text("long " * 100_000)
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(one[0].read_bytes()))
    texts = sample_sources(list_sources([str(tmp_path)]), "text", None)
    assert {text.split()[0] for text in texts} >= {"a", "b", "c", "long"}
    assert len(texts) <= 200 and max(map(len, texts)) <= 2000
    assert len(sample_sources(list_sources([str(packed)]), "text", None)) == 200


@pytest.mark.parametrize("letters", ["ACGT", "0123456789abcdef", "\u3042\u3044\u3046\u3048\u304a"])
def test_text_without_spaces(tmp_path, letters):
    rng, out = random.Random(0), tmp_path / "out"
    (tmp_path / "a.txt").write_text("".join(rng.choices(letters, k=100_000)))
    assert main(["--input", str(tmp_path / "a.txt"), "--vocab_size", "300", "--output", str(out)]) == 0
    encoder = TextEncoder(out)
    (ids,) = encoder.encode_batch([letters * 20])
    assert encoder.decode(ids) == letters * 20 and len(ids) < len(letters) * 20


def test_chat_tokens_are_special(tmp_path, tokenizer_dir):
    """In a tokenizer of train_tokenizer.py special tokens are text, in a chat template too."""
    for split, model_alone in ((True, False), (False, False), (False, True)):
        folder = edited(tmp_path / f"{split}{model_alone}", tokenizer_dir, split_special_tokens=split)
        if model_alone:
            (folder / "tokenizer.json").unlink()
        (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}</s>")
        copy_tokenizer(TextEncoder(folder), tmp_path / "copy")
        fast = AutoTokenizer.from_pretrained(tmp_path / "copy")
        ids = fast.apply_chat_template([{"role": "user", "content": "hi"}], return_dict=False)
        assert (ids[-1] == 2) == (not split)


STAND_INS = {  # of a tokenizer.model: the code of the error
    "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 493443\n": "tokenizer_unreadable",
    "AA== 0\nAQ== 1\n": "tokenizer_unreadable",
    "": "tokenizer_without_ends",
}


def test_invalid_tokenizer_folder_raises(tmp_path, tokenizer_dir):
    folder = edited(tmp_path / "tokenizer", tokenizer_dir, bos_token=None, eos_token="</s>")
    for content, code in STAND_INS.items():
        (folder / "tokenizer.model").write_text(content)
        with refused(DataError, code=code, key=str(folder / "tokenizer.model")):
            TextEncoder(folder)
    (folder / "tokenizer.model").unlink()
    with refused(DataError, code="tokenizer_without_ends", key="bos_token") as error:
        TextEncoder(folder)
    first, *_ = re.findall("'([^']+)'", str(error.value))  # of the special tokens that the message lists
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text().replace('"bos_token": null', f'"bos_token": "{first}"'))
    assert TextEncoder(folder).bos_id >= 0


def test_too_large_vocabulary_names_the_limit(corpus, tmp_path, reported):
    arguments = ["--input", str(corpus), "--output", str(tmp_path), "--vocab_size"]
    assert main([*arguments, "270"]) == 2
    assert (reported[-1].code, reported.pop().key) == ("training_failed", "--vocab_size")
    assert main([*arguments, "100000"]) == 2
    assert main([*arguments, str(int(numbers(reported.pop())[2]))]) == 0
    with pytest.raises(SystemExit):
        main([*arguments, "0"])


def test_unreadable_documents_are_counted(tmp_path, corpus, reported):
    for number in range(4):
        (tmp_path / f"{number}.txt").write_bytes(b"\xff" if number < 3 else b" ")  # blank text is none
    words = ["--vocab_size", "390", "--output", str(tmp_path / "out"), "--input", str(corpus)]
    words += map(str, tmp_path.glob("*.txt"))
    assert main([*words, "--max_dropped", "2"]) == 2
    assert reported[-1].code == "too_much_lost" and "--max_dropped 3" in str(reported.pop())
    assert main([*words, "--max_dropped", "3"]) == 0


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
def test_existing_tokenizer_is_kept(tmp_path, reported, name):
    """And a folder that cannot be written is named; both before the text is read, which takes minutes."""
    (tmp_path / name).write_text("mine")
    for output, code in ((tmp_path, "already_there"), (tmp_path / name / "new", "cannot_write")):
        assert main(["--input", str(tmp_path / "none"), "--vocab_size", "390", "--output", str(output)]) == 2
        assert reported.pop().code == code
    assert (tmp_path / name).read_text() == "mine"


def test_overwrite_removes_the_old_tokenizer(tmp_path, corpus, tokenizer_dir):
    (tmp_path / "added_tokens.json").write_text('{"<other>": 7}')
    (tmp_path / "tokenizer.json").write_text("other")
    (tmp_path / "README").write_text("mine")
    assert (
        main(["--input", str(corpus), "--vocab_size", "400", "--output", str(tmp_path), "--overwrite"]) == 0
    )
    assert contents(tmp_path) == contents(tokenizer_dir) | {"README": b"mine"}


def test_sample_texts():
    texts = [f"{i:04d}" + "x" * 96 for i in range(1000)]
    sample = sample_texts([Text(text, "") for text in texts], max_bytes=10_000)
    assert len(sample) == 100 and sample == sorted(sample)
    assert sum(text > texts[500] for text in sample) in range(30, 70)
    assert len(sample_texts([Text(text, "") for text in texts], max_bytes=10)) == 1  # documents stay whole


def test_training_options(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one|two|three")
    (tmp_path / "b.jsonl").write_text('{"content": "four", "text": 5}\n')
    train, out = Mock(side_effect=ValueError("enough")), tmp_path / "out"
    monkeypatch.setattr("train.prepare.tokenizer.train_model", train)
    options = [
        "--text_key",
        "content",
        "--split_on",
        "|",
        "--character_coverage",
        "0.99",
        "--vocab_size",
        "300",
    ]
    inputs = [str(tmp_path / name) for name in ("a.txt", "b.jsonl")]
    assert main([*options, "--output", str(out), "--input", *inputs]) == 2
    train.assert_called_once_with(["one", "two", "three", "four"], 300, 0.99)
    assert not list(out.iterdir())


def test_training_sentences():
    text = "line one\nline two\n\n" + "y" * 50_000 + "\n" + "日本" * 9000
    pieces = list(training_sentences([text]))
    assert "".join(pieces) == text
    assert max(len(piece.encode()) for piece in pieces) <= 8192


def test_character_coverage() -> None:
    texts = ["some words and others, again and again\n" * 20 + "é"]
    for coverage in (0.98, 1.0):
        model = sentencepiece.SentencePieceProcessor(model_proto=train_model(texts, 290, coverage))
        assert (model.piece_to_id("é") == model.unk_id()) == (coverage < 1) and model.piece_to_id("a") > 0
        assert model.decode(model.encode("é")) == "é"


def test_fast_tokenizer_is_written_for_sentencepiece(tokenizer_dir, tmp_path):
    """What transformers makes of the model itself has no space before a text, which training had."""
    alone, copy = tmp_path / "alone", tmp_path / "copy"
    alone.mkdir()
    shutil.copy(tokenizer_dir / "tokenizer.model", alone)
    (alone / "tokenizer_config.json").write_text('{"chat_template": "mine", "add_bos_token": false}')
    copy_tokenizer(TextEncoder(alone), copy)
    assert (copy / "tokenizer.json").read_bytes() == (tokenizer_dir / "tokenizer.json").read_bytes()
    config = json.loads((copy / "tokenizer_config.json").read_text())
    assert (config["chat_template"], config["add_bos_token"]) == ("mine", True)
    assert sorted(path.name for path in alone.iterdir()) == ["tokenizer.model", "tokenizer_config.json"]
