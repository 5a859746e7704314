"""Import Megatron-LM's indexed datasets into prepared data: check the ids, and add BOS and EOS to each document.

PREFIX.idx locates the sequences and documents in PREFIX.bin. All fields are little-endian, without padding:

      9 bytes        MMIDIDX and two zero bytes
      uint64         version, 1
      uint8          type of the token ids: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 6 float64, 7 float32, 8 uint16
      uint64         S, the number of sequences
      uint64         D + 1, the number of documents plus one
      int32 [S]      tokens in each sequence
      int64 [S]      offset of each sequence in PREFIX.bin, in bytes; the sequences are contiguous
      int64 [D + 1]  number of sequences before each document: first 0, last S
      int8 [S]       in multimodal datasets only: the mode of each sequence, 0 for text
    PREFIX.bin       the token ids and nothing else

Two equal document indices mean an empty document, which Megatron-LM's preprocess_data.py writes for an empty text.
Source of the format: Megatron-LM at d98e8a6 (2026-08-22), megatron/core/datasets/indexed_dataset.py.
"""

import argparse
import logging
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from model.hub import local_folder
from train.data.encoder import TextEncoder
from train.data.format import DataError, Manifest, token_dtype
from train.prepare.output import OutputFolder, SplitWriter
from train.prepare.tokenizer import check_tokenizer

logger = logging.getLogger(__name__)
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
INTEGER_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
BLOCK_ENTRIES = 1 << 19  # entries of an index array that are checked at a time
BLOCK_TOKENS = 1 << 21  # tokens that are read at a time, unless a document is longer
REMEDY = "the file is damaged or not a Megatron index; copy both files again, or recreate the dataset"
EMPTY = "empty document"
SHARE_TO_WARN = 0.9  # share of the documents that end in the same token other than EOS
PROGRESS_S = 5.0


# ---------------------------------------------------------------- reading


@dataclass(frozen=True)
class IndexedDataset:
    """A dataset with a checked index.

    Attributes:
        bin: path of the .bin file.
        dtype: type of the ids on disk.
        tokens: number of tokens in all sequences.
        pointers: [S], offset of each sequence in bytes, memory-mapped.
        bounds: [D + 1], number of sequences before each document, memory-mapped.
    """

    bin: Path
    dtype: np.dtype
    tokens: int
    pointers: np.ndarray
    bounds: np.ndarray

    @property
    def documents(self) -> int:
        return len(self.bounds) - 1


def open_dataset(prefix: str) -> IndexedDataset:
    """Check every field of PREFIX.idx and the size of PREFIX.bin, with constant memory.

    Raises:
        DataError: a file is missing, is invalid, or does not match the other one; or the dataset is empty or not text.
    """
    idx, bin_path = Path(prefix + ".idx"), Path(prefix + ".bin")
    for path in (idx, bin_path):
        if not path.is_file():
            name = Path(prefix)
            hint = f"pass the prefix of both files, {name.with_suffix('')}" if name.suffix in (".idx", ".bin") else (
                "a dataset consists of PREFIX.idx and PREFIX.bin; pass PREFIX as --input")  # fmt: skip
            raise DataError(f"{path} does not exist; {hint}", code="file_missing", key=str(path))
    dtype, sequences, documents = _read_header(idx)
    kinds = ("<i4", sequences), ("<i8", sequences), ("<i8", documents + 1), ("<i1", sequences)
    ends = np.cumsum([HEADER.size, *(np.dtype(kind).itemsize * count for kind, count in kinds)], dtype=object)
    if (size := idx.stat().st_size) not in ends[3:]:
        raise DataError(
            f"{idx} has {size} bytes, but the {sequences} sequences and {documents} documents in its header need "
            f"{ends[3]} ({ends[4]} if multimodal): {REMEDY}",
            code="wrong_size",
            key=str(idx),
        )
    content = np.memmap(idx, mode="r")
    lengths, pointers, bounds, modes = (
        np.asarray(content[start:end]).view(kind)
        for (kind, _), start, end in zip(kinds, ends, ends[1:], strict=False)
    )
    tokens = _check_sequences(idx, lengths, pointers, dtype.itemsize)
    if bounds[0] != 0 or bounds[-1] != sequences or any((b[1:] < b[:-1]).any() for b in _blocks(bounds, 1)):
        raise DataError(
            f"{idx}: the document indices do not increase from 0 to {sequences}, the number of sequences: {REMEDY}",
            code="bad_document_indices",
            key=str(idx),
        )
    if any(block.any() for block in _blocks(modes)):
        raise DataError(
            f"{idx} contains multimodal data, but only text (mode 0) can be imported; remove it from --input",
            code="multimodal",
            key=str(idx),
        )
    if (size := bin_path.stat().st_size) != tokens * dtype.itemsize:
        what = "it is truncated" if size < tokens * dtype.itemsize else "it does not belong to this index"
        raise DataError(
            f"{bin_path} has {size} bytes, but its index says {tokens * dtype.itemsize} ({tokens} tokens of "
            f"{dtype.name}): {what}; copy both files again, or recreate the dataset",
            code="wrong_size",
            key=str(bin_path),
        )
    if not tokens or not documents:
        raise DataError(
            f"{idx}: the dataset is empty ({documents} documents, {tokens} tokens); remove it from --input",
            code="empty_dataset",
            key=str(idx),
        )
    return IndexedDataset(bin_path, dtype, tokens, pointers, bounds)


