"""What a run has to do: the whole corpus is read and checked before anything is written.

Documents are told apart by digests of their ids, so that the plan of a corpus takes ``BYTES_PER_DOCUMENT`` a document
while it is made and ``PENDING_BYTES`` a document to extract while the job runs, whatever the texts are.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from c2kv_core import SourceDocument
from c2kv_core.errors import CorpusError
from c2kv_core.store import Ledger
from pipelines.corpus import Columns, CorpusFile, corpus_files
from pipelines.corpus.scan import (
    BYTES_PER_DOCUMENT,
    NAMED,
    Digests,
    Keys,
    Scan,
    digest_of,
    keys_of,
    metadata_digest,
    placed_rows,
    scan_corpus,
)

__all__ = ["BYTES_PER_DOCUMENT", "ExtractPlan", "Pending", "Stored", "corpus_documents", "plan_extraction"]

PENDING_BYTES = 16 + 4 + 1 + 4 + 8
"""Of a document to extract, in the driver and in each machine's object store."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Stored:
    """Content or metadata by document, sorted by key."""

    keys: Keys
    digests: Digests

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, int]]) -> "Stored":
        """From ids and digests."""
        listed = list(pairs)
        return cls.joined(
            [(keys_of([i for i, _ in listed]), np.array([digest for _, digest in listed], np.uint64))]
        )

    @classmethod
    def joined(cls, pieces: Sequence[tuple[Keys, Digests]]) -> "Stored":
        """From arrays in any order."""
        keys = np.concatenate([k for k, _ in pieces]) if pieces else keys_of([])
        digests = np.concatenate([d for _, d in pieces]) if pieces else np.array([], np.uint64)
        order = np.argsort(keys, kind="stable")
        return cls(keys=keys[order], digests=digests[order])

    def find(self, keys: Keys) -> tuple[NDArray[np.bool_], Digests]:
        """For each key, whether it is here and its digest (anything where it is not)."""
        if not len(self.keys):
            return np.zeros(len(keys), bool), np.zeros(len(keys), np.uint64)
        places = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return self.keys[places] == keys, self.digests[places]


def stored_contents(ledger: Ledger, fingerprint: str) -> Stored:
    """What is stored under one fingerprint, without an object a document.

    Raises:
        StoreError: the index cannot be read.
    """
    return Stored.joined([contents_of(table) for table in ledger.documents(fingerprint)])


def contents_of(table: pa.Table) -> tuple[Keys, Digests]:
    """Keys and content digests of a table with the columns ``doc_id`` and ``content_hash``."""
    digests = [digest_of(content) for content in table["content_hash"].to_pylist()]
    return keys_of(table["doc_id"].to_pylist()), np.array(digests, np.uint64)


