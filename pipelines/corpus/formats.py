"""Documents of one file, by its form. Every fault names the file and, where there is one, the line."""

import csv
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from c2kv_core import SourceDocument
from c2kv_core.errors import CorpusError
from pipelines.corpus.columns import Columns, CorpusRow, checked, row_of
from pipelines.corpus.files import CorpusFile, Kind, open_file, open_text

_UTF8 = "utf-8-sig"
"""A byte order mark, which some editors put first, is no part of the text."""
_PARQUET_ROWS = 256
"""Rows that are held at a time."""


OnBadRow = Callable[[CorpusError], None]
_Record = tuple[str, Any]
"""Where it stands, and what stands there; an error where that is nothing."""


def read_rows(file: CorpusFile, columns: Columns, on_bad: OnBadRow | None = None) -> Iterator[CorpusRow]:
    """Documents of one file, in its order.

    A text file is one document: its id is the path below the corpus without suffix, its title the first line where
    that is a Markdown heading, else none.

    Args:
        file: of a corpus.
        columns: which is what.
        on_bad: is told of rows that are no documents, which are passed over; None ends with the first.

    Raises:
        CorpusError: unreadable, not of its form, or a row without id or text; names file and line.
    """
    try:
        if file.kind == "text":
            yield _read_text(file)
            return
        for where, record in _READERS[file.kind](file, columns):
            try:
                if isinstance(record, CorpusError):
                    raise record
                row = row_of(record, where, columns)
            except CorpusError as error:
                if on_bad is None:
                    raise
                on_bad(error)
                continue
            yield row
    except (OSError, EOFError, zlib.error, pa.ArrowException, csv.Error) as error:
        raise CorpusError(f"cannot read {file}: {' '.join(str(error).split())}") from error
    except UnicodeDecodeError as error:
        raise CorpusError(f"{_place_of(error, file)}: expected UTF-8 text, got other bytes") from error


def _place_of(error: UnicodeDecodeError, file: CorpusFile) -> str:
    """Where the bytes are that are no text, as far as it can be told."""
    if file.kind in ("text", "parquet"):
        return f"{file}, offset {error.start} of the text"
    # The error knows a place in the piece that was decoded, not in the file.
    with open_text(file, encoding=_UTF8) as opened:
        for number, line in enumerate(cast(Iterable[bytes], opened.buffer), start=1):
            if line.decode(errors="replace") != line.decode(errors="ignore"):
                return f"{file}, line {number}"
    return str(file)


def _read_text(file: CorpusFile) -> CorpusRow:
    with open_text(file, encoding=_UTF8) as opened:
        text = opened.read()
    first, _, rest = text.partition("\n")
    title = ""
    if first.startswith("# "):
        title, text = first[2:].strip(), rest
    doc_id = PurePosixPath(file.name).with_suffix("").as_posix()
    return CorpusRow(checked(SourceDocument(doc_id, title, text), ascii(file.path)), None)


def _read_parquet(file: CorpusFile, columns: Columns) -> Iterator[_Record]:
    constants = dict(file.constants)
    with open_file(file) as opened:
        parquet = pq.ParquetFile(opened)
        there = parquet.schema_arrow.names
        _require([*there, *constants], file, columns)
        row = 0
        wanted = [c for c in columns.known if c in there]
        for batch in parquet.iter_batches(batch_size=_PARQUET_ROWS, columns=wanted):
            for record in batch.to_pylist():
                row += 1
                yield f"{file}, row {row}", {**constants, **record}


def _read_csv(file: CorpusFile, columns: Columns) -> Iterator[_Record]:
    # Python's own limit of 128 KiB a field is no limit of documents.
    csv.field_size_limit(sys.maxsize)
    with open_text(file, encoding=_UTF8, newline="") as lines:
        rows = csv.DictReader(lines, strict=True)
        _require(rows.fieldnames or (), file, columns)
        for record in rows:
            where = f"{file}, line {rows.line_num}"
            if None in record or None in record.values():
                many = len(rows.fieldnames or ())
                yield where, CorpusError(f"{where}: expected {many} fields, got more or fewer")
            else:
                yield where, record


def _read_jsonl(file: CorpusFile, columns: Columns) -> Iterator[_Record]:
    with open_text(file, encoding=_UTF8) as lines:
        for number, line in enumerate(lines, start=1):
            line = line.strip()
            if not line:
                continue
            where = f"{file}, line {number}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                record = CorpusError(f"{where}: broken JSON: {error.msg} at character {error.pos + 1}")
            except (ValueError, RecursionError) as error:
                record = CorpusError(f"{where}: JSON beyond what can be read: {error}")
            yield where, record


_READERS: dict[Kind, Callable[[CorpusFile, Columns], Iterator[_Record]]] = {
    "jsonl": _read_jsonl,
    "csv": _read_csv,
    "parquet": _read_parquet,
}


def _require(there: Sequence[str], file: CorpusFile, columns: Columns) -> None:
    """That every column that is read is there, once."""
    for name in columns.known:
        if name not in there and name in columns.required:
            raise CorpusError(
                f"{file}: expected columns {', '.join(columns.known)}; {name} is missing (columns.id, columns.text, "
                "columns.title and columns.metadata say which is what)"
            )
        if list(there).count(name) > 1:
            raise CorpusError(
                f"{file}: expected one column {name}, got {list(there).count(name)} of that name"
            )
