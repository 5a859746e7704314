"""Find input files and read their documents: all documents, or the share of one task.

A document is one line in a .jsonl file, one object in a .json file, one row in a .parquet file or saved
Hugging Face dataset, or one whole file of plain text or source code. With a separator, a .txt file contains several
documents. All formats except .parquet and .arrow can be compressed as .gz or .zst.

The input `python-stdlib` selects the standard library sources of the running Python, which exist on every host.
`hf:NAME[:CONFIG[:SPLIT]]` selects a dataset on the Hugging Face Hub.
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
RECORD_SUFFIXES = (".jsonl", ".parquet", ".json")
SPLITTABLE = (".jsonl", ".parquet", ".arrow")
PYTHON_CACHE = "__pycache__"  # never read as input
WORK_NAME = "prepare_data.unfinished"  # folder in --output with the unfinished work; never read as input
SAVED_DATASET = "state.json"  # file that the save_to_disk method of the datasets package writes
ALLOWED = (
    f"{', '.join(RECORD_SUFFIXES)}, {' '.join(sorted(TEXT_SUFFIXES))} (all except .parquet also as .gz or .zst; "
    ".json files in folders are skipped, so pass their paths as inputs), "
    f"a folder that save_to_disk of the datasets package wrote for one split, {HUB}NAME[:CONFIG[:SPLIT]], or {STDLIB}"
)
# Tests and tools are skipped because they are repetitive and contain deliberately broken files. _sysconfigdata is
# skipped because its content depends on the host that built Python.
STDLIB_SKIPPED = "site-packages dist-packages test tests idle_test idlelib lib2to3".split()


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """Add the options --text_key and --split_on to an argument parser."""
    parser.add_argument(
        "--text_key",
        type=unicode,
        default="text",
        help="JSON key or table column that contains the text (default: text)",
    )
    parser.add_argument(
        "--split_on",
        type=separator,
        metavar="SEPARATOR",
        help="separator between the documents in a .txt file: a text such as '<|endoftext|>', or "
        f"{BLANK_LINE} for blank lines (default: each file is one document)",
    )


def add_loss_limits(parser: argparse.ArgumentParser) -> None:
    """Add the options --max_dropped and --max_damaged_files to an argument parser."""
    add = partial(parser.add_argument, type=between(0), default=0)
    add("--max_dropped", help="maximum number of unreadable documents to skip without an error (default: 0)")
    add("--max_damaged_files", help="maximum number of damaged files to accept without an error (default: 0)")


def separator(text: str) -> str:
    """Check and return the value of --split_on. This function is the argparse type of the option."""
    if not unicode(text) or "\n" in text or "\\n" in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is empty or contains a line break. Pass a text such as '<|endoftext|>', or {BLANK_LINE} to "
            "split at blank lines"
        )
    return text


def eval_fraction(text: str) -> float:
    """Parse --eval_fraction for argparse: a number from 1e-6 to 0.5, or 1 to use all text for evaluation."""
    if 1e-6 <= (value := float(text)) <= 0.5 or value == 1:
        return value
    raise argparse.ArgumentTypeError(
        f"{text} is not allowed. Pass a fraction from 0.000001 to 0.5, or 1 to use all text for evaluation"
    )


@dataclass(frozen=True)
class Source:
    """An input file.

    Attributes:
        path: absolute path.
        kind: format of the file, given by its suffixes, such as ".jsonl.gz".
        bytes: size in bytes.
        mtime_ns: time of the last modification, in ns since the epoch.
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
        """Return whether the file is plain text or source code, as opposed to records with a text key."""
        return _uncompressed_name(self.kind) in TEXT_SUFFIXES


def list_sources(inputs: Iterable[str], split_on: str | None = None) -> list[Source]:
    """Return all input files in reading order. The files in a folder are sorted by path.

    In a folder, files with an unknown format are skipped with a warning, and hidden files are skipped silently. An
    input that is a file must have a known format.

    Args:
        inputs: files, folders and datasets, as accepted by --input.
        split_on: separator between documents in .txt files, or None.

    Raises:
        DataError: if a path does not exist, cannot be read, has an unknown format or is given twice; a folder contains
            no readable file; a dataset cannot be loaded; or `split_on` is given but there is no .txt file.
        SystemExit: if a package is not installed.
    """
    files: list[tuple[Path, str]] = []
    for name in inputs:
        if not name:
            raise DataError(f"input {name!r}: {NOT_GIVEN}", code="not_given", key="--input")
        try:
            found, skipped = _input_files(name)
            for file, _ in found:
                os.close(os.open(file, os.O_RDONLY))  # fail now rather than in a task
        except OSError as error:
            raise DataError(
                f"input {name}: {error.filename or name} cannot be read ({error.strerror}); change the permissions of "
                "the file, or remove the file from the inputs",
                code="unreadable",
                key=str(error.filename or name),
            ) from error
        suffixes = Counter(file.suffix or "without a suffix" for file in skipped).most_common(8)
        kinds = ", ".join(f"{count:,} {suffix}" for suffix, count in suffixes)
        if not found:
            raise DataError(
                f"input {name}: no file has a known format{f' (skipped: {kinds})' * bool(kinds)}. Allowed inputs: "
                f"{ALLOWED}",
                code="nothing_to_read",
                key=name,
            )
        if skipped:
            logger.warning(
                f"input {name}: {len(skipped):,} files were skipped because of their suffix: {kinds}. To read "
                ".json files, pass each file as an input"
            )
        files += found
    seen: dict[str, Path] = {}
    for file, _ in files:
        if (first := seen.setdefault(os.path.realpath(file), file)) is not file:
            raise DataError(
                f"{file} occurs twice in the inputs (directly, in a folder or through a link), first as {first}. "
                "Pass each input once, and remove links to other inputs from folders",
                code="given_twice",
                key=str(file),
            )
    if split_on is not None and not any(_uncompressed_name(kind) == ".txt" for _, kind in files):
        raise DataError(
            "--split_on applies only to .txt files, but the inputs contain no .txt file; remove --split_on",
            code="nothing_to_split",
            key="--split_on",
        )
    return [Source.from_path(file, kind) for file, kind in files]


