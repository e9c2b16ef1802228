"""Document sources: JSONL(.gz), Parquet, or a folder of text files, as a stream of documents.

Every fault names the file and, where there is one, the line.
"""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from c2kv_core import SourceDocument
from c2kv_core.errors import CorpusError

TEXT_SUFFIXES = (".md", ".txt")
JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
PARQUET_SUFFIXES = (".parquet",)
COLUMNS = ("id", "title", "text")
_UTF8 = "utf-8-sig"
"""A byte order mark, which some editors put first, is no part of the text."""


def source_files(corpus: str | Path) -> list[Path]:
    """Files of a corpus: the file itself, or all readable ones below a folder, in order of path.

    Raises:
        CorpusError: nothing there, or nothing readable in it.
    """
    if not str(corpus):
        raise CorpusError("expected the path of a corpus, got ''")
    path = _expanded(corpus)
    if path.is_file():
        _kind(path)
        return [path]
    if not path.is_dir():
        raise CorpusError(
            f"expected a corpus at {path}, found nothing; give a JSONL or Parquet file or a folder"
        )
    files = sorted(f for f in path.rglob("*") if f.is_file() and f.name.lower().endswith(_ALL_SUFFIXES))
    if not files:
        raise CorpusError(f"expected {', '.join(_ALL_SUFFIXES)} files in {path}, found none")
    return files


def read_documents(file: Path, *, root: Path) -> Iterator[SourceDocument]:
    """Documents of one file, in its order.

    A text file is one document: its id is the path below ``root`` without suffix, its title the first line where
    that is a Markdown heading, else none.

    Raises:
        CorpusError: unreadable, not of its form, or a row without id or text; names file and line.
    """
    kind = _kind(file)
    try:
        if kind == "text":
            yield _read_text(file, root)
        elif kind == "parquet":
            yield from _read_parquet(file)
        else:
            yield from _read_jsonl(file)
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise CorpusError(f"cannot read {file}: {' '.join(str(error).split())}") from error
    except UnicodeDecodeError as error:
        raise CorpusError(f"{file}: expected UTF-8 text, got other bytes at offset {error.start}") from error


def corpus_root(corpus: str | Path) -> Path:
    """Folder that ids of text files are relative to."""
    path = _expanded(corpus)
    return path if path.is_dir() else path.parent


def _expanded(corpus: str | Path) -> Path:
    try:
        return Path(corpus).expanduser()
    except RuntimeError as error:
        raise CorpusError(f"expected a corpus at {corpus}, found no such home directory") from error


_ALL_SUFFIXES = (*JSONL_SUFFIXES, *PARQUET_SUFFIXES, *TEXT_SUFFIXES)


def _kind(file: Path) -> str:
    name = file.name.lower()
    for kind, suffixes in (("jsonl", JSONL_SUFFIXES), ("parquet", PARQUET_SUFFIXES), ("text", TEXT_SUFFIXES)):
        if name.endswith(suffixes):
            return kind
    raise CorpusError(f"{file}: expected a file ending in {', '.join(_ALL_SUFFIXES)}")


def _read_text(file: Path, root: Path) -> SourceDocument:
    text = file.read_text(encoding=_UTF8)
    first, _, rest = text.partition("\n")
    title = ""
    if first.startswith("# "):
        title, text = first[2:].strip(), rest
    doc_id = file.relative_to(root).with_suffix("").as_posix()
    return _checked(SourceDocument(doc_id, title, text), ascii(str(file)))


def _read_parquet(file: Path) -> Iterator[SourceDocument]:
    parquet = pq.ParquetFile(file)
    missing = [c for c in ("id", "text") if c not in parquet.schema_arrow.names]
    if missing:
        raise CorpusError(f"{file}: expected columns {', '.join(COLUMNS)}; {missing[0]} is missing")
    columns = [c for c in COLUMNS if c in parquet.schema_arrow.names]
    row = 0
    for batch in parquet.iter_batches(batch_size=256, columns=columns):
        for record in batch.to_pylist():
            row += 1
            yield _document(record, f"{file}, row {row}")


def _read_jsonl(file: Path) -> Iterator[SourceDocument]:
    with _open_text(file) as lines:
        for number, line in enumerate(lines, start=1):
            line = line.strip()
            if not line:
                continue
            where = f"{file}, line {number}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise CorpusError(f"{where}: broken JSON: {error.msg} at column {error.colno}") from error
            except (ValueError, RecursionError) as error:
                raise CorpusError(f"{where}: JSON beyond what can be read: {error}") from error
            yield _document(record, where)


def _open_text(file: Path) -> io.TextIOWrapper:
    if file.name.lower().endswith(".gz"):
        return io.TextIOWrapper(gzip.open(file, "rb"), encoding=_UTF8)
    return file.open(encoding=_UTF8)


def _document(record: Any, where: str) -> SourceDocument:
    if not isinstance(record, dict):
        raise CorpusError(f"{where}: expected an object with id, title and text, got {type(record).__name__}")
    doc_id, title, text = record.get("id"), record.get("title"), record.get("text")
    if not isinstance(doc_id, str) or not doc_id:
        raise CorpusError(f"{where}: expected a non-empty string id, got {doc_id!r}")
    if not isinstance(text, str):
        came = "none" if text is None else type(text).__name__
        raise CorpusError(f"{where}: expected text as a string in document {doc_id!r}, got {came}")
    if title is not None and not isinstance(title, str):
        raise CorpusError(
            f"{where}: expected title as a string in document {doc_id!r}, got {type(title).__name__}"
        )
    return _checked(SourceDocument(doc_id, title or "", text), where)


def _checked(document: SourceDocument, where: str) -> SourceDocument:
    for name, value in document._asdict().items():
        if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise CorpusError(
                f"{where}: {name.removeprefix('doc_')} of document {document.doc_id!r} holds half a surrogate pair, "
                "which is no text (a file name that is not UTF-8 reads so)"
            )
    return document
