"""Encode and decode text with the tokenizer of prepared data, without special ids: sentencepiece or tokenizers."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from train.data.format import TOKENIZER_FOLDER, DataError
from train.files import data_folder, sha256_file

# The files of a tokenizer. The first one that exists in a folder defines the ids.
TOKENIZER_FILES = (
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


# Advice if transformers gives other ids than sentencepiece or tokenizers.
AGREE = (
    "In a copy of the folder, remove tokenizer.model or tokenizer.json, whichever is wrong, or correct "
    "tokenizer_config.json. If the folder has only a tokenizer.model, add a tokenizer.json with the same ids"
)
SPACE = "\u2581"  # stands for a space in sentencepiece


class Markers(NamedTuple):
    """Pieces that are not learned.

    Attributes:
        special: piece -> id. Text must never yield these ids.
        user_defined: pieces that are never split.
        unk_id: id of unknown text, or -1.
    """

    special: dict[str, int]
    user_defined: list[str]
    unk_id: int


class TextEncoder:
    """The tokenizer of a folder: sentencepiece if there is a tokenizer.model, else tokenizers with tokenizer.json.

    Attributes:
        vocab_size: one more than the largest id.
        bos_id, eos_id: the ids that begin and end a document.
        files: the tokenizer's files; the first one defines the ids.
        loaded_sha256: the hash of the defining file as it was loaded.
        encode_batch: texts -> ids, without BOS and EOS.
        decode: ids without BOS and EOS -> text.
        markers: () -> Markers.

    Raises:
        DataError: the folder has no tokenizer, an unreadable one, or one without BOS and EOS.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.encode_batch: Callable[[list[str]], list[list[int]]]
        self.decode: Callable[[list[int]], str]
        self.markers: Callable[[], Markers]
        self.files = [name for name in TOKENIZER_FILES if (self.folder / name).is_file()]
        if not self.files or self.files[0] not in ("tokenizer.model", "tokenizer.json"):
            raise DataError(
                f"--tokenizer {folder}: the folder has no tokenizer.model or tokenizer.json; pass a folder that has "
                "one, or train a tokenizer with train/train_tokenizer.py",
                code="no_tokenizer",
                key=str(folder),
            )
        path = self.folder / self.files[0]
        load = self._load_sentencepiece if path.name == "tokenizer.model" else self._load_tokenizers
        try:
            data = path.read_bytes()
            self.loaded_sha256 = hashlib.sha256(data).hexdigest()
            load(path, data)
        except DataError:
            raise
        except Exception as error:  # tokenizers raises plain Exception for a broken file
            raise DataError(
                f"{path} cannot be read: {error}. Copy it again (for a Git LFS pointer, run `git lfs pull`), or remove "
                "it if the folder has another tokenizer file",
                code="tokenizer_unreadable",
                key=str(path),
            ) from error

    def sha256(self) -> str:
        """Return the hash of the current content of the defining file."""
        return sha256_file(self.folder / self.files[0])

    def _load_sentencepiece(self, path: Path, data: bytes) -> None:
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(model_proto=data)
        self.vocab_size, self.bos_id, self.eos_id = model.vocab_size(), model.bos_id(), model.eos_id()
        if min(self.bos_id, self.eos_id) < 0:
            raise DataError(
                f"{path} has bos_id {self.bos_id} and eos_id {self.eos_id} (-1: none), but documents need both. Train "
                "a tokenizer with both, or pass a folder with only a tokenizer.json",
                code="tokenizer_without_ends",
                key=str(path),
            )
        self.decode = model.decode

        def markers() -> Markers:
            special = {i for i in range(self.vocab_size) if model.is_control(i)} | {self.bos_id, self.eos_id}
            # sentencepiece does not expose the type; user-defined pieces, and one learned piece, have a score of 0
            others = {i for i in range(self.vocab_size) if model.get_score(i) == 0 and not model.is_byte(i)}
            user_defined = [
                model.id_to_piece(i).replace(SPACE, " ") for i in others - special - {model.unk_id()}
            ]
            return Markers({model.id_to_piece(i): i for i in special}, user_defined, model.unk_id())

        self.markers = markers

        self.encode_batch = lambda texts: model.encode(texts, num_threads=1)

    def _load_tokenizers(self, path: Path, data: bytes) -> None:
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_buffer(data)
        tokenizer.encode_special_tokens = True  # a literal "</s>" in text is text
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.bos_id = self._special_id(tokenizer, "bos_token")
        self.eos_id = self._special_id(tokenizer, "eos_token")

        def markers() -> Markers:
            described = json.loads(tokenizer.to_str())["model"]
            unknown = described.get("unk_token")
            unk_id = described.get("unk_id") if unknown is None else tokenizer.token_to_id(unknown)
            added = tokenizer.get_added_tokens_decoder()
            ends = {self.bos_id, self.eos_id}
            special = {i for i, token in added.items() if token.special and i != unk_id} | ends
            user_defined = [token.content for i, token in added.items() if i not in {*special, unk_id}]
            named = {str(tokenizer.id_to_token(i)): i for i in special}
            return Markers(named, user_defined, -1 if unk_id is None else unk_id)

        self.markers = markers
        self.decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
        self.encode_batch = lambda texts: [
            encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]

    def text_bytes(self, inputs: np.ndarray, labels: np.ndarray) -> int:
        """Return the number of UTF-8 bytes of the text of `labels`, each of which follows its token in `inputs`.

        Both are int64 [n], of one or several documents. A character that the first label cuts is counted as a whole.
        """
        runs = np.split(labels, np.flatnonzero(inputs == self.bos_id))
        runs[0] = np.concatenate([inputs[:1], runs[0]])  # some decoders drop a space at the start of a text
        ends = (self.bos_id, self.eos_id)
        texts = [self.decode([i for i in run.tolist() if i not in ends]) for run in (*runs, inputs[:1])]
        sizes = [len(text.encode()) for text in texts]
        return sum(sizes[:-1]) - sizes[-1]

    def _special_id(self, tokenizer: Any, key: str) -> int:
        named = None
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if name in self.files:
                token = json.loads((self.folder / name).read_text(encoding="utf-8")).get(key)
                token = token["content"] if isinstance(token, dict) else token
                if token is not None and (token_id := tokenizer.token_to_id(token)) is not None:
                    return token_id
                named = named or token
        tokens = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        example = f'"{key}": {json.dumps(tokens[0] if tokens else "TOKEN", ensure_ascii=False)}'
        raise DataError(
            f"{self.folder}: {key} is {named!r} in tokenizer_config.json, but it must be a token of the tokenizer. "
            f"Add {example} to tokenizer_config.json in a copy of the folder; BOS and EOS may be the same token. "
            f"The tokenizer's special tokens: {', '.join(map(repr, tokens[:8])) or 'none'}",
            code="tokenizer_without_ends",
            key=key,
        )


