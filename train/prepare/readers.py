"""One file -> documents, strictly: what cannot be read is named and counted, never skipped in silence.

Readers of files that can be split take a range of bytes, start to stop, and give the documents that begin in it: the
ranges of a file together give each of its documents once.
"""

import codecs
import gzip
import importlib.util
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_DOCUMENT_BYTES = 64 << 20
BATCH_ROWS = 1024

BAD_UTF8 = "bad UTF-8"
INVALID_JSON = "invalid JSON"
MISSING_KEY = "missing key"
EMPTY = "empty document"
TOO_LONG = f"document over {MAX_DOCUMENT_BYTES >> 20} MiB"
BAD_PARQUET = "unreadable .parquet"


@dataclass(frozen=True)
class Text:
    """A document's text, which encodes to UTF-8, and where it came from (file, or file:line)."""

    text: str
    where: str


@dataclass(frozen=True)
class Dropped:
    """`count` documents that could not be read. A broken file counts once: how many it held is unknown.

    text_keys: where a key is missing, others that hold strings, the likeliest first.
    """

    reason: str
    where: str
    detail: str = ""
    count: int = 1
    text_keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.reason, self.detail) if part)


Items = Iterator[Text | Dropped]


def check_text(text: Any, where: str) -> Text | Dropped:
    """A document, unless `text` is none: not a string, blank, not UTF-8, or too long."""
    if text is None:
        return Dropped("null text", where)
    if not isinstance(text, str):
        return Dropped("text is not a string", where, f"a {type(text).__name__}")
    if not text.strip():
        return Dropped(EMPTY, where)
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        return Dropped(BAD_UTF8, where, str(error))
    if size > MAX_DOCUMENT_BYTES:
        return Dropped(TOO_LONG, where, f"{size} bytes; split it, or give it as .jsonl")
    return Text(text, where)


def read_text(path: Path, is_stdlib: bool) -> Items:
    """A whole file as one document."""
    where = str(path)
    if path.stat().st_size > MAX_DOCUMENT_BYTES:
        yield Dropped(TOO_LONG, where, f"{path.stat().st_size} bytes; split it, or give it as .jsonl")
        return
    data = path.read_bytes()
    try:
        # Python's own sources may name another encoding in their first lines.
        text = importlib.util.decode_source(data) if is_stdlib else data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield Dropped(BAD_UTF8, where, str(error))
        return
    yield check_text(text, where)


# ---------------------------------------------------------------- lines of JSON


def read_jsonl(path: Path, text_key: str, start: int, stop: int) -> Items:
    """The lines that begin in bytes start..stop-1. Lines are numbered where the range begins with the file's first,
    elsewhere they are named by their first byte."""
    with open(path, "rb") as file:
        if start:  # the line that holds the byte before belongs to the range before
            file.seek(start - 1)
            file.readline()
        number, position = 0, file.tell()
        if position == stop == 0:
            yield Dropped(EMPTY, str(path), "an empty file")
        while position < stop and (line := file.readline()):
            number += 1
            where = f"{path}:byte {position}" if start else f"{path}:{number}"
            if position == 0:
                line = line.removeprefix(codecs.BOM_UTF8)
            position = file.tell()
            if line.strip():
                yield _parse_line(line, where, text_key)


