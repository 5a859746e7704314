"""Read the documents in an input file, and report unreadable documents and unreadable parts of the file.

The readers yield a `Text` for each readable document, a `Dropped` for unreadable documents, and a `Damaged` for an
unreadable part of a file. Files in some formats can be read in byte ranges. The reader then yields the documents that
begin in the range, so consecutive ranges yield each document exactly once. datatrove's own readers are not used because
they skip unreadable documents with only a warning.
"""

import codecs
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
MISSING_KEY = "missing key"
EMPTY = "empty document"
TOO_LONG = f"document over {MAX_DOCUMENT_BYTES >> 20} MiB"
SHORTER = "divide the document (for .txt, pass --split_on), or convert the file to .jsonl"


@dataclass(frozen=True)
class Text:
    """A document that was read: the text, and the place where it begins, such as FILE or FILE:LINE."""

    text: str
    where: str


@dataclass(frozen=True)
class Dropped:
    """One or more documents (`count`) that could not be read."""

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
        detail: description of the readable part of the file, and the error.
        lost_rows: number of lost rows, or 0 if the number is unknown.
    """

    path: str
    reason: str
    detail: str
    lost_rows: int = 0

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}: {self.detail}"


Items = Iterator[Text | Dropped | Damaged]


def check_text(text: Any, where: str) -> Text | Dropped:
    """Return a `Text` with `text`, or a `Dropped` if `text` is not a string, blank, not valid UTF-8 or too long."""
    if text is None:
        return Dropped("null text", where)
    if not isinstance(text, str):
        return Dropped("text is not a string", where, f"type {type(text).__name__}")
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
    """Return a `Damaged` that describes the unreadable part of a file.

    Args:
        detail: description of the part of the file that was read.
        error: the exception raised while reading.

    Raises:
        OSError: if the operating system failed to read the file. The file itself may be intact.
    """
    if getattr(error, "errno", None):
        raise error
    line = str(error).partition("\n")[0]
    return Damaged(str(path), reason, f"{detail}: {line if line.isprintable() else repr(line)}", lost_rows)


def read_stream(path: Path, kind: str, text_key: str, split_on: str | None, start: int, stop: float) -> Items:
    """Yield the documents in a .jsonl, .json or plain text file, which may be compressed.

    Args:
        kind: format of the file, given by its suffixes, such as ".jsonl.gz".
        start, stop: the byte range to read. Only uncompressed .jsonl files, and .txt files with `split_on`, can be read
            in ranges.
    """
    packing = kind[kind.rindex(".") :] if kind.endswith(PACKED) else ""
    read = 0
    try:
        with open(path, "rb") as packed, _decompress(packed, packing) as file:
            if packing and not path.stat().st_size:
                raise EOFError("the file is empty")
            for item in _read_documents(
                file, path, kind.removesuffix(packing), text_key, split_on, start, stop
            ):
                read += 1
                yield item
    except (EOFError, OSError, zlib.error) as error:
        if not packing:
            raise
        reason = f"truncated or corrupt {packing}"
        if "requires too much memory" in str(error):
            reason = f"{packing} with a window over 128 MiB; decompress the file with `zstd -d --long=31`"
        yield describe_damage(path, reason, f"{read:,} documents were read", error)


def _decompress(file: io.BufferedReader, packing: str) -> Any:
    if packing == ".gz":
        return gzip.open(file)
    if packing == ".zst":
        import pyarrow

        # Arrow raises an error for a truncated frame. The reader in zstandard would treat it as the end of the data.
        return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))
    return file


def _read_documents(
    file: Any, path: Path, base: str, text_key: str, split_on: str | None, start: int, stop: float
) -> Items:
    """Yield the documents in a file that is uncompressed or being decompressed.

    Args:
        base: suffix of the file without .gz or .zst.
    """
    if not file.peek(1):
        yield Dropped(EMPTY, str(path), "an empty file")
    elif base == ".jsonl":
        yield from _read_jsonl(read_lines(file, path, start), text_key, stop)
    elif base == ".json":
        yield from _read_json(file.read(), path, text_key)
    elif base == ".txt" and split_on is not None:
        separator = None if split_on == BLANK_LINE else split_on.encode()
        for where, data in _split_text(read_lines(file, path, start), f"{path}:1", separator, start, stop):
            if data.strip():
                yield _decode(data.strip(b"\r\n"), where)
    else:
        yield _decode(file.read(MAX_DOCUMENT_BYTES + 1).removeprefix(codecs.BOM_UTF8), str(path))


def read_lines(file: Any, path: Path, start: int = 0) -> Iterator[tuple[int, str, bytes]]:
    """Yield the lines that begin at byte `start` of a file or later.

    Yields:
        (offset of the first byte, location for messages, content of the line).
    """
    begin = 0
    if start:  # the line that contains the byte before `start` belongs to the previous range
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
    """Split the lines of a text file into documents.

    A document belongs to the byte range that contains the separator before it. The first document of the file belongs
    to the first range.

    Args:
        lines: lines from `read_lines`.
        where: location of the first document.
        separator: text between documents, or None to split at blank lines.
        start, stop: the byte range to read.

    Yields:
        (location of the document, content).
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
    """Yield the documents in a .json file: an array of objects, a single object, or one object per line."""
    records = _parse(data.removeprefix(codecs.BOM_UTF8), str(path))
    if isinstance(records, Dropped):
        yield from _read_jsonl(read_lines(io.BytesIO(data), path), text_key)
        return
    if records == []:
        yield Dropped(EMPTY, str(path), "an empty array")
    for number, record in enumerate(records if isinstance(records, list) else [records], start=1):
        yield _extract_text(record, f"{path}:record {number}", text_key)


