"""What the `*.ds.index` of prepared data say: where documents end, and how long they are.

Indexes are memory-mapped and read a block at a time: the data may have more documents than memory.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from train.data.format import INDEX_DTYPE, DataError, Shard

BLOCK_DOCUMENTS = 1 << 18
BINS = 64  # bin k holds lengths of 2^k to 2^(k+1) - 1 tokens


@dataclass
class Lengths:
    """A histogram of document lengths: `documents` and their `tokens` by bin, int64 [BINS] each; extremes in tokens.

    `shortest` and `longest` are 0 when there is no document.
    """

    documents: np.ndarray
    tokens: np.ndarray
    shortest: int = 0
    longest: int = 0

    @classmethod
    def of(cls, lengths: np.ndarray) -> "Lengths":
        """The histogram of lengths [n] in tokens, 1 or more each; n may be 0."""
        bins = np.frexp(lengths.astype(np.float64))[1] - 1  # floor(log2), exact: float64 holds such integers
        documents = np.bincount(bins, minlength=BINS)
        tokens = np.bincount(bins, weights=lengths, minlength=BINS).astype(np.int64)
        extremes = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
        return cls(documents, tokens, *extremes)

    def __add__(self, other: "Lengths") -> "Lengths":
        shortest = min((x.shortest for x in (self, other) if x.shortest), default=0)
        longest = max(self.longest, other.longest)
        return Lengths(self.documents + other.documents, self.tokens + other.tokens, shortest, longest)

    def rows(self) -> list[tuple[str, int, int]]:
        """(range of lengths, documents, tokens) of each bin from the first to the last that holds something."""
        used = np.flatnonzero(self.documents)
        bins = range(int(used[0]), int(used[-1]) + 1) if len(used) else range(0)
        return [
            (f"{1 << k:,} to {(2 << k) - 1:,}" if k else "1", int(self.documents[k]), int(self.tokens[k]))
            for k in bins
        ]


def open_index(folder: str | Path, shard: Shard) -> np.ndarray:
    """The document ends [documents] of a shard, uint64, memory-mapped."""
    return np.asarray(np.memmap(Path(folder) / (shard.name + ".index"), dtype=INDEX_DTYPE, mode="r"))


def read_lengths(folder: str | Path, shard: Shard) -> Lengths:
    """The lengths of a shard's documents, by one pass over its index.

    Raises:
        DataError: document ends do not increase, or the last one is not the end of the shard.
    """
    name = Path(folder) / (shard.name + ".index")
    remedy = "its content changed; prepare or copy the data again"
    ends = open_index(folder, shard)
    total, before = Lengths.of(np.empty(0, dtype=np.int64)), np.uint64(0)
    for start in range(0, len(ends), BLOCK_DOCUMENTS):
        block = np.concatenate([[before], ends[start : start + BLOCK_DOCUMENTS]])
        wrong = np.flatnonzero(block[1:] <= block[:-1])  # not by differences, which wrap around in uint64
        if len(wrong):
            at = int(wrong[0])
            raise DataError(
                f"{name} is not increasing: document {start + at} ends at token {block[at + 1]}, "
                f"the one before it at {block[at]}; {remedy}",
                code="index_not_increasing",
                key=str(name),
            )
        total += Lengths.of(np.diff(block).astype(np.int64))
        before = block[-1]
    if int(before) != shard.tokens:
        raise DataError(
            f"{name} ends at token {before}, but {shard.name} has {shard.tokens} tokens; {remedy}",
            code="index_of_other_length",
            key=str(name),
        )
    return total
