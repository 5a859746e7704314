"""Read evaluation data as batches of one rank.

`Packed` reads prepared data as in training. `Documents` reads the documents of prepared data or text, packed or one per
row. A row has the tokens x_0 .. x_n; each token but x_0 is predicted from the tokens before it.
Shapes: B rows, T tokens.
"""

from __future__ import annotations

import itertools
import logging
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
    open_index,
    read_manifest,
)
from train.data.order import spread
from train.data.stream import NO_LABEL, Batch, held_out_batches, open_stream, separate_documents
from train.evaluation.models import EvaluationError
from train.prepare.corpus import WORK_NAME, list_sources, read_share
from train.prepare.readers import Damaged, Dropped

logger = logging.getLogger(__name__)
ENCODE_BATCH = 256  # documents
SORT_BATCH = 64  # batches; rows of similar length are batched together to reduce padding
MAX_EXAMPLES = 5  # number of unreadable documents to log


class Rows(NamedTuple):
    """A batch of rows. Row b belongs to source `sources[b]` and contains the ends of `ended[b]` documents."""

    batch: Batch
    sources: list[int]
    ended: list[int]


@dataclass
class Source:
    """A source with its own result.

    Attributes:
        name: The name of the source.
        encoder: Its tokenizer.
        text_bytes: UTF-8 bytes of its text. None: only its tokens are known.
    """

    name: str
    encoder: TextEncoder
    text_bytes: int | None = None


def is_prepared(data: str) -> bool:
    """Return whether `data` are prepared, even incompletely; a missing manifest is reported when they are opened."""
    return any(any(Path(data).glob(part)) for part in (MANIFEST_NAME, WORK_NAME, "*.ds"))


class Packed:
    """The eval splits of prepared folders as in training: windows of a stream of documents.

    Args:
        folders: Name -> prepared folder.
        length: Tokens per sample.
        size: Samples per batch.
        samples: The maximum number of samples in total, evenly spread over the sources. None: all.
        document_mask: Restrict attention to documents, as in training.

    Raises:
        DataError: See `open_stream`.
    """

    def __init__(
        self, folders: Mapping[str, str], length: int, size: int, samples: int | None, document_mask: bool
    ):
        self.stream = open_stream(folders, None, length, 0, "eval", document_mask, samples)
        self.size = size
        self.sources = [Source(s.name, TextEncoder(s.folder / TOKENIZER_FOLDER)) for s in self.stream.sources]
        self.tokens = self.stream.num_samples * length
        self.notes: list[str] = []

    def batches(self, rank: int, world: int) -> Iterator[Rows]:
        for start, rows, batch in held_out_batches(self.stream, self.size, rank, world):
            if rows:
                ids = self.stream.sample_ids(start, rows)
                ended = [len(self.stream.sources[source].document_ends(window)) for source, window in ids]
                yield Rows(batch, [source for source, _ in ids], ended)


class Row(NamedTuple):
    """A row of tokens x_0 .. x_n.

    Attributes:
        tokens: The tokens.
        source: Index of the source.
        ended: Number of documents that end in the row.
        context: Number of leading predicted tokens that are not counted, because another row counts them.
        begins: Positions at which documents begin, except the first.
    """

    tokens: np.ndarray
    source: int
    ended: int
    context: int = 0
    begins: np.ndarray = np.empty(0, dtype=np.int64)