# ---------------------------------------------------------------- the tokenizer of an export


def load_exported(folder: Path, encoder: TextEncoder, vocab_size: int) -> Any:
    """Load the tokenizer of an export with transformers.

    Args:
        folder: the export, with a config.json and the files of `encoder`.

    Raises:
        DataError: the tokenizer cannot be read, has an id of `vocab_size` or more, or its BOS or EOS differs from
            `encoder`.
    """
    from transformers import AutoTokenizer

    try:
        exported = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain Exception for a broken file
        raise DataError(
            f"transformers cannot read the tokenizer in {encoder.folder}: {error}",
            code="tokenizer_unreadable",
            key=str(encoder.folder),
        ) from error
    if beyond := [token for token, i in exported.get_vocab().items() if i >= vocab_size]:
        raise DataError(
            f"{encoder.folder}: the vocabulary has {vocab_size} ids, but transformers finds {len(beyond)} tokens with "
            f"larger ids: {', '.join(map(repr, beyond[:8]))}. {AGREE}",
            code="tokenizer_ids_differ",
            key=str(encoder.folder),
        )
    for key in ("bos", "eos"):
        own, other = getattr(encoder, f"{key}_id"), getattr(exported, f"{key}_token_id")
        if own != other:
            raise DataError(
                f"{encoder.folder}: the {key.upper()} id is {own} in {encoder.files[0]}, but {other} in transformers. "
                f"{AGREE}",
                code="tokenizer_ids_differ",
                key=str(encoder.folder),
            )
    return exported


def compare_ids(encoder: TextEncoder, exported: Any, texts: Sequence[str]) -> None:
    """Check that both tokenizers give the same ids for `texts` and markers, and that markers never yield special ids.

    Raises:
        DataError: ids differ (the message names the first text), or a text yields a special id.
    """
    special, user_defined, _ = encoder.markers()
    around = [text for piece in (*special, *user_defined) for text in (piece, f"a {piece} b{piece}c")]
    for text in around[: 2 * len(special)]:
        if found := {*special.values()}.intersection(*encoder.encode_batch([text])):
            raise DataError(
                f"{encoder.folder}: the text {text!r} yields the special id {min(found)}, so text could end a "
                "document. Use a BPE tokenizer whose special tokens are marked as special (in sentencepiece: control "
                "symbols, not user-defined symbols), such as one from train/train_tokenizer.py",
                code="special_id_from_text",
                key=str(encoder.folder),
            )
    texts = [*texts, *around]
    ids = encoder.encode_batch(texts)
    theirs = exported(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    for text, own, other in zip(texts, ids, theirs, strict=True):
        if own != other:
            at = next((i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), "the end")
            raise DataError(
                f"{encoder.folder}: {encoder.files[0]} and transformers give different ids for {text[:80]!r}, from "
                f"token {at}: {own[:20]} and {other[:20]}. {AGREE}",
                code="tokenizer_ids_differ",
                key=str(encoder.folder),
            )


def has_chat_template(folder: Path) -> bool:
    """Return whether the tokenizer in `folder` has a chat template, in its own file or in its configuration."""
    return (folder / "chat_template.jinja").is_file() or "chat_template" in _tokenizer_config(folder)


def chat_template_problem(folder: Path) -> str:
    """Return why the chat template in `folder` does not work, or ""."""
    if not (has_chat_template(folder) and _tokenizer_config(folder).get("split_special_tokens")):
        return ""
    return (
        "warning: the tokenizer has a chat template, but with split_special_tokens: true in tokenizer_config.json the "
        "special tokens of a chat are encoded as text. Set it to false; special tokens in a user's text are then also "
        "encoded as special tokens"
    )


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def find_tokenizer(sources: Mapping[str, str], export: Path | None = None) -> Path:
    """Return the folder of a run's tokenizer: in the data folders `sources`, or else in the run's export `export`.

    Raises:
        DataError: there is no tokenizer in any of them.
    """
    folders = [Path(data_folder(folder)) / TOKENIZER_FOLDER for folder in sources.values()]
    folders += [export] if export else []
    for folder in folders:
        if any((folder / name).is_file() for name in TOKENIZER_FILES[:2]):
            return folder
    raise DataError(
        f"there is no tokenizer in {' or '.join(map(str, folders))}; pass one as --tokenizer DIR",
        code="no_tokenizer",
        key=str(folders[0]),
    )
