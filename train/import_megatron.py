#!/usr/bin/env python3
"""Import Megatron datasets: `python train/import_megatron.py --input PREFIX... --tokenizer DIR --output DIR`.

A dataset consists of two files, PREFIX.bin and PREFIX.idx, which are not modified. --tokenizer is the folder of the
tokenizer that produced the token ids.

A document can consist of several sequences of the dataset. It is stored as BOS + tokens + EOS. BOS and EOS are added
only where they are missing: Megatron-LM's preprocess_data.py never writes a BOS, and writes an end-of-document id only
with --append-eod. If the end-of-document id is not the tokenizer's EOS, pass it as --eod_id. It is then replaced by
EOS. BOS and EOS inside documents are kept and counted. Documents without tokens are skipped and counted.

Each document is assigned to the train or eval split by a hash of its tokens, so identical documents are always in the
same split. The same datasets and options produce identical files.
"""

import argparse
import logging
import os
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from model import require_packages

require_packages("importing data", "pydantic", "numpy", "sentencepiece", "transformers")

import numpy as np
from tqdm import tqdm

from model.hf_folder import local_folder
from model.keys import between, given_path, unicode
from train.command import command
from train.data.encoder import TextEncoder
from train.data.format import DataError, token_dtype
from train.prepare.corpus import eval_fraction
from train.prepare.output import OutputFolder, SplitWriter
from train.prepare.tokenizer import check_tokenizer

logger = logging.getLogger(__name__)
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
INTEGER_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
BLOCK_TOKENS = 1 << 21  # number of tokens read at a time; a longer document is read as a whole
REMEDY = "the file is damaged or not a Megatron index. Copy both files again, or recreate the dataset"
EMPTY = "empty document"
PROGRESS_S = 5.0


# ---------------------------------------------------------------- reading
#
# PREFIX.idx locates the sequences and documents in PREFIX.bin. All fields are little-endian, without padding:
#
#       9 bytes        MMIDIDX and two zero bytes
#       uint64         version, 1
#       uint8          type of the token ids: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 6 float64, 7 float32, 8 uint16
#       uint64         S, the number of sequences
#       uint64         D + 1, the number of documents plus one
#       int32 [S]      tokens in each sequence
#       int64 [S]      offset of each sequence in PREFIX.bin, in bytes; the sequences are contiguous
#       int64 [D + 1]  number of sequences before each document: first 0, last S
#       int8 [S]       in multimodal datasets only: the mode of each sequence, 0 for text
#     PREFIX.bin       the token ids and nothing else
#
# Two equal document indices mark an empty document. Megatron-LM's preprocess_data.py writes one for an empty text.
# Source of the format: Megatron-LM at d98e8a6 (2026-08-22), megatron/core/datasets/indexed_dataset.py.


@dataclass(frozen=True)
class IndexedDataset:
    """A memory-mapped Megatron dataset with a valid index.

    Attributes:
        bin: path of the .bin file.
        tokens: all token ids, [number of tokens], with the data type of the file.
        ends: int64 [number of documents], the position in `tokens` after the last token of each document.
    """

    bin: Path
    tokens: np.ndarray
    ends: np.ndarray


