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

import numpy as np
import xxhash
from datatrove.data import Document
from datatrove.utils.text import TextNormConfig, simplify_text

from train.prepare.filters import hash_text, split_words
from train.prepare.tally import Tally

BANDS, HASHES_PER_BAND, NGRAM = 14, 8, 5
PRIME = np.uint64((1 << 61) - 1)
NORMALISED = TextNormConfig()  # unlike in decontamination, all numbers are treated as equal
SHINGLES = 1 << 14  # number of shingles hashed at a time; each has 112 64-bit hashes, together 15 MB
TASK_BITS = np.uint64(32)  # the id of a document is (task << TASK_BITS) + its index in the task


def minhash_bands(text: str, seed: int) -> list[int]:
    """Return one hash per band of a text's MinHash signature, or [] for a text without words.

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


def write_signatures(documents: Iterable[Document], kind: str, seed: int, folder: Path, task: int) -> None:
    """Compute the duplicate signatures (hashes) of the documents in a task, and write them to a file.

    The file of a task contains a table, uint64 [1 + number of hashes per document, number of documents]. The first row
    contains the indices of the documents within the task, and the other rows contain the hashes.

    Args:
        kind: "exact" or "minhash".
        seed: seed of the MinHash functions.
        folder: the folder for all files of the deduplication.
    """

    def values() -> Iterator[int]:
        for number, document in enumerate(documents):
            hashes = [hash_text(document.text)] if kind == "exact" else minhash_bands(document.text, seed)
            if hashes:
                yield number
                yield from hashes

    table = np.fromiter(values(), np.uint64).reshape(-1, 2 if kind == "exact" else 1 + BANDS)
    (folder / "signatures").mkdir(parents=True, exist_ok=True)
    np.save(folder / "signatures" / f"{task:05d}.npy", np.ascontiguousarray(table.T))


def search_duplicates(folder: Path, tasks: int) -> None:
    """Find all documents that duplicate an earlier document, and write one file with document indices per task.

    Args:
        folder: the folder with the signatures of all tasks.
    """
    files = [folder / "signatures" / f"{task:05d}.npy" for task in range(tasks)]
    later = find_later([np.load(file, mmap_mode="r") for file in files])
    starts = np.searchsorted(later >> TASK_BITS, np.arange(tasks + 1, dtype=np.uint64))
    (folder / "duplicates").mkdir(parents=True, exist_ok=True)
    for task in range(tasks):
        numbers = later[starts[task] : starts[task + 1]].astype(np.uint32)  # drop the task from the ids
        np.save(folder / "duplicates" / f"{task:05d}.npy", numbers)


def remove_duplicates(
    documents: Iterable[Document], kind: str, folder: Path, task: int, tally: Tally
) -> Iterator[Document]:
    """Yield the documents of a task except the duplicates from `search_duplicates`, and count the removed documents."""
    duplicates = set(np.load(folder / "duplicates" / f"{task:05d}.npy").tolist())
    for number, document in enumerate(documents):
        if number in duplicates:
            tally.by_step[f"duplicate ({kind})"] += 1
        else:
            yield document


def find_later(tables: list[np.ndarray]) -> np.ndarray:
    """Return the sorted ids of all documents that are duplicates of an earlier document.

    Two documents are duplicates if they share a hash, or if both are duplicates of a third document.

    Args:
        tables: for each task, the table written by `write_signatures`.
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

    Each node has a label, which is initially the index of the node. Each round takes the minimum of the labels along
    every edge, and then replaces each label with the label of the node with that index. The number of rounds is about
    log(longest path) (Zhang, Azad and Buluc 2020, "FastSV").

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
