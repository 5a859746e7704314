"""Inputs -> files -> documents, all of them or the share of one of several tasks.

One document a line in .jsonl (.gz, .zst), one a row in .parquet and in datasets' folders, one a file in .txt and
source text. The word `python-stdlib` stands for the standard library sources of the running Python: real text on every
machine. `hf:NAME[:CONFIG[:SPLIT]]` is a dataset of the Hugging Face hub.
"""

import importlib.util
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from train.prepare.readers import (
    Items,
    read_arrow,
    read_compressed_jsonl,
    read_jsonl,
    read_parquet,
    read_text,
)

STDLIB = "python-stdlib"
HUB = "hf:"
TEXT_SUFFIXES = frozenset(
    ".txt .md .rst .tex .py .pyi .c .h .cc .cpp .hpp .cu .cuh .java .js .ts .go .rs .rb .sh .sql .html .css".split()
)
RECORD_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
SPLITTABLE = (".jsonl", ".parquet", ".arrow")
SAVED_DATASET, SAVED_SPLITS = "state.json", "dataset_dict.json"  # what datasets' save_to_disk leaves
ALLOWED = (
    f"{', '.join(RECORD_SUFFIXES)}, {' '.join(sorted(TEXT_SUFFIXES))}, a folder of datasets' save_to_disk, "
    f"{HUB}NAME[:CONFIG[:SPLIT]], or the word {STDLIB}"
)
# Tests and tools repeat each other and hold deliberately broken files; _sysconfigdata names the build machine.
STDLIB_SKIPPED = "site-packages dist-packages test tests idle_test idlelib lib2to3".split()


@dataclass(frozen=True)
class Source:
    """A file to read: its absolute `path`, how (`kind`: a suffix, or "stdlib"), its `bytes` and time of change."""

    path: str
    kind: str
    bytes: int
    mtime_ns: int

    @classmethod
    def at(cls, path: Path, kind: str) -> "Source":
        stat = path.stat()
        return cls(str(path.absolute()), kind, stat.st_size, stat.st_mtime_ns)

    def is_changed(self) -> bool:
        """Whether the file is another one by now, or gone."""
        try:
            return self != Source.at(Path(self.path), self.kind)
        except FileNotFoundError:
            return True


def list_sources(inputs: Iterable[str]) -> list[Source]:
    """The files behind `inputs` in the order in which they are read: arguments as given, folders sorted by path.

    Files of other kinds inside a folder are left out, as are hidden ones; a file named itself must be of a known kind.

    Raises:
        ValueError: a path does not exist, is of an unknown kind or comes twice, a folder has nothing to read, a
            dataset of several splits without one of them named, or a package that an input needs is not installed.
    """
    files: list[tuple[Path, str]] = []
    for name in inputs:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"input {name!r}: its name is not UTF-8, which a manifest is; rename it"
            ) from error
        found = _files_of(name)
        if not found:
            raise ValueError(f"input {name} holds nothing to read; allowed: {ALLOWED}")
        files += found
    seen: set[str] = set()
    for file, _ in files:
        if (real := os.path.realpath(file)) in seen:
            raise ValueError(f"{file} is given twice (by itself, a folder or a link); name each input once")
        seen.add(real)
    return [Source.at(file, kind) for file, kind in files]


def _files_of(name: str) -> list[tuple[Path, str]]:
    """The files of one input, each with its kind."""
    path = Path(name)
    if name == STDLIB:
        return [(file, "stdlib") for file in _stdlib_files()]
    if name.startswith(HUB):
        return _hub_files(name)
    if path.is_dir():
        if (path / SAVED_SPLITS).is_file():
            splits = json.loads((path / SAVED_SPLITS).read_text(encoding="utf-8"))["splits"]
            raise ValueError(
                f"input {name} is a saved dataset with the splits {', '.join(splits)}; name one of them: "
                f"{path / splits[0]}"
            )
        if (path / SAVED_DATASET).is_file():
            return _saved_files(path)
        return [(file, kind) for file in _walk(path) if (kind := _kind(file))]
    if not path.is_file():
        raise ValueError(
            f"input {name} does not exist; give files or folders, {HUB}NAME, or the word {STDLIB}"
        )
    return [(path, kind)] if (kind := _kind(path)) else []


