"""The format of prepared data: token shards and the manifest that commits them.

    DATA/
      train_00000.ds          token ids, little-endian uint16 (vocabulary <= 65536) or uint32
      train_00000.ds.index    uint64 little-endian: end of each document, in tokens from the start of the shard
      eval_00000.ds ...
      tokenizer/              the tokenizer that produced the ids
      manifest.json           written last; a folder without it is not prepared data

The shards have datatrove's layout. Readers only open files that the manifest lists.
"""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from model.errors import UserError
from train.files import sha256_file, write_durably

SCHEMA = 1
MANIFEST_NAME = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
SPLITS = ("train", "eval")
INDEX_DTYPE = np.dtype("<u8")
UINT16_MAX_VOCABULARY = 1 << 16
STRICT = ConfigDict(extra="forbid", strict=True)
FileName = Annotated[str, Field(pattern="^[^/]+$")]
Positive = Annotated[int, Field(ge=1)]
COPY_ADVICE = "prepare or copy the data again"


class DataError(UserError, ValueError):
    """An error in the inputs or in prepared data; the message names the file and what to do."""

    code = "data"


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype on disk of token ids below `vocab_size`."""
    return np.dtype("<u2") if vocab_size <= UINT16_MAX_VOCABULARY else np.dtype("<u4")


@dataclass(frozen=True)
class Shard:
    """One shard: `bytes` and `sha256` describe its `*.ds` file, `index_sha256` its `*.ds.index`."""

    __pydantic_config__ = STRICT

    name: FileName
    split: Annotated[str, Field(pattern="^(train|eval)$")]
    tokens: Positive
    documents: Positive
    bytes: int
    sha256: str
    index_sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`.

    Attributes:
        tokenizer_sha256: hash of `tokenizer_files[0]`, the file that defines the ids (tokenizer.model or
            tokenizer.json).
        documents: {"in", "out", "dropped": {reason: count}, "removed": {step: count}}, and possibly more counts.
            "damaged_files" maps each path to the number of rows lost, 0 if unknown.
        text_key: the key of the text in the inputs; null if token ids were imported.
        text_bytes: UTF-8 size of the kept documents; null if token ids were imported.
        unigram_loss: cross entropy of the eval tokens under the add-one-smoothed unigram distribution of the train
            tokens, in nats per token; null if a split is empty.
        steps: the settings of the optional preparation steps, and other options.
    """

    __pydantic_config__ = STRICT

    schema: Annotated[int, Field(ge=SCHEMA, le=SCHEMA)]
    dtype: str
    vocab_size: int
    bos_id: int
    eos_id: int
    tokenizer_sha256: str
    tokenizer_files: Annotated[list[FileName], Field(min_length=1)]
    inputs: list[str]
    text_key: str | None
    eval_fraction: float
    documents: dict[str, int | dict[str, int]]
    text_bytes: int | None
    unigram_loss: float | None
    shards: list[Shard]
    steps: dict[str, Any] = field(default_factory=dict)

    def split_shards(self, split: str) -> list[Shard]:
        """Return the shards of one split, in order."""
        return [shard for shard in self.shards if shard.split == split]

    def split_tokens(self, split: str) -> int:
        """Return the number of tokens in one split."""
        return sum(shard.tokens for shard in self.split_shards(split))

    def summary(self) -> str:
        """Return lines with the documents and tokens of each split, for the log."""
        counts = {name: sum(c.values()) if isinstance(c, dict) else c for name, c in self.documents.items()}
        if isinstance(damaged := self.documents.get("damaged_files"), dict):
            counts["damaged_files"] = len(damaged)
        lines = ["documents: " + ", ".join(f"{count:,} {name}" for name, count in counts.items())]
        for split in SPLITS:
            shards = self.split_shards(split)
            documents = sum(shard.documents for shard in shards)
            lines.append(
                f"{split}: {documents:,} documents, {self.split_tokens(split):,} tokens, {len(shards)} shards"
            )
        if self.unigram_loss is not None:
            lines.append(f"unigram loss of the eval split: {self.unigram_loss:.4f} nats per token")
        return "\n".join(lines)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Commit the folder by writing its manifest durably. Call this after all other files are written."""
    write_durably(folder / MANIFEST_NAME, json.dumps(asdict(manifest), indent=2, ensure_ascii=False) + "\n")


def read_manifest(folder: str | Path) -> Manifest:
    """Read and check `folder/manifest.json`.

    Raises:
        DataError: the folder or its manifest is missing, or the manifest does not have this schema. In the latter case
            `key` is the first wrong field.
    """
    folder, path = Path(folder), Path(folder) / MANIFEST_NAME
    if not path.is_file():
        raise DataError(
            f"data folder {folder} has no manifest.json: it does not exist, or its preparation is unfinished; name a "
            "folder that train/prepare_data.py wrote (--output)",
            code="no_manifest" if folder.is_dir() else "folder_missing",
            key=str(folder),
        )
    try:
        return TypeAdapter(Manifest).validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        (problem, *_), key = error.errors(), ".".join(map(str, error.errors()[0]["loc"]))
        raise DataError(
            f"{path} is corrupt, or of another program: {key} {problem['msg']}; {COPY_ADVICE}",
            code="manifest_corrupt",
            key=key or None,
        ) from error


def is_foreign_manifest(path: Path) -> bool:
    """Return whether another program or a newer version wrote the manifest.json `path`, which must not be replaced.

    A checkpoint also has a file with this name.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return content["schema"] > SCHEMA or "dtype" not in content
    except (OSError, ValueError, KeyError, TypeError):
        return False


