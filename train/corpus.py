"""Text files -> documents, strictly: what cannot be read is named and counted, never skipped in silence.

One document a line in .jsonl (.gz, .zst), one a row in .parquet, one a file in .txt and source text. The word
`python-stdlib` stands for the standard library sources of the running Python: real text on every machine.
"""

import codecs
import gzip
import importlib.util
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

STDLIB = "python-stdlib"
TEXT_SUFFIXES = frozenset(
    ".txt .md .rst .tex .py .pyi .c .h .cc .cpp .hpp .cu .cuh .java .js .ts .go .rs .rb .sh .sql .html .css".split()
)
RECORD_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
ALLOWED = f"{', '.join(RECORD_SUFFIXES)}, {' '.join(sorted(TEXT_SUFFIXES))}, or the word {STDLIB}"
# Tests and tools repeat each other and hold deliberately broken files; _sysconfigdata names the build machine.
STDLIB_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3"}
)
MAX_DOCUMENT_BYTES = 64 << 20
READ_BYTES = 1 << 20

BAD_UTF8 = "bad UTF-8"
INVALID_JSON = "invalid JSON"
MISSING_KEY = "missing key"
NULL_TEXT = "null text"
NOT_A_STRING = "text is not a string"
EMPTY = "empty document"
TOO_LONG = f"document over {MAX_DOCUMENT_BYTES >> 20} MiB"
TRUNCATED_GZ = "truncated or corrupt .gz"
TRUNCATED_ZST = "truncated or corrupt .zst"
BAD_PARQUET = "unreadable .parquet"


@dataclass(frozen=True)
class Document:
    """A document's text, which encodes to UTF-8, and where it came from (file, or file:line)."""

    text: str
    where: str


@dataclass(frozen=True)
class Dropped:
    """`count` documents that could not be read. A broken file counts once: how many it held is unknown."""

    reason: str
    where: str
    detail: str = ""
    count: int = 1


class _UnreadableError(Exception):
    """The rest of a file cannot be read; holds the reason."""


def list_files(inputs: Iterable[str]) -> list[Path]:
    """The files behind `inputs` in the order in which they are read: arguments as given, folders sorted by path.

    Files of other kinds inside a folder are left out, as are hidden ones; a file named itself must be of a known kind.

    Raises:
        ValueError: a path does not exist, is of an unknown kind or comes twice, a folder has nothing to read, or the
            package that reads .zst is not installed.
    """
    files: list[Path] = []
    for name in inputs:
        path = Path(name)
        if name == STDLIB:
            found = _stdlib_files()
        elif path.is_dir():
            found = [file for file in _walk(path) if _kind(file)]
        elif path.is_file():
            found = [path] if _kind(path) else []
        else:
            raise ValueError(f"input {name} does not exist; give files or folders, or the word {STDLIB}")
        if not found:
            raise ValueError(f"input {name} holds nothing to read; allowed: {ALLOWED}")
        files += found
    seen: set[str] = set()
    for file in files:
        real = os.path.realpath(file)
        if real in seen:
            raise ValueError(f"{file} is given twice (by itself, a folder or a link); name each input once")
        seen.add(real)
    zst = next((file for file in files if _kind(file) == ".jsonl.zst"), None)
    if zst is not None and importlib.util.find_spec("zstandard") is None:
        raise ValueError(
            f"{zst} needs the package zstandard, which is not installed; pip install zstandard, or decompress the file"
        )
    return files