@dataclass
class Documents:
    """The documents of sources, in rows of up to `length` predicted tokens and batches of up to `size` such rows.

    Attributes:
        length: Maximum number of predicted tokens per row.
        size: Maximum number of rows of this length per batch.
        stride: None: pack the documents of a source into rows of `length`. Otherwise each row has one document. A
            longer document has a row every `stride` tokens; each row counts only the tokens that earlier rows have not
            predicted.
        samples: Maximum number of documents per source. None: all.
        document_mask: As in training, restrict attention to documents; their last token has no label.
        multiple: Rows are padded to a multiple of this number of tokens.
        sources: The sources.
        documents: Tokens with BOS and EOS, by source.
        notes: Notes for the report.
    """

    length: int
    size: int
    stride: int | None
    samples: int | None = None
    document_mask: bool = False
    multiple: int = FP8_TRAIN_ROW_MULTIPLE
    sources: list[Source] = field(default_factory=list)
    documents: list[list[np.ndarray]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add_prepared(self, name: str, folder: str) -> None:
        """Add the eval split of a prepared folder.

        Raises:
            DataError: Its files are damaged or inconsistent.
        """
        manifest = read_manifest(folder)
        check_tokenizer(folder, manifest)
        documents: list[np.ndarray] = []
        for shard in manifest.split_shards("eval"):
            check_sizes(folder, shard)
            ends = open_index(folder, shard)
            if np.any(ends[1:] <= ends[:-1]) or int(ends[-1]) != shard.tokens:
                raise DataError(
                    f"{Path(folder) / shard.name}.index is damaged: the document ends are not increasing; "
                    "prepare or copy the data again"
                )
            dtype = np.dtype(manifest.dtype).newbyteorder("<")
            documents += np.split(
                np.memmap(Path(folder) / shard.name, dtype, "r"), ends[:-1].astype(np.int64)
            )
        self.add(Source(name, TextEncoder(Path(folder) / TOKENIZER_FOLDER)), documents)

    def add_text(
        self, name: str, encoder: TextEncoder, text_key: str, split_on: str | None, max_dropped: int
    ) -> None:
        """Add text that train/prepare can read, such as a file or a folder.

        Raises:
            DataError: See `list_sources`.
            EvaluationError: More than `max_dropped` documents cannot be read, there is no document, or a file is
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
            logger.warning(f"dropped: {item}")
        count = sum(item.count for item in dropped)
        if count > max_dropped or not documents:
            remedy = f"repair them, set the key of the text with --text_key, or pass --max_dropped {count}"
            raise EvaluationError(
                f"DATA {name}: {count:,} documents cannot be read, {len(documents):,} can be read; {remedy}",
                code="unreadable_documents" if documents else "no_text",
                key=name,
            )
        if count:
            self.notes.append(f"{name}: {count:,} unreadable documents were dropped (--max_dropped)")
        self.add(Source(name, encoder, text_bytes), documents)

    def add(self, source: Source, documents: list[np.ndarray]) -> None:
        """Add documents of a source, at most `samples`, evenly spaced.

        Raises:
            DataError: There is no document.
        """
        if not documents:
            raise DataError(
                f"DATA {source.name}: the eval split has no document; prepare the data with a larger eval split"
            )
        if self.samples is not None and len(documents) > self.samples:
            documents = [documents[number] for number in spread(self.samples, len(documents))]
        self.sources.append(source)
        self.documents.append(documents)

    @property
    def tokens(self) -> int:
        """The approximate number of predicted tokens."""
        return sum(len(document) for documents in self.documents for document in documents)

    def batches(self, rank: int, world: int) -> Iterator[Rows]:
        rows = itertools.islice(self._rows(), rank, None, world)
        while some := list(itertools.islice(rows, SORT_BATCH * self.size)):
            some.sort(key=lambda row: len(row.tokens))
            while some:
                longest = _padded_length(len(some[-1].tokens) - 1, self.multiple)
                together = max(1, self.size * _padded_length(self.length, self.multiple) // longest)
                yield _batch(some[-together:], longest, self.document_mask)
                del some[-together:]

    def _rows(self) -> Iterator[Row]:
        for source, documents in enumerate(self.documents):
            if self.stride is None:
                yield from self._packed_rows(source, documents)
            else:
                for tokens in documents:
                    yield from self._document_rows(source, tokens, self.stride)

    def _document_rows(self, source: int, tokens: np.ndarray, stride: int) -> Iterator[Row]:
        predicted, last = 0, len(tokens) - 1
        for start in range(0, last, stride):
            stop = min(start + self.length, last)
            yield Row(tokens[start : stop + 1], source, int(stop == last), predicted - start)
            predicted = stop
            if stop == last:
                return

    def _packed_rows(self, source: int, documents: list[np.ndarray]) -> Iterator[Row]:
        tokens, ends = np.concatenate(documents), np.cumsum([len(document) for document in documents])
        for start in range(0, len(tokens) - 1, self.length):
            stop = min(start + self.length, len(tokens) - 1)
            # documents whose last token is predicted, that is one of the tokens start + 1 to stop
            first, behind = np.searchsorted(ends, [start + 2, stop + 2])
            begins = ends[(start < ends) & (ends <= stop)] - start
            yield Row(tokens[start : stop + 1], source, int(behind - first), begins=begins)


def _texts(items: Iterable, dropped: list[Dropped]) -> Iterator[str]:
    for item in items:
        if isinstance(item, Dropped):
            dropped.append(item)
        elif isinstance(item, Damaged):
            raise EvaluationError(f"DATA {item}; repair or remove the file", code="damaged_text")
        else:
            yield item.text


def _padded_length(tokens: int, multiple: int) -> int:
    return -(-tokens // multiple) * multiple


def _batch(rows: list[Row], length: int, document_mask: bool) -> Rows:
    """Build a batch of rows, padded to `length`.

    Padding repeats the last token of a row without labels. Attention is causal, so it does not change the losses.
    """
    input_ids = np.empty((len(rows), length), dtype=np.int64)
    labels = np.full_like(input_ids, NO_LABEL)
    for index, (tokens, _, _, context, _) in enumerate(rows):
        count = len(tokens) - 1
        input_ids[index, :count], input_ids[index, count:] = tokens[:-1], tokens[-1]
        labels[index, context:count] = tokens[1 + context :]
    documents = None
    if document_mask:
        after = [index * length + row.begins for index, row in enumerate(rows)]
        documents = separate_documents(labels, np.concatenate(after))
    batch = Batch(torch.from_numpy(input_ids), torch.from_numpy(labels), documents)
    return Rows(batch, [row.source for row in rows], [row.ended for row in rows])
