"""The prepared data on disk: token shards and the manifest that commits them.

    DATA/
      train_00000.ds          token ids, little-endian uint16 (vocabulary <= 65536) or uint32
      train_00000.ds.index    uint64 little-endian: where each document ends, in tokens from the shard's start
      eval_00000.ds ...
      tokenizer/              the tokenizer that made the ids
      manifest.json           written last: a folder without it holds no data

The shard layout is the one datatrove writes. Readers open what the manifest lists and nothing else.
"""

import hashlib
import json
import os
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from train.files import sha256_file, write_durably

SCHEMA = 1
MANIFEST_NAME = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
SPLITS = ("train", "eval")
INDEX_DTYPE = np.dtype("<u8")
UINT16_MAX_VOCABULARY = 1 << 16
READ_BYTES = 16 << 20  # read at a time by whatever goes through a whole shard


class DataError(ValueError):
    """Prepared data (or what was asked of it) cannot be used; the message names the file and the next step."""


def token_dtype(vocab_size: int) -> np.dtype:
    """The on-disk type of token ids below `vocab_size`."""
    return np.dtype("<u2") if vocab_size <= UINT16_MAX_VOCABULARY else np.dtype("<u4")


@dataclass(frozen=True)
class Shard:
    """One `*.ds` file. `bytes` and `sha256` are of the tokens, `index_sha256` of its `*.ds.index`."""

    name: str
    split: str
    tokens: int
    documents: int
    bytes: int
    sha256: str
    index_sha256: str


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` holds.

    `documents` counts {"in", "out", "dropped": {reason: count}}; `text_bytes` is the UTF-8 size of the documents kept.
    Further counts of what was done to documents may stand beside these, by reason or not. Where token ids were
    imported there was no text: `text_key` and `text_bytes` are null.
    `tokenizer_sha256` is the hash of `tokenizer_files[0]`, the file that defined the ids (tokenizer.model or
    tokenizer.json). `unigram_loss` is the cross entropy, in nats per token, of the eval tokens under the
    add-one-smoothed unigram distribution of the train tokens; null when a split is empty. `steps` are the optional
    steps of the preparation with their settings; what they removed is in `documents` as "removed", {step: count}.
    """

    schema: int
    dtype: str
    vocab_size: int
    bos_id: int
    eos_id: int
    tokenizer_sha256: str
    tokenizer_files: list[str]
    inputs: list[str]
    text_key: str | None
    eval_fraction: float
    documents: dict[str, Any]
    text_bytes: int | None
    unigram_loss: float | None
    shards: list[Shard]
    steps: dict[str, Any] = field(default_factory=dict)

    def split_shards(self, split: str) -> list[Shard]:
        """The shards of one split, in the order of their tokens."""
        return [shard for shard in self.shards if shard.split == split]

    def split_tokens(self, split: str) -> int:
        """Tokens in one split."""
        return sum(shard.tokens for shard in self.split_shards(split))

    def split_lines(self) -> list[str]:
        """What the splits hold, in lines for whoever prepared them."""
        lines = []
        for split in SPLITS:
            shards = self.split_shards(split)
            documents = sum(shard.documents for shard in shards)
            lines.append(
                f"{split}: {documents:,} documents, {self.split_tokens(split):,} tokens, {len(shards)} shards"
            )
        if self.unigram_loss is None:
            lines.append(
                "the eval split is empty, which training refuses: prepare again with --overwrite and an "
                f"--eval_fraction above {self.eval_fraction:g}, or with more documents"
            )
        else:
            lines.append(f"unigram loss of the eval split: {self.unigram_loss:.4f} nats per token")
        return lines


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Commit the folder: write the manifest beside its place, flush it to the disk, rename it there."""
    write_durably(folder / MANIFEST_NAME, json.dumps(asdict(manifest), indent=2, ensure_ascii=False) + "\n")


def read_manifest(folder: str | Path) -> Manifest:
    """Read and check `folder/manifest.json`.

    Raises:
        DataError: the folder is missing, is empty, has no manifest, or its manifest is not one of this schema.
    """
    folder = Path(folder)
    remedy = "prepare it with: python train/prepare_data.py --input PATH... --tokenizer DIR --output " + str(
        folder
    )
    if not folder.is_dir():
        state = "is a file, not a folder" if folder.exists() else "does not exist"
        raise DataError(f"data folder {folder} {state}; {remedy}")
    path = folder / MANIFEST_NAME
    if not path.is_file():
        state = (
            "has no manifest.json (unfinished or not prepared data)" if any(folder.iterdir()) else "is empty"
        )
        raise DataError(f"data folder {folder} {state}; {remedy}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is corrupt: not JSON ({error}); {remedy} --overwrite") from error
    try:
        return _parse_manifest(values)
    except DataError as error:
        raise DataError(f"{path} is corrupt: {error}; {remedy} --overwrite") from error


def _parse_manifest(values: Any) -> Manifest:
    _check_keys("manifest", values, Manifest)
    if values["schema"] != SCHEMA:
        raise DataError(f"its schema is {values['schema']!r}, this version reads {SCHEMA}")
    if not isinstance(values["shards"], list):
        raise DataError("'shards' is not a list")
    for index, shard in enumerate(values["shards"]):
        _check_keys(f"shard {index}", shard, Shard)
    manifest = Manifest(**{**values, "shards": [Shard(**shard) for shard in values["shards"]]})
    _check_values(manifest)
    return manifest


def _check_keys(what: str, values: Any, kind: type) -> None:
    if not isinstance(values, dict):
        raise DataError(f"{what} is not a JSON object")
    names = {f.name for f in fields(kind)}
    required = {f.name for f in fields(kind) if f.default_factory is MISSING}
    if missing := sorted(required - values.keys()):
        raise DataError(f"{what} lacks {', '.join(missing)}")
    if unknown := sorted(values.keys() - names):
        raise DataError(f"{what} has unknown keys {', '.join(unknown)}")
    scalars: dict[Any, tuple[type, ...]] = {int: (int,), str: (str,), float: (int, float)}
    scalars |= {kind | None: (*allowed, type(None)) for kind, allowed in scalars.items()}
    for entry in fields(kind):
        allowed = scalars.get(entry.type)
        value = values.get(entry.name)
        if allowed and (not isinstance(value, allowed) or isinstance(value, bool)):
            wanted = getattr(entry.type, "__name__", entry.type)
            raise DataError(f"{what}: '{entry.name}' is {value!r}, not {wanted}")


def _check_values(manifest: Manifest) -> None:
    expected = token_dtype(manifest.vocab_size).name
    if manifest.dtype != expected:
        raise DataError(
            f"dtype {manifest.dtype!r} does not fit vocab_size {manifest.vocab_size} ({expected})"
        )
    names = manifest.tokenizer_files
    if not isinstance(names, list) or not names or any(n != os.path.basename(str(n)) for n in names):
        raise DataError(f"'tokenizer_files' is {names!r}, not a list of at least one file name")
    counts = manifest.documents
    required = {"in": int, "out": int, "dropped": dict}
    if (
        not isinstance(counts, dict)
        or not all(isinstance(counts.get(key), kind) for key, kind in required.items())
        or not all(
            _is_count(v) or isinstance(v, dict) and all(map(_is_count, v.values())) for v in counts.values()
        )
    ):
        raise DataError(f"'documents' is {counts!r}, not the numbers in, out and dropped by reason")
    if not isinstance(manifest.steps, dict):
        raise DataError(f"'steps' is {manifest.steps!r}, not a JSON object")
    itemsize = np.dtype(manifest.dtype).itemsize
    for shard in manifest.shards:
        if shard.split not in SPLITS or shard.name != os.path.basename(shard.name):
            raise DataError(
                f"shard {shard.name!r} of split {shard.split!r}: not a file of this folder and {SPLITS}"
            )
        if shard.tokens < 1 or shard.bytes != shard.tokens * itemsize:
            raise DataError(
                f"{shard.name}: {shard.bytes} bytes are not {shard.tokens} tokens of {manifest.dtype}"
            )
        if not 1 <= shard.documents <= shard.tokens:
            raise DataError(f"{shard.name}: {shard.documents} documents in {shard.tokens} tokens")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_sizes(folder: str | Path, shard: Shard) -> None:
    """Check that a shard and its index are there in full.

    Raises:
        DataError: one is missing or has another size.
    """
    folder = Path(folder)
    index_bytes = shard.documents * INDEX_DTYPE.itemsize
    for name, size in ((shard.name, shard.bytes), (shard.name + ".index", index_bytes)):
        if not (folder / name).is_file():
            raise DataError(
                f"{folder / name} is missing but the manifest lists it; prepare or copy the data again"
            )
        if (found := (folder / name).stat().st_size) != size:
            raise DataError(
                f"{folder / name} has {found} bytes, the manifest says {size}: truncated or not the file that "
                "was prepared; prepare or copy the data again"
            )


def check_tokenizer(folder: str | Path, manifest: Manifest) -> None:
    """Check that the tokenizer beside the shards is the one that made their ids.

    Raises:
        DataError: its file is missing or has another hash than the manifest says.
    """
    path = Path(folder) / TOKENIZER_FOLDER / manifest.tokenizer_files[0]
    if not path.is_file():
        raise DataError(
            f"{path} is missing: the tokenizer that made the data; prepare or copy the data again"
        )
    if (found := sha256_file(path)) != manifest.tokenizer_sha256:
        raise DataError(
            f"{path} is not the tokenizer that made the data: its sha256 is {found}, that of "
            f"{Path(folder) / MANIFEST_NAME} is {manifest.tokenizer_sha256}; put the tokenizer back, or prepare the "
            "data again with the new one"
        )


def verify_shard(folder: str | Path, manifest: Manifest, shard: Shard) -> None:
    """Check the hashes of a shard and its index and every token id, reading each file once.

    Raises:
        DataError: a hash is another one, or an id is beyond the vocabulary.
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
    for name, found, sha256 in ((path, digest.hexdigest(), shard.sha256),
                                (index_path, sha256_file(index_path), shard.index_sha256)):  # fmt: skip
        if found != sha256:
            raise DataError(f"{name} does not have the sha256 of the manifest: its content changed; "
                            "prepare or copy the data again")  # fmt: skip
    if largest_id >= manifest.vocab_size:
        raise DataError(f"{path} holds token id {largest_id}, beyond the vocabulary of "
                        f"{manifest.vocab_size}: prepare the data again")  # fmt: skip
