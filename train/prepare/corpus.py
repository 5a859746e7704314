"""Inputs -> files -> documents, all of them or the share of one of several tasks.

One document a line in .jsonl, one an object in .json, one a row in .csv, .parquet and datasets' folders, one a file in
.txt and source text, or with a separator many in .txt; all but the tables of Arrow also packed as .gz or .zst. The
word `python-stdlib` stands for the standard library sources of the running Python: real text on every machine.
`hf:NAME[:CONFIG[:SPLIT]]` is a dataset of the Hugging Face hub.
"""

import argparse
import errno
import importlib.util
import json
import math
import os
import shlex
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from model import install_command
from model.keys import NOT_GIVEN, unicode
from train.data.format import DataError
from train.prepare.output import SLURM_NAME, WORK_NAME
from train.prepare.readers import (
    BAD_UTF8,
    BLANK_LINE,
    PACKED,
    Dropped,
    Items,
    Place,
    check_text,
    read_arrow,
    read_parquet,
    read_stream,
)

STDLIB = "python-stdlib"
HUB = "hf:"
TEXT_SUFFIXES = frozenset(
    ".txt .md .rst .tex .py .pyi .c .h .cc .cpp .hpp .cu .cuh .java .js .ts .go .rs .rb .sh .sql .html .css".split()
)
# A folder of text or sources often has these beside it as settings and tables: read where they are named themselves.
NAMED_ONLY = (".json", ".csv")
RECORD_SUFFIXES = (".jsonl", ".parquet", *NAMED_ONLY)
SPLITTABLE = (".jsonl", ".parquet", ".arrow")
RECORDS = (WORK_NAME, SLURM_NAME)  # folders of an unfinished preparation
SAVED_DATASET, SAVED_SPLITS = "state.json", "dataset_dict.json"  # what datasets' save_to_disk leaves
ALLOWED = (
    f"{', '.join(RECORD_SUFFIXES)}, {' '.join(sorted(TEXT_SUFFIXES))} (all but .parquet also as .gz or .zst; "
    f"{' and '.join(NAMED_ONLY)} files by their names, in a folder they are left out), "
    f"a folder of datasets' save_to_disk, {HUB}NAME[:CONFIG[:SPLIT]], or the word {STDLIB}"
)
# What the user has to mend; any other error of the system is its own, and another start may do.
USERS_TO_MEND = (errno.ENOENT, errno.ELOOP, errno.EACCES, errno.EPERM)
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


def list_sources(
    inputs: Iterable[str], split_on: str | None = None, tell: Callable[[str], None] | None = None
) -> list[Source]:
    """The files behind `inputs` in the order in which they are read: arguments as given, folders sorted by path.

    Files of other kinds inside a folder are left out, which `tell` is told, as are hidden ones, which it is not; a file
    named itself must be of a known kind. What cannot be listed or opened is an error: nobody could tell what is lost.

    Raises:
        DataError: a path does not exist, is of an unknown kind or comes twice, a folder has nothing to read, or
            something that cannot be read, a dataset of several splits without one of them named, or a package that an
            input needs is not installed; or there is no .txt for `split_on`.
        OSError: the system cannot read a folder, for a reason that is not the user's to mend.
    """
    files: list[tuple[Path, str]] = []
    beside: dict[str, list[Path]] = {}
    for name in inputs:
        if not name:
            raise DataError(f"input {name!r} is {NOT_GIVEN}", code="not_given", key="--input")
        check_name("input", name)
        found, left_out = _readable_files_of(name)
        if not found:
            others = f", but {_in_words(left_out)}" if left_out else ""
            raise DataError(
                f"input {name} holds nothing to read{others}. Allowed: {ALLOWED}",
                code="nothing_to_read",
                key=name,
            )
        files += found
        beside[name] = left_out
    seen: dict[str, Path] = {}
    for file, _ in files:
        if (first := seen.setdefault(os.path.realpath(file), file)) is not file:
            raise DataError(
                f"{file} is given twice (by itself, a folder or a link), first as {first}; name each input once, and "
                "take links to others out of a folder",
                code="given_twice",
                key=str(file),
            )
    for name, of_folder in beside.items():
        left_out = [file for file in of_folder if os.path.realpath(file) not in seen]  # else named by itself
        if left_out and tell:
            tell(f"input {name}: {len(left_out):,} files left out by suffix: {_in_words(left_out)}")
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


def _readable_files_of(name: str) -> tuple[list[tuple[Path, str]], list[Path]]:
    """As `_files_of`, with a DataError for what is missing, or closed to this user."""
    try:
        if os.path.isdir(name):
            _check_access(name, os.R_OK | os.X_OK)
        found, left_out = _files_of(name)
        for file, _ in found:
            _check_access(file, os.R_OK)  # now, not when a task comes to it
    except OSError as error:
        if error.errno not in USERS_TO_MEND:
            raise
        path = str(error.filename)
        link = f", a link to {os.readlink(path)}," if os.path.islink(path) else ""
        raise DataError(
            f"input {name}: {path}{link} cannot be read ({error.strerror}); give the user who runs this access to it, "
            "mend it, or take it out",
            code="unreadable",
            key=path,
        ) from error
    return found, left_out