def read_compressed_jsonl(path: Path, kind: str, text_key: str) -> Items:
    """The lines of a .jsonl.gz or .jsonl.zst, which can only be read from its beginning."""
    import pyarrow

    number = 0
    try:
        # a cut frame is an error to Arrow, for zstandard's own reader it is the end of the data
        is_gzip = kind == ".jsonl.gz"
        with gzip.open(path) if is_gzip else io.BufferedReader(pyarrow.input_stream(path, "zstd")) as stream:
            for number, line in enumerate(stream, start=1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield _parse_line(line, f"{path}:{number}", text_key)
    except (EOFError, OSError, zlib.error) as error:
        if getattr(error, "errno", None):  # the disk's, not the file's
            raise
        yield Dropped(
            f"truncated or corrupt {kind.removeprefix('.jsonl')}", f"{path}:{number + 1}", str(error)
        )
        return
    if number == 0:
        yield Dropped(EMPTY, str(path), "an empty file")


def _parse_line(line: bytes, where: str, text_key: str) -> Text | Dropped:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Dropped(BAD_UTF8, where, str(error))
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, or an integer of over 4,300 digits
        return Dropped(INVALID_JSON, where, str(error))
    if not isinstance(record, dict):
        return Dropped(INVALID_JSON, where, "not a JSON object")
    if text_key not in record:
        strings = [key for key in record if isinstance(record[key], str)]
        longest = tuple(sorted(strings, key=lambda key: -len(record[key])))
        detail = f"no {text_key!r} among {', '.join(sorted(record)[:8])}"
        return Dropped(MISSING_KEY, where, detail, text_keys=longest)
    return check_text(record[text_key], where)


# ---------------------------------------------------------------- columns of Arrow


def read_parquet(path: Path, text_key: str, start: int, stop: int) -> Items:
    """The rows of the row groups that begin in bytes start..stop-1, a group with the share k of the rows before it
    counting as beginning at the share k of the file's bytes. The first range tells what is wrong with the file."""
    import pyarrow
    import pyarrow.parquet

    size = path.stat().st_size
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = file.metadata.num_rows
            if rows == 0 or text_key not in file.schema_arrow.names:
                if start == 0:
                    yield _no_column(path, rows, text_key, file.schema_arrow)
                return
            first = 0
            for group in range(file.metadata.num_row_groups):
                if start <= size * first // rows < stop:
                    yield from _read_group(file, group, path, text_key, first)
                first += file.metadata.row_group(group).num_rows
    except (pyarrow.ArrowException, OSError) as error:
        if start == 0:
            yield Dropped(BAD_PARQUET, f"{path}:1", str(error).splitlines()[0])


def _read_group(file: Any, group: int, path: Path, text_key: str, first: int) -> Items:
    """A row group's documents, of which the first is the file's row `first` (from 0)."""
    import pyarrow

    row = first
    try:
        for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=[group], columns=[text_key]):
            for item in _check_column(batch.column(0), path, row):
                row += 1
                yield item
    except (pyarrow.ArrowException, OSError) as error:
        yield Dropped(BAD_PARQUET, f"{path}:{row + 1}", str(error).splitlines()[0])


def read_arrow(path: Path, text_key: str, start: int, stop: int) -> Items:
    """The rows of the record batches that begin in bytes start..stop-1 of an Arrow stream, as datasets saves one."""
    import pyarrow

    row = 0
    try:
        with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
            names = stream.schema.names
            if text_key not in names:
                if start == 0:
                    yield _no_column(path, sum(batch.num_rows for batch in stream), text_key, stream.schema)
                return
            begins = 0  # the schema counts with the first batch
            for batch in stream:
                if start <= begins < stop:
                    yield from _check_column(batch.column(names.index(text_key)), path, row)
                row, begins = row + batch.num_rows, file.tell()
            if row == 0 and start == 0:
                yield _no_column(path, 0, text_key, stream.schema)
    except (pyarrow.ArrowException, OSError) as error:
        if start == 0:
            yield Dropped("unreadable .arrow", f"{path}:{row + 1}", str(error).splitlines()[0])


def _no_column(path: Path, rows: int, text_key: str, schema: Any) -> Dropped:
    if rows == 0:
        return Dropped(EMPTY, str(path), "an empty file")
    text_keys = tuple(column.name for column in schema if _holds_strings(column.type))
    detail = f"no column {text_key!r} among {', '.join(schema.names[:8])}"
    return Dropped(MISSING_KEY, str(path), detail, rows, text_keys)


def _holds_strings(kind: Any) -> bool:
    """Whether an Arrow type is one of strings, or a dictionary of them."""
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return types.is_string(kind) or types.is_large_string(kind)


def _check_column(column: Any, path: Path, first: int) -> Items:
    """The documents of a column, of which the first is the file's row `first` (from 0)."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_text := _holds_strings(column.type):
        column = column.cast(pyarrow.large_binary())  # as Arrow does not check that strings are UTF-8
    for row, value in enumerate(column.to_pylist(), start=first + 1):
        where = f"{path}:{row}"
        try:
            text = value.decode("utf-8") if is_text and value is not None else value
        except UnicodeDecodeError as error:
            yield Dropped(BAD_UTF8, where, str(error))
        else:
            yield check_text(text, where)
