"""Read the documents of one file. An unreadable document becomes a `Dropped`, an unreadable part of a file a `Damaged`.

Readers of splittable files take a range of bytes, start to stop, and yield the documents that begin in it. Together,
the ranges of a file yield each of its documents exactly once. (datatrove's own readers skip bad documents with a
warning.)
"""

import codecs
import csv
import gzip
import io
import json
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

MAX_DOCUMENT_BYTES = 64 << 20
BATCH_ROWS = 1024
PACKED = (".gz", ".zst")
BLANK_LINE = "blank_line"  # a value of --split_on

BAD_UTF8 = "bad UTF-8"
INVALID_JSON = "invalid JSON"
INVALID_CSV = "invalid CSV"
MISSING_KEY = "missing key"
EMPTY = "empty document"
TOO_LONG = f"document over {MAX_DOCUMENT_BYTES >> 20} MiB"
SHORTER = "divide it (for .txt, use --split_on), or convert it to .jsonl"


@dataclass(frozen=True)
class Text:
    """The text of a document, which can be encoded as UTF-8, and its origin (file or file:line)."""

    text: str
    where: str


@dataclass(frozen=True)
class Dropped:
    """`count` documents that could not be read."""

    reason: str
    where: str
    detail: str = ""
    count: int = 1

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.reason, self.detail) if part)


@dataclass(frozen=True)
class Damaged:
    """A part of a file that could not be read.

    Attributes:
        detail: what was read of the file, and the error.
        lost_rows: number of lost rows; 0 if unknown.
    """

    path: str
    reason: str
    detail: str
    lost_rows: int = 0

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}: {self.detail}"


Items = Iterator[Text | Dropped | Damaged]


def check_text(text: Any, where: str) -> Text | Dropped:
    """Return the document, or a `Dropped` if `text` is not a string, is blank, is not valid UTF-8 or is too long."""
    if text is None:
        return Dropped("null text", where)
    if not isinstance(text, str):
        return Dropped("text is not a string", where, f"a {type(text).__name__}")
    if not text.strip():
        return Dropped(EMPTY, where)
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:  # JSON can contain half a surrogate pair
        return Dropped(BAD_UTF8, where, str(error))
    if size > MAX_DOCUMENT_BYTES:
        return Dropped(TOO_LONG, where, f"{size} bytes; {SHORTER}")
    return Text(text, where)


def describe_damage(path: Path, reason: str, detail: str, error: Exception, lost_rows: int = 0) -> Damaged:
    """Return the `Damaged` of a corrupt file. `detail` says what was read of it.

    Raises:
        OSError: the system failed to read the file, so the file may be fine.
    """
    if getattr(error, "errno", None):
        raise error
    line = str(error).partition("\n")[0]
    return Damaged(str(path), reason, f"{detail}: {line if line.isprintable() else repr(line)}", lost_rows)


def read_stream(path: Path, kind: str, text_key: str, split_on: str | None, start: int, stop: float) -> Items:
    """Yield the documents of a .jsonl, .json, .csv or plain text file, which may be compressed.

    Args:
        kind: the suffixes of the file, such as ".jsonl.gz".
        start, stop: the range of bytes. Only uncompressed .jsonl, and .txt with `split_on`, can be read in ranges.
    """
    packing = kind[kind.rindex(".") :] if kind.endswith(PACKED) else ""
    read = 0
    try:
        with open(path, "rb") as packed, _decompress(packed, packing) as file:
            if packing and not path.stat().st_size:
                raise EOFError("the file has no bytes")
            for item in _read_documents(
                file, path, kind.removesuffix(packing), text_key, split_on, start, stop
            ):
                read += 1
                yield item
    except (EOFError, OSError, zlib.error) as error:
        if not packing:
            raise
        yield describe_damage(path, f"truncated or corrupt {packing}", f"{read:,} documents were read", error)


def _decompress(file: io.BufferedReader, packing: str) -> Any:
    if packing == ".gz":
        return gzip.open(file)
    if packing == ".zst":
        import pyarrow

        # Arrow reports a truncated frame as an error; zstandard's own reader treats it as the end of the data
        return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))
    return file