def check_sizes(folder: str | Path, shard: Shard) -> None:
    """Check that a shard and its index have the sizes in the manifest.

    Raises:
        DataError: a file is missing or has another size.
    """
    index_bytes = shard.documents * INDEX_DTYPE.itemsize
    for name, size in ((shard.name, shard.bytes), (f"{shard.name}.index", index_bytes)):
        path = Path(folder) / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            raise DataError(
                f"{path} has {found} bytes (None: it is missing), but the manifest says {size}; {COPY_ADVICE}",
                code="file_missing" if found is None else "wrong_size",
                key=str(path),
            )


def open_index(folder: str | Path, shard: Shard) -> np.ndarray:
    """Return the document ends of a shard: uint64 [documents], memory-mapped, in tokens from the shard's start."""
    return np.asarray(np.memmap(Path(folder) / f"{shard.name}.index", dtype=INDEX_DTYPE, mode="r"))


def check_tokenizer(folder: str | Path, manifest: Manifest) -> None:
    """Check that the tokenizer in the data folder is the one that produced the ids.

    Raises:
        DataError: its file is missing, or its hash differs from the manifest.
    """
    path = Path(folder) / TOKENIZER_FOLDER / manifest.tokenizer_files[0]
    if not path.is_file():
        raise DataError(
            f"{path}, the tokenizer of the data, is missing; {COPY_ADVICE}",
            code="file_missing",
            key=str(path),
        )
    if (found := sha256_file(path)) != manifest.tokenizer_sha256:
        raise DataError(
            f"{path} is not the tokenizer of the data: its sha256 is {found}, but {Path(folder) / MANIFEST_NAME} says "
            f"{manifest.tokenizer_sha256}. Restore the tokenizer, or prepare the data again with the new one",
            code="tokenizer_replaced",
            key=str(path),
        )


def verify_shard(folder: str | Path, manifest: Manifest, shard: Shard) -> None:
    """Check the hashes of a shard and its index, and every token id.

    Raises:
        DataError: a hash differs, or an id is beyond the vocabulary.
    """
    path = Path(folder) / shard.name
    index_path = path.with_name(path.name + ".index")
    for name, sha256 in ((path, shard.sha256), (index_path, shard.index_sha256)):
        if sha256_file(name) != sha256:
            raise DataError(
                f"{name} changed: its sha256 differs from the manifest; {COPY_ADVICE}",
                code="wrong_sha256",
                key=str(name),
            )
    largest_id = int(np.memmap(path, np.dtype(manifest.dtype).newbyteorder("<"), mode="r").max())
    if largest_id >= manifest.vocab_size:
        raise DataError(
            f"{path} contains the token id {largest_id}, but the vocabulary has {manifest.vocab_size} ids; "
            f"{COPY_ADVICE}",
            code="token_beyond_vocabulary",
            key=str(path),
        )


def unigram_loss(train_counts: np.ndarray, eval_counts: np.ndarray) -> float | None:
    """Return the cross entropy of a unigram model, in nats per token.

    Args:
        train_counts: [V], counts of the train tokens; the model adds one to each (smoothing).
        eval_counts: [V], counts of the tokens to predict.

    Returns:
        The loss, or None if either has no tokens.
    """
    if not train_counts.sum() or not eval_counts.sum():
        return None
    log_p = np.log(train_counts + 1.0) - math.log(float(train_counts.sum()) + len(train_counts))
    return float(-(eval_counts * log_p).sum() / eval_counts.sum())
