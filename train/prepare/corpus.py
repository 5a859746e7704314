"""Find the input files and read their documents: all of them, or the share of one task.

A document is one line of a .jsonl, one object of a .json, one row of a .csv, .parquet or saved Hugging Face dataset, or
one file of plain text or source code. With a separator, a .txt holds several documents. All formats but .parquet and
.arrow can be compressed as .gz or .zst.

The input `python-stdlib` stands for the standard library sources of the running Python, which exist on every machine.
`hf:NAME[:CONFIG[:SPLIT]]` is a dataset on the Hugging Face Hub.
"""

import argparse
import json
import logging
import math
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from model import require_packages
from model.keys import NOT_GIVEN, between, unicode
from train.data.format import DataError
from train.prepare.readers import (
    BLANK_LINE,
    PACKED,
    Items,
    read_stream,
    read_table,
)

logger = logging.getLogger(__name__)
STDLIB = "python-stdlib"
HUB = "hf:"
TEXT_SUFFIXES = frozenset(
    ".txt .md .rst .tex .py .pyi .c .h .cc .cpp .hpp .cu .cuh .java .js .ts .go .rs .rb .sh .sql .html .css".split()
)
# Folders of text or source code often contain these as settings and tables. They are read only if named explicitly.
NAMED_ONLY = (".json", ".csv")
RECORD_SUFFIXES = (".jsonl", ".parquet", *NAMED_ONLY)
SPLITTABLE = (".jsonl", ".parquet", ".arrow")
WORK_NAME = "prepare_data.unfinished"  # folder of an unfinished preparation in --output, never read as input
SAVED_DATASET = "state.json"  # written by datasets' save_to_disk
ALLOWED = (
    f"{', '.join(RECORD_SUFFIXES)}, {' '.join(sorted(TEXT_SUFFIXES))} (all but .parquet also as .gz or .zst; "
    f"{' and '.join(NAMED_ONLY)} files must be named, and are skipped in folders), "
    f"a folder that datasets' save_to_disk wrote for one split, {HUB}NAME[:CONFIG[:SPLIT]], or {STDLIB}"
)
# Tests and tools are repetitive and contain deliberately broken files. _sysconfigdata is also skipped, because it names
# the build machine.
STDLIB_SKIPPED = "site-packages dist-packages test tests idle_test idlelib lib2to3".split()

SPLIT_ON = (
    f"separator between the documents of a .txt: a text such as '<|endoftext|>', or {BLANK_LINE} for blank lines "
    "(default: each file is one document)"
)


def add_loss_limits(parser: argparse.ArgumentParser) -> None:
    """Add the options that limit how many documents and files a program may lose."""
    add = partial(parser.add_argument, type=between(0), default=0)
    add("--max_dropped", help="number of unreadable documents to tolerate (default: 0)")
    add("--max_damaged_files", help="number of damaged files to tolerate (default: 0)")


def separator(text: str) -> str:
    """Check the value of --split_on (an argparse type)."""
    if not unicode(text) or "\n" in text or "\\n" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is empty or contains a line end; give the {SPLIT_ON}")
    return text


def eval_fraction(text: str) -> float:
    """Check the value of --eval_fraction (an argparse type): a share that leaves text to train on, or 1."""
    if 1e-6 <= (value := float(text)) <= 0.5 or value == 1:
        return value
    raise argparse.ArgumentTypeError(f"{text}: it must be 1e-06 to 0.5, or 1 to use all text for evaluation")


@dataclass(frozen=True)
class Source:
    """A file to read.

    Attributes:
        path: absolute path.
        kind: how to read it: the suffixes, such as ".jsonl.gz".
        bytes: size.
        mtime_ns: time of the last modification.
    """

    path: str
    kind: str
    bytes: int
    mtime_ns: int

    @classmethod
    def from_path(cls, path: Path, kind: str) -> "Source":
        found = path.stat()
        return cls(str(path.absolute()), kind, found.st_size, found.st_mtime_ns)

    @property
    def is_text(self) -> bool:
        """Whether the file is plain text rather than records."""
        return _uncompressed_name(self.kind) in TEXT_SUFFIXES


