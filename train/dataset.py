"""Token shards -> training samples, packed full: `open_stream` and `MicroBatches`.

    manifest -> TokenSource (memory-mapped tokens of one folder) -> SampleStream (global order) -> MicroBatches (rank)

A sample is a window of seq_length + 1 tokens of the split's concatenated documents, at a stride of seq_length, so
that each token is predicted once and nothing is padded. The order of samples is a pure function of (seed, manifests,
seq_length, weights, position); the state of a run is the number of samples it has consumed.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from train.data_format import SPLITS, DataError, check_shards, check_tokenizer, read_manifest
from train.sampler import Mixture, permutation_key, permute

Batch = tuple[torch.Tensor, torch.Tensor]

OPEN_SHARDS = 256  # a mapping holds a file descriptor; a login shell often allows 1024
PLAN_SAMPLES = 1024  # the order is computed for this many samples at a time


class TokenSource:
    """The windows of one split of one prepared folder.

    Attributes: `manifest`, `num_tokens` in the split, `num_windows`, `folder`.

    Raises:
        DataError: no such prepared folder, a corrupt manifest, a missing or truncated shard, another tokenizer than
            the one that made the ids, or less than one window.
    """

    def __init__(
        self, name: str, folder: str | Path, split: str, seq_length: int, verify: bool = False
    ) -> None:
        if split not in SPLITS:
            raise DataError(f"split {split!r} is none of {', '.join(SPLITS)}")
        if seq_length < 1:
            raise DataError(f"seq_length {seq_length} must be at least 1 token")
        self.name, self.folder, self.split, self.seq_length = name, Path(folder), split, seq_length
        self.manifest = read_manifest(self.folder)
        check_shards(self.folder, self.manifest, split, verify)
        check_tokenizer(self.folder, self.manifest)
        self.shards = self.manifest.split_shards(split)
        self.num_tokens = sum(shard.tokens for shard in self.shards)
        self.num_windows = max(0, (self.num_tokens - 1) // seq_length)
        if self.num_windows == 0:
            remedy = "a larger --eval_fraction" if split == "eval" else "more text"
            raise DataError(
                f"{self.folder}: the {split} split has {self.num_tokens} tokens, one sample needs {seq_length + 1}; "
                f"prepare it with {remedy}, or lower max_seq_length"
            )
        self._dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        self._starts = np.cumsum([0] + [shard.tokens for shard in self.shards])
        self._map = lru_cache(OPEN_SHARDS)(self._open)

    def _open(self, index: int) -> np.ndarray:
        path = self.folder / self.shards[index].name
        return np.asarray(np.memmap(path, dtype=self._dtype, mode="r"))

    def read(self, window: int, input_ids: np.ndarray, labels: np.ndarray) -> None:
        """Fill one sample: input_ids [T] and labels [T], labels one token ahead.

        Raises:
            DataError: a token id beyond the vocabulary, which an embedding would answer with an error of its own.
        """
        start = window * self.seq_length
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        offset = start - int(self._starts[shard])
        tokens = self._map(shard)[offset : offset + self.seq_length + 1]
        if len(tokens) <= self.seq_length:  # the window goes on in the next shards
            parts, missing = [tokens], self.seq_length + 1 - len(tokens)
            while missing:
                shard += 1
                parts.append(self._map(shard)[:missing])
                missing -= len(parts[-1])
            tokens = np.concatenate(parts)
        if tokens.max() >= self.manifest.vocab_size:
            raise self._bad_token(start, tokens)
        input_ids[:] = tokens[:-1]
        labels[:] = tokens[1:]

    def _bad_token(self, start: int, tokens: np.ndarray) -> DataError:
        """The error for the first id beyond the vocabulary in `tokens`, of which the first is the split's `start`th."""
        first = int(np.argmax(tokens >= self.manifest.vocab_size))
        shard = int(np.searchsorted(self._starts, start + first, side="right")) - 1
        return DataError(
            f"{self.folder / self.shards[shard].name}: token {start + first - int(self._starts[shard])} has the id "
            f"{int(tokens[first])}, beyond the vocabulary of {self.manifest.vocab_size}: the file's content changed; "
            "prepare or copy the data again"
        )

    def digest(self) -> str:
        """A hash of the hashes of the split's shards, in order: the identity of its tokens."""
        return hashlib.sha256("".join(shard.sha256 for shard in self.shards).encode()).hexdigest()