def _read_documents(
    file: Any, path: Path, base: str, text_key: str, split_on: str | None, start: int, stop: float
) -> Items:
    """Yield the documents of an uncompressed file. `base` is its suffix."""
    if not file.peek(1):
        yield Dropped(EMPTY, str(path), "an empty file")
    elif base == ".jsonl":
        yield from _read_jsonl(read_lines(file, path, start), text_key, stop)
    elif base == ".json":
        yield from _read_json(file.read(), path, text_key)
    elif base == ".csv":
        yield from _read_csv((line for _, _, line in read_lines(file, path)), path, text_key)
    elif base == ".txt" and split_on is not None:
        separator = None if split_on == BLANK_LINE else split_on.encode()
        for where, data in _split_text(read_lines(file, path, start), f"{path}:1", separator, start, stop):
            if data.strip():
                yield _decode(data.strip(b"\r\n"), where)
    else:
        yield _decode(file.read(MAX_DOCUMENT_BYTES + 1).removeprefix(codecs.BOM_UTF8), str(path))


def read_lines(file: Any, path: Path, start: int = 0) -> Iterator[tuple[int, str, bytes]]:
    """Yield the lines of an uncompressed file that begin at byte `start` or later.

    Yields:
        (first byte, place for messages, content).
    """
    begin = 0
    if start:  # the line that holds the byte before belongs to the range before
        file.seek(start - 1)
        begin = start - 1 + len(file.readline())
    for number, line in enumerate(file, start=1):
        where = f"{path}:byte {begin}" if start else f"{path}:{number}"
        yield begin, where, line if begin else line.removeprefix(codecs.BOM_UTF8)
        begin += len(line)


# ---------------------------------------------------------------- plain text


def _decode(data: bytes, where: str) -> Text | Dropped:
    if len(data) > MAX_DOCUMENT_BYTES:
        return Dropped(TOO_LONG, where, SHORTER)
    try:
        return check_text(data.decode("utf-8"), where)
    except UnicodeDecodeError as error:
        return Dropped(BAD_UTF8, where, str(error))


def _split_text(
    lines: Iterator[tuple[int, str, bytes]], where: str, separator: bytes | None, start: int, stop: float
) -> Iterator[tuple[str, bytes]]:
    """Yield the parts between separators (None: blank lines), each with the place of the separator before it.

    A part belongs to the range that contains the separator line before it; the first part to the first range.

    Args:
        where: the place of the first part.
    """
    parts: list[bytes] = []
    is_ours = not start
    for begin, place, line in lines:
        if not is_ours and begin >= stop:
            return
        if separator is not None:
            *ended, rest = line.split(separator)
        else:
            ended, rest = ([], line) if line.strip() else ([b""], b"")
        for part in ended:
            if is_ours:
                yield where, b"".join([*parts, part])
            parts, is_ours, where = [], begin < stop, place
            if not is_ours:
                return
        if is_ours:
            parts.append(rest)
    yield where, b"".join(parts)


# ---------------------------------------------------------------- records


def _read_jsonl(lines: Iterator[tuple[int, str, bytes]], text_key: str, stop: float = math.inf) -> Items:
    for begin, where, line in lines:
        if begin >= stop:
            return
        if line.strip():
            yield _extract_text(_parse(line, where), where, text_key)


def _read_json(data: bytes, path: Path, text_key: str) -> Items:
    """Yield the documents of a .json: an array of objects, one object, or one object per line."""
    records = _parse(data.removeprefix(codecs.BOM_UTF8), str(path))
    if isinstance(records, Dropped):
        yield from _read_jsonl(read_lines(io.BytesIO(data), path), text_key)
        return
    if records == []:
        yield Dropped(EMPTY, str(path), "an empty array")
    for number, record in enumerate(records if isinstance(records, list) else [records], start=1):
        yield _extract_text(record, f"{path}:record {number}", text_key)


def _read_csv(lines: Iterator[bytes], path: Path, text_key: str) -> Items:
    """Yield the rows below a header, as RFC 4180 defines them.

    After an invalid record it is unknown where the next one begins, so the rest of the file is not read and the file
    counts as damaged. If a record on one line has a wrong number of fields, one row is dropped. If it spans several
    lines, an open quote may have swallowed rows, so the file also counts as damaged.
    """
    row = 0
    csv.field_size_limit(MAX_DOCUMENT_BYTES)
    # invalid UTF-8 becomes lone surrogates, which check_text reports for their row
    rows = csv.reader((line.decode("utf-8", "surrogateescape") for line in lines), strict=True)
    try:
        header = next(rows, [])
        if header and header.count(text_key) != 1:
            yield _no_text(path, text_key, header, max(sum(map(bool, rows)), 1))
            return
        row = last = rows.line_num
        for fields in rows:
            if fields and len(fields) != len(header):
                detail = f"{len(fields)} fields under {len(header)} names"
                if rows.line_num > row + 1:
                    raise csv.Error(f"a record of {rows.line_num - row} lines has {detail}")
                yield Dropped(INVALID_CSV, f"{path}:{row + 1}", detail)
            elif fields:
                yield check_text(fields[header.index(text_key)], f"{path}:{row + 1}")
            row = rows.line_num
        if header and last == rows.line_num:
            yield Dropped(EMPTY, str(path), "no row under the header")
    except csv.Error as error:
        reason = str(error).partition(" - ")[0]  # the rest is advice for the developer
        detail = f"from line {row + 1:,} on, nothing was read; line {rows.line_num:,}: {reason}"
        yield Damaged(str(path), INVALID_CSV, detail)