def open_dataset(prefix: str) -> IndexedDataset:
    """Open the Megatron dataset PREFIX.idx and PREFIX.bin, and check the whole index and the size of PREFIX.bin.

    Raises:
        DataError: if a file is missing or invalid, the two files do not match, or the dataset is empty or multimodal.
    """
    idx, bin_path = Path(prefix + ".idx"), Path(prefix + ".bin")
    for path in (idx, bin_path):
        what = "the file is missing. A Megatron dataset consists of PREFIX.idx and PREFIX.bin. Pass PREFIX as --input"
        _require(path, path.is_file(), "file_missing", what)
    dtype, sequences, documents = _read_header(idx)
    kinds = ("<i4", sequences), ("<i8", sequences), ("<i8", documents + 1), ("<i1", sequences)
    ends = np.cumsum([HEADER.size, *(np.dtype(kind).itemsize * count for kind, count in kinds)], dtype=object)
    size = idx.stat().st_size
    _require(
        idx,
        size in ends[3:],
        "wrong_size",
        f"the file has {size} bytes, but its header lists {sequences} sequences and {documents} documents, which need "
        f"{ends[3]} bytes ({ends[4]} if multimodal): {REMEDY}",
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
    _require(
        idx,
        is_increasing,
        "bad_document_indices",
        f"the document indices must increase from 0 to {sequences}, the number of sequences: {REMEDY}",
    )
    _require(
        idx,
        not modes.any(),
        "multimodal",
        "multimodal data cannot be imported; remove this dataset from --input",
    )
    _require(idx, tokens and documents, "empty_dataset", "the dataset is empty; remove it from --input")
    size, expected = bin_path.stat().st_size, tokens * dtype.itemsize
    _require(
        bin_path,
        size == expected,
        "wrong_size",
        f"the file has {size} bytes, but the index lists {tokens} {dtype.name} tokens, which need {expected} bytes. "
        "Copy both files again, or recreate the dataset",
    )
    logger.info(f"{prefix}: {documents:,} documents, {sequences:,} sequences, {tokens:,} {dtype.name} tokens")
    return IndexedDataset(
        bin_path, np.memmap(bin_path, dtype, mode="r"), np.append(starts, tokens)[bounds[1:]]
    )


def _read_header(idx: Path) -> tuple[np.dtype, int, int]:
    """Read and check the header of an index file.

    Returns:
        The data type of the token ids, the number of sequences, and the number of documents.
    """
    with open(idx, "rb") as file:
        content = file.read(HEADER.size)
    is_index = len(content) == HEADER.size and content.startswith(MAGIC)
    _require(
        idx,
        is_index,
        "not_an_index",
        f"the file begins with {content[: len(MAGIC)]!r}, but a Megatron index begins with {MAGIC!r} and has at least "
        f"{HEADER.size} bytes; pass the PREFIX of a Megatron dataset",
    )
    _, version, code, sequences, indices = HEADER.unpack(content)
    _require(
        idx,
        version == VERSION,
        "unknown_version",
        f"index version {version} is not supported; recreate the dataset with a Megatron-LM release that writes "
        f"version {VERSION}",
    )
    allowed = ", ".join(f"{code} {np.dtype(name).name}" for code, name in sorted(INTEGER_TYPES.items()))
    _require(
        idx,
        code in INTEGER_TYPES,
        "not_token_ids",
        f"the type code of the token ids is {code}, but the ids must be integers (type codes: {allowed}). Copy both "
        "files again, or recreate the dataset with integer ids",
    )
    _require(idx, indices, "bad_document_indices", f"the file contains no document index: {REMEDY}")
    return np.dtype(INTEGER_TYPES[code]), sequences, indices - 1


def _require(path: Path, condition: object, code: str, problem: str) -> None:
    if not condition:
        raise DataError(f"{path}: {problem}", code=code, key=str(path))


def read_documents(dataset: IndexedDataset) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the documents of a dataset in order, in blocks of whole documents.

    A block has at most BLOCK_TOKENS tokens, or consists of a single longer document.

    Yields:
        (token ids of the block, [n] with the data type of the file; end position of each document in the block).
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
    """Adds missing BOS and EOS tokens to imported documents and counts the changes.

    Attributes:
        eod_id: end-of-document id in the dataset, which is replaced with EOS.
        counts: number of documents read ("in"), of documents skipped because they contain only BOS and EOS ("empty"),
            of tokens added ("bos_added", "eos_added"), and of end-of-document ids replaced ("eod_replaced").
    """

    encoder: TextEncoder
    eod_id: int
    counts: Counter[str] = field(default_factory=Counter)

    def frame(self, tokens: np.ndarray, ends: np.ndarray, bin_path: Path) -> list[np.ndarray]:
        """Split a block into documents, and add missing BOS and EOS tokens.

        Documents that contain only BOS and EOS are skipped.

        Args:
            tokens, ends: a block from `read_documents`.
            bin_path: the file named in error messages.

        Raises:
            DataError: if a token id, other than `eod_id`, is not in the vocabulary.
        """
        bos_id, eos_id, dtype = self.encoder.bos_id, self.encoder.eos_id, token_dtype(self.encoder.vocab_size)
        ids = self._checked(tokens, bin_path).astype(dtype, copy=False)
        documents, start = [], 0
        for end in ends.tolist():
            document, start = ids[start:end], end
            has_bos = len(document) > 0 and bool(document[0] == bos_id)
            # a single token cannot be both BOS and EOS
            has_eos = len(document) > has_bos and bool(document[-1] == eos_id)
            if len(document) > has_bos + has_eos:
                framed = np.empty(len(document) + 2 - has_bos - has_eos, dtype)
                framed[0], framed[-1] = bos_id, eos_id
                framed[1 - has_bos : len(framed) - 1 + has_eos] = document
                documents.append(framed)
                self.counts.update(bos_added=not has_bos, eos_added=not has_eos)
        self.counts.update({"in": len(ends), "empty": len(ends) - len(documents)})
        return documents

    def _checked(self, tokens: np.ndarray, bin_path: Path) -> np.ndarray:
        """Return `tokens` with `eod_id` replaced by EOS. Check that all ids are in the vocabulary."""
        vocab_size, eos_id = self.encoder.vocab_size, self.encoder.eos_id
        if self.eod_id != eos_id and (is_eod := tokens == self.eod_id).any():
            tokens = np.where(is_eod, np.array(eos_id, dtype=np.int64), tokens)
            self.counts["eod_replaced"] += int(np.count_nonzero(is_eod))
        for found in (int(tokens.min(initial=0)), int(tokens.max(initial=0))):
            if not 0 <= found < vocab_size:
                remedy = (
                    f", pass --eod_id {found} if this id marks the end of a document" if found > 0 else ""
                )
                raise DataError(
                    f"{bin_path} contains the token id {found}, but the ids of the tokenizer {self.encoder.folder} are "
                    f"0 to {vocab_size - 1}. Pass the tokenizer that produced the dataset{remedy}, or recreate the "
                    "dataset",
                    code="token_beyond_vocabulary",
                    key=str(bin_path),
                )
        return tokens

    def documents(self, counts: dict[str, np.ndarray]) -> dict[str, Any]:
        """Return the document counts for the field "documents" of the manifest.

        Args:
            counts: for each split, how often each token id was written, [vocabulary size].
        """
        total, kept = counts["train"] + counts["eval"], self.counts["in"] - self.counts["empty"]
        same = (
            self.encoder.bos_id == self.encoder.eos_id
        )  # each document then begins and ends with the same id
        return {
            "in": self.counts["in"],
            "out": kept,
            "dropped": {EMPTY: self.counts["empty"]} if self.counts["empty"] else {},
            "removed": {},
            "bos_added": self.counts["bos_added"],
            "eos_added": self.counts["eos_added"],
            "bos_inside": 0 if same else int(total[self.encoder.bos_id]) - kept,
            "eos_inside": int(total[self.encoder.eos_id]) - kept * (1 + same),
            "eod_replaced": self.counts["eod_replaced"],
        }


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--input",
        type=unicode,
        nargs="+",
        required=True,
        metavar="PREFIX",
        help="path prefixes of the Megatron datasets; each dataset consists of the files PREFIX.bin and PREFIX.idx",
    )
    add(
        "--tokenizer",
        type=given_path,
        required=True,
        help="folder with the tokenizer.model or tokenizer.json that was used to create the token ids",
    )
    add("--output", type=given_path, required=True, help="output folder for the prepared data")
    add(
        "--eod_id",
        type=between(0),
        help="token id that ends each document in the datasets (default: the EOS id of the tokenizer)",
    )
    add(
        "--eval_fraction",
        type=eval_fraction,
        default=0.01,
        help="fraction of the documents to put in the eval split; if 1, all data is used for evaluation "
        "(default: 0.01)",
    )
    add(
        "--shard_tokens",
        type=between(1),
        default=1 << 28,
        help="maximum number of tokens per shard (default: 2^28)",
    )
    add("--overwrite", action="store_true", help="replace existing prepared data in --output")
    return parser.parse_args(argv)


@command
def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    encoder = TextEncoder(local_folder(str(args.tokenizer), weights=False))
    check_tokenizer(encoder, [])
    framing = Framing(encoder, encoder.eos_id if args.eod_id is None else args.eod_id)
    datasets = [open_dataset(prefix) for prefix in args.input]  # check all datasets before writing
    if len({os.path.realpath(dataset.bin) for dataset in datasets}) < len(datasets):
        raise DataError(
            "--input contains the same dataset twice, directly or through a link; pass each dataset once",
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
    counts = manifest.documents
    for name in ("bos", "eos"):
        added, inside = counts[f"{name}_added"], counts[f"{name}_inside"]
        print(f"{name.upper()}: added to {added:,} documents, found {inside:,} times inside documents")
    print(f"end-of-document ids (--eod_id) replaced by the EOS id: {counts['eod_replaced']:,}")
    print(f"wrote {args.output}\n{manifest.summary()}")


if __name__ == "__main__":
    sys.exit(main())
