"""Which column of a source is what, and a record of a source as a checked document."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import Field, model_validator

from c2kv_core import SourceDocument
from c2kv_core.config import Config
from c2kv_core.errors import CorpusError


class Columns(Config):
    """Names of the columns (of JSON lines: keys) that documents are read from."""

    id: str = Field(default="id", min_length=1)
    """Holds a non-empty string, unique in the corpus."""
    title: str | None = "title"
    """Null: there are no titles. A source may lack this column."""
    text: str = Field(default="text", min_length=1)
    """Holds a string; documents whose text is empty are skipped, with that reason."""
    metadata: tuple[str, ...] = ()
    """Columns carried along as one JSON object a document, beside its text; text files have none. A document may lack
    some of them, but each must be somewhere in the corpus."""

    @model_validator(mode="after")
    def _each_is_named_once(self) -> "Columns":
        names = [self.id, self.text, *self.metadata]
        if len(set(names)) < len(names):
            raise ValueError("expected every column in one place")
        return self

    @property
    def required(self) -> tuple[str, ...]:
        """Columns that a source must have."""
        return (self.id, self.text, *self.metadata)

    @property
    def known(self) -> tuple[str, ...]:
        """All columns that are read where they are there."""
        optional = () if self.title is None or self.title in self.required else (self.title,)
        return (*self.required, *optional)


class CorpusRow(NamedTuple):
    """A document of a corpus and what is carried along with it."""

    document: SourceDocument
    metadata: str | None
    """JSON object with sorted keys; None where no column is carried along."""


def row_of(record: Any, where: str, columns: Columns) -> CorpusRow:
    """A record of a source as a document.

    Args:
        record: values by column.
        where: file and line, for messages.
        columns: which is what.

    Raises:
        CorpusError: no record, or one without id or text.
    """
    if not isinstance(record, dict):
        raise CorpusError(f"{where}: expected an object with id, title and text, got {type(record).__name__}")
    doc_id, text = record.get(columns.id), record.get(columns.text)
    title = record.get(columns.title) if columns.title is not None else None
    if not isinstance(doc_id, str) or not doc_id:
        raise CorpusError(f"{where}: expected a non-empty string {columns.id}, got {doc_id!r}")
    if not isinstance(text, str):
        came = "none" if text is None else type(text).__name__
        raise CorpusError(f"{where}: expected {columns.text} as a string in document {doc_id!r}, got {came}")
    if title is not None and not isinstance(title, str):
        raise CorpusError(
            f"{where}: expected {columns.title} as a string in document {doc_id!r}, got {type(title).__name__}"
        )
    document = checked(SourceDocument(doc_id, title or "", text), where)
    return CorpusRow(document, _metadata(record, where, columns))


def checked(document: SourceDocument, where: str) -> SourceDocument:
    """The document itself.

    Raises:
        CorpusError: a value that cannot be written as UTF-8.
    """
    for name, value in document._asdict().items():
        if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise CorpusError(
                f"{where}: {name.removeprefix('doc_')} of document {document.doc_id!r} holds half a surrogate pair, "
                "which is no text (a file name that is not UTF-8 reads so)"
            )
    return document


def _metadata(record: Mapping[str, Any], where: str, columns: Columns) -> str | None:
    if not columns.metadata:
        return None
    values = {name: record[name] for name in columns.metadata if name in record}
    try:
        # Dates and decimals of a Parquet file become text.
        return json.dumps(values, sort_keys=True, default=str, allow_nan=False)
    except ValueError as error:
        raise CorpusError(f"{where}: metadata that JSON cannot hold: {error}") from error
