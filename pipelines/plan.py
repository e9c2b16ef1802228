"""What a run has to do: the whole corpus is read and checked before anything is written."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

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
    root = corpus_root(str(corpus))
    documents = (d for file in source_files(str(corpus)) for d in read_documents(file, root=root))
    return islice(documents, limit)


def plan_extraction(
    corpus: str | os.PathLike[str], stored: Mapping[int, Mapping[str, str]], *, limit: int | None = None
) -> ExtractPlan:
    """Compare a corpus with what is stored.

    Args:
        corpus: file or folder.
        stored: for each ratio, content hash by document id.
        limit: documents to take from the start; the rest is not read.

    Raises:
        CorpusError: an unreadable row or an id that occurs twice.
    """
    pending: dict[str, tuple[int, ...]] = {}
    seen: set[str] = set()
    empty: list[str] = []
    unchanged = 0
    for document in corpus_documents(corpus, limit=limit):
        if document.doc_id in seen:
            raise CorpusError(f"{corpus}: document id {document.doc_id!r} occurs twice; ids must be unique")
        seen.add(document.doc_id)
        if not document.text.strip():
            empty.append(document.doc_id)
            continue
        digest = content_hash(document.title, document.text)
        missing = tuple(k for k, hashes in stored.items() if hashes.get(document.doc_id) != digest)
        if missing:
            pending[document.doc_id] = missing
        else:
            unchanged += 1
    return ExtractPlan(pending=pending, unchanged=unchanged, empty=tuple(empty))
