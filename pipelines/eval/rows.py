"""Rows of a question file, checked: every fault names file and line."""

import gzip
import io
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from c2kv_core import SourceDocument
from c2kv_core.errors import CorpusError


@dataclass(frozen=True, kw_only=True)
class Row:
    """A question as the file gives it."""

    row_id: str
    documents: tuple[SourceDocument, ...]
    """At least one, all with text."""
    supporting: frozenset[str]
    """Ids of documents the answer needs; all where the file does not say."""
    question: str
    answers: tuple[str, ...]
    """Every accepted answer; the first is the one whose likelihood is taken."""


def read_rows(data: str | Path) -> list[Row]:
    """All rows of a JSONL(.gz) file.

    Raises:
        CorpusError: missing, unreadable, without rows, or a row that is not of the form; names the line.
    """
    file = Path(data).expanduser()
    if not file.is_file():
        raise CorpusError(f"expected a question file at {file}, found none; give a JSONL or JSONL.gz file")
    try:
        with _open(file) as lines:
            rows = [_row(line, f"{file}, line {n}") for n, line in enumerate(lines, start=1) if line.strip()]
    except (OSError, EOFError, zlib.error) as error:
        raise CorpusError(f"cannot read {file}: {error}") from error
    except UnicodeDecodeError as error:
        raise CorpusError(f"{file}: expected UTF-8 text, got other bytes at offset {error.start}") from error
    if not rows:
        raise CorpusError(f"expected at least one question in {file}, found none")
    _check_ids(rows, file)
    return rows


def _open(file: Path) -> io.TextIOWrapper:
    if file.name.lower().endswith(".gz"):
        return io.TextIOWrapper(gzip.open(file, "rb"), encoding="utf-8")
    return file.open(encoding="utf-8")


def _row(line: str, where: str) -> Row:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise CorpusError(f"{where}: broken JSON: {error.msg} at character {error.pos + 1}") from error
    if not isinstance(record, dict):
        raise CorpusError(
            f"{where}: expected an object with documents, question and answers, got {type(record).__name__}"
        )
    answers = record.get("answers")
    if not isinstance(answers, list) or not answers:
        raise CorpusError(f"{where}: expected answers as a list of at least one string, got {answers!r}")
    documents = record.get("documents")
    if not isinstance(documents, list) or not documents:
        raise CorpusError(f"{where}: expected documents as a list of at least one, got {documents!r}")
    read = tuple(_document(d, f"{where}, document {place}") for place, d in enumerate(documents))
    known = frozenset(d.doc_id for d in read)
    return Row(
        row_id=_text(record, "id", where),
        documents=read,
        supporting=frozenset(map(str, record.get("supporting") or ())) & known or known,
        question=_text(record, "question", where).strip(),
        answers=tuple(_text({"answer": a}, "answer", where).strip() for a in answers),
    )


def _document(record: Any, where: str) -> SourceDocument:
    if not isinstance(record, dict):
        raise CorpusError(f"{where}: expected an object with id, title and text, got {type(record).__name__}")
    title = record.get("title") or ""
    if not isinstance(title, str):
        raise CorpusError(f"{where}: expected title as a string, got {title!r}")
    return SourceDocument(_text(record, "id", where), title, _text(record, "text", where))


def _text(record: dict[str, Any], name: str, where: str) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value.strip():
        raise CorpusError(f"{where}: expected {name} as a non-empty string, got {value!r}")
    return value


def _check_ids(rows: list[Row], file: Path) -> None:
    seen: set[str] = set()
    for row in rows:
        if row.row_id in seen:
            raise CorpusError(f"{file}: question id {row.row_id!r} occurs twice; ids must be unique")
        seen.add(row.row_id)