class SampleStream:
    """All samples of one split of one or several sources, in one global order without end.

    train: sources are mixed by `weights` (None: by their size) with exact quotas, each shuffled anew every epoch.
    eval: every window of every source once, each source in its natural order, spread evenly; `weights` play no role.

    Attributes:
        vocab_size: of the tokenizer that all sources share.
        num_tokens: in the split, over all sources.
        num_samples: windows in the split; of train: one epoch's if sources were mixed by size.
        unigram_loss: nats per token of the eval tokens under unigram models of the train tokens, averaged over the
            sources by eval tokens; NaN when no source has an eval split.
    """

    def __init__(self, sources: list[TokenSource], weights: Mapping[str, float] | None, seed: int) -> None:
        self.sources = sorted(sources, key=lambda source: source.name)
        self.split, self.seq_length, self.seed = sources[0].split, sources[0].seq_length, seed
        self._check_tokenizers()
        windows = [source.num_windows for source in self.sources]
        if self.split == "eval":
            self._mixture = Mixture(windows, max_period=sum(windows))
        else:
            self._mixture = Mixture(windows if weights is None else self._checked_weights(weights))
        self.vocab_size = self.sources[0].manifest.vocab_size
        self.num_tokens = sum(source.num_tokens for source in self.sources)
        self.num_samples = sum(windows)
        self.unigram_loss = self._unigram_loss()
        self._plan = lru_cache(4)(self._make_plan)

    def _check_tokenizers(self) -> None:
        first = self.sources[0]
        for source in self.sources[1:]:
            if source.manifest.tokenizer_sha256 != first.manifest.tokenizer_sha256:
                raise DataError(
                    f"data sources {first.name!r} and {source.name!r} were prepared with different tokenizers "
                    f"({first.folder} and {source.folder}); prepare both with the same"
                )

    def _checked_weights(self, weights: Mapping[str, float]) -> list[float]:
        names = [source.name for source in self.sources]
        if set(weights) != set(names):
            raise DataError(
                f"data weights name {sorted(weights)}, the sources are {names}: give one weight each"
            )
        for name, weight in weights.items():
            if not (math.isfinite(weight) and weight > 0):
                raise DataError(
                    f"data weight of {name!r} is {weight}; it must be above 0 (or leave the source out)"
                )
        return [weights[name] for name in names]

    def _unigram_loss(self) -> float:
        pairs = [
            (source.manifest.unigram_loss, source.manifest.split_tokens("eval")) for source in self.sources
        ]
        known = [(loss, tokens) for loss, tokens in pairs if loss is not None]
        return sum(loss * tokens for loss, tokens in known) / sum(t for _, t in known) if known else math.nan

    def _make_plan(self, block: int) -> list[tuple[int, int]]:
        """(source, window) of samples block * PLAN_SAMPLES .. (block + 1) * PLAN_SAMPLES - 1."""
        which, ordinal = self._mixture.locate(block * PLAN_SAMPLES, PLAN_SAMPLES)
        windows = np.empty_like(ordinal)
        for index, source in enumerate(self.sources):
            epochs, within = np.divmod(ordinal, source.num_windows)
            if self.split == "eval":
                windows[which == index] = within[which == index]
                continue
            for epoch in np.unique(epochs[which == index]):
                chosen = (which == index) & (epochs == epoch)
                key = permutation_key(self.seed, source.name, int(epoch))
                windows[chosen] = permute(within[chosen], source.num_windows, key)
        return list(zip(which.tolist(), windows.tolist(), strict=True))

    def sample_ids(self, start: int, count: int) -> list[tuple[int, int]]:
        """(source index in name order, window) of samples start..start+count-1: what the order consists of."""
        ids: list[tuple[int, int]] = []
        for block in range(start // PLAN_SAMPLES, -(-(start + count) // PLAN_SAMPLES)):
            first = block * PLAN_SAMPLES
            ids += self._plan(block)[max(0, start - first) : max(0, start + count - first)]
        return ids

    def batch(self, start: int, count: int) -> Batch:
        """Samples start..start+count-1 of the global order: (input_ids, labels), int64 [count, seq_length] each.

        Raises:
            DataError: a negative start, a count below 1, samples beyond the end of an eval split, or corrupt tokens.
        """
        if start < 0 or count < 1 or (self.split == "eval" and start + count > self.num_samples):
            end = f"of {self.num_samples}" if self.split == "eval" else "of an endless stream"
            raise DataError(f"samples {start} to {start + count} {end} {self.split} samples were asked for")
        input_ids = np.empty((count, self.seq_length), dtype=np.int64)
        labels = np.empty_like(input_ids)
        for row, (source, window) in enumerate(self.sample_ids(start, count)):
            self.sources[source].read(window, input_ids[row], labels[row])
        return torch.from_numpy(input_ids), torch.from_numpy(labels)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise DataError when the model's vocabulary does not hold all ids of the data."""
        if self.vocab_size > vocab_size:
            raise DataError(
                f"the tokenizer of the data does not fit the model: {self.sources[0].folder} has a vocabulary of "
                f"{self.vocab_size}, the model one of {vocab_size}; raise the model's vocab_size, or prepare the data "
                "with the model's tokenizer"
            )

    def fingerprint(self) -> dict[str, Any]:
        """What must not change between a run and its resume, as JSON values: all that the order depends on."""
        sources = {
            source.name: {
                "tokenizer_sha256": source.manifest.tokenizer_sha256,
                "shards_sha256": source.digest(),
                "tokens": source.num_tokens,
                "weight": weight,
            }
            for source, weight in zip(self.sources, self._mixture.weights, strict=True)
        }
        values = {"split": self.split, "seq_length": self.seq_length, "seed": self.seed, "sources": sources}
        return json.loads(json.dumps(values))

    def describe(self) -> str:
        """One line a source for the log."""
        return "\n".join(
            f"{source.name}: {source.num_tokens:,} {self.split} tokens in {len(source.shards)} shards, "
            f"{source.num_windows:,} samples of {self.seq_length}, {weight:.2%} of the mixture ({source.folder})"
            for source, weight in zip(self.sources, self._mixture.weights, strict=True)
        )


def open_stream(
    sources: Mapping[str, str | Path],
    weights: Mapping[str, float] | None,
    seq_length: int,
    seed: int,
    split: str = "train",
    verify: bool = False,
) -> SampleStream:
    """Open prepared folders ({name: folder}) as one stream; `verify` also checks every hash and token id.

    Raises:
        DataError: as TokenSource and SampleStream do; its message names the folder and what to do.
    """
    if not sources:
        raise DataError("data.sources is empty: name at least one folder that prepare_data.py wrote")
    opened = [TokenSource(name, folder, split, seq_length, verify) for name, folder in sources.items()]
    return SampleStream(opened, weights, seed)


class MicroBatches:
    """The micro-batches of one rank, the next one read ahead by a thread.

    A micro-step takes batch_size * world_size samples of the stream in a row; rank r has the r-th batch_size of them.
    So the samples that an optimizer step consumes are the same for every number of ranks with the same global batch.
    """

    def __init__(self, stream: SampleStream, batch_size: int, rank: int, world_size: int) -> None:
        if batch_size < 1 or not 0 <= rank < world_size:
            raise ValueError(
                f"batch_size {batch_size}, rank {rank} of {world_size}: needs 1 or more, 0 <= rank < size"
            )
        self.stream, self.batch_size, self.rank, self.world_size = stream, batch_size, rank, world_size
        self._reader = ThreadPoolExecutor(1, "micro-batches")
        self._ahead: tuple[int, Future[Batch]] | None = None

    def get(self, consumed: int, micro_step: int) -> Batch:
        """(input_ids, labels), int64 [batch_size, seq_length], `micro_step` micro-steps after `consumed` samples."""
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
