"""Near duplicates by datatrove's MinHash blocks; the first of a cluster stays.

    signatures (a task for each reading task) -> buckets -> clusters -> removal

What is subclassed here, and why: datatrove's clusters keep the document with the most neighbours; its removal removes
nothing, with a warning, if the stages before it left nothing; its signatures leave out texts under five words, also
equal ones, and take 3 GB for a text of 10 MB.

In the folder, which all tasks share: signatures/, found/ (pairs), remove/ (numbers of duplicates), documents/ (what
each reading task saw).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.utils.text import simplify_text

from train.prepare.dedup import READ_RECORDS, allow_open_files, counted, record_of, require, watch
from train.prepare.tally import Stage, Tally
from train.prepare.words import PlainWords, hash_text, split_words

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
        self.folder = folder
        self._hash_func = hash_text

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        super().run(watch(data, record_of(self.folder, rank), check=False), rank, world_size)

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
            pairs = (
                np.fromfile(file, dtype="<u4").reshape(-1, 2, 2).astype(np.uint64)
            )  # pair, document, (task, number)
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
        documents = watch(data, record_of(self.folder, rank), check=True)
        yield from counted(super().run, documents, rank, world_size, "duplicate (minhash)", self.tally)


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
