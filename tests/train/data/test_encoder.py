"""How many bytes of text the ids of a tokenizer stand for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from tests.conftest import refused
from tests.fixtures import corpus_texts
from train.data.encoder import SPACE, UNKNOWN, TextEncoder, tokenizer_of
from train.data.format import DataError
from train.prepare.tokenizer import HARD_STRINGS

# to sentencepiece the sign for a space is one
TEXTS = [
    *(text for text in HARD_STRINGS if text and SPACE not in text),
    *corpus_texts(5),
    "\u6771",
    " \U0001f642",
    "a",
]


def byte_level(prefix: bool, normalizer: Any = None) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(corpus_texts(20), trainer)
    return tokenizer


def words() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="a"))


def metaspace() -> tokenizers.Tokenizer:
    """Sentencepiece's pieces, and no bytes: what it does not know is one id."""
    pieces = {piece: i for i, piece in enumerate(["<unk>", "<s>", "</s>", "\u2581", "a", "b", "\u00e9"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(pieces, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tokenizer


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[[tokenizers.Tokenizer], Path]:
    def write(tokenizer: tokenizers.Tokenizer) -> Path:
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
        return tmp_path

    return write


def sizes_of(encoder: TextEncoder, texts: list[str]) -> list[int]:
    pieces = encoder.pieces()
    assert pieces is not None and pieces.sizes[[encoder.bos_id, encoder.eos_id]].tolist() == [0, 0]
    return [int(pieces.sizes[ids].sum() - pieces.added_space) for ids in encoder.encode_batch(texts)]


def test_the_bytes_of_tokens_are_those_of_their_text(
    tokenizer_dir: Path, tmp_path: Path, folder_of: Callable[[tokenizers.Tokenizer], Path]
) -> None:
    sizes = [len(text.encode()) for text in TEXTS]
    assert sizes_of(TextEncoder(tokenizer_dir), TEXTS) == sizes
    same = shutil.copytree(tokenizer_dir, tmp_path / "same", ignore=shutil.ignore_patterns("tokenizer.model"))
    assert TextEncoder(same).files[0] == "tokenizer.json" and sizes_of(TextEncoder(same), TEXTS) == sizes
    for prefix in (False, True):
        encoder = TextEncoder(folder_of(byte_level(prefix)))
        assert encoder.pieces().added_space == prefix  # type: ignore[union-attr]
        unprefixed = [text for text in TEXTS if not (prefix and text[0].isspace())]  # these get none
        assert sizes_of(encoder, unprefixed) == [len(text.encode()) for text in unprefixed]


@pytest.mark.parametrize("tokenizer", [words(), byte_level(False, normalizers.NFKC())])
def test_tokens_that_do_not_say(
    tokenizer: tokenizers.Tokenizer, folder_of: Callable[[tokenizers.Tokenizer], Path]
) -> None:
    """Whatever they stand for was changed, or is not said."""
    assert TextEncoder(folder_of(tokenizer)).pieces() is None


def test_what_a_tokenizer_does_not_know(folder_of: Callable[[tokenizers.Tokenizer], Path]) -> None:
    encoder = TextEncoder(folder_of(metaspace()))
    pieces = encoder.pieces()
    assert pieces is not None and pieces.added_space
    (ids,) = encoder.encode_batch(["a \u00e9\u6771b"])
    assert pieces.sizes[ids].tolist() == [1, 1, 1, 2, UNKNOWN, 1]


def test_a_vocabulary_with_unused_ids_reaches_to_its_largest(
    folder_of: Callable[[tokenizers.Tokenizer], Path],
) -> None:
    """A model has a row for each id below vocab_size."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 7}, unk_token="a"))
    encoder = TextEncoder(folder_of(tokenizer))
    assert encoder.encode_batch(["a"]) == [[7]] and encoder.vocab_size == 8


def test_the_tokenizer_of_a_training_is_with_its_data_else_in_its_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of data whose relative folder is in the repository, and not where we are."""
    here, repository, export = (tmp_path / name for name in ("here", "repository", "run/hf"))
    monkeypatch.setattr("train.files.REPOSITORY", repository)
    for folder in (here, repository / "data/mine", export):
        folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    sources = {"gone": "data/gone", "mine": "data/mine"}
    for given in (export, None):
        with refused(DataError, code="no_tokenizer", key="data/gone/tokenizer"):
            tokenizer_of(sources, given)
    (export / "tokenizer.json").touch()
    assert tokenizer_of(sources, export) == export
    (repository / "data/mine/tokenizer").mkdir()
    (repository / "data/mine/tokenizer/tokenizer.model").touch()
    assert tokenizer_of(sources, export) == repository / "data/mine/tokenizer"
