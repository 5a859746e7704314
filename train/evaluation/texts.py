"""Read evaluation data as batches for each rank.

`Packed` reads prepared data as in training. `Documents` reads single documents from prepared data or text, and puts one
document or several packed documents into a row. A row of a batch has the tokens x_0 .. x_n. Each token except x_0 is
predicted from the tokens before it.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from model.fp8.recipes import FP8_TRAIN_ROW_MULTIPLE
from train.data.encoder import TextEncoder
from train.data.format import (
    MANIFEST_NAME,
    TOKENIZER_FOLDER,
    DataError,
    check_sizes,
    check_tokenizer,
    read_index,
    read_manifest,
)
from train.data.order import spread
from train.data.stream import NO_LABEL, Batch, held_out_batches, open_stream, separate_documents
from train.evaluation.models import EvaluationError
from train.prepare.corpus import WORK_NAME, list_sources, read_share
from train.prepare.readers import Damaged, Dropped

logger = logging.getLogger(__name__)
ENCODE_BATCH = 256  # number of documents encoded at a time
SORT_BATCH = 64  # number of batches whose rows are sorted by length, to reduce padding
MAX_EXAMPLES = 5  # maximum number of unreadable documents to log


class Rows(NamedTuple):
    """An evaluation batch with the data source of each row.

    Attributes:
        batch: The token ids and labels.
        sources: Index of the data source of each row.
        documents: Number of documents that begin or end in each row, for the document count of the source. NaN if
            only some samples of the data are read.
    """

    batch: Batch
    sources: list[int]
    documents: list[float]


@dataclass
class Source:
    """A data source for which the evaluation reports a result.

    Attributes:
        name: The name in the report.
        encoder: The tokenizer of the data.
        text_bytes: Size of the text in UTF-8 bytes, or None if only the tokens are known.
    """

    name: str
    encoder: TextEncoder
    text_bytes: int | None = None


def is_prepared(data: str) -> bool:
    """Return whether the path `data` contains prepared data, including data whose preparation is unfinished."""
    return any(any(Path(data).glob(part)) for part in (MANIFEST_NAME, WORK_NAME, "*.ds"))


class Packed:
    """Reader for the eval splits of prepared data. As in training, several documents are packed into each sample.

    Args:
        folders: {name: folder with prepared data}.
        length: Number of tokens per sample.
        size: Number of samples per batch.
        samples: Maximum total number of samples, divided between the sources by size, or None for all samples.
        document_mask: Restrict attention to tokens of the same document, as in training.

    Raises:
        DataError: If a folder cannot be opened, or the folders are incompatible with each other.
    """

    def __init__(
        self, folders: Mapping[str, str], length: int, size: int, samples: int | None, document_mask: bool
    ):
        self.stream = open_stream(folders, None, length, 0, "eval", document_mask, samples)
        self.size = size
        self.sources = [Source(s.name, TextEncoder(s.folder / TOKENIZER_FOLDER)) for s in self.stream.sources]
        self.tokens = self.stream.num_samples * length
        self.is_sampled = self.stream.num_samples < sum(s.num_windows for s in self.stream.sources)
        self.notes: list[str] = []

    def batches(self, rank: int, world: int) -> Iterator[Rows]:
        for samples in self.stream.parts.values():
            for start, rows, batch in held_out_batches(self.stream, self.size, rank, world, samples):
                ids = self.stream.sample_ids(start, rows)
                if rows:
                    yield Rows(batch, [source for source, _ in ids], [self._begun(*each) for each in ids])

    def _begun(self, source: int, window: int) -> float:
        """Return the number of documents that begin in a sample, or NaN if only some samples are evaluated."""
        ends = self.stream.sources[source].document_ends(window)
        return math.nan if self.is_sampled else int(window == 0) + int((ends < self.stream.seq_length).sum())


class Row(NamedTuple):
    """One row of an evaluation batch before padding.

    Attributes:
        tokens: The tokens x_0 .. x_n of the row.
        source: Index of the data source.
        ended: Number of documents that end in the row.
        begins: Positions in the row at which documents begin, except the first document.
    """

    tokens: np.ndarray
    source: int
    ended: int
    begins: np.ndarray


@dataclass
class Documents:
    """Reader that arranges the documents of data sources in rows and batches for the evaluation.

    Attributes:
        length: Maximum number of predicted tokens per row.
        size: Maximum number of rows with `length` tokens per batch.
        one_per_row: Whether each row has tokens from only one document. Otherwise, the documents of a source are packed
            into rows of `length` tokens.
        samples: Maximum number of documents per source, or None for all documents.
        document_mask: Restrict attention to tokens of the same document, and remove the label of the last token of each
            document, as in training.
        multiple: Rows are padded to a multiple of this number of tokens.
        sources: The data sources added so far.
        documents: For each source, the tokens of each document, with BOS and EOS.
        notes: Notes for the report.
    """

    length: int
    size: int
    one_per_row: bool
    samples: int | None = None
    document_mask: bool = False
    multiple: int = FP8_TRAIN_ROW_MULTIPLE
    sources: list[Source] = field(default_factory=list)
    documents: list[list[np.ndarray]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add_prepared(self, name: str, folder: str) -> None:
        """Add the eval split of a folder with prepared data as a source.

        Raises:
            DataError: If a file in the folder is damaged or missing.
        """
        manifest = read_manifest(folder)
        check_tokenizer(folder, manifest)
        documents: list[np.ndarray] = []
        for shard in manifest.split_shards("eval"):
            check_sizes(folder, shard)
            dtype = np.dtype(manifest.dtype).newbyteorder("<")
            tokens = np.memmap(Path(folder) / shard.name, dtype, "r")
            documents += np.split(tokens, read_index(folder, shard)[:-1])
        self.add(Source(name, TextEncoder(Path(folder) / TOKENIZER_FOLDER)), documents)

    def add_text(
        self, name: str, encoder: TextEncoder, text_key: str, split_on: str | None, max_dropped: int
    ) -> None:
        """Add a text file, a folder or a dataset as a source. All inputs of prepare_data.py are accepted.

        Args:
            text_key: Key of the text in records.
            split_on: Separator between documents in .txt files, or None.
            max_dropped: Maximum number of unreadable documents.

        Raises:
            DataError: If the input does not exist or is not accepted.
            EvaluationError: If more than `max_dropped` documents cannot be read, there are no documents, or a file is
                damaged.
        """
        dropped: list[Dropped] = []
        sources = list_sources([name], split_on)
        texts = itertools.islice(_texts(read_share(sources, text_key, 0, 1, split_on), dropped), self.samples)
        text_bytes, documents = 0, list[np.ndarray]()
        while some := list(itertools.islice(texts, ENCODE_BATCH)):
            text_bytes += sum(len(text.encode()) for text in some)
            encoded = encoder.encode_batch(some)
            documents += [np.array([encoder.bos_id, *ids, encoder.eos_id], np.int32) for ids in encoded]
        for item in dropped[:MAX_EXAMPLES]:
            logger.warning(f"unreadable text was dropped: {item}")
        count = sum(item.count for item in dropped)
        if count > max_dropped or not documents:
            # --max_dropped does not help if no document is left
            remedy = f", or pass --max_dropped {count}" * bool(documents)
            raise EvaluationError(
                f"DATA {name}: {len(documents):,} documents can be read, but {count:,} cannot. Repair the documents, "
                f"or pass the key that contains the text as --text_key{remedy}",
                code="unreadable_documents" if documents else "no_text",
                key=name,
            )
        if count:
            self.notes.append(
                f"{name}: {count:,} unreadable documents were dropped (allowed by --max_dropped)"
            )
        self.add(Source(name, encoder, text_bytes), documents)

    def add(self, source: Source, documents: list[np.ndarray]) -> None:
        """Add a source with all its documents, or with `samples` evenly spaced documents if the source has more.

        Raises:
            DataError: If the source has no documents.
        """
        if not documents:
            raise DataError(
                f"DATA {source.name}: the eval split is empty; prepare the data with a larger --eval_fraction"
            )
        if self.samples is not None and len(documents) > self.samples:
            documents = [documents[number] for number in spread(self.samples, len(documents))]
        self.sources.append(source)
        self.documents.append(documents)

    @property
    def tokens(self) -> int:
        """Return the approximate number of predicted tokens in all sources."""
        return sum(len(document) for documents in self.documents for document in documents)

    def batches(self, rank: int, world: int) -> Iterator[Rows]:
        rows = itertools.islice(self._rows(), rank, None, world)
        return make_batches(rows, self.size, self.length, self.multiple, self.document_mask)

    def _rows(self) -> Iterator[Row]:
        for source, documents in enumerate(self.documents):
            for packed in ([document] for document in documents) if self.one_per_row else [documents]:
                yield from self._packed_rows(source, packed)

    def _packed_rows(self, source: int, documents: list[np.ndarray]) -> Iterator[Row]:
        tokens, ends = np.concatenate(documents), np.cumsum([len(document) for document in documents])
        for start in range(0, len(tokens) - 1, self.length):
            stop = min(start + self.length, len(tokens) - 1)
            # Find the documents whose last token is predicted in this row, at one of the positions start + 1 to stop.
            first, behind = np.searchsorted(ends, [start + 2, stop + 2])
            begins = ends[(start < ends) & (ends <= stop)] - start
            yield Row(tokens[start : stop + 1], source, int(behind - first), begins)


def make_batches(
    rows: Iterator[Row], size: int, length: int, multiple: int, document_mask: bool = False
) -> Iterator[Rows]:
    """Yield batches of rows with similar lengths. For the arguments, see `Documents`."""
    while some := list(itertools.islice(rows, SORT_BATCH * size)):
        some.sort(key=lambda row: len(row.tokens))
        while some:
            longest = _padded_length(len(some[-1].tokens) - 1, multiple)
            together = max(1, size * _padded_length(length, multiple) // longest)
            yield _batch(some[-together:], longest, document_mask)
            del some[-together:]


def _texts(items: Iterable, dropped: list[Dropped]) -> Iterator[str]:
    for item in items:
        if isinstance(item, Dropped):
            dropped.append(item)
        elif isinstance(item, Damaged):
            raise EvaluationError(f"DATA is damaged: {item}. Repair or remove the file", code="damaged_text")
        else:
            yield item.text


def _padded_length(tokens: int, multiple: int) -> int:
    return -(-tokens // multiple) * multiple


def _batch(rows: list[Row], length: int, document_mask: bool) -> Rows:
    """Build a batch from rows, padded to `length` tokens.

    The padding repeats the last token of the row and has no labels. It does not change the losses, because attention is
    causal.
    """
    input_ids = np.empty((len(rows), length), dtype=np.int64)
    labels = np.full_like(input_ids, NO_LABEL)
    for index, (tokens, *_) in enumerate(rows):
        count = len(tokens) - 1
        input_ids[index, :count], input_ids[index, count:] = tokens[:-1], tokens[-1]
        labels[index, :count] = tokens[1:]
    documents = None
    if document_mask:
        after = [index * length + row.begins for index, row in enumerate(rows)]
        documents = separate_documents(labels, np.concatenate(after))
    batch = Batch(torch.from_numpy(input_ids), torch.from_numpy(labels), documents)
    return Rows(batch, [row.source for row in rows], [row.ended for row in rows])