def _input_files(name: str) -> tuple[list[tuple[Path, str]], list[Path]]:
    """Return the files of one input as (path, format) pairs, and a list of the skipped files."""
    path = Path(name)
    if name == STDLIB:
        return [(file, ".py") for file in _stdlib_files()], []
    if name.startswith(HUB):
        return _hub_files(name), []
    if path.is_dir():
        if (path / SAVED_DATASET).is_file():
            # In a saved Hugging Face dataset, read only the files that state.json lists.
            state = json.loads((path / SAVED_DATASET).read_text(encoding="utf-8"))
            return [(path / entry["filename"], ".arrow") for entry in state.get("_data_files", [])], []
        read, skipped = [], []
        for file in _walk(path, set()):
            kind = _kind(file)
            if kind and _uncompressed_name(kind) != ".json":  # in folders, .json files are often settings
                read.append((file, kind))
            else:
                skipped.append(file)
        return read, skipped
    if not path.is_file():
        raise DataError(
            f"input {name} does not exist; pass the path of a file or folder, {HUB}NAME or {STDLIB}",
            code="file_missing",
            key=name,
        )
    return ([(path, kind)], []) if (kind := _kind(path)) else ([], [path])


def _hub_files(name: str) -> list[tuple[Path, str]]:
    """Return the Arrow files of a dataset on the Hugging Face Hub, after downloading the dataset if necessary."""
    require_packages(f"input {name}", "datasets", requirements="requirements-prep.txt")
    import datasets

    dataset, _, rest = name.removeprefix(HUB).partition(":")
    config, _, split = rest.partition(":")
    if "[" in split:
        raise DataError(
            f"input {name}: a slice of a split is not supported. Pass the whole split, or save the slice with "
            "the save_to_disk method of the datasets package and pass the saved folder",
            code="part_of_split",
            key=name,
        )
    try:
        loaded = datasets.load_dataset(dataset, config or None, split=split or "train")
    except Exception as error:  # datasets raises exceptions of many types
        raise DataError(
            f"input {name} cannot be loaded by the datasets package: {error}. Check the network and the name, which "
            f"has the form {HUB}NAME[:CONFIG[:SPLIT]] (the default split is train), or download the dataset and pass "
            "its files",
            code="dataset_unavailable",
            key=name,
        ) from error
    return [(Path(entry["filename"]), ".arrow") for entry in loaded.cache_files]


def read_share(
    sources: Sequence[Source], text_key: str, task: int = 0, tasks: int = 1, split_on: str | None = None
) -> Items:
    """Yield the documents in one task's share of the input files.

    A share is a contiguous part of the input. All shares have about the same number of bytes, unless the input contains
    large files that cannot be split. The shares of all tasks in order contain exactly the documents that a single task
    would read.

    Args:
        task: index of the task, from 0.
        tasks: number of tasks.
        split_on: separator between documents in .txt files, as in --split_on.
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
    """Yield the parts of files in one task's share, as (file, first byte, byte after the last).

    A file that cannot be split is assigned to the share in which it begins. An empty file is treated as one byte long,
    so it is assigned to exactly one share.
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
    """Return the format of a file, such as ".jsonl.gz", or "" if the format is unknown."""
    name = path.name.lower()
    packing = Path(name).suffix if name.endswith(PACKED) else ""
    base = Path(_uncompressed_name(name)).suffix
    is_known = base in TEXT_SUFFIXES or (base in RECORD_SUFFIXES and not (packing and base == ".parquet"))
    return base + packing if is_known else ""


def _uncompressed_name(name: str) -> str:
    """Return a file name or format without .gz or .zst."""
    return name[: name.rindex(".")] if name.endswith(PACKED) else name


def _walk(folder: Path, visited: set[str]) -> Iterator[Path]:
    """Yield all files in a folder and its subfolders, sorted by path.

    Hidden files, Python's caches and the files of unfinished data preparations are skipped.

    Args:
        visited: real paths of the folders visited so far. Links to these folders are not followed.

    Raises:
        OSError: if a folder cannot be listed.
        DataError: if a link is broken.
    """
    visited.add(os.path.realpath(folder))
    for name in sorted(os.listdir(folder)):
        path = folder / name
        if name.startswith(".") or name in (PYTHON_CACHE, WORK_NAME):
            continue
        if path.is_dir():
            if os.path.realpath(path) not in visited:
                yield from _walk(path, visited)
            continue
        # A broken link without a suffix may have pointed to a folder. Other files with unknown suffixes are skipped.
        if (_kind(path) or not path.suffix) and not path.is_file():
            raise DataError(
                f"{path} is a broken link, a pipe or a device, not a regular file; repair or remove it",
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
    return sorted(file for file in files if file.stat().st_size)  # an empty file contains no document
