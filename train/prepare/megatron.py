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
from collections.abc import Iterator
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
BLOCK_TOKENS = 1 << 21  # tokens that are read at a time, unless a document is longer
REMEDY = "the file is damaged or not a Megatron index; copy both files again, or recreate the dataset"
EMPTY = "empty document"
PROGRESS_S = 5.0


# ---------------------------------------------------------------- reading


@dataclass(frozen=True)
class IndexedDataset:
    """A dataset with a checked index.

    Attributes:
        bin: path of the .bin file.
        tokens: [tokens], the ids with their type on disk, memory-mapped.
        ends: int64 [documents], the end of each document in `tokens`.
    """

    bin: Path
    tokens: np.ndarray
    ends: np.ndarray


def open_dataset(prefix: str) -> IndexedDataset:
    """Check every field of PREFIX.idx and the size of PREFIX.bin.

    Raises:
        DataError: a file is missing, is invalid, or does not match the other one; or the dataset is empty or not text.
    """
    idx, bin_path = Path(prefix + ".idx"), Path(prefix + ".bin")
    for path in (idx, bin_path):
        if not path.is_file():
            raise DataError(
                f"{path} does not exist; a dataset consists of PREFIX.idx and PREFIX.bin; pass PREFIX as --input",
                code="file_missing",
                key=str(path),
            )
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
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    tokens = int(lengths.sum(dtype=np.int64))
    is_contiguous = (lengths >= 0).all() and (pointers == starts * dtype.itemsize).all()
    is_increasing = bounds[0] == 0 and bounds[-1] == sequences and (bounds[1:] >= bounds[:-1]).all()
    _require(idx, is_contiguous, "bad_sequences", f"the sequences are not contiguous: {REMEDY}")
    what = f"the document indices do not increase from 0 to {sequences}, the number of sequences: {REMEDY}"
    _require(idx, is_increasing, "bad_document_indices", what)
    _require(idx, not modes.any(), "multimodal", "multimodal data cannot be imported; remove it from --input")
    _require(idx, tokens and documents, "empty_dataset", "the dataset is empty; remove it from --input")
    size, expected = bin_path.stat().st_size, tokens * dtype.itemsize
    what = f"it has {size} bytes, but its index says {expected} ({tokens} tokens of {dtype.name}): {REMEDY}"
    _require(bin_path, size == expected, "wrong_size", what)
    logger.info(
        f"{prefix}: {documents:,} documents, {sequences:,} sequences, {tokens:,} tokens of {dtype.name}"
    )
    return IndexedDataset(
        bin_path, np.memmap(bin_path, dtype, mode="r"), np.append(starts, tokens)[bounds[1:]]
    )


def _read_header(idx: Path) -> tuple[np.dtype, int, int]:
    """Return the type of the ids, the number of sequences and the number of documents."""
    with open(idx, "rb") as file:
        content = file.read(HEADER.size)
    is_index = len(content) == HEADER.size and content.startswith(MAGIC)
    what = (
        f"it begins with {content[: len(MAGIC)]!r}, not with {MAGIC!r}; pass the PREFIX of a Megatron dataset"
    )
    _require(idx, is_index, "not_an_index", what)
    _, version, code, sequences, indices = HEADER.unpack(content)
    what = f"version {version} is not supported; recreate the dataset with a Megatron-LM that writes version {VERSION}"
    _require(idx, version == VERSION, "unknown_version", what)
    allowed = ", ".join(f"{code} {np.dtype(name).name}" for code, name in sorted(INTEGER_TYPES.items()))
    what = f"the ids have type {code}, but token ids must be integers ({allowed}): {REMEDY}"
    _require(idx, code in INTEGER_TYPES, "not_token_ids", what)
    _require(
        idx, indices, "bad_document_indices", f"there is no document index, but there must be one: {REMEDY}"
    )
    return np.dtype(INTEGER_TYPES[code]), sequences, indices - 1


def _require(path: Path, condition: object, code: str, problem: str) -> None:
    if not condition:
        raise DataError(f"{path}: {problem}", code=code, key=str(path))


def read_documents(dataset: IndexedDataset) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield all documents in order, in blocks of whole documents. Memory is bounded by a block or the longest document.

    Yields:
        (tokens [n] with the dtype on disk, end of each document in these tokens).
    """
    begin = done = 0
    while done < len(dataset.ends):
        now = max(int(np.searchsorted(dataset.ends, begin + BLOCK_TOKENS, side="right")), done + 1)
        end = int(dataset.ends[now - 1])
        yield np.array(dataset.tokens[begin:end]), dataset.ends[done:now] - begin
        done, begin = now, end


# ---------------------------------------------------------------- import


@dataclass
class Framing:
    """The addition of missing BOS and EOS to documents, with counts of the changes.

    Attributes:
        eod_id: end-of-document id of the dataset, which is replaced by EOS.
    """

    encoder: TextEncoder
    eod_id: int
    found: int = 0
    empty: int = 0
    bos_added: int = 0
    eos_added: int = 0
    eod_replaced: int = 0

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
            # a single token cannot be both
            has_eos = len(document) > has_bos and bool(document[-1] == eos_id)
            if len(document) > has_bos + has_eos:
                framed = np.empty(len(document) + 2 - has_bos - has_eos, dtype)
                framed[0], framed[-1] = bos_id, eos_id
                framed[1 - has_bos : len(framed) - 1 + has_eos] = document
                documents.append(framed)
                self.bos_added += not has_bos
                self.eos_added += not has_eos
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
    datasets = [open_dataset(prefix) for prefix in args.input]  # before anything is written
    if len({os.path.realpath(dataset.bin) for dataset in datasets}) < len(datasets):
        raise DataError(
            "--input names a dataset twice (directly or by a link); name each one once",
            code="given_twice",
            key="--input",
        )
    total = sum(len(dataset.tokens) for dataset in datasets)
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
    return manifest
