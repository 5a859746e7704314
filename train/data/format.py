"""Define the format of prepared data: token shards and a manifest that lists them.

    DATA/
      train_00000.ds          token ids, little-endian uint16 (vocabulary <= 65536) or uint32
      train_00000.ds.index    end of each document, in tokens from the start of the shard, little-endian uint64
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
    """Error raised if inputs, a tokenizer or prepared data are missing, invalid or incompatible."""

    code = "data"


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the data type in which token ids below `vocab_size` are stored in shards."""
    return np.dtype("<u2") if vocab_size <= UINT16_MAX_VOCABULARY else np.dtype("<u4")


@dataclass(frozen=True)
class Shard:
    """Manifest entry for a token shard.

    Attributes:
        bytes, sha256: size and hash of the `*.ds` file with the token ids.
        index_sha256: hash of the `*.ds.index` file with the document ends.
    """

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
    """The contents of manifest.json in a folder with prepared data.

    Attributes:
        tokenizer_sha256: hash of `tokenizer_files[0]`, the file that defines the ids (tokenizer.model or
            tokenizer.json).
        documents: document counts: {"in", "out", "dropped": {reason: count}, "removed": {step: count}}. If files are
            damaged, "damaged_files" maps each path to the number of lost rows, or to 0 if the number is unknown.
            import_megatron.py adds counts of BOS and EOS tokens.
        text_key: key of the text in the inputs; null if token ids were imported.
        text_bytes: UTF-8 size of the kept documents; null if token ids were imported.
        unigram_loss: cross entropy of the eval tokens under the add-one-smoothed unigram distribution of the train
            tokens, in nats per token; null if a split is empty.
        steps: options of the preparation, and reports on the tokenizer and the evaluation texts.
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
        """Return the shards of the train or eval split, in order."""
        return [shard for shard in self.shards if shard.split == split]

    def split_tokens(self, split: str) -> int:
        """Return the number of tokens in the train or eval split."""
        return sum(shard.tokens for shard in self.split_shards(split))

    def summary(self) -> str:
        """Return a summary for the log, with the number of documents and tokens in each split."""
        counts = {name: sum(c.values()) if isinstance(c, dict) else c for name, c in self.documents.items()}
        what = "parts of documents" if self.steps.get("eval_by") == "position" else "documents"
        if isinstance(damaged := self.documents.get("damaged_files"), dict):
            counts["damaged_files"] = len(damaged)
        lines = [f"{what}: " + ", ".join(f"{number:,} {name}" for name, number in counts.items())]
        for split in SPLITS:
            shards = self.split_shards(split)
            documents = sum(shard.documents for shard in shards)
            lines.append(
                f"{split}: {count(documents, 'document')}, {self.split_tokens(split):,} tokens, "
                f"{count(len(shards), 'shard')}"
            )
        if self.unigram_loss is not None:
            lines.append(
                f"loss of a unigram model (token frequencies) on the eval split: {self.unigram_loss:.4f} nats per token"
            )
        return "\n".join(lines)


def count(number: int, noun: str) -> str:
    """Return a number followed by `noun` in the singular or plural, such as "1 shard" or "2,000 shards"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a folder with prepared data and flush it to the disk. Call this after all other writes."""
    write_durably(folder / MANIFEST_NAME, json.dumps(asdict(manifest), indent=2, ensure_ascii=False) + "\n")


def read_manifest(folder: str | Path, what: str = "data folder") -> Manifest:
    """Read and check the manifest in a folder with prepared data.

    Args:
        what: description of the folder for the error message.

    Raises:
        DataError: if the folder or its manifest is missing, or the manifest is invalid. If the manifest is invalid, the
            error's `key` is the first invalid field.
    """
    folder, path = Path(folder), Path(folder) / MANIFEST_NAME
    if not path.is_file():
        raise DataError(
            f"{what} {folder} "
            + (
                "has no manifest.json: its data is not prepared, or the preparation is unfinished. Run "
                f"`python train/prepare_data.py --input {folder} --tokenizer DIR --output NEW`, and pass the folder NEW"
                if folder.is_dir()
                else "does not exist. Pass the output folder of a completed run of train/prepare_data.py"
            ),
            code="no_manifest" if folder.is_dir() else "folder_missing",
            key=str(folder),
        )
    try:
        return TypeAdapter(Manifest).validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        (problem, *_), key = error.errors(), ".".join(map(str, error.errors()[0]["loc"]))
        raise DataError(
            f"{path} is corrupt or does not describe prepared data: {key} {problem['msg']}; {COPY_ADVICE}",
            code="manifest_corrupt",
            key=key or None,
        ) from error


def is_foreign_manifest(path: Path) -> bool:
    """Return whether the manifest.json file at `path` must not be overwritten.

    A file must not be overwritten if a newer version of this code wrote it, or if it does not describe prepared data.
    For example, checkpoints also contain a manifest.json.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # missing, or only partly written
        return False
    schema = content.get("schema") if isinstance(content, dict) else None
    return not isinstance(schema, int) or schema > SCHEMA or "dtype" not in content


