"""Token shards -> training samples, packed full: `open_stream` and `MicroBatches`.

    manifest -> TokenSource (the tokens of one folder) -> SampleStream (global order) -> MicroBatches (rank)

A sample is a window of seq_length + 1 tokens of the split's concatenated documents, at a stride of seq_length, so
that each token is predicted once and nothing is padded. The order of samples (order.py) is a pure function of (seed,
manifests, seq_length, weights, position); the state of a run is the number of samples it has consumed.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from model.documents import Documents
from train.data.format import COPY_AGAIN, DataError, unigram_loss, verify_shard
from train.data.order import MAX_PERIOD, Mixture, Weights, mix, permutation_key, permute, spread
from train.data.source import TokenSource, check_no_leak, check_same_tokenizer, open_sources

NO_LABEL = -100  # ignored by the loss

VERIFY_THREADS = 8
PLAN_SAMPLES = 1024  # the order is computed for this many samples at a time


class Batch(NamedTuple):
    """input_ids, labels: int64 [B, T]; NO_LABEL is no label. documents: attention stays within them; None without a
    document mask."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    documents: Documents | None = None

    def to(self, device: Any) -> "Batch":
        """Return the batch on `device`, without waiting for the copies."""
        documents = None if self.documents is None else self.documents.to(device)
        return Batch(
            self.input_ids.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            documents,
        )

    def filled(self, rows: int) -> "Batch":
        """Return the batch with its first row repeated up to `rows` rows."""
        input_ids, labels, documents = self
        if not (missing := rows - len(input_ids)):
            return self
        if documents is not None:
            positions = documents.positions
            documents = Documents.of(torch.cat([positions, positions[:1].expand(missing, -1)]))
        return Batch(
            torch.cat([input_ids, input_ids[:1].expand(missing, -1)]),
            torch.cat([labels, labels[:1].expand(missing, -1)]),
            documents,
        )

    def labelled(self) -> torch.Tensor:
        """Return the share of tokens that have a label, a float32 scalar, without waiting for it."""
        return (self.labels != NO_LABEL).float().mean()


def separate_documents(labels: np.ndarray, after: np.ndarray) -> Documents:
    """Remove the labels of last tokens in place; return the documents of the rows.

    Args:
        labels: int64 [B, T].
        after: int64; of the B * T tokens in sequence, the one after each document that ends in a row.
    """
    labels.reshape(-1)[after - 1] = NO_LABEL
    begins = np.zeros(labels.size + 1, dtype=bool)
    begins[after] = begins[:: labels.shape[1]] = True
    starts = np.flatnonzero(begins[:-1])
    # A cumulative sum of ones that returns to 0 at each start, in place: allocating and zeroing several arrays of the
    # batch's size takes longer than everything else here.
    positions = np.ones(labels.size, dtype=np.int64)
    positions[0] = 0
    positions[starts[1:]] -= starts[1:] - starts[:-1]
    np.cumsum(positions, out=positions)
    return Documents.of_pieces(torch.from_numpy(positions.reshape(labels.shape)), torch.from_numpy(starts))


def _mix_by_tokens(sources: Sequence[TokenSource]) -> Mixture:
    """Raises DataError: a source is too small beside the others."""
    windows = [source.num_windows for source in sources]
    try:
        return Mixture(windows)
    except ValueError as error:
        least = min(sources, key=lambda source: source.num_windows)
        raise DataError(
            f"source {least.name} has {least.num_tokens:,} of {sum(s.num_tokens for s in sources):,} tokens, less than "
            f"one in {MAX_PERIOD:,}, so it cannot be mixed by tokens. Set data.weights, or prepare it together with "
            "another source",
            code="source_too_small",
            key=least.name,
        ) from error