def stored_metadata(ledger: Ledger) -> Stored:
    """Digests of what is carried along with the documents whose text is kept.

    Raises:
        StoreError: the table cannot be read.
    """
    return Stored.joined(
        [
            (
                keys_of(table["doc_id"].to_pylist()),
                np.array([metadata_digest(m) for m in table["metadata"].to_pylist()], np.uint64),
            )
            for table in ledger.metadata()
        ]
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Pending:
    """Documents to extract, sorted by key. Arrays, so that readers on one machine share one copy."""

    keys: Keys
    masks: NDArray[np.uint32]
    """Bit r: the document is wanted at the r-th ratio."""
    stored: NDArray[np.bool_]
    """Whether an earlier content of it is stored at one of these."""
    sizes: NDArray[np.uint32]
    """Bytes of title and text."""
    contents: Digests
    ratios: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        return sum(getattr(self, name).nbytes for name in ("keys", "masks", "stored", "sizes", "contents"))

    def only(self, kept: NDArray[np.bool_]) -> "Pending":
        """Some of the documents."""
        columns = ("keys", "masks", "stored", "sizes", "contents")
        return replace(self, **{name: getattr(self, name)[kept] for name in columns})

    def place(self, doc_id: str) -> int | None:
        """Where a document stands here; None: it is not to be extracted."""
        # As arrays: a single value would lose the zeros it ends with.
        key = keys_of([doc_id])
        place = int(np.searchsorted(self.keys, key)[0])
        return place if (self.keys[place : place + 1] == key).any() else None

    def ratios_of(self, doc_id: str) -> tuple[int, ...]:
        """At which ratios a document is wanted; none where it is not to be extracted."""
        place = self.place(doc_id)
        return () if place is None else self.ratios_at(place)

    def ratios_at(self, place: int) -> tuple[int, ...]:
        """Ratios at which the document at a place is wanted."""
        mask = int(self.masks[place])
        return tuple(ratio for bit, ratio in enumerate(self.ratios) if mask >> bit & 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class ExtractPlan:
    """Documents of a corpus by what is to be done with them."""

    files: tuple[CorpusFile, ...]
    """Of the corpus, as they were listed."""
    documents: int
    """All of the corpus within limit and partition; the counts below add up to it."""
    pending: Pending
    unchanged: int
    """Stored with this very content at every ratio, those of ``relabelled`` included."""
    empty: int
    """Without text: skipped with that reason."""
    empty_ids: tuple[str, ...]
    """The first of those."""
    relabelled: Keys
    """Unchanged documents of other metadata than stored, sorted."""
    all_keys: Keys
    """Of all documents, sorted: what a store holds beyond them is gone from the corpus."""
    gone: int | None
    """How many documents at these ratios that is; None where only a part of the corpus was looked at."""

    @property
    def new(self) -> int:
        """Documents to extract of which nothing is stored."""
        return len(self.pending) - self.changed

    @cached_property
    def changed(self) -> int:
        """Documents to extract of which another content is stored."""
        return int(self.pending.stored.sum())

    @cached_property
    def pending_bytes(self) -> int:
        """Bytes of the texts to extract."""
        return int(self.pending.sizes.sum(dtype=np.uint64))


def corpus_documents(
    corpus: str | os.PathLike[str], *, limit: int | None = None, columns: Columns | None = None
) -> Iterator[SourceDocument]:
    """Documents of all files of a corpus in order.

    Raises:
        CorpusError: see ``pipelines.corpus``.
    """
    rows = placed_rows(corpus_files(os.fspath(corpus)), columns or Columns())
    return (row.document for _, _, row in islice(rows, limit))


def plan_extraction(
    corpus: str | os.PathLike[str],
    stored: Mapping[int, Stored],
    *,
    limit: int | None = None,
    columns: Columns | None = None,
    metadata: Stored | None = None,
    only_new: bool = False,
    keep: Callable[[str], bool] | None = None,
    processes: int = 1,
) -> ExtractPlan:
    """Compare a corpus with what is stored.

    Args:
        corpus: file, folder or Delta table, local or ``s3://``.
        stored: for each ratio, contents by document.
        limit: documents to take from the start; the rest is not read.
        columns: which column is what.
        metadata: what is carried along with documents in the store; None does not compare it.
        only_new: leave documents alone of which another content is stored.
        keep: which documents are looked at, by id; all by default.
        processes: that read the corpus at the same time.

    Raises:
        CorpusError: no document, an unreadable row or an id that occurs twice.
    """
    files = corpus_files(os.fspath(corpus))
    scan = scan_corpus(files, columns or Columns(), limit=limit, keep=keep, processes=processes)
    # Of a partition there may be none, of the whole corpus not: what is stored would seem to be gone.
    if not scan.read:
        raise CorpusError(f"expected documents in {os.fspath(corpus)}, found none")
    masks, held = _compare(scan, stored, only_new=only_new)
    masks[scan.empty] = 0
    (wanted,) = np.nonzero(masks)
    order = wanted[np.argsort(scan.keys[wanted], kind="stable")]
    settled = (masks == 0) & ~scan.empty
    return ExtractPlan(
        files=tuple(files),
        documents=scan.documents,
        pending=Pending(
            keys=scan.keys[order],
            masks=masks[order],
            stored=held[order],
            sizes=scan.sizes[order],
            contents=scan.contents[order],
            ratios=tuple(stored),
        ),
        unchanged=int(settled.sum()),
        empty=int(scan.empty.sum()),
        empty_ids=scan.empty_ids[:NAMED],
        relabelled=_relabelled(scan, settled, metadata),
        all_keys=np.sort(scan.keys),
        gone=_gone(scan, stored) if limit is None and keep is None else None,
    )


def _gone(scan: Scan, stored: Mapping[int, Stored]) -> int:
    beyond = [contents.keys[~np.isin(contents.keys, scan.keys)] for contents in stored.values()]
    return len(np.unique(np.concatenate(beyond))) if beyond else 0


def _compare(
    scan: Scan, stored: Mapping[int, Stored], *, only_new: bool
) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """At which ratios each document is to be made, and whether another content of it is stored."""
    masks = np.zeros(scan.documents, np.uint32)
    held = np.zeros(scan.documents, bool)
    for bit, contents in enumerate(stored.values()):
        there, digests = contents.find(scan.keys)
        differs = there & (digests != scan.contents)
        masks |= np.where(~there | (differs & (not only_new)), np.uint32(1 << bit), np.uint32(0))
        held |= differs
    return masks, held


def _relabelled(scan: Scan, settled: NDArray[np.bool_], metadata: Stored | None) -> Keys:
    if metadata is None:
        return keys_of([])
    there, digests = metadata.find(scan.keys)
    return np.sort(scan.keys[settled & there & (digests != scan.metadata)])
