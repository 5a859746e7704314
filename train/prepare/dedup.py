"""Removal of duplicates, equal or near, by datatrove's blocks; the first of them stays.

    exact      signatures (a task for each reading task) -> search -> removal
    minhash    signatures (a task for each reading task) -> buckets -> clusters -> removal

What is subclassed here, and why. datatrove's exact search keeps the document with the lowest number in its task,
whichever task that is; its clusters the one with the most neighbours. Its removals remove nothing if the stages before
them left nothing. Its MinHash signatures skip texts under five words, also equal ones, and take 3 GB for a text of
10 MB.

In the folder, which all tasks share: signatures/; exact: signed/ and done/ (a mark of each reading and search task),
found/ (numbers of duplicates); minhash: found/ (pairs), remove/ (numbers of duplicates). An input that changes between
the stages is refused at the end of the preparation.
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

MOST_TASKS = 65_535  # datatrove's 16-bit priority, by which an earlier task goes first
SEARCH_TASKS = 16
# Of each reading task's signatures, what a search holds in memory; datatrove's 5 would be a system call for each 5.
READ_RECORDS = 1000

AGAIN = f"remove {WORK_NAME} in --output, and prepare again"


def document_bytes(document: Document) -> bytes:
    return document.text.encode()


def mark(folder: Path, rank: int) -> None:
    """Note that a task is completed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{rank:05d}").write_bytes(b"")


def require(folder: Path, pattern: str, count: int, what: str) -> None:
    """Raise unless a stage before left `count` files: datatrove takes what it finds."""
    if (found := sum(1 for _ in folder.glob(pattern))) != count:
        raise DataError(
            f"{folder} has {found} of {count} {what}: an earlier stage has not ended, or its files were "
            f"removed; {AGAIN}",
            code="stage_unfinished",
            key=str(folder),
        )


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files: the searches open one or more for each reading task."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise DataError(
                f"--dedup needs {wanted} open files at once, the limit here is {hard}: raise it (ulimit -Hn), or give "
                "fewer --tasks",
                code="too_few_open_files",
                key="--tasks",
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def counted(
    run: Any, data: Iterator[Document], rank: int, world_size: int, step: str, tally: Tally
) -> Iterator[Document]:
    """What `run`, a filter's, passes on of the data; what it does not is counted as removed by `step`."""
    numbers, kept = itertools.count(), 0
    for document in run((document for document, _ in zip(data, numbers, strict=False)), rank, world_size):
        kept += 1
        yield document
    if removed := next(numbers) - kept:
        tally.by_step[step] += removed


# ---------------------------------------------------------------- exact

# datatrove compares xxh64 hashes alone. Of n different documents, n^2 / 2^65 pairs are expected to share one: 0.01 in
# 600 million documents.
EXACT = ExactDedupConfig(content_getter=document_bytes)


def exact_stages(documents: list[PipelineStep], folder: Path, tasks: int) -> list[Stage]:
    """The stages that find the repeated texts among what `documents` gives in each of `tasks` tasks."""
    searches = min(tasks, SEARCH_TASKS)
    return [
        Stage("exact_signatures", [*documents, ExactSignature(folder, searches)], tasks),
        Stage("exact_search", [ExactSearch(folder, tasks)], searches),
    ]


class ExactSignature(ExactDedupSignature):
    """Hashes of a task's documents, those of earlier tasks going first among equal ones."""

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
    """The numbers of the documents, by task, that repeat an earlier one; a search task has a range of hashes."""

    def __init__(self, folder: Path, tasks: int) -> None:
        super().__init__(
            str(folder / "signatures"), str(folder / "found"), EXACT, lines_to_buffer=READ_RECORDS
        )
        self.folder, self.tasks = folder, tasks

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        require(self.folder / "signed", "*", self.tasks, "tasks' signatures")
        allow_open_files(3 * self.tasks)
        with without_patterns(self.folder / "signatures") as signatures:  # which datatrove finds by a glob
            self.data_folder = get_datafolder(str(signatures))
            super().run(None, rank, world_size)
        mark(self.folder / "done", rank)


