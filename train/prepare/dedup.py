"""Remove exact or near duplicates with datatrove's blocks, keeping the first document of each group.

    exact      signatures (one task per reading task) -> search -> removal
    minhash    signatures (one task per reading task) -> buckets -> clusters -> removal

datatrove's blocks are subclassed here for these reasons:

- Its exact search keeps the document with the lowest number within its task, whichever task that is. Its clusters keep
  the document with the most neighbors.
- Its removal blocks silently remove nothing if the output of the previous stages is missing.
- Its MinHash signatures skip texts of fewer than five words, even identical ones, and need 3 GB for a text of 10 MB.

The shared folder contains signatures/. For exact: signed/ and done/ (a marker per completed reading and search task)
and found/ (indices of duplicates). For minhash: found/ (pairs) and remove/ (indices of duplicates). The preparation
refuses inputs that changed between the stages when it finishes.
"""

import itertools
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.io import get_datafolder
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup.exact_dedup import (
    ExactDedupConfig,
    ExactDedupFilter,
    ExactDedupSignature,
    ExactFindDedups,
)
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.utils.text import simplify_text

from train.data.format import DataError
from train.files import without_patterns
from train.prepare.corpus import WORK_NAME
from train.prepare.ngrams import PlainWords, hash_text, split_words
from train.prepare.tally import Stage, Tally

MOST_TASKS = 65_535  # earlier tasks get a higher priority, which is a 16-bit number in datatrove
SEARCH_TASKS = 16
# Signatures of each reading task that a search buffers; datatrove's default of 5 means a system call for every 5.
READ_RECORDS = 1000

AGAIN = f"remove {WORK_NAME} in --output and prepare the data again"


def document_bytes(document: Document) -> bytes:
    return document.text.encode()


def mark(folder: Path, rank: int) -> None:
    """Mark a task as completed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{rank:05d}").write_bytes(b"")


def require(folder: Path, pattern: str, count: int, what: str) -> None:
    """Check that a previous stage wrote `count` files; datatrove itself ignores missing ones.

    Raises:
        DataError: the number of files differs.
    """
    if (found := sum(1 for _ in folder.glob(pattern))) != count:
        raise DataError(
            f"{folder} has {found} of {count} {what}: an earlier stage did not finish, or its files were "
            f"removed; {AGAIN}",
            code="stage_unfinished",
            key=str(folder),
        )


def allow_open_files(count: int) -> None:
    """Increase this process's limit of open files: a search opens one or more files per reading task."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise DataError(
                f"--dedup needs {wanted} open files at a time, but the limit is {hard}; raise it (ulimit -Hn) or use "
                "fewer --tasks",
                code="too_few_open_files",
                key="--tasks",
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def counted(
    run: Any, data: Iterator[Document], rank: int, world_size: int, step: str, tally: Tally
) -> Iterator[Document]:
    """Yield the documents that a filter's `run` keeps, and count the others as removed by `step`."""
    numbers, kept = itertools.count(), 0
    for document in run((document for document, _ in zip(data, numbers, strict=False)), rank, world_size):
        kept += 1
        yield document
    if removed := next(numbers) - kept:
        tally.by_step[step] += removed


# ---------------------------------------------------------------- exact

# datatrove compares only xxh64 hashes. Among n different documents, n^2 / 2^65 pairs are expected to collide: 0.01 for
# 600 million documents.
EXACT = ExactDedupConfig(content_getter=document_bytes)


def exact_stages(documents: list[PipelineStep], folder: Path, tasks: int) -> list[Stage]:
    """Return the stages that find identical documents. `documents` are the blocks that read them, in `tasks` tasks."""
    searches = min(tasks, SEARCH_TASKS)
    return [
        Stage("exact_signatures", [*documents, ExactSignature(folder, searches)], tasks),
        Stage("exact_search", [ExactSearch(folder, tasks)], searches),
    ]


class ExactSignature(ExactDedupSignature):
    """Block that hashes a task's documents. Among equal hashes, those of earlier tasks come first."""

    def __init__(self, folder: Path, searches: int) -> None:
        super().__init__(str(folder / "signatures"), EXACT, finder_workers=searches)
        self.folder, self.priority = folder, 0

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        self.priority = MOST_TASKS - rank
        super().run(data, rank, world_size)
        mark(self.folder / "signed", rank)

    def get_hashes(self, doc: Document, doc_idx: int) -> Any:
        return [(value, self.priority, number) for value, _, number in super().get_hashes(doc, doc_idx)]


class ExactSearch(ExactFindDedups):
    """Block that writes, for each task, the indices of documents that repeat an earlier one.

    Each search task handles a range of hashes.
    """

    def __init__(self, folder: Path, tasks: int) -> None:
        super().__init__(
            str(folder / "signatures"), str(folder / "found"), EXACT, lines_to_buffer=READ_RECORDS
        )
        self.folder, self.tasks = folder, tasks

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        require(self.folder / "signed", "*", self.tasks, "tasks' signatures")
        allow_open_files(3 * self.tasks)
        with without_patterns(
            self.folder / "signatures"
        ) as signatures:  # datatrove finds the files by a glob
            self.data_folder = get_datafolder(str(signatures))
            super().run(None, rank, world_size)
        mark(self.folder / "done", rank)


