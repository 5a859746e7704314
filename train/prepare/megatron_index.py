"""Megatron-LM's indexed datasets, read-only: PREFIX.idx says where the sequences and documents in PREFIX.bin are.

    PREFIX.idx, little-endian, nothing between the fields:
      9 bytes        MMIDIDX and two zero bytes
      uint64         version, 1
      uint8          type of the token ids: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 6 float64, 7 float32, 8 uint16
      uint64         S, the number of sequences
      uint64         D + 1, the number of documents and one
      int32 [S]      tokens in each sequence
      int64 [S]      byte of PREFIX.bin at which each begins; they stand one behind the other
      int64 [D + 1]  how many sequences precede each document: 0 first, S last
      int8 [S]       in multimodal datasets only, the mode of each sequence: 0 is text
    PREFIX.bin       the token ids and nothing else

Two equal document indices are an empty document, which Megatron-LM's preprocess_data.py writes for an empty text.
Source of the format: Megatron-LM at d98e8a6 (2026-08-22), megatron/core/datasets/indexed_dataset.py.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from train.data.format import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
INTEGER_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
FLOAT_TYPES = {6: "float64", 7: "float32"}
BLOCK_ENTRIES = 1 << 19  # of an array of the index, read at a time
BLOCK_TOKENS = 1 << 21  # read at a time, unless one document has more
REMEDY = "damaged, or not such an index: copy both files again, or make the dataset again"


@dataclass(frozen=True)
class IndexedDataset:
    """A dataset whose index was checked: `dtype` is that of the ids on the disk, `tokens` are in all sequences."""

    prefix: str
    dtype: np.dtype
    sequences: int
    documents: int
    tokens: int

    @property
    def idx(self) -> Path:
        return Path(self.prefix + ".idx")

    @property
    def bin(self) -> Path:
        return Path(self.prefix + ".bin")


@dataclass(frozen=True)
class Block:
    """Whole documents in a row: `tokens` [n] as they are on the disk, `ends` [documents] in tokens from the block's
    start, and the number in the dataset of the first document and of the first token."""

    tokens: np.ndarray
    ends: np.ndarray
    first_document: int
    first_token: int


class _Array:
    """An array inside an open file, of which parts are read; `name` is what messages call one of its entries."""

    def __init__(self, file: BinaryIO, offset: int, dtype: str | np.dtype, count: int) -> None:
        self.file, self.offset, self.dtype, self.count = file, offset, np.dtype(dtype), count

    @property
    def stop(self) -> int:
        """The byte behind the array."""
        return self.offset + self.count * self.dtype.itemsize

    def read(self, first: int, count: int) -> np.ndarray:
        """Entries `first` to `first + count`.

        Raises:
            DataError: the file has become shorter since its size was checked.
        """
        self.file.seek(self.offset + first * self.dtype.itemsize)
        values = np.fromfile(self.file, self.dtype, count)
        if len(values) != count:
            raise DataError(f"{self.file.name} became shorter while it was read: something else writes to it; import "
                            "it when that has ended")  # fmt: skip
        return values

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """(number of its first entry, entries) of each part."""
        for first in range(0, self.count, BLOCK_ENTRIES):
            yield first, self.read(first, min(BLOCK_ENTRIES, self.count - first))

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """The entries with these increasing numbers [n], without holding those between them."""
        values = np.empty(len(numbers), dtype=self.dtype)
        done = 0
        while done < len(numbers):
            first = int(numbers[done])
            stop = min(first + BLOCK_ENTRIES, int(numbers[-1]) + 1)
            now = int(np.searchsorted(numbers, stop))
            values[done:now] = self.read(first, stop - first)[numbers[done:now] - first]
            done = now
        return values


def _index_arrays(file: BinaryIO, sequences: int, documents: int) -> tuple[_Array, _Array, _Array, _Array]:
    """Of the index: sequence lengths, sequence pointers, document indices, and the modes if there are any."""
    lengths = _Array(file, HEADER.size, "<i4", sequences)
    pointers = _Array(file, lengths.stop, "<i8", sequences)
    bounds = _Array(file, pointers.stop, "<i8", documents + 1)
    return lengths, pointers, bounds, _Array(file, bounds.stop, "<i1", sequences)


def open_dataset(prefix: str) -> IndexedDataset:
    """Check every field of PREFIX.idx and the size of PREFIX.bin, in memory that does not grow with them.

    Raises:
        DataError: one of the files is missing, is not what the format says, or does not fit the other one; or the
            dataset is empty, or not of text.
    """
    idx, bin_path = Path(prefix + ".idx"), Path(prefix + ".bin")
    for path in (idx, bin_path):
        if not path.is_file():
            name = Path(prefix)
            hint = f"give the prefix of both, {name.with_suffix('')}" if name.suffix in (".idx", ".bin") else (
                "a dataset is PREFIX.idx and PREFIX.bin, and --input takes its PREFIX")  # fmt: skip
            raise DataError(f"{path} does not exist; {hint}")
    with open(idx, "rb") as file:
        dtype, sequences, documents = _read_header(file, idx.stat().st_size)
        lengths, pointers, bounds, modes = _index_arrays(file, sequences, documents)
        if (size := idx.stat().st_size) not in (bounds.stop, modes.stop):
            raise DataError(f"{idx} has {size} bytes; with the {sequences} sequences and {documents} documents of its "
                            f"header it has {bounds.stop} ({modes.stop} if multimodal): {REMEDY}")  # fmt: skip
        size = bin_path.stat().st_size
        tokens = _check_sequences(lengths, pointers, dtype.itemsize, size)
        _check_documents(bounds, sequences)
        if idx.stat().st_size == modes.stop:
            _check_modes(modes)
    if size != tokens * dtype.itemsize:
        what = "truncated" if size < tokens * dtype.itemsize else "not the file of this index"
        raise DataError(f"{bin_path} has {size} bytes, its index says {tokens * dtype.itemsize} ({tokens} tokens of "
                        f"{dtype.name}): {what}; copy both files again, or make the dataset again")  # fmt: skip
    if not tokens or not documents:
        raise DataError(
            f"{idx} is of an empty dataset ({documents} documents, {tokens} tokens); leave it out"
        )
    return IndexedDataset(prefix, dtype, sequences, documents, tokens)


def _read_header(file: BinaryIO, size: int) -> tuple[np.dtype, int, int]:
    """The type of the ids, the number of sequences, the number of documents."""
    content = file.read(HEADER.size)
    if content[: len(MAGIC)] != MAGIC:
        raise DataError(f"{file.name} begins with {content[: len(MAGIC)]!r}, not with {MAGIC!r}: not the index of a "
                        "Megatron indexed dataset; give the PREFIX of one")  # fmt: skip
    if len(content) < HEADER.size:
        raise DataError(f"{file.name} has {size} bytes, the header alone has {HEADER.size}: {REMEDY}")
    _, version, code, sequences, indices = HEADER.unpack(content)
    if version != VERSION:
        raise DataError(f"{file.name}: byte 9 says version {version}, this program reads {VERSION}; make the dataset "
                        "again with a Megatron-LM that writes that")  # fmt: skip
    if code not in INTEGER_TYPES:
        allowed = ", ".join(f"{code} {np.dtype(name).name}" for code, name in sorted(INTEGER_TYPES.items()))
        found = f"{code} ({FLOAT_TYPES[code]})" if code in FLOAT_TYPES else str(code)
        raise DataError(
            f"{file.name}: byte 17 says ids of type {found}; token ids are integers: {allowed}; {REMEDY}"
        )
    if indices < 1:
        raise DataError(f"{file.name}: byte 26 says 0 document indices, there is one at least: {REMEDY}")
    return np.dtype(INTEGER_TYPES[code]), sequences, indices - 1


def _check_sequences(lengths: _Array, pointers: _Array, itemsize: int, bin_bytes: int) -> int:
    """The tokens of all sequences, which have to stand one behind the other."""
    name, tokens = lengths.file.name, 0
    for first, part in lengths.blocks():
        if (part < 0).any():
            wrong = int(np.argmax(part < 0))
            raise DataError(
                f"{name}: sequence {first + wrong} has the negative length {part[wrong]}: {REMEDY}"
            )
        found = pointers.read(first, len(part))
        expected = (np.cumsum(part, dtype=np.int64) - part + tokens) * itemsize
        if (found != expected).any():
            wrong = int(np.argmax(found != expected))
            beyond = f", beyond the {bin_bytes} bytes of the .bin" if found[wrong] > bin_bytes else ""
            raise DataError(f"{name}: sequence {first + wrong} begins at byte {found[wrong]}{beyond}; the sequences "
                            f"before it end at {expected[wrong]}: {REMEDY}")  # fmt: skip
        tokens += int(part.sum(dtype=np.int64))
    return tokens


def _check_documents(bounds: _Array, sequences: int) -> None:
    name, before = bounds.file.name, 0
    for first, part in bounds.blocks():
        if first == 0 and part[0] != 0:
            raise DataError(f"{name}: document index 0 is {part[0]}, it has to be 0: {REMEDY}")
        previous = np.concatenate([[before], part[:-1]])
        if (part < previous).any():
            wrong = int(np.argmax(part < previous))
            raise DataError(f"{name}: document index {first + wrong} is {part[wrong]}, less than the one before it, "
                            f"{previous[wrong]}: {REMEDY}")  # fmt: skip
        before = int(part[-1])
    if before != sequences:
        raise DataError(f"{name}: the last document index, {bounds.count - 1}, is {before}; it has to be the number "
                        f"of sequences, {sequences}: {REMEDY}")  # fmt: skip


def _check_modes(modes: _Array) -> None:
    for first, part in modes.blocks():
        if part.any():
            wrong = int(np.argmax(part != 0))
            raise DataError(f"{modes.file.name}: sequence {first + wrong} has the mode {part[wrong]}: multimodal "
                            "data, of which only text (mode 0) can be imported; leave it out")  # fmt: skip


def read_blocks(dataset: IndexedDataset) -> Iterator[Block]:
    """All documents in their order. Memory is that of a block, or of the longest document if that is longer.

    Raises:
        DataError: a file has become shorter since `open_dataset`.
    """
    itemsize, start = dataset.dtype.itemsize, 0
    with open(dataset.idx, "rb") as idx_file, open(dataset.bin, "rb") as bin_file:
        _, pointers, bounds, _ = _index_arrays(idx_file, dataset.sequences, dataset.documents)
        tokens = _Array(bin_file, 0, dataset.dtype, dataset.tokens)
        for first in range(0, dataset.documents, BLOCK_ENTRIES):
            numbers = bounds.read(first + 1, min(BLOCK_ENTRIES, dataset.documents - first))
            inner = int(
                np.searchsorted(numbers, dataset.sequences)
            )  # those behind end with the last sequence
            ends = np.full(len(numbers), dataset.tokens, dtype=np.int64)
            ends[:inner] = pointers.take(numbers[:inner]) // itemsize
            done = 0
            while done < len(ends):
                now = max(int(np.searchsorted(ends, start + BLOCK_TOKENS, side="right")), done + 1)
                stop = int(ends[now - 1])
                yield Block(tokens.read(start, stop - start), ends[done:now] - start, first + done, start)
                done, start = now, stop
