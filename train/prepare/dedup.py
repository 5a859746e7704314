"""Remove exact or near duplicates. The first document of each group of duplicates is kept.

    signatures    one task per reading task: compute one or more hashes of each document
    search        a single task: group the documents that share a hash
    removal       in the last pipeline: drop all documents of a group except the first

To find exact duplicates, the whole text is hashed. To find near duplicates, each MinHash band is hashed. Two documents
that share a fraction s of their word 5-grams are found with probability 1 - (1 - s^8)^14: 0.01 for s = 0.4, 0.57
for 0.7 and 0.92 for 0.8. The parameters and hash functions are those of datatrove and FineWeb. datatrove's own blocks
are not used: they do not keep the first document, silently remove nothing if the output of a pipeline is missing, skip
texts of fewer than five words, and need 3 GB for a text of 10 MB.

The hashes have 64 bits. Among n different documents, the expected number of hash collisions is n^2 / 2^65: 0.01 for 600
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

from train.prepare.filters import hash_text, split_words
from train.prepare.tally import Tally

BANDS, HASHES_PER_BAND, NGRAM = 14, 8, 5
PRIME = np.uint64((1 << 61) - 1)
NORMALISED = TextNormConfig()  # unlike in decontamination, all numbers are treated as equal
SHINGLES = 1 << 14  # number of shingles hashed at a time; each has 112 64-bit hashes, together 15 MB
TASK_BITS = np.uint64(32)  # the id of a document is (task << TASK_BITS) + its index in the task


def minhash_bands(text: str, seed: int) -> list[int]:
    """Return a hash of each band of a text's MinHash signature, or [] for a text without words.

    The shingles are the word 5-grams. A text with fewer than five words has a single shingle with all its words.
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
    """Return the factors and the offsets of the 112 MinHash functions, two uint64 arrays [112]."""
    random = np.random.RandomState(seed)
    size = BANDS * HASHES_PER_BAND
    factors = random.randint(1, PRIME, dtype=np.uint64, size=size)
    return factors, random.randint(0, PRIME, dtype=np.uint64, size=size)


def minhash_signature(shingles: np.ndarray, seed: int) -> np.ndarray:
    """Return the MinHash signature of a text: the minimum of each hash function over all shingles.

    Args:
        shingles: hashes of the shingles, uint64 [number of shingles].
        seed: seed of the hash functions.

    Returns:
        uint64 [112].
    """
    factors, offsets = minhash_functions(seed)
    parts = [
        ((shingles[start : start + SHINGLES, None] * factors + offsets) % PRIME).min(axis=0)
        for start in range(0, len(shingles), SHINGLES)
    ]
    return np.min(parts, axis=0)


class DuplicateSignatures(PipelineStep):
    """Pipeline block that writes the duplicate signatures of a task's documents.

    The file of a task contains a table, uint64 [1 + number of hashes per document, number of documents]. The first row
    has the indices of the documents in the task.
    """

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
    """Pipeline block that finds the documents that duplicate an earlier document.

    Their indices are written to one file per task.
    """

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
            numbers = later[starts[task] : starts[task + 1]].astype(np.uint32)  # drop the task from the ids
            np.save(self.folder / "duplicates" / f"{task:05d}.npy", numbers)


class DuplicateRemoval(PipelineStep):
    """Pipeline block that removes and counts the duplicates found by `DuplicateSearch`."""

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
    """Return the sorted ids of all documents that are duplicates of an earlier document.

    Two documents are duplicates if they share a hash, or if both are duplicates of a third document.

    Args:
        tables: for each task, the table written by DuplicateSignatures.
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
    """Find the connected components of a graph, and link each node to the lowest node of its component.

    Each node has a label, at first its own number. Each round takes the minimum of the labels along every edge, and
    then replaces each label with the label of the node that it points to. The number of rounds is about log(longest
    path) (Zhang, Azad and Buluc 2020, "FastSV").

    Args:
        edges: pairs of connected nodes, [number of edges, 2].

    Returns:
        Pairs (node, lowest node of its component), [number of pairs, 2], sorted by node. The lowest nodes themselves
        are omitted.
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
