"""The tokenizer of prepared data: the bytes of its ids, the size of its vocabulary, and where it is found."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from tests.fixtures import corpus_texts
from tests.folders import write_word_tokenizer
from train.data.encoder import TextEncoder


def byte_level_tokenizer(folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus_texts(3), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')


@pytest.mark.parametrize("kind", ["tokenizer.model", "tokenizer.json", "byte level"])
def test_text_bytes(tokenizer_dir: Path, tmp_path: Path, kind: str) -> None:
    """Over several documents, and for each part of them, although characters are several tokens."""
    if kind == "byte level":
        byte_level_tokenizer(tmp_path)
    else:
        for file in tokenizer_dir.iterdir():
            if kind == "tokenizer.model" or file.name != "tokenizer.model":
                shutil.copy(file, tmp_path)
    encoder = TextEncoder(tmp_path)
    texts = [
        corpus_texts(1)[0][:300],
        " \u6771 \U0001f642\U0001f642\u6771\u6771",
        "  a\n",
        "\ufffd a\ufffd",
        "\u6771",
    ]
    encoded = encoder.encode_batch(texts)
    ids = np.array([i for each in encoded for i in (encoder.bos_id, *each, encoder.eos_id)])
    size = sum(len(text.encode()) for text in texts)
    assert encoder.text_bytes(ids[:-1], ids[1:]) == size < sum(map(len, encoded)) * 4
    for cut in range(1, len(ids) - 1):
        parts = (ids[: cut + 1], ids[cut:])
        assert sum(encoder.text_bytes(part[:-1], part[1:]) for part in parts) == size


def test_vocabulary_size_with_unused_ids(tmp_path: Path) -> None:
    """A model has a row for each id below vocab_size."""
    encoder = TextEncoder(write_word_tokenizer(tmp_path, {"<s>": 0, "</s>": 1, "a": 7}))
    assert encoder.encode_batch(["a"]) == [[7]] and encoder.vocab_size == 8
