"""Encode and decode text with the sentencepiece or tokenizers package, without producing special ids from text."""

import functools
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from train.data.format import TOKENIZER_FOLDER, DataError, read_manifest
from train.files import sha256_file

logger = logging.getLogger(__name__)

# Tokenizer files. The first file in this list that exists in a folder defines the ids.
TOKENIZER_FILES = (
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


# Advice for error messages if the ids in the transformers library differ from those in sentencepiece or tokenizers.
# Texts that tokenizers often encode differently.
HARD_STRINGS = (
    "", " ", "  ", "\n", "\t", "a  b   c    d", " leading", "   leading", "trailing ", "trailing   ",
    "line\nline\n\n\nline\r\nline", "\tindent\n\t\tindent\n    \tmixed", "def f(x):\n        return x  # two  spaces\n",
    "1234567890 3.14159 2**31", "éèüß ñ ø ł", "日本語の文章。中文 한국어", "שלום مرحبا हिन्दी",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 end",
    "rare \U00010348 \U0001f9ff \ue000 \x07 \x7f", "e\u0301 combining",
    "\ufeffbom \u200b zero \u00a0 nbsp \u3000 wide",
    "</s>", "<s>", "<unk>", "a</s>b <s> c<unk>d", "</s></s>", "<0x0A> <0x41>",
    "under_score \u2581 \u2581\u2581x", "x" * 300,
)  # fmt: skip
AGREE = (
    "Copy the folder, and in the copy remove either tokenizer.model or tokenizer.json, whichever is wrong, or correct "
    "tokenizer_config.json. If the folder has only a tokenizer.model, add a tokenizer.json with the same ids"
)
COMPARED_TOKENS = 2**16  # tokens of prepared data that are decoded to compare two tokenizers
SPACE = "\u2581"  # sentencepiece's symbol for a space
REPLACEMENT = "\ufffd"  # decoders return this character for bytes that are not UTF-8
BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")  # name of a token for one byte


class Markers(NamedTuple):
    """The special and user-defined pieces of a tokenizer, which are not learned from text.

    Attributes:
        special: {piece: id} of the special pieces. Text must never be encoded to these ids.
        user_defined: pieces that are never split.
        unk_id: id for unknown text, or -1 if the tokenizer has no such id.
    """

    special: dict[str, int]
    user_defined: list[str]
    unk_id: int


class TextEncoder:
    """A tokenizer loaded from a folder.

    The sentencepiece package loads tokenizer.model. If the folder has no tokenizer.model, the tokenizers package loads
    tokenizer.json.

    Attributes:
        vocab_size: the largest id plus one.
        bos_id, eos_id: the ids at the beginning and at the end of a document.
        files: names of the tokenizer files. The first file defines the ids.
        sha256: hash of the first file when it was loaded.
        encode_batch: function that encodes texts to ids, without BOS and EOS.
        decode: function that decodes ids without BOS and EOS to text.
        piece: function that converts an id to its piece, the entry in the vocabulary.
        markers: function that returns the special and user-defined pieces.

    Raises:
        DataError: if the folder contains no tokenizer, or the tokenizer cannot be read or has no BOS or EOS token.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.encode_batch: Callable[[list[str]], list[list[int]]]
        self.decode: Callable[[list[int]], str]
        self.piece: Callable[[int], str]
        self.markers: Callable[[], Markers]
        self._token_bytes = functools.cache(self._count_bytes)
        self.files = [name for name in TOKENIZER_FILES if (self.folder / name).is_file()]
        if not self.files or self.files[0] not in ("tokenizer.model", "tokenizer.json"):
            what = (
                "is a file, not a folder with tokenizer.model or tokenizer.json"
                if self.folder.is_file()
                else "contains no tokenizer.model or tokenizer.json"
            )
            raise DataError(
                f"the tokenizer path {folder} {what}; pass a folder with one of these files, or train a tokenizer with "
                "train/train_tokenizer.py",
                code="no_tokenizer",
                key=str(folder),
            )
        path = self.folder / self.files[0]
        load = self._load_sentencepiece if path.name == "tokenizer.model" else self._load_tokenizers
        try:
            data = path.read_bytes()
            self.sha256 = hashlib.sha256(data).hexdigest()
            load(path, data)
        except DataError:
            raise
        except Exception as error:  # tokenizers raises plain Exception for a broken file
            raise DataError(
                f"{path} cannot be read: {error}. Copy the file again (for a Git LFS pointer, run `git lfs pull`). "
                "If the folder contains both tokenizer.model and tokenizer.json, you can delete the unreadable file",
                code="tokenizer_unreadable",
                key=str(path),
            ) from error

    def _load_sentencepiece(self, path: Path, data: bytes) -> None:
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(model_proto=data)
        self.vocab_size, self.bos_id, self.eos_id = model.vocab_size(), model.bos_id(), model.eos_id()
        if min(self.bos_id, self.eos_id) < 0:
            raise DataError(
                f"{path} has bos_id {self.bos_id} and eos_id {self.eos_id} (-1: no such token), but both "
                "tokens are required. Train a tokenizer with BOS and EOS, or pass a folder that has a tokenizer.json "
                "but no tokenizer.model",
                code="tokenizer_without_ends",
                key=str(path),
            )
        self.decode, self.piece = model.decode, model.id_to_piece

        def markers() -> Markers:
            special = {i for i in range(self.vocab_size) if model.is_control(i)} | {self.bos_id, self.eos_id}
            # sentencepiece does not expose the type of a piece. User-defined pieces, and one learned piece, score 0.
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
        tokenizer.encode_special_tokens = True  # encode a literal "</s>" as text
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
        self.piece = lambda token: str(tokenizer.id_to_token(token))
        self.decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
        self.encode_batch = lambda texts: [
            encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]

    def text_bytes(self, inputs: np.ndarray, labels: np.ndarray) -> int:
        """Return the size of the text that the labels encode, in UTF-8 bytes.

        If a character consists of several tokens, each token counts only its own bytes.

        Args:
            inputs: the token before each label, int64 [n].
            labels: tokens from one or more documents, int64 [n].
        """
        found, counts = np.unique(2 * labels + (inputs == self.bos_id), return_counts=True)
        return sum(
            count * self._token_bytes(*divmod(each, 2))
            for each, count in zip(found.tolist(), counts.tolist(), strict=True)
        )

    def _count_bytes(self, token: int, is_first: int) -> int:
        """Return the number of UTF-8 bytes that a token adds to a text.

        Args:
            token: id of the token.
            is_first: 1 if the token is the first token of the text, or else 0.
        """
        if token in (self.bos_id, self.eos_id):
            return 0
        piece, alone = self.piece(token), self.decode([token])
        if REPLACEMENT in alone and REPLACEMENT not in piece:  # a part of a character
            return 1 if BYTE_PIECE.fullmatch(piece) else len(piece)  # byte-level BPE: a symbol for each byte
        if is_first:
            return len(alone.encode())
        before = self.encode_batch(["a"])[0]  # many decoders drop a space at the start of a text
        return len(self.decode([*before, token]).encode()) - len(self.decode(before).encode())

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
        problem = (
            f"{key} is {named!r}, which is not in the vocabulary"
            if named
            else f"{key} is not set in tokenizer_config.json or special_tokens_map.json"
        )
        raise DataError(
            f"{self.folder}: {problem}. In a copy of the folder, set {key} in tokenizer_config.json to a token of the "
            "vocabulary. BOS and EOS may be the same token. Special tokens of the tokenizer: "
            f"{', '.join(map(repr, tokens[:8])) or 'none'}",
            code="tokenizer_without_ends",
            key=key,
        )


# ---------------------------------------------------------------- the tokenizer of an export


def load_exported(folder: Path, encoder: TextEncoder, vocab_size: int) -> Any:
    """Load the tokenizer of an exported model with the transformers library, and check its BOS and EOS ids.

    Args:
        folder: folder with a config.json and the tokenizer files of `encoder`.
        vocab_size: number of ids in the vocabulary.

    Raises:
        DataError: if the transformers library cannot load the tokenizer, an id is `vocab_size` or larger, or the BOS or
            EOS id differs from the id in `encoder`.
    """
    from transformers import AutoTokenizer

    try:
        exported = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain Exception for a broken file
        raise DataError(
            f"the transformers library cannot load the tokenizer in {encoder.folder}: {error}. Repair the tokenizer "
            "files, or pass another tokenizer",
            code="tokenizer_unreadable",
            key=str(encoder.folder),
        ) from error
    if beyond := [token for token, i in exported.get_vocab().items() if i >= vocab_size]:
        raise DataError(
            f"{encoder.folder}: the vocabulary has the ids 0 to {vocab_size - 1}, but the transformers library assigns "
            f"larger ids to {len(beyond)} tokens, such as {', '.join(map(repr, beyond[:8]))}. {AGREE}",
            code="tokenizer_ids_differ",
            key=str(encoder.folder),
        )
    for key in ("bos", "eos"):
        own, other = getattr(encoder, f"{key}_id"), getattr(exported, f"{key}_token_id")
        if own != other:
            raise DataError(
                f"{encoder.folder}: the {key.upper()} id is {own} in {encoder.files[0]}, but {other} in the "
                f"transformers library. {AGREE}",
                code="tokenizer_ids_differ",
                key=str(encoder.folder),
            )
    return exported


def copy_tokenizer_files(encoder: TextEncoder, folder: Path) -> None:
    """Copy the tokenizer files to `folder`, and set tokenizer_class so that transformers uses tokenizer.json unchanged.

    transformers 5 otherwise chooses a class by the model type, such as Qwen2Tokenizer, that replaces the normalizer and
    the pre-tokenizer of tokenizer.json, and then encodes some texts to different ids.
    """
    for name in encoder.files:
        shutil.copyfile(encoder.folder / name, folder / name)
    if "tokenizer.json" in encoder.files:
        config = _tokenizer_config(folder) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def compare_ids(encoder: TextEncoder, exported: Any, texts: Sequence[str]) -> None:
    """Check that two tokenizers encode texts to the same ids, and that no text is encoded to a special id.

    Args:
        encoder: the tokenizer of this project.
        exported: the same tokenizer, loaded with the transformers library.
        texts: texts to encode, in addition to the special and user-defined pieces.

    Raises:
        DataError: if the ids of a text differ, or a text is encoded to a special id.
    """
    special, user_defined, _ = encoder.markers()
    around = [text for piece in (*special, *user_defined) for text in (piece, f"a {piece} b{piece}c")]
    for text in around[: 2 * len(special)]:
        if found := {*special.values()}.intersection(*encoder.encode_batch([text])):
            raise DataError(
                f"{encoder.folder}: the text {text!r} is encoded as the special id {min(found)}, so a document could "
                "end in the middle of its text. Use a BPE tokenizer whose special tokens are marked as special (in "
                "sentencepiece, control symbols), such as a tokenizer from train/train_tokenizer.py",
                code="special_id_from_text",
                key=str(encoder.folder),
            )
    texts = [*texts, *around]
    ids = encoder.encode_batch(texts)
    theirs = exported(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    for text, own, other in zip(texts, ids, theirs, strict=True):
        if own != other:
            shorter = min(len(own), len(other))
            at = next((i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), shorter)
            raise DataError(
                f"{encoder.folder}: {encoder.files[0]} and the transformers library encode {text[:80]!r} to different "
                f"ids. The ids {own[:20]} and {other[:20]} differ at index {at}. {AGREE}",
                code="tokenizer_ids_differ",
                key=str(encoder.folder),
            )


def check_model_tokenizer(data: str | Path, folder: str | Path, key: str) -> None:
    """Check that prepared data can be used with a model's tokenizer.

    If the tokenizer files differ, the first COMPARED_TOKENS tokens of the data are decoded with both tokenizers, and
    the texts are compared. If there is no tokenizer in `folder`, a warning is logged.

    Args:
        data: folder with prepared data.
        folder: folder with the model's tokenizer.
        key: configuration key or option to report in the error.

    Raises:
        DataError: if the texts differ, or the data or a tokenizer cannot be read.
    """
    manifest = read_manifest(data)
    files = [file for name in TOKENIZER_FILES[:2] if (file := Path(folder) / name).is_file()]
    if not files:
        logger.warning(
            f"{folder} contains no tokenizer.model or tokenizer.json, so this command cannot check that {data} was "
            "prepared with the model's tokenizer"
        )
    if not files or manifest.tokenizer_sha256 in map(sha256_file, files):
        return
    own, other = TextEncoder(Path(data) / TOKENIZER_FOLDER), TextEncoder(folder)
    dtype = np.dtype(manifest.dtype).newbyteorder("<")
    tokens = np.fromfile(Path(data) / manifest.shards[0].name, dtype, COMPARED_TOKENS)
    ids = tokens[~np.isin(tokens, (own.bos_id, own.eos_id))].tolist()
    if max(ids, default=0) >= other.vocab_size or own.decode(ids).strip() != other.decode(ids).strip():
        raise DataError(
            f"{data} was not prepared with the model's tokenizer: the tokenizer in {folder} does not decode the token "
            f"ids to the same text. Prepare the data with --tokenizer {folder}",
            code="another_tokenizer",
            key=key,
        )


def has_chat_template(folder: Path) -> bool:
    """Return whether the tokenizer in `folder` has a chat template, in chat_template.jinja or tokenizer_config.json."""
    return (folder / "chat_template.jinja").is_file() or "chat_template" in _tokenizer_config(folder)


def chat_template_problem(folder: Path) -> str:
    """Return a warning if the tokenizer in `folder` encodes the special tokens of its chat template as text, or ""."""
    if not (has_chat_template(folder) and _tokenizer_config(folder).get("split_special_tokens")):
        return ""
    return (
        "warning: the tokenizer has a chat template, but split_special_tokens is true in tokenizer_config.json. The "
        "special tokens in a chat are therefore encoded as text. Set split_special_tokens to false. Special tokens in "
        "a user's text are then also encoded as special tokens"
    )


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
