"""Remove exact or near duplicates, keeping the first document of each group.

    signatures    one task per reading task: one or more hashes of each document
    search        one task: group the documents that share a hash
    removal       in the last pipeline: drop all documents of a group but the first

Exact duplicates have one hash, of the whole text. Near duplicates have one hash per MinHash band: a pair of documents
with similarity s, the share of common 5-grams of words, is found with probability 1 - (1 - s^8)^14, which is 0.57 for
0.7, 0.92 for 0.8 and 0.01 for 0.4. This is the setting of datatrove and FineWeb, with datatrove's hash functions.
datatrove's own blocks are not used: they do not keep the first document, silently remove nothing if the output of a
pipeline is missing, skip texts of fewer than five words, and need 3 GB for a text of 10 MB.

The hashes have 64 bits. Among n different documents, n^2 / 2^65 pairs are expected to collide by hash: 0.01 for 600
million documents. The search needs about 90 bytes of memory per document.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.utils.text import TextNormConfig, simplify_text

from train.prepare.ngrams import hash_text, split_words
from train.prepare.tally import Tally

BANDS, HASHES_PER_BAND, NGRAM = 14, 8, 5
PRIME = np.uint64((1 << 61) - 1)
NORMALISED = TextNormConfig()  # unlike for decontamination, all numbers count as equal
SHINGLES = 1 << 14  # number hashed at a time: 112 64-bit hashes each, 15 MB
TASK_BITS = np.uint64(32)  # a document is (task << TASK_BITS) + its number in the task


def minhash_bands(text: str, seed: int) -> list[int]:
    """Return a hash of each band of the MinHash signature, or [] for a text without words.

    A text of fewer than five words has a single shingle of all its words.
    """
    words = split_words(simplify_text(text, NORMALISED))
    if not words:
        return []
    count = max(len(words) - NGRAM + 1, 1)
    shingles = np.array([hash_text(" ".join(words[i : i + NGRAM])) for i in range(count)], dtype=np.uint64)
    bands = minhash_signature(shingles, seed).reshape(BANDS, HASHES_PER_BAND)
    return [xxhash.xxh64_intdigest(band.tobytes()) for band in bands]


@cache
def minhash_functions(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the factors and the offsets of the hash functions, uint64 [112] each."""
    random = np.random.RandomState(seed)
    size = BANDS * HASHES_PER_BAND
    factors = random.randint(1, PRIME, dtype=np.uint64, size=size)
    return factors, random.randint(0, PRIME, dtype=np.uint64, size=size)


def minhash_signature(shingles: np.ndarray, seed: int) -> np.ndarray:
    """Return the minimum of each hash function over all shingles: uint64 [shingles] -> uint64 [112]."""
    factors, offsets = minhash_functions(seed)
    parts = [
        ((shingles[start : start + SHINGLES, None] * factors + offsets) % PRIME).min(axis=0)
        for start in range(0, len(shingles), SHINGLES)
    ]
    return np.min(parts, axis=0)


class DuplicateSignatures(PipelineStep):
    """Block that writes the number and the hashes of each document of a task: uint64 [1 + hashes, documents]."""

    type, name = "DEDUP", "signatures"

    def __init__(self, folder: Path, kind: str, seed: int) -> None:
        super().__init__()
        self.folder, self.kind, self.seed = folder / "signatures", kind, seed

    def run(self, data: Iterable[Document], rank: int = 0, world_size: int = 1) -> None:  # type: ignore[override]
        values = (value for number, document in enumerate(data) for value in self._row(number, document.text))
        width = 1 + (1 if self.kind == "exact" else BANDS)
        table = np.fromiter(values, np.uint64).reshape(-1, width)
        self.folder.mkdir(parents=True, exist_ok=True)
        np.save(self.folder / f"{rank:05d}.npy", np.ascontiguousarray(table.T))

    def _row(self, number: int, text: str) -> list[int]:
        hashes = [hash_text(text)] if self.kind == "exact" else minhash_bands(text, self.seed)
        return [number, *hashes] if hashes else []


class DuplicateSearch(PipelineStep):
    """Block that writes the numbers of each task's documents that repeat an earlier document, in one file per task."""

    type, name = "DEDUP", "search"

    def __init__(self, folder: Path, tasks: int) -> None:
        super().__init__()
        self.folder, self.tasks = folder, tasks

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:  # type: ignore[override]
        files = [self.folder / "signatures" / f"{task:05d}.npy" for task in range(self.tasks)]
        later = find_later([np.load(file, mmap_mode="r") for file in files])
        starts = np.searchsorted(later >> TASK_BITS, np.arange(self.tasks + 1, dtype=np.uint64))
        (self.folder / "duplicates").mkdir(parents=True, exist_ok=True)
        for task in range(self.tasks):
            numbers = later[starts[task] : starts[task + 1]].astype(np.uint32)  # without the task
            np.save(self.folder / "duplicates" / f"{task:05d}.npy", numbers)


class DuplicateRemoval(PipelineStep):
    """Block that removes the duplicates that the search found, and counts them."""

    type, name = "DEDUP", "removal"

    def __init__(self, folder: Path, kind: str, tally: Tally) -> None:
        super().__init__()
        self.folder, self.step, self.tally = folder / "duplicates", f"duplicate ({kind})", tally

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        duplicates = set(np.load(self.folder / f"{rank:05d}.npy").tolist())
        for number, document in enumerate(data):
            if number in duplicates:
                self.tally.by_step[self.step] += 1
            else:
                yield document


def find_later(tables: list[np.ndarray]) -> np.ndarray:
    """Return the documents that share a hash, directly or through other documents, with an earlier one, sorted.

    Args:
        tables: for each task, the table of DuplicateSignatures.
    """
    documents = np.concatenate(
        [table[0] + (np.uint64(task) << TASK_BITS) for task, table in enumerate(tables)]
    )
    links = np.empty((0, 2), dtype=np.uint64)
    for column in range(1, len(tables[0])):
        hashes = np.concatenate([table[column] for table in tables])
        _, first, group = np.unique(hashes, return_index=True, return_inverse=True)
        later = np.flatnonzero(first[group] != np.arange(len(hashes)))
        pairs = np.stack([documents[later], documents[first[group[later]]]], axis=1)
        links = link_to_first(np.concatenate([links, pairs]))
    return links[:, 0]


def link_to_first(edges: np.ndarray) -> np.ndarray:
    """Return each node of a graph with the lowest node of its component.

    Labels are minimized along the edges and replaced by the labels of their labels, which takes about log(longest path)
    rounds (Zhang, Azad and Buluc 2020, "FastSV").

    Args:
        edges: [E, 2].

    Returns:
        (member, first), [M, 2], sorted by member, without the lowest nodes themselves.
    """
    members, places = np.unique(edges, return_inverse=True)
    a, b = places.reshape(-1, 2).T
    labels = np.arange(len(members))
    while True:
        sunk = labels.copy()
        lowest = np.minimum(labels[a], labels[b])
        for target in (labels[a], labels[b], a, b):
            np.minimum.at(sunk, target, lowest)
        sunk = sunk[sunk]
        if np.array_equal(sunk, labels):
            break
        labels = sunk
    later = labels != np.arange(len(members))
    return np.stack([members[later], members[labels[later]]], axis=1)