def list_sources(inputs: Iterable[str], split_on: str | None = None) -> list[Source]:
    """Return the files of `inputs` in reading order: inputs as given, the files of a folder sorted by path.

    Files of unknown kinds in a folder are skipped and logged; hidden files are skipped silently. A file named
    explicitly must be of a known kind.

    Raises:
        DataError: a path does not exist, cannot be read, is of an unknown kind or is given twice; a folder has nothing
            to read; a dataset cannot be loaded; there is no .txt for `split_on`.
        SystemExit: a package is not installed.
    """
    files: list[tuple[Path, str]] = []
    for name in inputs:
        if not name:
            raise DataError(f"input {name!r} is {NOT_GIVEN}", code="not_given", key="--input")
        try:
            found, skipped = _input_files(name)
            for file, _ in found:
                os.close(os.open(file, os.O_RDONLY))  # fail now, not when a task reads it
        except OSError as error:
            raise DataError(
                f"input {name}: {error.filename or name} cannot be read ({error.strerror}); change its permissions or "
                "remove it from the inputs",
                code="unreadable",
                key=str(error.filename or name),
            ) from error
        suffixes = Counter(file.suffix or "without a suffix" for file in skipped).most_common(8)
        kinds = ", ".join(f"{count:,} {suffix}" for suffix, count in suffixes)
        if not found:
            raise DataError(
                f"input {name} contains no readable file{f', only {kinds}' * bool(kinds)}. Allowed: {ALLOWED}",
                code="nothing_to_read",
                key=name,
            )
        if skipped:
            logger.warning(
                f"input {name}: {len(skipped):,} files skipped by suffix: {kinds} (to read "
                f"{' and '.join(NAMED_ONLY)} files, name them as inputs)"
            )
        files += found
    seen: dict[str, Path] = {}
    for file, _ in files:
        if (first := seen.setdefault(os.path.realpath(file), file)) is not file:
            raise DataError(
                f"{file} is given twice (directly, in a folder or by a link), first as {first}. Name each input once, "
                "and remove links to other inputs from folders",
                code="given_twice",
                key=str(file),
            )
    if split_on is not None and not any(_uncompressed_name(kind) == ".txt" for _, kind in files):
        raise DataError(
            "--split_on applies to .txt files, but the inputs contain none; remove --split_on",
            code="nothing_to_split",
            key="--split_on",
        )
    return [Source.from_path(file, kind) for file, kind in files]


def _input_files(name: str) -> tuple[list[tuple[Path, str]], list[Path]]:
    """Return the files of one input, each with its kind, and the files that are skipped."""
    path = Path(name)
    if name == STDLIB:
        return [(file, ".py") for file in _stdlib_files()], []
    if name.startswith(HUB):
        return _hub_files(name), []
    if path.is_dir():
        if (path / SAVED_DATASET).is_file():
            # of a saved Hugging Face dataset, only the files that its state.json lists
            state = json.loads((path / SAVED_DATASET).read_text(encoding="utf-8"))
            return [(path / entry["filename"], ".arrow") for entry in state.get("_data_files", [])], []
        read, skipped = [], []
        for file in _walk(path, set()):
            kind = _kind(file)
            if kind and _uncompressed_name(kind) not in NAMED_ONLY:
                read.append((file, kind))
            else:
                skipped.append(file)
        return read, skipped
    if not path.is_file():
        raise DataError(
            f"input {name} does not exist; give files, folders, {HUB}NAME or {STDLIB}",
            code="file_missing",
            key=name,
        )
    return ([(path, kind)], []) if (kind := _kind(path)) else ([], [path])


