"""What both searches for duplicates share, and the exact one, by datatrove's blocks; the first of equal texts stays.

    signatures (a task for each reading task) -> search -> removal

What is subclassed here, and why: datatrove's search keeps the document with the lowest number in its task, whichever
task that is; its removal removes nothing if the stages before it left nothing, and another document if the input has
changed meanwhile.

In the folder, which all tasks share: signatures/, found/ (numbers of duplicates), done/ (a mark of each search task),
documents/ (what each reading task saw).
"""

import json
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup.exact_dedup import (
    ExactDedupConfig,
    ExactDedupFilter,
    ExactDedupSignature,
    ExactFindDedups,
)

from train.data.format import DataError
from train.files import write_durably
from train.prepare.tally import Stage, Tally

MOST_TASKS = 65_535  # datatrove's 16-bit priority, by which an earlier task goes first
SEARCH_TASKS = 16
# Of each reading task's signatures, what a search holds in memory; datatrove's 5 would be a system call for each 5.
READ_RECORDS = 1000

AGAIN = "prepare with --overwrite"


def document_bytes(document: Document) -> bytes:
    return document.text.encode()


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


# ---------------------------------------------------------------- the same documents again


def watch(data: Iterable[Document], record: Path, check: bool) -> Iterator[Document]:
    """Pass the documents on, and at their end write what they were to `record`, or check that they are as it says.

    Raises:
        DataError: they are not: the numbers of duplicates in the folder would remove others.
    """
    count, digest = 0, xxhash.xxh3_64()
    for document in data:
        text = document_bytes(document)
        digest.update(len(text).to_bytes(8, "little") + text)
        count += 1
        yield document
    seen = {"documents": count, "xxh3_64": digest.hexdigest()}
    if not check:
        record.parent.mkdir(parents=True, exist_ok=True)
        write_durably(record, json.dumps(seen) + "\n")
    elif (before := json.loads(record.read_text(encoding="utf-8"))) != seen:
        raise DataError(
            f"the {count} documents of task {record.stem} are not the {before['documents']} among which duplicates "
            f"were searched: the input or the packages have changed meanwhile; {AGAIN}"
        )


def record_of(folder: Path, rank: int) -> Path:
    return folder / "documents" / f"{rank:05d}.json"


def require(folder: Path, pattern: str, count: int, what: str) -> None:
    """Raise unless a stage before left `count` files: datatrove takes what it finds."""
    if (found := sum(1 for _ in folder.glob(pattern))) != count:
        raise DataError(f"{folder} has {found} of {count} {what}: an earlier stage has not ended, or its files were "
                        f"removed; {AGAIN}")  # fmt: skip


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files: the searches open one or more for each reading task."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise DataError(
                f"--dedup needs {wanted} open files at once, the limit here is {hard}: raise it (ulimit -Hn), or give "
                "fewer --tasks"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# ---------------------------------------------------------------- exact


class ExactSignature(ExactDedupSignature):
    """Hashes of a task's documents, those of earlier tasks going first among equal ones."""

    def __init__(self, folder: Path, searches: int) -> None:
        super().__init__(str(folder / "signatures"), EXACT, finder_workers=searches)
        self.folder, self.priority = folder, 0

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        self.priority = MOST_TASKS - rank
        super().run(watch(data, record_of(self.folder, rank), check=False), rank, world_size)

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
        require(self.folder / "documents", "*.json", self.tasks, "tasks' signatures")
        allow_open_files(3 * self.tasks)
        super().run(None, rank, world_size)
        done = self.folder / "done" / f"{rank:05d}"
        done.parent.mkdir(exist_ok=True)
        done.write_bytes(b"")


class ExactRemoval(ExactDedupFilter):
    """Removes what the search found."""

    def __init__(self, folder: Path, tally: Tally) -> None:
        super().__init__(str(folder / "found"), EXACT)
        self.folder, self.tally = folder, tally

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        require(self.folder / "done", "*", min(world_size, SEARCH_TASKS), "searches")
        documents = watch(data, record_of(self.folder, rank), check=True)
        yield from counted(super().run, documents, rank, world_size, "duplicate (exact)", self.tally)


def counted(
    run: Any, data: Iterator[Document], rank: int, world_size: int, step: str, tally: Tally
) -> Iterator[Document]:
    """What `run`, a filter's, passes on of the data; what it does not is counted as removed by `step`."""
    given = 0

    def count() -> Iterator[Document]:
        nonlocal given
        for document in data:
            given += 1
            yield document

    kept = 0
    for document in run(count(), rank, world_size):
        kept += 1
        yield document
    if given > kept:
        tally.removed(step, given - kept)
