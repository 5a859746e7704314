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
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

MAX_DOCUMENT_BYTES = 64 << 20
MAX_JSON_BYTES = 1 << 30  # a .json is read as a whole
BATCH_ROWS = 1024
PACKED = (".gz", ".zst")
BLANK_LINE = "blank_line"  # a value of --split_on

BAD_UTF8 = "bad UTF-8"
INVALID_JSON = "invalid JSON"
INVALID_CSV = "invalid CSV"
MISSING_KEY = "missing key"
SEVERAL_COLUMNS = "several columns of the key"
EMPTY = "empty document"
TOO_LONG = f"document over {MAX_DOCUMENT_BYTES >> 20} MiB"
BAD_PARQUET = "unreadable .parquet"
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


class Lines:
    """The lines of an uncompressed file that begin at byte `start` or later.

    Attributes:
        number: number of the current line, counted from `start`.
        begin: first byte of the current line.
        where: the current line for messages: its number, or its first byte if `start` is not 0.
    """

    def __init__(self, file: BinaryIO, path: Path, start: int = 0) -> None:
        self.file, self.path, self.start = file, path, start
        self.number = self.begin = self._end = 0
        if start:  # the line that holds the byte before belongs to the range before
            file.seek(start - 1)
            self._end = start - 1 + len(file.readline())

    @property
    def where(self) -> str:
        return f"{self.path}:byte {self.begin}" if self.start else f"{self.path}:{self.number}"

    def __iter__(self) -> Iterator[bytes]:
        while line := self.file.readline():
            yield self._counted(line)

    def rest(self, limit: int) -> bytes:
        """Return the rest of the file, or its first `limit + 1` bytes if the rest is longer than `limit`."""
        data = self.file.read(limit + 1)
        return self._counted(data) if data else data

    def _counted(self, data: bytes) -> bytes:
        self.number += 1
        self.begin, self._end = self._end, self._end + len(data)
        return data if self.begin else data.removeprefix(codecs.BOM_UTF8)


def read_stream(path: Path, kind: str, text_key: str, split_on: str | None, start: int, stop: float) -> Items:
    """Yield the documents of a .jsonl, .json, .csv or plain text file, which may be compressed.

    Args:
        kind: the suffixes of the file, such as ".jsonl.gz".
        start, stop: the range of bytes. Only uncompressed .jsonl, and .txt with `split_on`, can be read in ranges.
    """
    packing = kind[kind.rindex(".") :] if kind.endswith(PACKED) else ""
    base = kind.removesuffix(packing)
    lines: Lines | None = None
    try:
        with open(path, "rb") as packed, _unpacked(packed, packing) as file:
            lines = Lines(file, path, start)
            if base == ".jsonl":
                yield from _read_jsonl(lines, text_key, stop)
            elif base == ".json":
                yield from _read_json(lines, text_key)
            elif base == ".csv":
                yield from _read_csv(lines, text_key)
            elif base == ".txt" and split_on is not None:
                yield from _split_text(lines, None if split_on == BLANK_LINE else split_on.encode(), stop)
            else:
                yield from _read_text(lines)
            if packing and not packed.tell():
                raise EOFError("the file has no bytes")
            if not lines.number and not start:
                yield Dropped(EMPTY, str(path), "an empty file")
    except (EOFError, OSError, zlib.error) as error:
        if not packing or _is_of_disk(error):
            raise
        read = f"{lines.number if lines else 0:,} lines were read"
        yield Damaged(str(path), f"truncated or corrupt {packing}", f"{read}: {error}")


def _is_of_disk(error: Exception) -> bool:
    """Return whether the system failed to read the file, rather than the file being corrupt."""
    return bool(getattr(error, "errno", None))


def _unpacked(file: BinaryIO, packing: str) -> BinaryIO:
    if packing == ".gz":
        return gzip.open(file)  # type: ignore[return-value]
    if packing == ".zst":
        import pyarrow

        # Arrow reports a truncated frame as an error; zstandard's own reader treats it as the end of the data
        return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))
    return file


# ---------------------------------------------------------------- plain text


def _read_text(lines: Lines) -> Items:
    """Yield the whole file as one document."""
    data, where = lines.rest(MAX_DOCUMENT_BYTES), str(lines.path)
    if len(data) > MAX_DOCUMENT_BYTES:
        yield Dropped(TOO_LONG, where, SHORTER)
    elif lines.number:  # also for a file of only a byte order mark
        yield _decoded(data, where)


