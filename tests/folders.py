"""Write folders of tokenizers, and prepared data folders with synthetic token ids.

These token ids are never decoded, so a placeholder file replaces the tokenizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tokenizers

from train.data.format import INDEX_DTYPE, SCHEMA, Manifest, Shard, token_dtype, write_manifest
from train.files import sha256_file

TOKENIZER = b"stand-in"


def make_folder(
    folder: Path,
    splits: Mapping[str, Sequence[np.ndarray]],
    vocab_size: int = 400,
    document_tokens: int | np.ndarray = 100,
) -> Path:
    """Write a prepared data folder with the given token ids, and return its path.

    splits: the shards of each split, as arrays of token ids. vocab_size: the vocabulary size. document_tokens: the
    number of tokens in each document, either one number for all documents or an array with the numbers for the first
    documents of a shard. The last document of a shard contains all remaining tokens.
    """
    folder.mkdir(parents=True)
    shards = []
    for split, parts in splits.items():
        for number, tokens in enumerate(parts):
            path = folder / f"{split}_{number:05d}.ds"
            tokens.astype(token_dtype(vocab_size), copy=False).tofile(path)
            ends = (
                np.arange(document_tokens, len(tokens), document_tokens)
                if isinstance(document_tokens, int)
                else np.cumsum(document_tokens)
            )
            ends = np.append(ends[ends < len(tokens)], len(tokens))
            ends.astype(INDEX_DTYPE).tofile(index := path.with_name(path.name + ".index"))
            hashes = sha256_file(path), sha256_file(index)
            shards.append(Shard(path.name, split, len(tokens), len(ends), path.stat().st_size, *hashes))
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.model").write_bytes(TOKENIZER)
    documents = sum(shard.documents for shard in shards)
    manifest = Manifest(
        schema=SCHEMA,
        dtype=token_dtype(vocab_size).name,
        vocab_size=vocab_size,
        bos_id=1,
        eos_id=2,
        tokenizer_sha256=hashlib.sha256(TOKENIZER).hexdigest(),
        tokenizer_files=["tokenizer.model"],
        inputs=[],
        text_key="text",
        eval_fraction=0.0,
        documents={"in": documents, "out": documents, "dropped": {}},
        text_bytes=sum(shard.tokens for shard in shards),
        unigram_loss=None,
        shards=shards,
    )
    write_manifest(folder, manifest)
    return folder


def write_word_tokenizer(folder: Path, words: Mapping[str, int]) -> Path:
    """Write a tokenizer with one token per word, whose ids are given; "<s>" and "</s>" begin and end a document."""
    folder.mkdir(exist_ok=True)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(words), unk_token=[*words][-1]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # text has no "<s>" then
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return folder