def _read_header(idx: Path) -> tuple[np.dtype, int, int]:
    """Return the type of the ids, the number of sequences and the number of documents."""
    with open(idx, "rb") as file:
        content = file.read(HEADER.size)
    if len(content) < HEADER.size or content[: len(MAGIC)] != MAGIC:
        raise DataError(
            f"{idx} begins with {content[: len(MAGIC)]!r}, not with {MAGIC!r}, so it is not the index of a Megatron "
            "dataset; pass the PREFIX of one",
            code="not_an_index",
            key=str(idx),
        )
    _, version, code, sequences, indices = HEADER.unpack(content)
    if version != VERSION:
        raise DataError(
            f"{idx} has version {version}, but only version {VERSION} is supported; recreate the dataset with a "
            f"Megatron-LM that writes version {VERSION}",
            code="unknown_version",
            key=str(idx),
        )
    if code not in INTEGER_TYPES:
        allowed = ", ".join(f"{code} {np.dtype(name).name}" for code, name in sorted(INTEGER_TYPES.items()))
        raise DataError(
            f"{idx} has ids of type {code}, but token ids must be integers ({allowed}): {REMEDY}",
            code="not_token_ids",
            key=str(idx),
        )
    if indices < 1:
        raise DataError(
            f"{idx} has 0 document indices, but there must be at least one: {REMEDY}",
            code="bad_document_indices",
            key=str(idx),
        )
    return np.dtype(INTEGER_TYPES[code]), sequences, indices - 1


def _blocks(array: np.ndarray, overlap: int = 0) -> Iterator[np.ndarray]:
    """Yield the array in blocks, each with the first `overlap` entries of the next one."""
    for first in range(0, len(array), BLOCK_ENTRIES):
        yield array[first : first + BLOCK_ENTRIES + overlap]


def _check_sequences(idx: Path, lengths: np.ndarray, pointers: np.ndarray, itemsize: int) -> int:
    """Check that the sequences are contiguous, and return their total number of tokens."""
    tokens = 0
    for part, begins in zip(_blocks(lengths), _blocks(pointers), strict=True):
        expected = (np.cumsum(part, dtype=np.int64) - part + tokens) * itemsize
        if (part < 0).any() or (begins != expected).any():
            raise DataError(
                f"{idx}: the sequences are not contiguous: {REMEDY}",
                code="bad_sequences",
                key=str(idx),
            )
        tokens += int(part.sum(dtype=np.int64))
    return tokens


