"""Inputs -> files -> documents, all of them or the share of one of several tasks.

One document a line in .jsonl, one an object in .json, one a row in .csv, .parquet and datasets' folders, one a file in
.txt and source text, or with a separator many in .txt; all but the tables of Arrow also packed as .gz or .zst. The
word `python-stdlib` stands for the standard library sources of the running Python: real text on every machine.
`hf:NAME[:CONFIG[:SPLIT]]` is a dataset of the Hugging Face hub.
"""

import argparse
import importlib.util
import json
import logging
import math
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from model import install_command
from model.keys import NOT_GIVEN, unicode
from train.data.format import DataError
from train.prepare.readers import (
    BAD_UTF8,
    BLANK_LINE,
    PACKED,
    Dropped,
    Items,
    check_text,
    read_arrow,
    read_parquet,
    read_stream,
)

logger = logging.getLogger(__name__)
STDLIB = "python-stdlib"
HUB = "hf:"
TEXT_SUFFIXES = frozenset(
    ".txt .md .rst .tex .py .pyi .c .h .cc .cpp .hpp .cu .cuh .java .js .ts .go .rs .rb .sh .sql .html .css".split()
)
# A folder of text or sources often has these beside it as settings and tables: read where they are named themselves.
NAMED_ONLY = (".json", ".csv")
RECORD_SUFFIXES = (".jsonl", ".parquet", *NAMED_ONLY)
SPLITTABLE = (".jsonl", ".parquet", ".arrow")
# In --output: what an unfinished preparation has done so far, and the ids and logs of Slurm's jobs. Not read as input.
WORK_NAME, SLURM_NAME = "prepare_data.unfinished", "prepare_data.slurm"
SAVED_DATASET, SAVED_SPLITS = "state.json", "dataset_dict.json"  # what datasets' save_to_disk leaves
ALLOWED = (
    f"{', '.join(RECORD_SUFFIXES)}, {' '.join(sorted(TEXT_SUFFIXES))} (all but .parquet also as .gz or .zst; "
    f"{' and '.join(NAMED_ONLY)} files by their names; in a folder they are skipped), "
    f"a folder of datasets' save_to_disk, {HUB}NAME[:CONFIG[:SPLIT]], or the word {STDLIB}"
)
# Tests and tools repeat each other and hold deliberately broken files; _sysconfigdata names the build machine.
STDLIB_SKIPPED = "site-packages dist-packages test tests idle_test idlelib lib2to3".split()

SPLIT_ON = (
    f"what is between the documents of a .txt: text such as '<|endoftext|>', or {BLANK_LINE} for lines without text; "
    "default: a file is one document"
)


def separator(text: str) -> str:
    """An argparse type: what --split_on takes."""
    if not unicode(text):
        raise argparse.ArgumentTypeError(f"empty; give {SPLIT_ON}")
    if "\n" in text or "\\n" in text:
        raise argparse.ArgumentTypeError(
            f"{text!r}: a separator lies within a line; for lines without text give {BLANK_LINE}"
        )
    return text


def eval_fraction(text: str) -> float:
    """An argparse type: a part that leaves text to train on, or all."""
    if 1e-6 <= (value := float(text)) <= 0.5 or value == 1:
        return value
    raise argparse.ArgumentTypeError(f"{text}: allowed is 1e-06 to 0.5, or 1: all, for evaluation alone")


@dataclass(frozen=True)
class Source:
    """A file to read: its absolute `path`, how (`kind`: a suffix, or "stdlib"), its `bytes` and time of change."""

    path: str
    kind: str
    bytes: int
    mtime_ns: int

    @classmethod
    def at(cls, path: Path, kind: str) -> "Source":
        found = path.stat()
        return cls(str(path.absolute()), kind, found.st_size, found.st_mtime_ns)

    @property
    def is_text(self) -> bool:
        """Whether it is plain text, and not records."""
        return _unpacked(self.kind) in TEXT_SUFFIXES or self.kind == "stdlib"

    def is_changed(self) -> bool:
        """Whether the file is another one by now, or gone."""
        try:
            return self != Source.at(Path(self.path), self.kind)
        except FileNotFoundError:
            return True