def _no_text(path: Path, text_key: str, names: Sequence[str], rows: int) -> Dropped:
    """Return the `Dropped` of a table without rows or without exactly one text column."""
    if not rows:
        return Dropped(EMPTY, str(path), "an empty file")
    detail = f"{names.count(text_key) or 'no'} columns {text_key!r} among {_format_names(names)}"
    return Dropped(MISSING_KEY, str(path), detail, rows)


def _format_names(names: Sequence[str]) -> str:
    """Return the first 8 names, with control and unprintable characters escaped."""
    return ", ".join(name if name.isprintable() else repr(name) for name in names[:8])


def _parse(data: bytes, where: str) -> Any:
    """Return the JSON value, or a `Dropped`."""
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Dropped(BAD_UTF8, where, str(error))
    except (ValueError, RecursionError) as error:  # ValueError: also an integer of more than 4,300 digits
        return Dropped(INVALID_JSON, where, str(error))


def _extract_text(record: Any, where: str, text_key: str) -> Text | Dropped:
    """Return the document in a JSON value. Pass a `Dropped` of `_parse` through."""
    if isinstance(record, Dropped):
        return record
    if not isinstance(record, dict):
        return Dropped(INVALID_JSON, where, "not a JSON object")
    if text_key not in record:
        return Dropped(MISSING_KEY, where, f"no {text_key!r} among {_format_names(sorted(record))}")
    return check_text(record[text_key], where)


# ---------------------------------------------------------------- columns of Arrow

Part = tuple[int, Callable[[], Any]]  # the number of rows, and a function that yields record batches


def read_table(path: Path, kind: str, text_key: str, start: int, stop: float) -> Items:
    """Yield the rows of the parts of a .parquet or .arrow file that begin in bytes start..stop-1.

    A part is a row group or a record batch. One with a fraction k of the rows before it counts as beginning at the
    fraction k of the file's bytes. The first range reports problems of the file.
    """
    import pyarrow

    try:
        names, parts = _open_parquet(path, text_key) if kind == ".parquet" else _open_arrow(path)
    except (pyarrow.ArrowException, OSError) as error:
        if start == 0:
            yield describe_damage(path, f"unreadable {kind}", "nothing was read", error)
        return
    rows, row, size = sum(count for count, _ in parts), 0, path.stat().st_size
    if not rows or names.count(text_key) != 1:
        if start == 0:
            yield _no_text(path, text_key, names, rows)
        return
    for count, read in parts:
        if start <= size * row // rows < stop:
            yield from _read_part(path, kind, text_key, row, count, read)
        row += count


def _open_parquet(path: Path, text_key: str) -> tuple[list[str], list[Part]]:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    groups = range(file.metadata.num_row_groups)
    parts: list[Part] = [
        (file.metadata.row_group(group).num_rows, partial(file.iter_batches, BATCH_ROWS, [group], [text_key]))
        for group in groups
    ]
    return file.schema_arrow.names, parts


def _open_arrow(path: Path) -> tuple[list[str], list[Part]]:
    """Open an Arrow stream, the format of datasets' save_to_disk."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
        return stream.schema.names, [(batch.num_rows, partial(iter, [batch])) for batch in stream]


def _read_part(
    path: Path, kind: str, text_key: str, first: int, count: int, read: Callable[[], Any]
) -> Items:
    """Yield the documents of a part, whose first row is row `first` (from 0) of the file."""
    import pyarrow

    row = first
    try:
        for batch in read():
            for value in _values(batch.column(batch.schema.names.index(text_key))):
                row += 1
                where = f"{path}:{row}"
                yield _decode(value, where) if isinstance(value, bytes) else check_text(value, where)
    except (pyarrow.ArrowException, OSError) as error:
        detail = f"rows {row + 1:,} to {first + count:,} cannot be read"
        yield describe_damage(path, f"unreadable {kind}", detail, error, first + count - row)


def _values(column: Any) -> list[Any]:
    """Return the values of a column; text as bytes, because Arrow does not check that strings are UTF-8."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    text = (pyarrow.string(), pyarrow.large_string(), pyarrow.binary(), pyarrow.large_binary())
    return (column.cast(pyarrow.large_binary()) if column.type in text else column).to_pylist()
