"""The tokenizer of prepared data: the bytes of its ids, the size of its vocabulary, and where it is found."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from tests.fixtures import corpus_texts
from train.data.encoder import TextEncoder


@pytest.mark.parametrize("without", ["", "tokenizer.model"])
def test_text_bytes(tokenizer_dir: Path, tmp_path: Path, without: str) -> None:
    """Over several documents, and for each part of them."""
    folder = shutil.copytree(tokenizer_dir, tmp_path / "own", ignore=shutil.ignore_patterns(without))
    encoder, texts = TextEncoder(folder), [*corpus_texts(3), " \u6771 \U0001f642", "  a\n"]
    encoded = encoder.encode_batch(texts)
    ids = np.array([i for each in encoded for i in (encoder.bos_id, *each, encoder.eos_id)])
    size = sum(len(text.encode()) for text in texts)
    assert encoder.text_bytes(ids[:-1], ids[1:]) == size
    for cut in range(1, len(encoded[0])):  # of the first document, which is ASCII
        parts = (ids[: cut + 1], ids[cut:])
        assert sum(encoder.text_bytes(part[:-1], part[1:]) for part in parts) == size


def test_vocabulary_size_with_unused_ids(tmp_path: Path) -> None:
    """A model has a row for each id below vocab_size."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 7}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    encoder = TextEncoder(tmp_path)
    assert encoder.encode_batch(["a"]) == [[7]] and encoder.vocab_size == 8