def _decoded(data: bytes, where: str) -> Text | Dropped:
    try:
        return check_text(data.decode("utf-8"), where)
    except UnicodeDecodeError as error:
        return Dropped(BAD_UTF8, where, str(error))


def _split_text(lines: Lines, separator: bytes | None, stop: float) -> Items:
    """Yield the parts between separators (None: blank lines), without surrounding line ends. Skip blank parts.

    A document belongs to the range that contains the separator line before it; the first document to the first range.
    """
    document, size, is_ours, where = [b""], 0, not lines.start, f"{lines.path}:1"

    def whole() -> Items:
        if is_ours and size > MAX_DOCUMENT_BYTES:
            yield Dropped(TOO_LONG, where, f"{size} bytes; {SHORTER}")
        elif is_ours and (data := b"".join(document).strip(b"\r\n")).strip():
            yield _decoded(data, where)

    for line in lines:
        if not is_ours and lines.begin >= stop:
            return
        if separator is not None:
            *ended, rest = line.split(separator)
        else:
            ended, rest = ([], line) if line.strip() else ([b""], b"")
        for part in ended:
            document.append(part)
            size += len(part)
            yield from whole()
            document, size, is_ours, where = [], 0, lines.begin < stop, lines.where
            if not is_ours:
                return
        if is_ours:
            size += len(rest)
            if size <= MAX_DOCUMENT_BYTES:
                document.append(rest)
            else:  # too long: reported at its end
                document.clear()
    yield from whole()


# ---------------------------------------------------------------- records


def _read_jsonl(lines: Lines, text_key: str, stop: float) -> Items:
    for line in lines:
        if lines.begin >= stop:
            return
        if not line.strip():
            continue
        yield _text_of(_parse(line, lines.where), lines.where, text_key)


def _read_json(lines: Lines, text_key: str) -> Items:
    """Yield the documents of a .json: an array of objects, one object, or one object per line."""
    path, data = str(lines.path), lines.rest(MAX_JSON_BYTES)
    if len(data) > MAX_JSON_BYTES:
        reason = f".json over {MAX_JSON_BYTES >> 30} GiB"
        yield Damaged(path, reason, "nothing was read; give it as .jsonl: jq -c '.[]' FILE > NEW.jsonl")
        return
    records = _parse(data, path)
    if isinstance(records, Dropped):
        for number, line in enumerate(data.split(b"\n"), start=1):
            if line.strip():
                where = f"{path}:{number}"
                yield _text_of(_parse(line, where), where, text_key)
        return
    if records == []:
        yield Dropped(EMPTY, path, "an empty array")
    for number, record in enumerate(records if isinstance(records, list) else [records], start=1):
        yield _text_of(record, f"{path}:record {number}", text_key)


def _read_csv(lines: Lines, text_key: str) -> Items:
    """Yield the rows below a header, as RFC 4180 defines them.

    After an invalid record it is unknown where the next one begins, so the rest of the file is not read and the file
    counts as damaged. If a record on one line has a wrong number of fields, one row is dropped. If it spans several
    lines, an open quote may have swallowed rows, so the file also counts as damaged.
    """
    path, row = lines.path, 0
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
        last = lines.number + sum(1 for _ in lines)
        why = str(error).partition(" - ")[0]  # the rest is advice for the developer
        detail = f"lines {row + 1:,} to {last:,} were not read; line {rows.line_num:,}: {why}"
        yield Damaged(str(path), INVALID_CSV, detail)


def _no_text(path: Path, text_key: str, names: Sequence[str], rows: int) -> Dropped:
    """Return the `Dropped` of a table that does not have exactly one text column."""
    if (columns := names.count(text_key)) > 1:
        detail = f"{columns} columns are named {text_key!r}; rename all but the one with the text"
        return Dropped(SEVERAL_COLUMNS, str(path), detail, rows)
    return Dropped(MISSING_KEY, str(path), f"no column {text_key!r} among {_listed(names)}", rows)


def _listed(names: Sequence[str]) -> str:
    """Return the first 8 names, with control and unprintable characters escaped."""
    return ", ".join(name if name.isprintable() else repr(name) for name in names[:8])


def _parse(data: bytes, where: str) -> Any:
    """Return the JSON value, or a `Dropped`."""
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Dropped(BAD_UTF8, where, str(error))
    except (
        ValueError,
        RecursionError,
    ) as error:  # ValueError: invalid JSON, or an integer of more than 4,300 digits
        return Dropped(INVALID_JSON, where, str(error))