def list_sources(inputs: Iterable[str], split_on: str | None = None) -> list[Source]:
    """Return the files behind `inputs` in the order in which they are read: arguments as given, folders sorted by path.

    Files of other kinds in a folder are skipped and logged; hidden ones are skipped. A file named itself
    must be of a known kind.

    Raises DataError: a path does not exist, cannot be read, is of an unknown kind or comes twice; a folder has nothing
    to read; a dataset has several splits and none is named; a package is not installed; there is no .txt for
    `split_on`.
    """
    files: list[tuple[Path, str]] = []
    for name in inputs:
        if not name:
            raise DataError(f"input {name!r} is {NOT_GIVEN}", code="not_given", key="--input")
        check_name("input", name)
        try:
            found, skipped = _files_of(name)
            for file, _ in found:
                os.close(os.open(file, os.O_RDONLY))  # now, not when a task comes to it
        except OSError as error:
            raise DataError(
                f"input {name}: {error.filename or name} cannot be read ({error.strerror}); change its permissions, or "
                "leave it out",
                code="unreadable",
                key=str(error.filename or name),
            ) from error
        suffixes = Counter(file.suffix or "without a suffix" for file in skipped).most_common(8)
        kinds = ", ".join(f"{count:,} {suffix}" for suffix, count in suffixes)
        if not found:
            raise DataError(
                f"input {name} holds nothing to read{f', but {kinds}' * bool(kinds)}. Allowed: {ALLOWED}",
                code="nothing_to_read",
                key=name,
            )
        if skipped:
            logger.warning(
                f"input {name}: {len(skipped):,} files skipped by suffix: {kinds} (name {' and '.join(NAMED_ONLY)} "
                "files themselves to read them)"
            )
        files += found
    seen: dict[str, Path] = {}
    for file, _ in files:
        if (first := seen.setdefault(os.path.realpath(file), file)) is not file:
            raise DataError(
                f"{file} is given twice (by itself, a folder or a link), first as {first}; name each input once, and "
                "take links to others out of a folder",
                code="given_twice",
                key=str(file),
            )
    if split_on is not None and not any(_unpacked(kind) == ".txt" for _, kind in files):
        raise DataError(
            "--split_on splits .txt, and there is none among the inputs; leave it out",
            code="nothing_to_split",
            key="--split_on",
        )
    return [Source.at(file, kind) for file, kind in files]


def check_name(what: str, name: str) -> None:
    """Raises DataError: a manifest could not hold the name of this file or folder."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{what} {name!r}: its name is not UTF-8, which a manifest is; rename it",
            code="name_not_utf8",
            key=what,
        ) from error


def _files_of(name: str) -> tuple[list[tuple[Path, str]], list[Path]]:
    """Return the files of one input, each with its kind, and the others in a folder."""
    path = Path(name)
    if name == STDLIB:
        return [(file, "stdlib") for file in _stdlib_files()], []
    if name.startswith(HUB):
        return _hub_files(name), []
    if path.is_dir():
        if (path / SAVED_SPLITS).is_file():
            splits = json.loads((path / SAVED_SPLITS).read_text(encoding="utf-8"))["splits"]
            raise DataError(
                f"input {name} is a saved dataset with the splits {', '.join(splits)}; name one of them: "
                f"{path / splits[0]}",
                code="several_splits",
                key=name,
            )
        if (path / SAVED_DATASET).is_file():
            return _saved_files(path), []
        read, skipped = [], []
        for file in _walk(path):
            kind = _kind(file)
            if kind and _unpacked(kind) not in NAMED_ONLY:
                read.append((file, kind))
            else:
                skipped.append(file)
        return read, skipped
    if not path.is_file():
        raise DataError(
            f"input {name} does not exist; give files or folders, {HUB}NAME, or the word {STDLIB}",
            code="file_missing",
            key=name,
        )
    return ([(path, kind)], []) if (kind := _kind(path)) else ([], [path])


def _saved_files(folder: Path) -> list[tuple[Path, str]]:
    """Return the files of a dataset that datasets' save_to_disk wrote, by its own list."""
    try:
        state = json.loads((folder / SAVED_DATASET).read_text(encoding="utf-8"))
        return [(folder / entry["filename"], ".arrow") for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder / SAVED_DATASET} is not the state of a saved dataset ({error}); save the dataset again",
            code="not_a_saved_dataset",
            key=str(folder),
        ) from error