def _saved_files(folder: Path) -> list[tuple[Path, str]]:
    """The files of a dataset that datasets' save_to_disk wrote, by its own list."""
    try:
        state = json.loads((folder / SAVED_DATASET).read_text(encoding="utf-8"))
        files = [folder / entry["filename"] for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / SAVED_DATASET} is not the state of a saved dataset ({error}); save the dataset again"
        ) from error
    for file in files:
        if not file.is_file():
            raise ValueError(
                f"{file} is missing, and {SAVED_DATASET} beside it lists it; save the dataset again"
            )
    return [(file, ".arrow") for file in files]


def _hub_files(name: str) -> list[tuple[Path, str]]:
    """The files of a dataset of the Hugging Face hub, which datasets downloads into its cache once."""
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(
            f"input {name} needs the package datasets, which is not installed; pip install datasets"
        )
    import datasets

    dataset, _, rest = name.removeprefix(HUB).partition(":")
    config, _, split = rest.partition(":")
    try:
        loaded = datasets.load_dataset(dataset, config or None, split=split or "train")
    except Exception as error:  # datasets raises many kinds: no such set, configuration or split, no network
        raise ValueError(
            f"input {name}: datasets cannot load it: {error}. Check the name, {HUB}NAME[:CONFIG[:SPLIT]] "
            "(the split train unless given), and the network; or download it and give its files"
        ) from error
    return [(Path(entry["filename"]), ".arrow") for entry in loaded.cache_files]


def read_documents(inputs: Iterable[str], text_key: str = "text") -> Items:
    """Every document of `inputs` in order, with a `Dropped` in the place of what cannot be read.

    Raises ValueError as `list_sources` does, before anything is read.
    """
    return read_share(list_sources(inputs), text_key, 0, 1)


def read_share(sources: Sequence[Source], text_key: str, task: int, tasks: int) -> Items:
    """The share of `task` (from 0) of `tasks`: contiguous, and equal in bytes as far as files can be split. The shares
    of all tasks in their order are what one task would read."""
    for source, start, stop in _share(sources, task, tasks):
        path = Path(source.path)
        if source.kind == ".jsonl":
            yield from read_jsonl(path, text_key, start, stop)
        elif source.kind == ".parquet":
            yield from read_parquet(path, text_key, start, stop)
        elif source.kind == ".arrow":
            yield from read_arrow(path, text_key, start, stop)
        elif source.kind in RECORD_SUFFIXES:
            yield from read_compressed_jsonl(path, source.kind, text_key)
        else:
            yield from read_text(path, is_stdlib=source.kind == "stdlib")


def _share(sources: Sequence[Source], task: int, tasks: int) -> Iterator[tuple[Source, int, int]]:
    """(file, first byte, byte after the last) of a share. What cannot be split belongs where it begins. An empty file
    counts as one byte, so that it has a place."""
    total = sum(max(source.bytes, 1) for source in sources)
    low, high = total * task // tasks, total * (task + 1) // tasks
    begin = 0
    for source in sources:
        end = begin + max(source.bytes, 1)
        if source.kind in SPLITTABLE and source.bytes:
            if max(low, begin) < min(high, end):
                yield source, max(low - begin, 0), min(high, end) - begin
        elif low <= begin < high:
            yield source, 0, source.bytes
        begin = end


def text_key_option(text_keys: Sequence[str]) -> str:
    """The option that mends a missing key, where `text_keys` hold strings: `--text_key content (or title)`."""
    first, *others = text_keys[:8] or ["KEY"]
    return f"--text_key {first}" + f" (or {', '.join(others)})" * bool(others)


def _kind(path: Path) -> str:
    """The reader's name for a file ('' for an unknown one)."""
    name = path.name.lower()
    for suffix in RECORD_SUFFIXES:
        if name.endswith(suffix):
            return suffix
    return path.suffix.lower() if path.suffix.lower() in TEXT_SUFFIXES else ""


def _walk(folder: Path) -> list[Path]:
    files, visited = [], set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(parent)) in visited:  # a link back to a folder above
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(file for file in files if file.is_file())


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