def _check_access(path: str | Path, mode: int) -> None:
    if not os.access(path, mode):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def _files_of(name: str) -> tuple[list[tuple[Path, str]], list[Path]]:
    """The files of one input, each with its kind, and those that a folder has beside them."""
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
        read, left_out = [], []
        for file in _walk(path):
            kind = _kind(file)
            if kind and _unpacked(kind) not in NAMED_ONLY:
                read.append((file, kind))
            else:
                left_out.append(file)
        return read, left_out
    if not path.is_file():
        raise DataError(
            f"input {name} does not exist; give files or folders, {HUB}NAME, or the word {STDLIB}",
            code="file_missing",
            key=name,
        )
    return ([(path, kind)], []) if (kind := _kind(path)) else ([], [path])


def _in_words(left_out: list[Path]) -> str:
    """How many there are of each suffix, with the first: `2 .png (a/b.png ...), 1 .json (c.json)`."""
    by_suffix: dict[str, list[Path]] = {}
    for file in left_out:
        by_suffix.setdefault(file.suffix or "without a suffix", []).append(file)
    most = sorted(by_suffix.items(), key=lambda item: -len(item[1]))
    parts = [f"{len(files):,} {suffix} ({files[0]}{' ...' * (len(files) > 1)})" for suffix, files in most[:8]]
    if others := sum(len(files) for _, files in most[8:]):
        parts.append(f"{others:,} of other suffixes")
    named = any(_unpacked(_kind(file)) in NAMED_ONLY for file in left_out)
    return ", ".join(parts) + f"; name {' and '.join(NAMED_ONLY)} files themselves to read them" * named


def _saved_files(folder: Path) -> list[tuple[Path, str]]:
    """The files of a dataset that datasets' save_to_disk wrote, by its own list."""
    try:
        state = json.loads((folder / SAVED_DATASET).read_text(encoding="utf-8"))
        files = [folder / entry["filename"] for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder / SAVED_DATASET} is not the state of a saved dataset ({error}); save the dataset again",
            code="not_a_saved_dataset",
            key=str(folder),
        ) from error
    for file in files:
        if not file.is_file():
            raise DataError(
                f"{file} is missing, and {SAVED_DATASET} beside it lists it; save the dataset again",
                code="file_missing",
                key=str(file),
            )
    return [(file, ".arrow") for file in files]


def _hub_files(name: str) -> list[tuple[Path, str]]:
    """The files of a dataset of the Hugging Face hub, which datasets downloads into its cache once."""
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
            f"input {name}: the files of a split hold all of it, not the part {split[split.index('[') :]}. Name the "
            "split alone, of which --eval_fraction holds a part out, or save the part with datasets' save_to_disk and "
            "name that folder",
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
    sources: Sequence[Source],
    text_key: str,
    task: int,
    tasks: int,
    split_on: str | None = None,
    place: Place | None = None,
) -> Items:
    """The share of `task` (from 0) of `tasks`: contiguous, and equal in bytes as far as files can be split. The shares
    of all tasks in their order are what one task would read.

    split_on: of .txt, as --split_on takes it. place: is told how far the reading is.
    """
    share = [
        (source, start, stop, source.bytes - start if stop == math.inf else int(stop) - start)
        for source, start, stop in _share(sources, task, tasks, split_on)
    ]
    place = place or Place()
    place.total = sum(size for *_, size in share)
    for source, start, stop, size in share:
        path = Path(source.path)
        if source.kind == ".parquet":
            yield from read_parquet(path, text_key, start, stop)
        elif source.kind == ".arrow":
            yield from read_arrow(path, text_key, start, stop)
        elif source.kind == "stdlib":
            yield from _read_stdlib(path)
        else:
            yield from read_stream(path, source.kind, text_key, split_on, start, stop, place)
        place.done += size


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


def text_key_option(text_keys: Sequence[str]) -> str:
    """Return the option for a missing key, where `text_keys` hold strings: `--text_key content (or title)`."""
    first, *others = map(shlex.quote, text_keys[:8])
    return f"--text_key {first}" + f" (or {', '.join(others)})" * bool(others)


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
    """All files but hidden ones, and those of a preparation whose --output lies in the folder.

    Raises OSError for a folder that cannot be listed, DataError for links to nothing.
    """
    files, visited = [], set()
    for parent, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        if (real := os.path.realpath(parent)) in visited:  # a link back to a folder above
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in RECORDS)
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    # a link to nothing may stand for a folder, too; of another suffix it would be left out whatever it led to
    broken = sorted(f for f in files if (_kind(f) or not f.suffix) and not f.is_file())
    if broken:
        raise DataError(_broken(broken), code="unreadable", key=str(broken[0]))
    return sorted(files)


def _broken(files: list[Path]) -> str:
    shown = [
        f"{f}, a link to {os.readlink(f)}" if f.is_symlink() else f"{f}, a pipe or device" for f in files[:3]
    ]
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return (
        f"{'; '.join(shown)}{more}: no file or folder that can be read is there; mend what should be, and take out "
        "the others"
    )


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