def _text_of(record: Any, where: str, text_key: str) -> Text | Dropped:
    """Return the document in a JSON value. Pass a `Dropped` of `_parse` through."""
    if isinstance(record, Dropped):
        return record
    if not isinstance(record, dict):
        return Dropped(INVALID_JSON, where, "not a JSON object")
    if text_key not in record:
        return Dropped(MISSING_KEY, where, f"no {text_key!r} among {_listed(sorted(record))}")
    return check_text(record[text_key], where)


# ---------------------------------------------------------------- columns of Arrow


def read_parquet(path: Path, text_key: str, start: int, stop: float) -> Items:
    """Yield the rows of the row groups that begin in bytes start..stop-1. The first range reports problems of the file.

    A row group with a fraction k of the rows before it counts as beginning at the fraction k of the file's bytes.
    """
    import pyarrow
    import pyarrow.parquet

    size = path.stat().st_size
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = file.metadata.num_rows
            if rows == 0 or file.schema_arrow.names.count(text_key) != 1:
                if start == 0:
                    yield _no_column(path, rows, text_key, file.schema_arrow)
                return
            first = 0
            for group in range(file.metadata.num_row_groups):
                if start <= size * first // rows < stop:
                    yield from _read_group(file, group, path, text_key, first)
                first += file.metadata.row_group(group).num_rows
    except (pyarrow.ArrowException, OSError) as error:
        if _is_of_disk(error):
            raise
        if start == 0:
            yield Damaged(str(path), BAD_PARQUET, f"no row was read: {_first_line(error)}")


def _read_group(file: Any, group: int, path: Path, text_key: str, first: int) -> Items:
    """Yield the documents of a row group, whose first row is row `first` (from 0) of the file."""
    import pyarrow

    row = first
    try:
        for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=[group], columns=[text_key]):
            for item in _check_column(batch.column(0), path, row):
                row += 1
                yield item
    except (pyarrow.ArrowException, OSError) as error:
        if _is_of_disk(error):
            raise
        end = first + file.metadata.row_group(group).num_rows
        detail = (
            f"rows {row + 1:,} to {end:,} of {file.metadata.num_rows:,} cannot be read: {_first_line(error)}"
        )
        yield Damaged(str(path), BAD_PARQUET, detail, end - row)


def read_arrow(path: Path, text_key: str, start: int, stop: float) -> Items:
    """Yield the rows of the record batches that begin in bytes start..stop-1 of an Arrow stream (datasets' format)."""
    import pyarrow

    row = 0
    try:
        with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
            names = stream.schema.names
            if names.count(text_key) != 1:
                if start == 0:
                    yield _no_column(path, sum(batch.num_rows for batch in stream), text_key, stream.schema)
                return
            begins = 0  # the schema counts as part of the first batch
            for batch in stream:
                if start <= begins < stop:
                    yield from _check_column(batch.column(names.index(text_key)), path, row)
                row, begins = row + batch.num_rows, file.tell()
            if row == 0 and start == 0:
                yield _no_column(path, 0, text_key, stream.schema)
    except (pyarrow.ArrowException, OSError) as error:
        if _is_of_disk(error):
            raise
        if start == 0:
            yield Damaged(str(path), "unreadable .arrow", f"{row:,} rows were read: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    line = str(error).partition("\n")[0]
    return line if line.isprintable() else repr(line)


def _no_column(path: Path, rows: int, text_key: str, schema: Any) -> Dropped:
    if rows == 0:
        return Dropped(EMPTY, str(path), "an empty file")
    return _no_text(path, text_key, schema.names, rows)


def _holds_text(kind: Any) -> bool:
    """Return whether an Arrow type, or its dictionary values, is strings, or bytes, as Impala and Hive write text."""
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    tests = types.is_string, types.is_large_string, types.is_binary, types.is_large_binary
    return any(test(kind) for test in tests)


def _check_column(column: Any, path: Path, first: int) -> Items:
    """Yield the documents of a column, whose first row is row `first` (from 0) of the file."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_text := _holds_text(column.type):
        column = column.cast(pyarrow.large_binary())  # Arrow does not check that strings are UTF-8
    for row, value in enumerate(column.to_pylist(), start=first + 1):
        where = f"{path}:{row}"
        try:
            yield check_text(value.decode("utf-8") if is_text and value is not None else value, where)
        except UnicodeDecodeError as error:
            yield Dropped(BAD_UTF8, where, str(error))