def check_sizes(folder: str | Path, shard: Shard) -> None:
    """Check that the files of a shard have the sizes listed in the manifest.

    Raises:
        DataError: if a file is missing or has a different size.
    """
    index_bytes = shard.documents * INDEX_DTYPE.itemsize
    for name, size in ((shard.name, shard.bytes), (f"{shard.name}.index", index_bytes)):
        path = Path(folder) / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            raise DataError(
                f"{path}: the manifest lists {size} bytes, but the file "
                f"{'is missing' if found is None else f'has {found} bytes'}; {COPY_ADVICE}",
                code="file_missing" if found is None else "wrong_size",
                key=str(path),
            )


def open_index(folder: str | Path, shard: Shard) -> np.ndarray:
    """Memory-map the index of a shard.

    Returns:
        End of each document, in tokens from the start of the shard, uint64 [number of documents].
    """
    return np.asarray(np.memmap(Path(folder) / f"{shard.name}.index", dtype=INDEX_DTYPE, mode="r"))


def read_index(folder: str | Path, shard: Shard) -> np.ndarray:
    """Read and check the whole index of a shard.

    Returns:
        End of each document, in tokens from the start of the shard, int64 [number of documents].

    Raises:
        DataError: if the ends do not increase, or the last document does not end at the end of the shard.
    """
    ends = open_index(folder, shard).astype(np.int64)
    if np.diff(ends, prepend=0).min() < 1 or ends[-1] != shard.tokens:
        path = Path(folder) / f"{shard.name}.index"
        raise DataError(
            f"{path} is damaged: the document end offsets must increase up to {shard.tokens}, the number of tokens in "
            f"the shard; {COPY_ADVICE}",
            code="index_not_increasing",
            key=str(path),
        )
    return ends


def check_tokenizer(folder: str | Path, manifest: Manifest) -> None:
    """Check that the tokenizer in a data folder is the tokenizer that produced the token ids.

    Raises:
        DataError: if the tokenizer file is missing, or its hash differs from the manifest.
    """
    path = Path(folder) / TOKENIZER_FOLDER / manifest.tokenizer_files[0]
    if not path.is_file():
        raise DataError(
            f"the tokenizer file {path} is missing; {COPY_ADVICE}",
            code="file_missing",
            key=str(path),
        )
    if (found := sha256_file(path)) != manifest.tokenizer_sha256:
        raise DataError(
            f"{path} is not the tokenizer that produced the data: its sha256 is {found}, but "
            f"{Path(folder) / MANIFEST_NAME} lists {manifest.tokenizer_sha256}. Restore the original tokenizer, or "
            "prepare the data again",
            code="tokenizer_replaced",
            key=str(path),
        )


def verify_shard(folder: str | Path, manifest: Manifest, shard: Shard) -> None:
    """Check the hashes of a shard and of its index, and that all token ids are in the vocabulary.

    Raises:
        DataError: if a hash differs from the manifest, or an id is not in the vocabulary.
    """
    path = Path(folder) / shard.name
    index_path = path.with_name(path.name + ".index")
    for name, sha256 in ((path, shard.sha256), (index_path, shard.index_sha256)):
        if sha256_file(name) != sha256:
            raise DataError(
                f"{name} was changed or damaged: its sha256 does not match the manifest; {COPY_ADVICE}",
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
    """Return the cross entropy of an add-one-smoothed unigram model, in nats per token.

    Args:
        train_counts: how often each token id occurs in the training data, [vocab_size].
        eval_counts: how often each token id occurs in the evaluation data, [vocab_size].

    Returns:
        The cross entropy on the evaluation data, or None if there are no training or no evaluation tokens.
    """
    if not train_counts.sum() or not eval_counts.sum():
        return None
    log_p = np.log(train_counts + 1.0) - math.log(float(train_counts.sum()) + len(train_counts))
    return float(-(eval_counts * log_p).sum() / eval_counts.sum())
