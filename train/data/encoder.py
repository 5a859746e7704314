"""The tokenizer as preparation uses it: text <-> ids, without special ids, from sentencepiece or tokenizers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from train.data.format import DataError
from train.files import sha256_file

# What a tokenizer consists of; the first that is there defines the ids.
TOKENIZER_FILES = (
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


class TextEncoder:
    """The tokenizer of a folder: by sentencepiece where it has a tokenizer.model, else by its tokenizer.json.

    Attributes: `vocab_size`, `bos_id`, `eos_id`, and `files`, the tokenizer's files with the defining one first;
    `encode_batch` texts -> ids, without BOS and EOS, and `decode` ids (without these) -> text.

    Raises:
        DataError: no tokenizer in the folder, an unreadable one, or one without BOS and EOS.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.encode_batch: Callable[[list[str]], list[list[int]]]
        self.decode: Callable[[list[int]], str]
        self.files = [name for name in TOKENIZER_FILES if (self.folder / name).is_file()]
        if not self.files or self.files[0] not in ("tokenizer.model", "tokenizer.json"):
            raise DataError(
                f"--tokenizer {folder}: no tokenizer.model or tokenizer.json there; give a folder that has one, or "
                "train one with train/train_tokenizer.py"
            )
        path = self.folder / self.files[0]
        load = self._load_sentencepiece if path.name == "tokenizer.model" else self._load_tokenizers
        try:
            load(path)
        except DataError:
            raise
        except Exception as error:  # tokenizers raises plain Exception for a broken file
            raise DataError(f"{path} cannot be read: {error}") from error

    def sha256(self) -> str:
        """The hash of the defining file."""
        return sha256_file(self.folder / self.files[0])

    def _load_sentencepiece(self, path: Path) -> None:
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
        self.vocab_size, self.bos_id, self.eos_id = model.vocab_size(), model.bos_id(), model.eos_id()
        if min(self.bos_id, self.eos_id) < 0:
            raise DataError(f"{path} has no BOS or no EOS; documents need both")
        self.decode = model.decode
        self.encode_batch = lambda texts: model.encode(texts, num_threads=1)

    def _load_tokenizers(self, path: Path) -> None:
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        tokenizer.encode_special_tokens = True  # a literal "</s>" in text is text
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.bos_id = self._special_id(tokenizer, "bos_token")
        self.eos_id = self._special_id(tokenizer, "eos_token")

        self.decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
        self.encode_batch = lambda texts: [
            encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]

    def _special_id(self, tokenizer: Any, key: str) -> int:
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if name in self.files:
                token = json.loads((self.folder / name).read_text(encoding="utf-8")).get(key)
                token = token["content"] if isinstance(token, dict) else token
                if token is not None and (token_id := tokenizer.token_to_id(token)) is not None:
                    return token_id
        raise DataError(f"{self.folder} names no {key} in tokenizer_config.json; documents need BOS and EOS")