def _no_text(path: Path, text_key: str, names: Sequence[str], rows: int) -> Dropped:
    """Return the `Dropped` for a table that has no rows, or does not have exactly one text column."""
    if not rows:
        return Dropped(EMPTY, str(path), "an empty file")
    detail = f"{names.count(text_key) or 'no'} columns are named {text_key!r}; the columns are {_format_names(names)}"
    return Dropped(MISSING_KEY, str(path), detail, rows)


def _format_names(names: Sequence[str]) -> str:
    """Return the first 8 names as comma-separated text, with unprintable characters escaped."""
    return ", ".join(name if name.isprintable() else repr(name) for name in names[:8])


def _parse(data: bytes, where: str) -> Any:
    """Return the parsed JSON value, or a `Dropped` if `data` is not valid JSON."""
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Dropped(BAD_UTF8, where, str(error))
    except (ValueError, RecursionError) as error:
        # A ValueError is also raised for an integer with more than 4,300 digits.
        return Dropped(INVALID_JSON, where, str(error))


def _extract_text(record: Any, where: str, text_key: str) -> Text | Dropped:
    """Return the document in a record that `_parse` returned, or a `Dropped` if there is no valid text."""
    if isinstance(record, Dropped):
        return record
    if not isinstance(record, dict):
        return Dropped(INVALID_JSON, where, "not a JSON object")
    if text_key not in record:
        return Dropped(
            MISSING_KEY,
            where,
            f"the record has no key {text_key!r}; its keys are {_format_names(sorted(record))}",
        )
    return check_text(record[text_key], where)


# ---------------------------------------------------------------- columns of Arrow

# The number of rows, and a function that returns an iterator over record batches.
Part = tuple[int, Callable[[], Any]]


def read_table(path: Path, kind: str, text_key: str, start: int, stop: float) -> Items:
    """Yield the documents of a .parquet or .arrow file that belong to the byte range start..stop-1.

    The file is read in parts: row groups in .parquet, record batches in .arrow. A part belongs to the range that
    contains its approximate offset, which is the size of the file times the fraction of rows before the part. The first
    range reports errors that affect the whole file.
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
    """Open an Arrow stream, the format that save_to_disk in the datasets package writes.

    Returns:
        The names of the columns, and the record batches.
    """
    import pyarrow

    with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
        return stream.schema.names, [(batch.num_rows, partial(iter, [batch])) for batch in stream]


def _read_part(
    path: Path, kind: str, text_key: str, first: int, count: int, read: Callable[[], Any]
) -> Items:
    """Yield the documents in one part of a .parquet or .arrow file.

    Args:
        first: index in the file of the first row in this part, from 0.
        count: number of rows in this part.
        read: returns an iterator over the record batches of this part.
    """
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
    """Return the values in an Arrow column. Text is returned as bytes, because Arrow does not check its UTF-8."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    text = (pyarrow.string(), pyarrow.large_string(), pyarrow.binary(), pyarrow.large_binary())
    return (column.cast(pyarrow.large_binary()) if column.type in text else column).to_pylist()