def _hub_files(name: str) -> list[tuple[Path, str]]:
    """Return the files of a dataset of the Hugging Face hub, which datasets downloads into its cache once."""
    if importlib.util.find_spec("datasets") is None:
        raise DataError(
            f"input {name} needs the package datasets, which is not installed. Install it with "
            + install_command("datasets", requirements="requirements-prep.txt"),
            code="package_missing",
            key="datasets",
        )
    import datasets

    dataset, _, rest = name.removeprefix(HUB).partition(":")
    config, _, split = rest.partition(":")
    if "[" in split:
        raise DataError(
            f"input {name}: a part of a split is not supported. Name the split alone, or save the part with datasets' "
            "save_to_disk and name that folder",
            code="part_of_split",
            key=name,
        )
    try:
        loaded = datasets.load_dataset(dataset, config or None, split=split or "train")
    except Exception as error:  # datasets raises many kinds: no such set, configuration or split, no network
        raise DataError(
            f"input {name}: datasets cannot load it: {error}. Check the name, {HUB}NAME[:CONFIG[:SPLIT]] "
            "(the split train unless given), and the network; or download it and give its files",
            code="dataset_unavailable",
            key=name,
        ) from error
    return [(Path(entry["filename"]), ".arrow") for entry in loaded.cache_files]


def read_documents(inputs: Iterable[str], text_key: str = "text", split_on: str | None = None) -> Items:
    """Read every document of `inputs` in order, with a `Dropped` or `Damaged` in the place of what cannot be read.

    Raises DataError as `list_sources` does, before anything is read.
    """
    return read_share(list_sources(inputs, split_on), text_key, 0, 1, split_on)


def read_share(
    sources: Sequence[Source], text_key: str, task: int, tasks: int, split_on: str | None = None
) -> Items:
    """Read the share of `task` (from 0) of `tasks`: contiguous, and equal in bytes as far as files can be split.

    The shares of all tasks in their order are what one task would read.

    Args:
        split_on: of .txt, as --split_on takes it.
    """
    for source, start, stop in _share(sources, task, tasks, split_on):
        path = Path(source.path)
        if source.kind == ".parquet":
            yield from read_parquet(path, text_key, start, stop)
        elif source.kind == ".arrow":
            yield from read_arrow(path, text_key, start, stop)
        elif source.kind == "stdlib":
            yield from _read_stdlib(path)
        else:
            yield from read_stream(path, source.kind, text_key, split_on, start, stop)


def _share(
    sources: Sequence[Source], task: int, tasks: int, split_on: str | None
) -> Iterator[tuple[Source, int, float]]:
    """(file, first byte, byte after the last) of a share. What cannot be split belongs where it begins. An empty file
    counts as one byte, so that it has a place."""
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
    """The reader's name for a file ('' for an unknown one)."""
    name = path.name.lower()
    packing = Path(name).suffix if name.endswith(PACKED) else ""
    base = Path(_unpacked(name)).suffix
    is_known = base in TEXT_SUFFIXES or (base in RECORD_SUFFIXES and not (packing and base == ".parquet"))
    return base + packing if is_known else ""


def _unpacked(name: str) -> str:
    """A name or a kind without .gz or .zst."""
    return name[: name.rindex(".")] if name.endswith(PACKED) else name


def _walk(folder: Path) -> list[Path]:
    """Return all files but hidden ones, and those of a preparation whose --output lies in the folder.

    Raises OSError: a folder cannot be listed. DataError: a link leads nowhere.
    """
    files, visited = [], set()
    for parent, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        if (real := os.path.realpath(parent)) in visited:  # a link back to a folder above
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name not in (WORK_NAME, SLURM_NAME)
        )
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    for file in sorted(files):
        # without a suffix it may stand for a folder; of an unknown one it would be skipped anyway
        if (_kind(file) or not file.suffix) and not file.is_file():
            raise DataError(
                f"{file} is a link that leads nowhere, a pipe or a device; mend it, or take it out",
                code="unreadable",
                key=str(file),
            )
    return sorted(files)


def _raise(error: OSError) -> None:
    raise error


@cache
def _stdlib_files() -> list[Path]:
    files = []
    for parent, folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = [name for name in folders if name not in STDLIB_SKIPPED]
        files += [Path(parent, name) for name in names if name.endswith(".py")]
    return sorted(
        file
        for file in files
        if not file.name.startswith("_sysconfigdata") and file.stat().st_size  # an empty file is no document
    )


def _read_stdlib(path: Path) -> Items:
    """A file of Python's own sources, which may name another encoding in its first lines, as one document."""
    try:
        text = importlib.util.decode_source(path.read_bytes())
    except UnicodeDecodeError as error:
        yield Dropped(BAD_UTF8, str(path), str(error))
        return
    yield check_text(text, str(path))