def read_documents(inputs: Iterable[str], text_key: str = "text") -> Iterator[Document | Dropped]:
    """Every document of `inputs` in order, with a `Dropped` in the place of what cannot be read.

    Raises ValueError as `list_files` does, before anything is read.
    """
    inputs = list(inputs)
    stdlib = set(_stdlib_files()) if STDLIB in inputs else set()
    for path in list_files(inputs):
        kind = _kind(path)
        if kind == ".parquet":
            yield from _read_parquet(path, text_key)
        elif kind in RECORD_SUFFIXES:
            yield from _read_jsonl(path, kind, text_key)
        else:
            yield _read_text_file(path, is_stdlib=path in stdlib)


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
        files += [
            Path(parent, name)
            for name in names
            if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    return sorted(file for file in files if file.stat().st_size > 0)  # an empty __init__.py is no document


def _check_text(text: Any, where: str) -> Document | Dropped:
    if text is None:
        return Dropped(NULL_TEXT, where)
    if not isinstance(text, str):
        return Dropped(NOT_A_STRING, where, f"a {type(text).__name__}")
    if not text.strip():
        return Dropped(EMPTY, where)
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        return Dropped(BAD_UTF8, where, str(error))
    if size > MAX_DOCUMENT_BYTES:
        return Dropped(TOO_LONG, where, f"{size} bytes; split it, or give it as .jsonl")
    return Document(text, where)


def _read_text_file(path: Path, is_stdlib: bool) -> Document | Dropped:
    where = str(path)
    if path.stat().st_size > MAX_DOCUMENT_BYTES:
        return Dropped(TOO_LONG, where, f"{path.stat().st_size} bytes; split it, or give it as .jsonl")
    data = path.read_bytes()
    try:
        # Python's own sources may name another encoding in their first lines.
        text = importlib.util.decode_source(data) if is_stdlib else data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Dropped(BAD_UTF8, where, str(error))
    return _check_text(text, where)


def _read_jsonl(path: Path, kind: str, text_key: str) -> Iterator[Document | Dropped]:
    number = 0
    try:
        for number, line in enumerate(_lines(path, kind), start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield _parse_line(line, f"{path}:{number}", text_key)
    except _UnreadableError as error:
        yield Dropped(
            str(error), f"{path}:{number + 1}", str(error.__cause__ or "the file ends inside a frame")
        )
        return
    if number == 0:
        yield Dropped(EMPTY, str(path), "an empty file")


def _parse_line(line: bytes, where: str, text_key: str) -> Document | Dropped:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Dropped(BAD_UTF8, where, str(error))
    except (json.JSONDecodeError, RecursionError) as error:
        return Dropped(INVALID_JSON, where, str(error))
    if not isinstance(record, dict):
        return Dropped(INVALID_JSON, where, "not a JSON object")
    if text_key not in record:
        return Dropped(MISSING_KEY, where, f"no {text_key!r} among {', '.join(sorted(record)[:8])}")
    return _check_text(record[text_key], where)


def _lines(path: Path, kind: str) -> Iterator[bytes]:
    if kind == ".jsonl":
        with open(path, "rb") as file:
            yield from file
    elif kind == ".jsonl.gz":
        try:
            with gzip.open(path, "rb") as stream:
                yield from stream
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise _UnreadableError(TRUNCATED_GZ) from error
    else:
        yield from _split_lines(_zstd_blocks(path))


def _split_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _zstd_blocks(path: Path) -> Iterator[bytes]:
    """Decompressed blocks of all frames of a file. zstandard's own reader takes a cut frame for the end of the data."""
    import zstandard

    frame = zstandard.ZstdDecompressor().decompressobj()
    started = False
    with open(path, "rb") as file:
        while block := file.read(READ_BYTES):
            while block:
                started = True
                try:
                    yield frame.decompress(block)
                except zstandard.ZstdError as error:
                    raise _UnreadableError(TRUNCATED_ZST) from error
                block = frame.unused_data
                if frame.eof:
                    frame, started = zstandard.ZstdDecompressor().decompressobj(), False
    if started:
        raise _UnreadableError(TRUNCATED_ZST)


def _read_parquet(path: Path, text_key: str) -> Iterator[Document | Dropped]:
    import pyarrow
    import pyarrow.parquet

    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = file.metadata.num_rows
            if rows == 0:
                yield Dropped(EMPTY, str(path), "an empty file")
            elif text_key not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names[:8])
                yield Dropped(MISSING_KEY, str(path), f"no column {text_key!r} among {names}", count=rows)
            else:
                for batch in file.iter_batches(batch_size=1024, columns=[text_key]):
                    for text in _column_values(batch.column(0)):
                        row += 1
                        where = f"{path}:{row}"
                        bad = isinstance(text, UnicodeDecodeError)
                        yield Dropped(BAD_UTF8, where, str(text)) if bad else _check_text(text, where)
    except (pyarrow.ArrowException, OSError) as error:
        yield Dropped(BAD_PARQUET, f"{path}:{row + 1}", str(error).splitlines()[0])


def _column_values(column: Any) -> Iterator[Any]:
    """A column's values; a string that is not UTF-8 comes as its UnicodeDecodeError (Arrow does not check)."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not (pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)):
        yield from column.to_pylist()
        return
    for value in column.cast(pyarrow.large_binary()).to_pylist():
        try:
            yield None if value is None else value.decode("utf-8")
        except UnicodeDecodeError as error:
            yield error