def read_documents(dataset: IndexedDataset) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield all documents in order, in blocks of whole documents. Memory is bounded by a block or the longest document.

    Yields:
        (tokens [n] with the dtype on disk, end of each document in these tokens).

    Raises:
        DataError: the .bin was truncated after `open_dataset`.
    """
    begin = 0
    with open(dataset.bin, "rb") as file:
        for numbers in _blocks(dataset.bounds[1:]):
            ends = np.full(len(numbers), dataset.tokens)
            inner = numbers < len(dataset.pointers)  # the others end with the last sequence
            ends[inner] = dataset.pointers[numbers[inner]] // dataset.dtype.itemsize
            done = 0
            while done < len(ends):
                now = max(int(np.searchsorted(ends, begin + BLOCK_TOKENS, side="right")), done + 1)
                tokens = np.fromfile(file, dataset.dtype, int(ends[now - 1]) - begin)
                if len(tokens) != ends[now - 1] - begin:
                    raise DataError(
                        f"{dataset.bin} was truncated while it was read, because another process writes to it; "
                        "import it after that process has ended",
                        code="file_shrank",
                        key=str(dataset.bin),
                    )
                yield tokens, ends[done:now] - begin
                done, begin = now, int(ends[now - 1])


# ---------------------------------------------------------------- import


@dataclass
class Framing:
    """The addition of missing BOS and EOS to documents, with counts of the changes.

    Attributes:
        eod_id: end-of-document id of the dataset, which is replaced by EOS.
        last_ids: [V], counts the last tokens of the documents without EOS.
    """

    encoder: TextEncoder
    eod_id: int
    found: int = 0
    empty: int = 0
    bos_added: int = 0
    eos_added: int = 0
    eod_replaced: int = 0

    def __post_init__(self) -> None:
        self.last_ids = np.zeros(self.encoder.vocab_size, dtype=np.int64)

    def frame(self, tokens: np.ndarray, ends: np.ndarray, bin_path: Path) -> list[np.ndarray]:
        """Return the documents of a block of `read_documents` with BOS and EOS. Skip documents without other tokens.

        Raises:
            DataError: an id other than `eod_id` is negative or beyond the vocabulary.
        """
        bos_id, eos_id, dtype = self.encoder.bos_id, self.encoder.eos_id, token_dtype(self.encoder.vocab_size)
        ids = self._checked(tokens, bin_path).astype(dtype, copy=False)
        documents, start = [], 0
        for end in ends.tolist():
            document, start = ids[start:end], end
            has_bos = len(document) > 0 and bool(document[0] == bos_id)
            has_eos = len(document) > has_bos and bool(
                document[-1] == eos_id
            )  # a single token cannot be both
            if len(document) > has_bos + has_eos:
                framed = np.empty(len(document) + 2 - has_bos - has_eos, dtype)
                framed[0], framed[-1] = bos_id, eos_id
                framed[1 - has_bos : len(framed) - 1 + has_eos] = document
                documents.append(framed)
                self.bos_added += not has_bos
                self.eos_added += not has_eos
                self.last_ids[document[-1]] += not has_eos
        self.found += len(ends)
        self.empty += len(ends) - len(documents)
        return documents

    def _checked(self, tokens: np.ndarray, bin_path: Path) -> np.ndarray:
        """Return the tokens with `eod_id` replaced by EOS, after checking that all are in the vocabulary."""
        vocab_size, eos_id = self.encoder.vocab_size, self.encoder.eos_id
        if self.eod_id != eos_id and (is_eod := tokens == self.eod_id).any():
            tokens = np.where(is_eod, np.array(eos_id, dtype=np.int64), tokens)
            self.eod_replaced += int(np.count_nonzero(is_eod))
        for found in (int(tokens.min(initial=0)), int(tokens.max(initial=0))):
            if not 0 <= found < vocab_size:
                remedy = f" (or with --eod_id {found}, if this id ends its documents)" if found > 0 else ""
                raise DataError(
                    f"{bin_path} has the id {found}, but the vocabulary of {self.encoder.folder} is 0 to "
                    f"{vocab_size - 1}; import the dataset with the tokenizer that produced it{remedy}, or recreate it",
                    code="token_beyond_vocabulary",
                    key=str(bin_path),
                )
        return tokens

    def documents(self, counts: dict[str, np.ndarray]) -> dict[str, Any]:
        """Return the manifest's field "documents".

        Args:
            counts: the number of each written token by split, [V] each.
        """
        total, kept = counts["train"] + counts["eval"], self.found - self.empty
        same = self.encoder.bos_id == self.encoder.eos_id  # then it is both first and last
        return {
            "in": self.found,
            "out": kept,
            "dropped": {EMPTY: self.empty} if self.empty else {},
            "removed": {},
            "bos_added": self.bos_added,
            "eos_added": self.eos_added,
            "bos_inside": 0 if same else int(total[self.encoder.bos_id]) - kept,
            "eos_inside": int(total[self.encoder.eos_id]) - kept * (1 + same),
            "eod_replaced": self.eod_replaced,
        }

    def likely_eod(self) -> str:
        """Return a warning if nearly all documents end in one id other than EOS, probably the EOD id; else ""."""
        most = int(self.last_ids.argmax())
        number, kept = int(self.last_ids[most]), self.found - self.empty
        if kept < 2 or number < SHARE_TO_WARN * kept:
            return ""
        return (f"{number:,} of {kept:,} documents end in the id {most}, not in the tokenizer's EOS; if it is the "
                f"end-of-document id of the datasets, import them with --eod_id {most} --overwrite")  # fmt: skip


def open_all(prefixes: Sequence[str]) -> list[IndexedDataset]:
    """Open and check all datasets before anything is written.

    Raises:
        DataError: a dataset is invalid or given twice.
    """
    datasets: dict[str, IndexedDataset] = {}
    for prefix in prefixes:
        dataset = open_dataset(prefix)
        if (real := os.path.realpath(dataset.bin)) in datasets:
            raise DataError(
                f"{dataset.bin} is given twice (directly or by a link); name each dataset once",
                code="given_twice",
                key=str(dataset.bin),
            )
        datasets[real] = dataset
        logger.info(
            f"{prefix}: {dataset.documents:,} documents, {len(dataset.pointers):,} sequences, {dataset.tokens:,} "
            f"tokens of {dataset.dtype.name}"
        )
    return list(datasets.values())


def import_datasets(args: argparse.Namespace) -> Manifest:
    """Import datasets into a folder and return its manifest.

    Args:
        args: the options of import_megatron.py.

    Raises:
        DataError: a dataset, the tokenizer or the output folder is invalid, or a split has no document.
        OSError: a file cannot be read or written.
    """
    encoder = TextEncoder(local_folder(str(args.tokenizer), weights=False))
    check_tokenizer(encoder, [])
    framing = Framing(encoder, encoder.eos_id if args.eod_id is None else args.eod_id)
    datasets = open_all(args.input)
    total = sum(dataset.tokens for dataset in datasets)
    folder = OutputFolder(args.output, encoder, args.overwrite)
    with folder.open():
        writer = SplitWriter(folder.new, encoder.vocab_size, args.eval_fraction, args.shard_tokens)
        with tqdm(
            total=total, desc="imported", unit="token", unit_scale=True, mininterval=PROGRESS_S
        ) as progress:
            for dataset in datasets:
                for tokens, ends in read_documents(dataset):
                    documents = framing.frame(tokens, ends, dataset.bin)
                    writer.write(documents, [document.data for document in documents])
                    progress.update(len(tokens))
        shards = writer.close()
        manifest = folder.commit(
            shards,
            writer.counts,
            inputs=args.input,
            text_key=None,
            eval_fraction=args.eval_fraction,
            documents=framing.documents(writer.counts),
            text_bytes=None,
        )
    if args.eod_id is None and (warning := framing.likely_eod()):
        logger.warning(warning)
    return manifest
