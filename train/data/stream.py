"""Read batches of packed training samples from token shards.

    TokenSource (tokens of one folder) -> SampleStream (global order of samples) -> MicroBatches (batches of one rank)

A sample is a window of seq_length + 1 tokens from the concatenated documents of a split. The stride of the windows is
seq_length, so each token is predicted once and there is no padding. A sample id is (index of the source, index of the
window in that source), with the sources sorted by name. The order of samples (order.py) is a pure function of the seed,
the manifests, the sequence length, the weights and the number of samples drawn so far from each source.
"""

import hashlib
import json
import math
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from model.documents import Documents, copy_to
from train.data.format import DataError, unigram_loss, verify_shard
from train.data.order import Drawn, Mixture, Weights, permutation_key, permute, spread
from train.data.source import TokenSource, open_sources

NO_LABEL = -100  # label of tokens that the loss ignores

VERIFY_THREADS = 8
PLAN_SAMPLES = 1024  # number of samples for which the order is computed at a time


class Batch(NamedTuple):
    """A batch of training samples.

    Attributes:
        input_ids: token ids, int64 [batch size, sequence length].
        labels: next tokens, int64 [batch size, sequence length]. NO_LABEL marks tokens that the loss ignores.
        documents: the document boundaries that limit attention, or None without a document mask.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    documents: Documents | None = None

    def to(self, device: Any) -> "Batch":
        """Copy the batch to `device` asynchronously."""
        documents = None if self.documents is None else self.documents.to(device)
        return Batch(copy_to(self.input_ids, device), copy_to(self.labels, device), documents)

    def labelled(self) -> torch.Tensor:
        """Return the fraction of tokens that have a label, as a float32 scalar, without synchronizing the GPU."""
        return (self.labels != NO_LABEL).float().mean()


def separate_documents(labels: np.ndarray, after: np.ndarray) -> Documents:
    """Remove the label of the last token of each document in place, and return the document boundaries.

    Args:
        labels: int64 [batch size, sequence length].
        after: int64 [number of document ends], index of the position after each document end in the flattened labels.
    """
    labels.reshape(-1)[after - 1] = NO_LABEL
    begins = np.zeros(labels.size + 1, dtype=bool)
    begins[after] = begins[:: labels.shape[1]] = True
    starts = np.flatnonzero(begins[:-1])
    # A cumulative sum of ones that returns to 0 at each start. It is computed in place, because allocating several
    # arrays of the batch's size would take longer than the rest of this function.
    positions = np.ones(labels.size, dtype=np.int64)
    positions[0] = 0
    positions[starts[1:]] -= starts[1:] - starts[:-1]
    np.cumsum(positions, out=positions)
    return Documents.from_piece_starts(
        torch.from_numpy(positions.reshape(labels.shape)), torch.from_numpy(starts)
    )


class SampleStream:
    """The samples from one split of one or more data sources, in a global order.

    In the train split, the sources are mixed by weight, each source is reshuffled in every epoch, and the stream has no
    end. In the eval split, the samples of each source follow each other in their original order.

    Args:
        weights: weights of the sources in the train split, or None for weights in proportion to their size.
        document_mask: add `documents` to the batches, and remove the label of the last token of each document, because
            the next token belongs to an unrelated document. The number of labels then differs between batches, so
            train/engine/step.py weights the loss with this number.
        max_samples: maximum number of samples in the eval split, or None. The windows are evenly spaced. The number of
            windows from a source is in proportion to the size of the source, but at least one.

    Attributes:
        vocab_size: vocabulary size of the tokenizer.
        num_tokens: number of tokens in the split, over all sources.
        num_samples: for train, number of windows in the split; for eval, number of samples in the stream.
        parts: for eval, the positions of the samples of each source, by name.
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
        sizes = {source.name: source.num_windows for source in self.sources}
        self._mixture = Mixture(sizes if weights is None else weights, list(sizes), self.seq_length)
        self.vocab_size = self.sources[0].manifest.vocab_size
        self.num_tokens = sum(source.num_tokens for source in self.sources)
        self.num_samples = total = sum(sizes.values())
        self.parts: dict[str, range] = {}
        self._eval_ids: list[tuple[int, int]] = []
        if self.split == "eval":
            ends = np.cumsum([*sizes.values()]) * min(max_samples or total, total) // total
            for index, (name, count) in enumerate(zip(sizes, np.diff(ends, prepend=0).tolist(), strict=True)):
                first, windows = len(self._eval_ids), spread(max(count, 1), sizes[name])
                self._eval_ids += [(index, window) for window in windows.tolist()]
                self.parts[name] = range(first, len(self._eval_ids))
            self.num_samples = len(self._eval_ids)
        self._plan = lru_cache(4)(self._make_plan)
        self._lock = threading.Lock()  # MicroBatches reads in another thread
        self.seek(0, {})

    def seek(self, position: int, drawn: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue the sample order of the train split from `position`.

        Args:
            position: number of samples drawn from all sources, including skipped samples.
            drawn: the samples drawn from each source, as returned by `drawn_at`. A source that is not in `drawn`
                starts with its first sample.
        """
        found = [drawn.get(source.name, {}) for source in self.sources]
        samples = tuple(each.get("samples", 0) for each in found)
        with self._lock:
            # the samples drawn before each block of PLAN_SAMPLES samples
            self._blocks = [Drawn(position, samples, tuple(each.get("deficit", 0.0) for each in found))]
            self._plan.cache_clear()

    def drawn_at(self, position: int) -> dict[str, dict[str, Any]]:
        """Return the samples drawn from each source before `position` in the global order, as JSON values."""
        with self._lock:
            block, count = divmod(position - self._blocks[0].position, PLAN_SAMPLES)
            _, drawn = self._mixture.draw(self._before_block(block), count)
        values = zip(self.sources, drawn.samples, drawn.deficits, strict=True)
        return {source.name: {"samples": samples, "deficit": deficit} for source, samples, deficit in values}

    def _before_block(self, block: int) -> Drawn:
        while len(self._blocks) <= block:
            self._blocks.append(self._mixture.draw(self._blocks[-1], PLAN_SAMPLES)[1])
        return self._blocks[block]

    def _make_plan(self, block: int) -> list[tuple[int, int]]:
        """Return a pair (source index, window index) for each sample in a block of PLAN_SAMPLES training samples.

        A window is the slice of a source's tokens that makes up one sample.
        """
        before = self._before_block(block)
        order, _ = self._mixture.draw(before, PLAN_SAMPLES)
        windows = np.empty_like(order)
        for index, source in enumerate(self.sources):
            places = np.flatnonzero(order == index)
            epochs, within = np.divmod(before.samples[index] + np.arange(len(places)), source.num_windows)
            for epoch in np.unique(epochs):
                chosen = epochs == epoch
                key = permutation_key(self.seed, source.name, int(epoch))
                windows[places[chosen]] = permute(within[chosen], source.num_windows, key)
        return list(zip(order.tolist(), windows.tolist(), strict=True))

    def sample_ids(self, start: int, count: int) -> list[tuple[int, int]]:
        """Return a pair (source index, window index) for each of the samples start..start+count-1.

        Sources are sorted by name.
        """
        if self.split == "eval":
            return self._eval_ids[start : start + count]
        ids: list[tuple[int, int]] = []
        with self._lock:
            start -= self._blocks[0].position
            for block in range(start // PLAN_SAMPLES, -(-(start + count) // PLAN_SAMPLES)):
                first = block * PLAN_SAMPLES
                ids += self._plan(block)[max(0, start - first) : max(0, start + count - first)]
        return ids

    def batch(self, start: int, count: int, rows: int = 0) -> Batch:
        """Read samples start..start+count-1 in the global order as a batch with one sample per row.

        With a document mask, the positions in `documents` are 0 at the first token of each document and each sample.

        Args:
            rows: minimum number of rows. Missing rows are filled with copies of the first sample.

        Raises:
            DataError: if the eval split has too few samples, or the data are corrupt.
        """
        if self.split == "eval" and start + count > self.num_samples:
            raise DataError(
                f"samples {start} to {start + count - 1} were requested, but the eval split has only "
                f"{self.num_samples} samples; request fewer samples",
                code="samples_beyond_end",
            )
        samples = self.sample_ids(start, count)
        samples += samples[:1] * (rows - count)
        input_ids = np.empty((len(samples), self.seq_length), dtype=np.int64)
        labels, documents = np.empty_like(input_ids), None
        for row, (source, window) in enumerate(samples):
            self.sources[source].read(window, input_ids[row], labels[row])
        if self.document_mask:
            after = [
                row * self.seq_length + self.sources[source].document_ends(window)
                for row, (source, window) in enumerate(samples)
            ]
            documents = separate_documents(labels, np.concatenate(after))
        return Batch(torch.from_numpy(input_ids), torch.from_numpy(labels), documents)

    def verify(self, part: int = 0, parts: int = 1) -> int:
        """Check the hashes and token ids of the shards, or of one part of the shards.

        Args:
            part: index of the part to check.
            parts: number of parts. Part p consists of the shards p, p + parts, p + 2 * parts, and so on.

        Returns:
            The number of checked shards.

        Raises:
            DataError: if a hash differs from the manifest, or a token id is not in the vocabulary.
        """
        shards = [(source, shard) for source in self.sources for shard in source.shards][part::parts]
        with ThreadPoolExecutor(VERIFY_THREADS) as pool:  # hashing releases the GIL
            list(pool.map(lambda item: verify_shard(item[0].folder, item[0].manifest, item[1]), shards))
        return len(shards)

    def fingerprint(self) -> dict[str, Any]:
        """Return all values that determine the order of samples, as JSON values.

        A resumed run compares this fingerprint with the fingerprint in the checkpoint.
        """
        sources: dict[str, dict[str, Any]] = {
            source.name: {
                "tokenizer_sha256": source.manifest.tokenizer_sha256,
                "shards_sha256": hashlib.sha256(
                    "".join(shard.sha256 for shard in source.shards).encode()
                ).hexdigest(),
                "tokens": source.num_tokens,
            }
            for source in self.sources
        }
        values = {"split": self.split, "seq_length": self.seq_length, "seed": self.seed, "sources": sources}
        for index, name in enumerate(sources):
            # For constant weights, use the format of checkpoints written before phases were added.
            if len(self._mixture.starts) == 1:
                sources[name]["weight"] = self._mixture.weights[0][index]
            else:
                sources[name]["weight_from_sample"] = {
                    str(start): weights[index]
                    for start, weights in zip(self._mixture.starts, self._mixture.weights, strict=True)
                }
        return json.loads(json.dumps(values))

    def describe(self) -> str:
        """Return the size, the folder and the weights of each source as text for the log, with one line per source."""
        lines = []
        for index, source in enumerate(self.sources):
            phases = zip(self._mixture.weights, self._mixture.starts, strict=True)
            weights = ", ".join(
                f"{each[index]:.2%} starting at token {start * self.seq_length:,}" for each, start in phases
            )
            share = f", share of the mixture: {weights}" if len(self.sources) > 1 else ""
            lines.append(
                f"{source.name}: {source.num_tokens:,} tokens, {source.num_windows:,} samples of {self.seq_length} "
                f"tokens ({source.folder}){share}"
            )
        return "\n".join(lines)

    def weights_at(self, sample: int) -> dict[str, float]:
        """Return the nonzero weights of the sources, by name, at position `sample` in the global order."""
        weights = self._mixture.weights_at(sample)
        return {source.name: weight for source, weight in zip(self.sources, weights, strict=True) if weight}


def open_stream(
    sources: Mapping[str, str | Path],
    weights: Weights | None,
    seq_length: int,
    seed: int,
    split: str = "train",
    document_mask: bool = False,
    max_samples: int | None = None,
) -> SampleStream:
    """Open folders with prepared data as one stream of samples.

    Args:
        sources: {name of the source: folder}. For the other arguments, see SampleStream.

    Raises:
        DataError: if a folder cannot be opened, the folders are incompatible with each other, or the weights are
            invalid.
    """
    return SampleStream(open_sources(sources, split, seq_length), weights, seed, document_mask, max_samples)


def compute_unigram_loss(train: SampleStream, held_out: SampleStream) -> float:
    """Compute the loss of a unigram model on the evaluation samples, in nats per token.

    A unigram model predicts each token by its frequency. Each source has its own unigram model, which predicts the
    evaluation samples of this source.

    Args:
        train: the training stream whose token frequencies define the unigram models.
        held_out: the evaluation stream with the same sources.

    Raises:
        DataError: if a shard is corrupt.
    """
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
    stream: SampleStream, size: int, rank: int, world: int, samples: range
) -> Iterator[tuple[int, int, Batch]]:
    """Yield the batches of one rank for an evaluation.

    Every rank gets the same number of batches. Otherwise, the collectives of ZeRO 3 would hang.

    Args:
        samples: positions of the samples to evaluate (see `SampleStream.parts`).

    Yields:
        (index of the first sample, number of rows with samples, batch with `size` rows). The remaining rows have no
        labels.
    """
    steps = math.ceil(len(samples) / (size * world))
    for start in range(samples.start + rank * size, samples.start + steps * size * world, size * world):
        rows = max(0, min(size, samples.stop - start))
        batch = stream.batch(start if rows else samples.start, max(rows, 1), size)
        batch.labels[rows:] = NO_LABEL
        yield start, rows, batch


class MicroBatches:
    """Loader for the micro-batches of one rank. A thread prefetches the next micro-batch.

    Each micro-step consumes the next batch_size * world_size samples of the stream. Rank r reads block r of batch_size
    samples. An optimizer step therefore trains on the same samples for any number of ranks, if the global batch size is
    the same.
    """

    def __init__(self, stream: SampleStream, batch_size: int, rank: int, world_size: int) -> None:
        self.stream, self.batch_size, self.rank, self.world_size = stream, batch_size, rank, world_size
        self._reader = ThreadPoolExecutor(1, "micro-batches")
        self._ahead: tuple[int, Future[Batch]] | None = None

    def get(self, consumed: int, micro_step: int) -> Batch:
        """Return the micro-batch of this rank.

        Args:
            consumed: number of samples consumed before the optimizer step.
            micro_step: index of the micro-step in the optimizer step.
        """
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
        """Stop the prefetch thread."""
        self._reader.shutdown(cancel_futures=True)