def _hub_files(name: str) -> list[tuple[Path, str]]:
    """Return the files of a dataset on the Hugging Face Hub; datasets downloads them into its cache once."""
    require_packages(f"input {name}", "datasets", requirements="requirements-prep.txt")
    import datasets

    dataset, _, rest = name.removeprefix(HUB).partition(":")
    config, _, split = rest.partition(":")
    if "[" in split:
        raise DataError(
            f"input {name}: slices of a split are not supported. Name the whole split, or save the slice with "
            "datasets' save_to_disk and name that folder",
            code="part_of_split",
            key=name,
        )
    try:
        loaded = datasets.load_dataset(dataset, config or None, split=split or "train")
    except Exception as error:  # datasets raises many types: unknown name, configuration or split, no network
        raise DataError(
            f"input {name}: datasets cannot load it: {error}. Check the name, {HUB}NAME[:CONFIG[:SPLIT]] "
            "(the default split is train), and the network; or download the dataset and name its files",
            code="dataset_unavailable",
            key=name,
        ) from error
    return [(Path(entry["filename"]), ".arrow") for entry in loaded.cache_files]


def read_share(
    sources: Sequence[Source], text_key: str, task: int = 0, tasks: int = 1, split_on: str | None = None
) -> Items:
    """Yield the documents of one task's share: contiguous, and of equal bytes as far as files can be split.

    The shares of all tasks, in order, are exactly what a single task would read.

    Args:
        task: index of the task, from 0.
        tasks: number of tasks.
        split_on: separator of documents in .txt files, as in --split_on.
    """
    for source, start, stop in _share(sources, task, tasks, split_on):
        path = Path(source.path)
        if source.kind in (".parquet", ".arrow"):
            yield from read_table(path, source.kind, text_key, start, stop)
        else:
            yield from read_stream(path, source.kind, text_key, split_on, start, stop)


def _share(
    sources: Sequence[Source], task: int, tasks: int, split_on: str | None
) -> Iterator[tuple[Source, int, float]]:
    """Yield (file, first byte, byte after the last) of a share.

    A file that cannot be split belongs to the share in which it begins. An empty file counts as one byte, so that it
    belongs to exactly one share.
    """
    total = sum(max(source.bytes, 1) for source in sources)
    low, high = total * task // tasks, total * (task + 1) // tasks
    splittable = SPLITTABLE if split_on is None else (*SPLITTABLE, ".txt")
    begin = 0
    for source in sources:
        end = begin + max(source.bytes, 1)
        if source.kind in splittable and source.bytes:
            if max(low, begin) < min(high, end):
                yield source, max(low - begin, 0), min(high, end) - begin
        elif low <= begin < high:
            yield source, 0, math.inf
        begin = end


def _kind(path: Path) -> str:
    """Return the kind of a file, such as ".jsonl.gz", or "" if it is unknown."""
    name = path.name.lower()
    packing = Path(name).suffix if name.endswith(PACKED) else ""
    base = Path(_uncompressed_name(name)).suffix
    is_known = base in TEXT_SUFFIXES or (base in RECORD_SUFFIXES and not (packing and base == ".parquet"))
    return base + packing if is_known else ""


def _uncompressed_name(name: str) -> str:
    """Return a file name or kind without .gz or .zst."""
    return name[: name.rindex(".")] if name.endswith(PACKED) else name


def _walk(folder: Path, visited: set[str]) -> Iterator[Path]:
    """Yield all files, sorted, except hidden ones and those of a preparation whose --output is in the folder.

    Args:
        visited: the folders that were visited before, which a link may lead to again.

    Raises:
        OSError: a folder cannot be listed.
        DataError: a link is broken.
    """
    visited.add(os.path.realpath(folder))
    for name in sorted(os.listdir(folder)):
        path = folder / name
        if name.startswith(".") or name == WORK_NAME:
            continue
        if path.is_dir():
            if os.path.realpath(path) not in visited:
                yield from _walk(path, visited)
            continue
        # a broken link without a suffix may have been a folder; files with unknown suffixes are skipped anyway
        if (_kind(path) or not path.suffix) and not path.is_file():
            raise DataError(
                f"{path} is a broken link, a pipe or a device; repair or remove it",
                code="unreadable",
                key=str(path),
            )
        yield path


def _stdlib_files() -> list[Path]:
    files = []
    for parent, folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = [name for name in folders if name not in STDLIB_SKIPPED]
        files += [
            Path(parent, name) for name in names if name.endswith(".py") and "_sysconfigdata" not in name
        ]
    return sorted(file for file in files if file.stat().st_size)  # an empty file holds no document
