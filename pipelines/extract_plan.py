"""What one run is to do, by its configuration, the corpus and the store as they are."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from c2kv_core.errors import InputError
from c2kv_core.store import DeadLetters, KVStore, Ledger
from pipelines.corpus import corpus_files
from pipelines.corpus.scan import Keys, ids_beyond, keys_of, scan_corpus
from pipelines.extract_config import ExtractConfig
from pipelines.extract_upkeep import missing_documents, missing_failures, partition_of
from pipelines.plan import (
    ExtractPlan,
    Stored,
    contents_of,
    plan_extraction,
    stored_contents,
    stored_metadata,
)


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A plan and what it was made for."""

    plan: ExtractPlan
    fingerprints: dict[int, str]
    failed_before: int
    """Documents left out of the plan because they failed in an earlier run with the content they have."""
    refusal: str | None
    """Why these may not be removed; only of a dry run, others end with it."""
    missing: tuple[str, ...]
    """Ids that are in the store and no longer in the corpus, to be removed; empty unless that is wanted."""
    missing_failures: tuple[str, ...]
    """Ids of failures that are to be forgotten for the same reason."""


def plan_run(config: ExtractConfig) -> PlannedRun:
    """Read the whole corpus and compare it with the store; writes nothing.

    Raises:
        InputError: a subclass that says what is wrong with corpus, model, sidecar, ratio or store.
        StoreError: the store cannot be read.
    """
    identities = config.spec().identities()
    fingerprints = {ratio: identity.fingerprint for ratio, identity in identities.items()}
    # Before anything is read: a place that cannot hold a store.
    KVStore.find(config.store)
    ledger = Ledger.open(config.store, namespace=config.namespace)
    stored = {ratio: stored_contents(ledger, fingerprint) for ratio, fingerprint in fingerprints.items()}
    plan = plan_extraction(
        config.corpus,
        stored,
        limit=config.limit,
        columns=config.columns,
        metadata=stored_metadata(ledger) if config.columns.metadata else None,
        only_new=config.mode == "add",
        keep=partition_of(config, ledger),
        processes=config.plan_processes,
    )
    failed_before = 0
    if not config.retry_failed and len(plan.pending):
        plan, failed_before = _without_failed(config, plan, fingerprints)
    missing, refusal = missing_documents(config, ledger, plan) if config.delete_missing else ((), None)
    if refusal is not None and not config.dry_run:
        raise InputError(refusal)
    return PlannedRun(
        plan=plan,
        refusal=refusal,
        fingerprints=fingerprints,
        failed_before=failed_before,
        missing=missing,
        missing_failures=missing_failures(config, ledger, plan) if config.delete_missing else (),
    )


def _without_failed(
    config: ExtractConfig, plan: ExtractPlan, fingerprints: dict[int, str]
) -> tuple[ExtractPlan, int]:
    """The plan without documents that failed with this very content, and how many those are."""
    if KVStore.find(config.store) is None:
        return plan, 0
    letters = DeadLetters.open(config.store)
    pending = plan.pending
    masks = pending.masks.copy()
    for bit, fingerprint in enumerate(fingerprints.values()):
        tables = letters.tables(
            ["doc_id", "content_hash"], {"namespace": [config.namespace], "fingerprint": [fingerprint]}
        )
        failed = Stored.joined([contents_of(table) for table in tables])
        there, digests = failed.find(pending.keys)
        masks[there & (digests == pending.contents)] &= ~np.uint32(1 << bit)
    kept = masks != 0
    if kept.all():
        return replace(plan, pending=replace(pending, masks=masks)), 0
    return replace(plan, pending=replace(pending, masks=masks).only(kept)), int((~kept).sum())


def still_there(config: ExtractConfig, keys: Keys) -> int:
    """How many of these documents the corpus holds now.

    Raises:
        CorpusError: it cannot be read.
    """
    return int(np.isin(keys, _keys_now(config)).sum())


def still_missing(config: ExtractConfig, doc_ids: Sequence[str]) -> tuple[str, ...]:
    """Which of these documents the corpus still lacks: it may have been incomplete when the run was planned.

    Raises:
        CorpusError: it cannot be read.
    """
    return tuple(ids_beyond(doc_ids, keys_of(doc_ids), _keys_now(config)))


def _keys_now(config: ExtractConfig) -> Keys:
    files = corpus_files(config.corpus)
    return scan_corpus(files, config.columns, limit=config.limit, processes=config.plan_processes).keys