class SampleStream:
    """All samples of one split of one or several sources, in one global order.

    train: sources are mixed by `weights` (None: in proportion to their size) with exact quotas; each is shuffled again
    in every epoch. The order has no end. eval: every window of every source once, in natural order.

    Args:
        max_samples: of eval: use only so many windows, evenly spaced over each source, in proportion to its windows.
        document_mask: batches have `documents`, and the last token of a document has no label, since an unrelated
            document follows. So batches differ in their number of labels, by which the loss is weighted
            (train/engine/step.py).

    Attributes:
        vocab_size: of the tokenizer of all sources.
        num_tokens: in the split, over all sources.
        num_samples: of train: windows in the split; of eval: samples of the stream.
    """

    def __init__(
        self,
        sources: list[TokenSource],
        weights: Weights | None,
        seed: int,
        document_mask: bool = False,
        max_samples: int | None = None,
    ) -> None:
        self.document_mask = document_mask
        self.sources = sources
        self.split, self.seq_length, self.seed = sources[0].split, sources[0].seq_length, seed
        windows = [source.num_windows for source in self.sources]
        if self.split == "eval":
            self._mixture = Mixture(windows, max_period=sum(windows))
        elif weights is None:
            self._mixture = _mix_by_tokens(self.sources)
        else:
            self._mixture = mix(weights, [source.name for source in self.sources], seq_length=self.seq_length)
        self.vocab_size = self.sources[0].manifest.vocab_size
        self.num_tokens = sum(source.num_tokens for source in self.sources)
        self.num_samples = sum(windows)
        if self.split == "eval":
            self.num_samples = min(max_samples or self.num_samples, self.num_samples)
            chosen = np.bincount(self._mixture.locate(0, self.num_samples)[0], minlength=len(windows))
            self._chosen = [spread(int(some), total) for some, total in zip(chosen, windows, strict=True)]
        self._plan = lru_cache(4)(self._make_plan)

    def _make_plan(self, block: int) -> list[tuple[int, int]]:
        """Return (source, window) of the samples of a block of PLAN_SAMPLES, of eval up to its end."""
        first, count = block * PLAN_SAMPLES, PLAN_SAMPLES
        if self.split == "eval":
            count = min(count, self.num_samples - first)
        which, ordinal = self._mixture.locate(first, count)
        windows = np.empty_like(ordinal)
        for index, source in enumerate(self.sources):
            epochs, within = np.divmod(ordinal, source.num_windows)
            if self.split == "eval":
                windows[which == index] = self._chosen[index][within[which == index]]
                continue
            for epoch in np.unique(epochs[which == index]):
                chosen = (which == index) & (epochs == epoch)
                key = permutation_key(self.seed, source.name, int(epoch))
                windows[chosen] = permute(within[chosen], source.num_windows, key)
        return list(zip(which.tolist(), windows.tolist(), strict=True))

    def sample_ids(self, start: int, count: int) -> list[tuple[int, int]]:
        """Return (source index in name order, window) of samples start..start+count-1."""
        ids: list[tuple[int, int]] = []
        for block in range(start // PLAN_SAMPLES, -(-(start + count) // PLAN_SAMPLES)):
            first = block * PLAN_SAMPLES
            ids += self._plan(block)[max(0, start - first) : max(0, start + count - first)]
        return ids

    def batch(self, start: int, count: int) -> Batch:
        """Return samples start..start+count-1 of the global order, count rows of seq_length tokens. With a document
        mask the positions of `documents` are 0 at the first token of each document and of each sample.

        Raises:
            DataError: a negative start, a count below 1, samples beyond the end of an eval split, or corrupt data.
        """
        if start < 0 or count < 1 or (self.split == "eval" and start + count > self.num_samples):
            end = f"of {self.num_samples}" if self.split == "eval" else "of an endless stream"
            raise DataError(
                f"samples {start} to {start + count} {end} {self.split} samples are requested",
                code="samples_beyond_end",
            )
        input_ids = np.empty((count, self.seq_length), dtype=np.int64)
        labels = np.empty_like(input_ids)
        samples = self.sample_ids(start, count)
        for row, (source, window) in enumerate(samples):
            self.sources[source].read(window, input_ids[row], labels[row])
        documents = self._separate_documents(samples, labels) if self.document_mask else None
        return Batch(torch.from_numpy(input_ids), torch.from_numpy(labels), documents)

    def _separate_documents(self, samples: list[tuple[int, int]], labels: np.ndarray) -> Documents:
        """Remove the labels of last tokens; return the documents of the rows.

        Raises:
            DataError: the document ends of a sample do not increase.
        """
        T = self.seq_length
        rows = [self.sources[source].document_ends(window) for source, window in samples]
        ends, begin = np.concatenate(rows), np.repeat(np.arange(len(rows)) * T, [len(row) for row in rows])
        after = begin + ends  # in the flattened batch, the token after each document
        wrong = (ends < 1) | (ends > T)
        wrong[1:] |= after[1:] <= after[:-1]
        if wrong.any():
            source, window = samples[begin[np.argmax(wrong)] // T]
            raise DataError(
                f"{self.sources[source].folder}: the document ends of sample {window} of the {self.split} split do not "
                f"increase: the content of an index changed; {COPY_AGAIN}",
                code="index_not_increasing",
                key=str(self.sources[source].folder),
            )
        return separate_documents(labels, after)

    @property
    def num_bytes(self) -> int:
        """The size of the split's shards."""
        return sum(shard.bytes for source in self.sources for shard in source.shards)

    def verify(self, part: int = 0, parts: int = 1) -> int:
        """Check the hashes and every token id of each `parts`-th shard, from shard `part` on; return their number.

        Raises:
            DataError: as verify_shard.
        """
        shards = [(source, shard) for source in self.sources for shard in source.shards][part::parts]
        with ThreadPoolExecutor(VERIFY_THREADS) as pool:  # hashing releases the interpreter lock
            list(pool.map(lambda item: verify_shard(item[0].folder, item[0].manifest, item[1]), shards))
        return len(shards)

    def fingerprint(self) -> dict[str, Any]:
        """Return all that the order depends on, as JSON values: it must not change between a run and its resume."""
        sources: dict[str, dict[str, Any]] = {
            source.name: {
                "tokenizer_sha256": source.manifest.tokenizer_sha256,
                "shards_sha256": source.manifest.split_digest(source.split),
                "tokens": source.num_tokens,
            }
            for source in self.sources
        }
        values = {"split": self.split, "seq_length": self.seq_length, "seed": self.seed, "sources": sources}
        for index, name in enumerate(sources):
            # constant weights keep the form of checkpoints from before there were phases
            if len(self._mixture.starts) == 1:
                sources[name]["weight"] = self._mixture.weights[0][index]
            else:
                sources[name]["weight_from_sample"] = {
                    str(start): weights[index]
                    for start, weights in zip(self._mixture.starts, self._mixture.weights, strict=True)
                }
        return json.loads(json.dumps(values))

    def describe(self) -> str:
        """Return one line per source for the log, with its weight in every phase."""
        lines = []
        for source, (first, *later) in zip(
            self.sources, zip(*self._mixture.weights, strict=True), strict=True
        ):
            changes = "".join(
                f", {weight:.2%} from token {start * self.seq_length:,} on"
                for weight, start in zip(later, self._mixture.starts[1:], strict=True)
            )
            lines.append(
                f"{source.name}: {source.num_tokens:,} {self.split} tokens in {len(source.shards)} shards, "
                f"{source.num_windows:,} samples of {self.seq_length}, {first:.2%} of the mixture{changes} "
                f"({source.folder})"
            )
        return "\n".join(lines)

    def weights_at(self, sample: int) -> dict[str, float]:
        """Return the weights above 0 of the sources at this position of the global order."""
        weights = self._mixture.weights[bisect_right(self._mixture.starts, sample) - 1]
        return {source.name: weight for source, weight in zip(self.sources, weights, strict=True) if weight}

    def phase_that_begins(self, start: int, count: int) -> str | None:
        """Return a line for the log if a phase of the mixture begins in samples start..start+count-1."""
        starts = self._mixture.starts
        found = [phase for phase, first in enumerate(starts) if start <= first < start + count]
        if len(starts) == 1 or not found:
            return None
        weights = zip(self.sources, self._mixture.weights[found[-1]], strict=True)
        return (
            f"mixture: phase {found[-1] + 1} of {len(starts)} begins with sample {starts[found[-1]]:,}: "
            + ", ".join(f"{source.name} {weight:.2%}" for source, weight in weights)
        )


def open_stream(
    sources: Mapping[str, str | Path],
    weights: Weights | None,
    seq_length: int,
    seed: int,
    split: str = "train",
    document_mask: bool = False,
    max_samples: int | None = None,
) -> SampleStream:
    """Open prepared folders ({name: folder}) as one stream; document_mask, max_samples: see SampleStream.

    Raises:
        DataError: as open_sources and SampleStream.
    """
    return SampleStream(open_sources(sources, split, seq_length), weights, seed, document_mask, max_samples)


def open_held_out(
    train: SampleStream,
    sources: Mapping[str, str | Path],
    sets: Mapping[str, str | Path],
    max_samples: int | None = None,
) -> dict[str, SampleStream]:
    """Open the evaluation data of a run, by the name of its loss.

    Args:
        train: the stream of the folders `sources`, whose eval split is "eval_loss".
        sets: name -> folder whose eval split is "eval_loss/NAME".
        max_samples: of each (see SampleStream).

    Raises:
        DataError: as open_stream; a set was prepared with another tokenizer than the sources, or with a larger eval
            fraction.
    """
    streams = {"eval_loss": sources} | {f"eval_loss/{name}": {name: folder} for name, folder in sets.items()}
    opened = {
        loss: open_stream(
            folders, None, train.seq_length, train.seed, "eval", train.document_mask, max_samples
        )
        for loss, folders in streams.items()
    }
    for stream in opened.values():
        check_same_tokenizer(train.sources[0], stream.sources[0])
        check_no_leak(train.sources, stream.sources)
    return opened


def unigram_loss_of(train: SampleStream, held_out: SampleStream) -> float:
    """Return the loss of a unigram model of each source's train tokens on the labels of `held_out`, the same sources'
    evaluation samples, in nats per token. Raises DataError: corrupt tokens."""
    counts = np.zeros((len(held_out.sources), held_out.vocab_size), dtype=np.int64)
    for start in range(0, held_out.num_samples, PLAN_SAMPLES):
        count = min(PLAN_SAMPLES, held_out.num_samples - start)
        labels = held_out.batch(start, count).labels.numpy()
        for (source, _), row in zip(held_out.sample_ids(start, count), labels, strict=True):
            counts[source] += np.bincount(row[row != NO_LABEL], minlength=held_out.vocab_size)
    losses = [
        (unigram_loss(source.token_counts(), of_source), int(of_source.sum()))
        for source, of_source in zip(train.sources, counts, strict=True)
    ]
    return sum(loss * tokens for loss, tokens in losses if loss is not None) / int(counts.sum())


def held_out_batches(
    stream: SampleStream, size: int, rank: int, world: int
) -> Iterator[tuple[int, int, Batch]]:
    """Yield the samples of an eval stream as the batches of one rank: (first sample, number of rows with samples of
    this rank, batch of `size` rows). The other rows have no labels. Every rank has the same number of batches, or the
    collectives of ZeRO 3 would hang."""
    samples = stream.num_samples
    for start in range(rank * size, math.ceil(samples / (size * world)) * size * world, size * world):
        rows = max(0, min(size, samples - start))
        batch = stream.batch(start if rows else 0, max(rows, 1)).filled(size)
        batch.labels[rows:] = NO_LABEL
        yield start, rows, batch


class MicroBatches:
    """The micro-batches of one rank; a thread reads the next one ahead.

    A micro-step takes the next batch_size * world_size samples of the stream; rank r has the r-th batch_size of them.
    So an optimizer step has the same samples for every number of ranks with the same global batch.
    """

    def __init__(self, stream: SampleStream, batch_size: int, rank: int, world_size: int) -> None:
        self.stream, self.batch_size, self.rank, self.world_size = stream, batch_size, rank, world_size
        self._reader = ThreadPoolExecutor(1, "micro-batches")
        self._ahead: tuple[int, Future[Batch]] | None = None

    def get(self, consumed: int, micro_step: int) -> Batch:
        """Return the batch of this rank in micro-step `micro_step` after `consumed` samples."""
        stride = self.batch_size * self.world_size
        start = consumed + micro_step * stride + self.rank * self.batch_size
        if self._ahead is not None and self._ahead[0] == start:
            batch = self._ahead[1].result()
        else:
            batch = self._reader.submit(self.stream.batch, start, self.batch_size).result()
        self._ahead = (
            start + stride,
            self._reader.submit(self.stream.batch, start + stride, self.batch_size),
        )
        return batch

    def close(self) -> None:
        """Stop the thread."""
        self._reader.shutdown(cancel_futures=True)
