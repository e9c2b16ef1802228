"""What a run has to do: the whole corpus is read and checked before anything is written."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from c2kv_core import SourceDocument
from c2kv_core.errors import CorpusError
from c2kv_core.text import content_hash
from pipelines.sources import corpus_root, read_documents, source_files


@dataclass(frozen=True, kw_only=True)
class ExtractPlan:
    """Documents of a corpus by what is to be done with them."""

    pending: Mapping[str, tuple[int, ...]]
    """For each document to extract, the ratios at which its current content is not stored yet."""
    unchanged: int
    """Documents stored with this very content at every ratio."""
    empty: tuple[str, ...]
    """Ids of documents without text: skipped with that reason."""

    @property
    def documents(self) -> int:
        """All documents of the corpus within the limit."""
        return len(self.pending) + self.unchanged + len(self.empty)


def corpus_documents(corpus: str | os.PathLike[str], *, limit: int | None = None) -> Iterator[SourceDocument]:
    """Documents of all files of a corpus in order.

    Raises:
        CorpusError: see ``pipelines.sources``.
    """
    return (document for _, document in _placed_documents(corpus, limit))


class _Place(NamedTuple):
    """Where a document was read."""

    file: Path
    number: int
    """Place of the document in its file, from 1."""

    def __str__(self) -> str:
        return f"{self.file} (document {self.number})"


def _placed_documents(
    corpus: str | os.PathLike[str], limit: int | None
) -> Iterator[tuple[_Place, SourceDocument]]:
    root = corpus_root(str(corpus))
    placed = (
        (_Place(file, number), document)
        for file in source_files(str(corpus))
        for number, document in enumerate(read_documents(file, root=root), start=1)
    )
    return islice(placed, limit)


def plan_extraction(
    corpus: str | os.PathLike[str], stored: Mapping[int, Mapping[str, str]], *, limit: int | None = None
) -> ExtractPlan:
    """Compare a corpus with what is stored.

    Args:
        corpus: file or folder.
        stored: for each ratio, content hash by document id.
        limit: documents to take from the start; the rest is not read.

    Raises:
        CorpusError: no document, an unreadable row or an id that occurs twice.
    """
    pending: dict[str, tuple[int, ...]] = {}
    seen: dict[str, _Place] = {}
    empty: list[str] = []
    unchanged = 0
    for place, document in _placed_documents(corpus, limit):
        if (first := seen.setdefault(document.doc_id, place)) != place:
            raise CorpusError(
                f"document id {document.doc_id!r} occurs in {first} and again in {place}; ids must be unique"
            )
        if not document.text.strip():
            empty.append(document.doc_id)
            continue
        digest = content_hash(document.title, document.text)
        missing = tuple(k for k, hashes in stored.items() if hashes.get(document.doc_id) != digest)
        if missing:
            pending[document.doc_id] = missing
        else:
            unchanged += 1
    if not seen:
        raise CorpusError(f"expected documents in {corpus}, found none")
    return ExtractPlan(pending=pending, unchanged=unchanged, empty=tuple(empty))