class ExactRemoval(ExactDedupFilter):
    """Removes what the search found."""

    def __init__(self, folder: Path, tally: Tally) -> None:
        super().__init__(str(folder / "found"), EXACT)
        self.folder, self.tally = folder, tally

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        require(self.folder / "done", "*", min(world_size, SEARCH_TASKS), "searches")
        yield from counted(super().run, data, rank, world_size, "duplicate (exact)", self.tally)


# ---------------------------------------------------------------- near

SHINGLES = 1 << 14  # hashed at a time: 112 64-bit hashes each, 15 MB


def minhash_stages(documents: list[PipelineStep], folder: Path, tasks: int, seed: int) -> list[Stage]:
    """The stages that find the near duplicates among what `documents` gives in each of `tasks` tasks.

    A pair of similarity s, the share of common 5-grams of words, is found with probability 1 - (1 - s^8)^14: 0.57 at
    0.7, 0.92 at 0.8, 0.01 at 0.4 (datatrove's and FineWeb's setting: 14 buckets of 8 64-bit hashes).
    """
    config = MinhashConfig(seed=seed)
    return [
        Stage("minhash_signatures", [*documents, MinhashSignature(folder, config)], tasks),
        Stage("minhash_buckets", [MinhashBuckets(folder, config, tasks)], config.num_buckets),
        Stage("minhash_clusters", [MinhashClusters(folder, config, tasks)], 1),
    ]


class MinhashSignature(MinhashDedupSignature):
    """MinHash signatures of a task's documents, one file a bucket.

    Texts of less than five words have one shingle, all their words; those without any word have no signature.
    """

    def __init__(self, folder: Path, config: MinhashConfig) -> None:
        super().__init__(str(folder / "signatures"), config, language=PlainWords())  # type: ignore[arg-type]
        self._hash_func = hash_text

    def get_shingles(self, text: str) -> np.ndarray:
        """uint64 [shingles, 1]"""
        shingles = super().get_shingles(text)
        if not shingles.size and (words := split_words(simplify_text(text, self.config.norm_config))):
            shingles = np.array([[hash_text(" ".join(words))]], dtype=np.uint64)
        return shingles

    def get_signature(self, shingles: np.ndarray) -> list[list[int]]:
        """[buckets][hashes of one]: the minima over all shingles."""
        parts = [
            super(MinhashSignature, self).get_signature(shingles[start : start + SHINGLES])
            for start in range(0, len(shingles), SHINGLES)
        ]
        return np.array(parts, dtype=np.uint64).min(axis=0).tolist()


class MinhashBuckets(MinhashDedupBuckets):
    """The pairs of neighbours with an equal signature in one bucket, one task a bucket."""

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
    """The connected documents of all buckets' pairs, of which the first stays: a file of numbers for each task."""

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
        for task in range(self.tasks):  # also an empty one, so that a missing one is known to be missing
            later[starts[task] : starts[task + 1]].astype("<u4").tofile(remove / f"{task:06d}.remove")
        self.stat_update("to_remove", value=len(later))


class MinhashRemoval(MinhashDedupFilter):
    """Removes what the clusters name."""

    def __init__(self, folder: Path, tally: Tally) -> None:
        super().__init__(str(folder / "remove"), lines_to_buffer=READ_RECORDS)
        self.folder, self.tally = folder, tally

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        require(self.folder / "remove", "*.remove", world_size, "tasks' lists of duplicates")
        yield from counted(super().run, data, rank, world_size, "duplicate (minhash)", self.tally)


def link_to_first(edges: np.ndarray) -> np.ndarray:
    """Edges [E, 2] of a graph -> (member, first) [M, 2]: each member of a component with its lowest one, which itself
    is left out; sorted by member.

    Labels sink along the edges and are replaced by their labels' labels, which takes about log(longest path) rounds
    (Zhang, Azad and Buluc 2020, "FastSV").
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