class ExactRemoval(ExactDedupFilter):
    """Filter that removes the duplicates found by the search."""

    def __init__(self, folder: Path, tally: Tally) -> None:
        super().__init__(str(folder / "found"), EXACT)
        self.folder, self.tally = folder, tally

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        require(self.folder / "done", "*", min(world_size, SEARCH_TASKS), "searches")
        yield from counted(super().run, data, rank, world_size, "duplicate (exact)", self.tally)


# ---------------------------------------------------------------- near

SHINGLES = 1 << 14  # number hashed at a time: 112 64-bit hashes each, 15 MB


def minhash_stages(documents: list[PipelineStep], folder: Path, tasks: int, seed: int) -> list[Stage]:
    """Return the stages that find near duplicates. `documents` are the blocks that read them, in `tasks` tasks.

    A pair of documents with similarity s, the share of common 5-grams of words, is found with probability
    1 - (1 - s^8)^14: 0.57 for 0.7, 0.92 for 0.8 and 0.01 for 0.4. This is the setting of datatrove and FineWeb:
    14 buckets of 8 64-bit hashes.
    """
    config = MinhashConfig(seed=seed)
    return [
        Stage("minhash_signatures", [*documents, MinhashSignature(folder, config)], tasks),
        Stage("minhash_buckets", [MinhashBuckets(folder, config, tasks)], config.num_buckets),
        Stage("minhash_clusters", [MinhashClusters(folder, config, tasks)], 1),
    ]


class MinhashSignature(MinhashDedupSignature):
    """Block that computes MinHash signatures of a task's documents, one file per bucket.

    A text of fewer than five words has a single shingle of all its words. A text without words has no signature.
    """

    def __init__(self, folder: Path, config: MinhashConfig) -> None:
        super().__init__(str(folder / "signatures"), config, language=PlainWords())  # type: ignore[arg-type]
        self._hash_func = hash_text

    def get_shingles(self, text: str) -> np.ndarray:
        """Return the hashes of the shingles, uint64 [shingles, 1]."""
        shingles = super().get_shingles(text)
        if not shingles.size and (words := split_words(simplify_text(text, self.config.norm_config))):
            shingles = np.array([[hash_text(" ".join(words))]], dtype=np.uint64)
        return shingles

    def get_signature(self, shingles: np.ndarray) -> list[list[int]]:
        """Return the minima over all shingles, [buckets][hashes per bucket]."""
        parts = [
            super(MinhashSignature, self).get_signature(shingles[start : start + SHINGLES])
            for start in range(0, len(shingles), SHINGLES)
        ]
        return np.array(parts, dtype=np.uint64).min(axis=0).tolist()


class MinhashBuckets(MinhashDedupBuckets):
    """Block that finds pairs of neighbors with equal signatures in a bucket, one task per bucket."""

    def __init__(self, folder: Path, config: MinhashConfig, tasks: int) -> None:
        super().__init__(
            str(folder / "signatures"), str(folder / "found"), config=config, lines_to_buffer=READ_RECORDS
        )
        self.tasks = tasks

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        signatures = Path(self.input_folder.path) / f"bucket_{rank:03d}"
        require(signatures, "*.minhash.sig", self.tasks, "tasks' signatures")
        allow_open_files(self.tasks)
        super().run(None, rank, world_size)


class MinhashClusters(MinhashDedupCluster):
    """Block that groups the pairs of all buckets into clusters, and writes the duplicates to one file per task.

    A file has the indices of the documents to remove: all of a cluster but the first.
    """

    def __init__(self, folder: Path, config: MinhashConfig, tasks: int) -> None:
        super().__init__(str(folder / "found"), str(folder / "remove"), config)
        self.tasks = tasks

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        found, remove = Path(self.input_folder.path), Path(self.output_folder.path)
        require(found, "*.dups", self.config.num_buckets, "buckets")
        links = np.empty((0, 2), dtype=np.uint64)
        for file in sorted(found.glob("*.dups")):
            # pair, document, (task, number)
            pairs = np.fromfile(file, dtype="<u4").reshape(-1, 2, 2).astype(np.uint64)
            links = link_to_first(np.concatenate([links, pairs[..., 0] << np.uint64(32) | pairs[..., 1]]))
        later = links[:, 0]
        remove.mkdir(parents=True, exist_ok=True)
        task_of = later >> np.uint64(32)
        starts = np.searchsorted(task_of, np.arange(self.tasks + 1, dtype=np.uint64))
        for task in range(self.tasks):  # write empty files as well, so that a missing file is detected
            later[starts[task] : starts[task + 1]].astype("<u4").tofile(remove / f"{task:06d}.remove")
        self.stat_update("to_remove", value=len(later))


class MinhashRemoval(MinhashDedupFilter):
    """Filter that removes the duplicates found by the clusters."""

    def __init__(self, folder: Path, tally: Tally) -> None:
        super().__init__(str(folder / "remove"), lines_to_buffer=READ_RECORDS)
        self.folder, self.tally = folder, tally

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        require(self.folder / "remove", "*.remove", world_size, "tasks' lists of duplicates")
        yield from counted(super().run, data, rank, world_size, "duplicate (minhash)", self.tally)


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
