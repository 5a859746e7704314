"""The format of prepared data: token shards and the manifest that commits them.

    DATA/
      train_00000.ds          token ids, little-endian uint16 (vocabulary <= 65536) or uint32
      train_00000.ds.index    uint64 little-endian: end of each document, in tokens from the start of the shard
      eval_00000.ds ...
      tokenizer/              the tokenizer that produced the ids
      manifest.json           written last; a folder without it is not prepared data

The shards have datatrove's layout. Readers only open files that the manifest lists.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

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
READ_BYTES = 16 << 20  # block size for reading a whole shard
COPY_AGAIN = "prepare or copy the data again"


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

    @property
    def is_split_by_hash(self) -> bool:
        """Whether the split of each document was chosen by its hash."""
        return 0 < self.eval_fraction < 1 and self.steps.get("eval_by", "hash") == "hash"

    def split_shards(self, split: str) -> list[Shard]:
        """Return the shards of one split, in order."""
        return [shard for shard in self.shards if shard.split == split]

    def split_digest(self, split: str) -> str:
        """Return a hash that identifies the tokens of a split: the hash of its shards' hashes, in order."""
        return hashlib.sha256(
            "".join(shard.sha256 for shard in self.split_shards(split)).encode()
        ).hexdigest()

    def split_tokens(self, split: str) -> int:
        """Return the number of tokens in one split."""
        return sum(shard.tokens for shard in self.split_shards(split))

    def documents_line(self) -> str:
        """Return the counts of documents as one line."""
        counts = {name: sum(c.values()) if isinstance(c, dict) else c for name, c in self.documents.items()}
        removed = counts.get("removed", 0)
        line = "documents: {in:,} in, {out:,} out, {dropped:,} dropped, {:,} removed".format(
            removed, **counts
        )
        if isinstance(damaged := self.documents.get("damaged_files"), dict):
            rows = (
                f"{counts['damaged_files']:,} rows" if all(damaged.values()) else "an unknown number of rows"
            )
            line += f"; {len(damaged):,} damaged files that lost {rows}"
        return line

    def summary(self) -> str:
        """Return lines with the documents and tokens of each split, for the log."""
        lines = [self.documents_line()]
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
        code, state = (
            "no_manifest",
            "has no manifest.json: its preparation is unfinished, or it is not prepared data",
        )
        if not folder.is_dir():
            code, state = "folder_missing", "does not exist or is not a folder"
        raise DataError(
            f"data folder {folder} {state}; name a folder that train/prepare_data.py wrote (--output)",
            code=code,
            key=str(folder),
        )
    try:
        return _parse_manifest(path.read_text(encoding="utf-8"))
    except ValueError as error:
        if other := foreign_manifest(path):
            raise DataError(
                f"{other}; name a folder that this version of prepare_data.py wrote",
                code="foreign_manifest",
                key=str(path),
            ) from error
        raise DataError(
            f"{path} is corrupt: {error}; prepare or copy the data again",
            code="manifest_corrupt",
            key=getattr(error, "key", None),
        ) from error


def foreign_manifest(path: Path) -> str:
    """Return why another program or a newer version wrote the manifest.json `path`, or "".

    Such a file is not corrupt and must not be replaced.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        schema = int(content["schema"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if not content.keys() & {"shards", "dtype", "vocab_size"}:
        return f"{path} does not describe prepared data (checkpoints also have a file with this name)"
    if schema > SCHEMA:
        return f"{path} has schema {schema} of a newer version of this program; this version reads schema {SCHEMA}"
    return ""


def _parse_manifest(text: str) -> Manifest:
    try:
        manifest = TypeAdapter(Manifest).validate_json(text)
    except ValidationError as error:
        problems = error.errors()[:5]
        raise DataError(
            "; ".join(map(_problem, problems)), key=".".join(map(str, problems[0]["loc"])) or None
        ) from error
    expected = token_dtype(manifest.vocab_size).name
    if manifest.dtype != expected:
        raise DataError(
            f"dtype is {manifest.dtype!r}, but vocab_size {manifest.vocab_size} needs {expected}",
            key="dtype",
        )
    itemsize = np.dtype(manifest.dtype).itemsize
    for shard in manifest.shards:
        if shard.bytes != shard.tokens * itemsize:
            raise DataError(
                f"{shard.name}: the size {shard.bytes} bytes does not match {shard.tokens} tokens of {manifest.dtype}",
                key=f"{shard.name}.bytes",
            )
    return manifest


def _problem(error: ErrorDetails) -> str:
    """Return a message for one of pydantic's problems with a manifest."""
    if not error["loc"]:
        return f"it is not JSON ({error['msg']})"
    where = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return f"'{where}' is missing"
    return f"'{where}' is {error['input']!r}, which is not allowed: {error['msg']}"


def check_sizes(folder: str | Path, shard: Shard) -> None:
    """Check that a shard and its index have the sizes in the manifest.

    Raises:
        DataError: a file is missing or has another size.
    """
    index_bytes = shard.documents * INDEX_DTYPE.itemsize
    for name, size in ((shard.name, shard.bytes), (f"{shard.name}.index", index_bytes)):
        path = Path(folder) / name
        if not path.is_file():
            raise DataError(
                f"{path} is missing, but the manifest lists it; {COPY_AGAIN}",
                code="file_missing",
                key=str(path),
            )
        if (found := path.stat().st_size) != size:
            raise DataError(
                f"{path} has {found} bytes, but the manifest says {size}; {COPY_AGAIN}",
                code="wrong_size",
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
            f"{path}, the tokenizer of the data, is missing; {COPY_AGAIN}",
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
    """Check the hashes of a shard and its index, and every token id. Reads each file once.

    Raises:
        DataError: a hash differs, or an id is beyond the vocabulary.
    """
    path = Path(folder) / shard.name
    dtype = np.dtype(manifest.dtype).newbyteorder("<")
    digest, largest_id = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
            ids = np.frombuffer(block, dtype, count=len(block) // dtype.itemsize)
            largest_id = max(largest_id, int(ids.max(initial=0)))
    index_path = path.with_name(path.name + ".index")
    hashes = (
        (path, digest.hexdigest(), shard.sha256),
        (index_path, sha256_file(index_path), shard.index_sha256),
    )
    for name, found, sha256 in hashes:
        if found != sha256:
            raise DataError(
                f"{name} changed: its sha256 differs from the manifest; {COPY_AGAIN}",
                code="wrong_sha256",
                key=str(name),
            )
    if largest_id >= manifest.vocab_size:
        raise DataError(
            f"{path} contains the token id {largest_id}, but the vocabulary has {manifest.vocab_size} ids; "
            f"{COPY_AGAIN}",
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
