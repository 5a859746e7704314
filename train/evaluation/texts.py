"""DATA -> the batches of one rank: prepared data as training evaluates on it (`Packed`), or documents of prepared data
and of text (`Documents`), each alone or one behind the other.

A row has the tokens x_0 .. x_n; each but x_0 is predicted from those before it. Shapes: B rows, T tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    read_manifest,
)
from train.data.index import open_index
from train.data.order import spread
from train.data.stream import NO_LABEL, Batch, held_out_batches, open_stream, separate_documents
from train.evaluation.models import EvaluationError
from train.prepare.corpus import list_sources, read_share, text_key_option
from train.prepare.output import WORK_NAME
from train.prepare.readers import Damaged, Dropped

ENCODED_TOGETHER = 256  # documents
SORTED_TOGETHER = 64  # batches: rows of one length go together, so that little is padded
SHOWN = 5  # of what cannot be read


class Rows(NamedTuple):
    """A batch: the rows, of which each is of source `sources[b]` and holds the ends of `ended[b]` documents."""

    batch: Batch
    sources: list[int]
    ended: list[int]


@dataclass
class Source:
    """What is told of a source by itself. text_bytes: UTF-8 bytes of its text, None where only its tokens are known.
    asked: False where none of the samples that were asked for is its own, so that there is nothing to tell."""

    name: str
    encoder: TextEncoder
    text_bytes: int | None = None
    asked: bool = True


def is_prepared(data: str) -> bool:
    """Also data that are not whole, as their manifest, which is not there, will say."""
    return any(any(Path(data).glob(part)) for part in (MANIFEST_NAME, WORK_NAME, "*.ds"))


class Packed:
    """The eval splits of prepared folders, {name: folder}, as training evaluates on them: windows of a stream of
    documents, spread evenly over the sources. `samples`: at most so many of all.

    Raises DataError: as open_stream.
    """

    def __init__(
        self, folders: Mapping[str, str], length: int, size: int, samples: int | None, document_mask: bool
    ):
        self.stream = open_stream(folders, None, length, 0, "eval", document_mask, samples)
        self.size, self.samples = size, self.stream.num_samples
        self.sources = [Source(s.name, TextEncoder(s.folder / TOKENIZER_FOLDER)) for s in self.stream.sources]
        self.tokens = self.samples * length
        self.notes = []
        if self.samples < (found := sum(source.num_windows for source in self.stream.sources)):
            self.notes = [f"{self.samples:,} of {found:,} samples (--max_samples)"]
            its = {source for source, _ in self.stream.sample_ids(0, self.samples)}
            for index, source in enumerate(self.sources):
                source.asked = index in its
                if not source.asked:
                    self.notes.append(
                        f"{source.name}: none of these samples, so it has no line; ask for more"
                    )
        elif left := sum(s.num_tokens - s.num_windows * length - 1 for s in self.stream.sources):
            self.notes = [
                f"the last {left:,} tokens fill no sample of {length} and are left out, as in training"
            ]

    def batches(self, rank: int, world: int) -> Iterator[Rows]:
        for start, rows, batch in held_out_batches(self.stream, self.size, rank, world):
            if rows:
                ids = self.stream.sample_ids(start, rows)
                ended = [len(self.stream.sources[source].document_ends(window)) for source, window in ids]
                yield Rows(batch, [source for source, _ in ids], ended)


@dataclass
class Part:
    """Documents one behind the other: their tokens, with BOS and EOS, and where each ends among these."""

    tokens: np.ndarray
    ends: np.ndarray


class Row(NamedTuple):
    """tokens x_0 .. x_n. context: of the predicted ones, how many are not counted: another row has them. begins: of
    documents behind the first, where they begin."""

    tokens: np.ndarray
    source: int
    ended: int
    context: int = 0
    begins: np.ndarray = np.empty(0, dtype=np.int64)


@dataclass
class Documents:
    """Documents of sources, in rows of up to `length` predicted tokens and batches of up to `size` such rows.

    stride: None: the documents of a source one behind the other, in rows of `length`. Else each alone: a longer one in
    rows that begin every `stride` tokens, of which each predicts what those before it have not. document_mask: as in
    training, attention stays within documents and nothing is predicted from the last token of one.
    """

    length: int
    size: int
    stride: int | None
    samples: int | None = None  # documents of each source at most
    document_mask: bool = False
    sources: list[Source] = field(default_factory=list)
    parts: list[list[Part]] = field(default_factory=list)  # by source
    notes: list[str] = field(default_factory=list)

    def add_prepared(self, name: str, folder: str) -> None:
        """The eval split of a prepared folder. Raises DataError: as read_manifest, check_sizes, check_tokenizer."""
        manifest = read_manifest(folder)
        check_tokenizer(folder, manifest)
        parts = []
        for shard in manifest.split_shards("eval"):
            check_sizes(folder, shard)
            dtype = np.dtype(manifest.dtype).newbyteorder("<")
            ends = open_index(folder, shard)
            if np.any(ends[1:] <= ends[:-1]) or int(ends[-1]) != shard.tokens:
                raise DataError(
                    f"{Path(folder) / shard.name}.index: the document ends do not increase to the end: its content "
                    "changed; prepare or copy the data again"
                )
            parts.append(Part(np.memmap(Path(folder) / shard.name, dtype, "r"), ends.astype(np.int64)))
        self._add(Source(name, TextEncoder(Path(folder) / TOKENIZER_FOLDER)), parts)

    def add_text(
        self,
        name: str,
        encoder: TextEncoder,
        text_key: str,
        split_on: str | None,
        max_dropped: int,
        tell: Callable[[str], None],
    ) -> None:
        """Text that train/prepare can read: a file, a folder. Raises ValueError: as list_sources; more than
        `max_dropped` documents that cannot be read; none at all; a damaged file."""
        dropped: list[Dropped] = []
        texts = _texts(read_share(list_sources([name], split_on, tell), text_key, 0, 1, split_on), dropped)
        text_bytes, lengths, tokens = 0, list[int](), list[np.ndarray]()
        wanted = itertools.islice(texts, self.samples)
        while some := list(itertools.islice(wanted, ENCODED_TOGETHER)):
            text_bytes += sum(len(text.encode()) for text in some)
            encoded = [[encoder.bos_id, *ids, encoder.eos_id] for ids in encoder.encode_batch(some)]
            lengths += map(len, encoded)
            tokens.append(np.fromiter(itertools.chain.from_iterable(encoded), np.int32))
        for item in dropped[:SHOWN]:
            tell(f"left out: {item}")
        count = sum(item.count for item in dropped)
        keys = next((item.text_keys for item in dropped if item.text_keys), ())
        remedy = f"{text_key_option(keys)} names the text" if keys else "mend them"
        if not lengths:
            raise EvaluationError(
                f"DATA {name} has no text: {count:,} documents, none can be read; {remedy}",
                code="no_text",
                key=name,
            )
        if count > max_dropped:
            raise EvaluationError(
                f"DATA {name}: {count:,} documents cannot be read, such as {dropped[0]}; {remedy}, or allow so many "
                f"with --max_dropped {count}",
                code="unreadable_documents",
                key=name,
            )
        if count:
            self.notes.append(f"{name}: {count:,} documents cannot be read and are left out (--max_dropped)")
        self._add(Source(name, encoder, text_bytes), [Part(np.concatenate(tokens), np.cumsum(lengths))])

    def _add(self, source: Source, parts: list[Part]) -> None:
        found = sum(len(part.ends) for part in parts)
        if not found:
            raise DataError(
                f"DATA {source.name}: the eval split has no document; prepare it with a larger one"
            )
        if self.samples is not None and found > self.samples:
            self.notes.append(f"{source.name}: {self.samples:,} of {found:,} documents (--max_samples)")
            chosen, first = spread(self.samples, found), 0
            for part in parts:
                starts, count = np.concatenate([[0], part.ends[:-1]]), len(part.ends)
                own = chosen[(chosen >= first) & (chosen < first + count)] - first
                documents = [part.tokens[starts[number] : part.ends[number]] for number in own]
                part.tokens = np.concatenate([part.tokens[:0], *documents])
                part.ends, first = np.cumsum(part.ends[own] - starts[own]), first + count
        lengths = np.concatenate([np.diff(part.ends, prepend=0) for part in parts])
        if self.stride is not None and (long := int((lengths - 1 > self.length).sum())):
            self.notes.append(
                f"{source.name}: {long:,} documents are longer than the {self.length} tokens of --max_seq_length, the "
                f"longest has {int(lengths.max()):,}: they are read in rows of it that begin every {self.stride} "
                "tokens (--stride)"
            )
        self.sources.append(source)
        self.parts.append(parts)

    @property
    def tokens(self) -> int:
        """About as many are predicted."""
        return sum(len(part.tokens) for parts in self.parts for part in parts)

    def batches(self, rank: int, world: int) -> Iterator[Rows]:
        rows = itertools.islice(self._rows(), rank, None, world)
        while some := list(itertools.islice(rows, SORTED_TOGETHER * self.size)):
            some.sort(key=lambda row: len(row.tokens))
            while some:
                longest = _padded(len(some[-1].tokens) - 1)
                together = max(1, self.size * _padded(self.length) // longest)
                yield _batch(some[-together:], longest, self.document_mask)
                del some[-together:]

    def _rows(self) -> Iterator[Row]:
        for source, parts in enumerate(self.parts):
            if self.stride is None:
                yield from self._packed(source, parts)
                continue
            for part in parts:
                for start, end in itertools.pairwise([0, *part.ends.tolist()]):
                    yield from self._alone(source, part.tokens[start:end])

    def _alone(self, source: int, tokens: np.ndarray) -> Iterator[Row]:
        """One document."""
        predicted, last = 0, len(tokens) - 1
        for start in range(0, last, self.stride or self.length):
            stop = min(start + self.length, last)
            yield Row(tokens[start : stop + 1], source, int(stop == last), predicted - start)
            predicted = stop
            if stop == last:
                return

    def _packed(self, source: int, parts: list[Part]) -> Iterator[Row]:
        """The documents of a source one behind the other."""
        tokens = np.concatenate([part.tokens for part in parts])
        starts = np.cumsum([0, *(len(part.tokens) for part in parts)])
        ends = np.concatenate([part.ends + start for part, start in zip(parts, starts, strict=False)])
        for start in range(0, len(tokens) - 1, self.length):
            stop = min(start + self.length, len(tokens) - 1)
            # documents whose last token is predicted: tokens start + 1 to stop
            first, behind = np.searchsorted(ends, [start + 2, stop + 2])
            begins = ends[(start < ends) & (ends <= stop)] - start
            yield Row(tokens[start : stop + 1], source, int(behind - first), begins=begins)


def _texts(items: Iterable, dropped: list[Dropped]) -> Iterator[str]:
    for item in items:
        if isinstance(item, Dropped):
            dropped.append(item)
        elif isinstance(item, Damaged):
            raise EvaluationError(f"DATA {item}; repair the file or leave it out", code="damaged_text")
        else:
            yield item.text


def _padded(tokens: int) -> int:
    """A length that FP8 products take."""
    return -(-tokens // FP8_TRAIN_ROW_MULTIPLE) * FP8_TRAIN_ROW_MULTIPLE


def _batch(rows: list[Row], length: int, document_mask: bool) -> Rows:
    """Behind the end of a row its last token is repeated, without labels: what comes later changes nothing before."""
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
