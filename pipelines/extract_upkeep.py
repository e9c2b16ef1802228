"""What a run does to a store beyond adding slots: metadata that changed, documents that are gone from the corpus."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np

from c2kv_core.store import DeadLetters, KVStore, Ledger
from c2kv_core.store.names import bucket_of
from pipelines.corpus.scan import ids_beyond, keys_of, placed_rows
from pipelines.extract_config import ExtractConfig
from pipelines.plan import ExtractPlan

T = TypeVar("T")

AT_ONCE = 1000
"""Documents of one commit."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Documents whose bucket modulo ``of`` is ``mine``; picklable."""

    namespace: str
    buckets: int
    mine: int
    of: int

    def __call__(self, doc_id: str) -> bool:
        """Whether a document is of this partition."""
        return bucket_of(self.namespace, doc_id, buckets=self.buckets) % self.of == self.mine


def partition_of(config: ExtractConfig, ledger: Ledger) -> Partition | None:
    """Which documents are this job's, by the bucket that their rows are in; None: all."""
    if config.partition is None:
        return None
    mine, of = config.partition
    return Partition(namespace=config.namespace, buckets=ledger.buckets, mine=mine, of=of)


def missing_documents(
    config: ExtractConfig, ledger: Ledger, plan: ExtractPlan
) -> tuple[tuple[str, ...], str | None]:
    """Ids in the store, under any fingerprint, that the corpus no longer has; and why they may not be removed, if so.

    Raises:
        StoreError: the index cannot be read.
    """
    is_mine = partition_of(config, ledger)
    gone: set[str] = set()
    held = []
    for table in ledger.documents():
        ids = table["doc_id"].to_pylist()
        if is_mine is not None:
            ids = [doc_id for doc_id in ids if is_mine(doc_id)]
        keys = keys_of(ids)
        held.append(keys)
        gone.update(ids_beyond(ids, keys, plan.all_keys))
    stored = len(np.unique(np.concatenate(held))) if held else 0
    refusal = None
    if len(gone) > config.max_deleted_fraction * stored:
        refusal = (
            f"delete_missing would remove {len(gone)} of {stored} documents of namespace {config.namespace!r}, more "
            f"than max_deleted_fraction ({config.max_deleted_fraction:g}): check corpus and namespace, or raise it"
        )
    return tuple(sorted(gone)), refusal


def missing_failures(config: ExtractConfig, ledger: Ledger, plan: ExtractPlan) -> tuple[str, ...]:
    """Ids of documents that failed and that the corpus no longer has; mostly nothing of them is stored.

    Raises:
        StoreError: the table cannot be read.
    """
    if KVStore.find(config.store) is None:
        return ()
    is_mine = partition_of(config, ledger)
    gone: set[str] = set()
    for table in DeadLetters.open(config.store).tables(["doc_id"], {"namespace": [config.namespace]}):
        ids = [doc_id for doc_id in table["doc_id"].to_pylist() if is_mine is None or is_mine(doc_id)]
        gone.update(ids_beyond(ids, keys_of(ids), plan.all_keys))
    return tuple(sorted(gone))


def remove_missing(config: ExtractConfig, missing: Iterable[str], failures: Iterable[str]) -> int:
    """Remove documents at every fingerprint, with text and notes, and forget these failures; how many documents.

    Raises:
        StoreError: I/O error or lasting write conflict.
    """
    removed = 0
    for ids in _chunks(missing):
        KVStore.open(config.store).delete(ids, namespace=config.namespace)
        removed += len(ids)
    for ids in _chunks(failures):
        DeadLetters.open(config.store).delete(config.namespace, ids)
    return removed


def relabel(config: ExtractConfig, plan: ExtractPlan) -> int:
    """Replace the metadata of unchanged documents that carry another one now; no slots are computed.

    Raises:
        CorpusError: the corpus cannot be read again.
        StoreError: I/O error or lasting write conflict.
    """
    if not len(plan.relabelled):
        return 0
    ledger = Ledger.open(config.store, namespace=config.namespace)
    wanted = set(plan.relabelled.tolist())
    rows = (row for _, _, row in islice(placed_rows(plan.files, config.columns), config.limit))
    changed = (
        (row.document.doc_id, row.metadata) for row in rows if keys_of([row.document.doc_id])[0] in wanted
    )
    return sum(ledger.set_metadata(dict(chunk)) for chunk in _chunks(changed))


def _chunks(items: Iterable[T]) -> Iterator[list[T]]:
    listed = iter(items)
    while chunk := list(islice(listed, AT_ONCE)):
        yield chunk
