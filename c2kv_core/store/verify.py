"""Reading a store's records to find damage before a request does."""

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from c2kv_core.errors import InputError
from c2kv_core.store.fetch import fetch_documents
from c2kv_core.store.identities import Identities
from c2kv_core.store.index import Index
from c2kv_core.store.miss import Miss
from c2kv_core.store.row import IndexRow
from c2kv_core.store.storage import Storage

THREADS = 8
BATCH_BYTES = 32 * 2**20
"""Records that one thread reads at once."""

_UNREAD = {"missing_shard", "unreadable_shard", "missing_identity"}
"""Reasons of records that were not read at all."""
_NO_DAMAGE = {"unreadable_shard", "missing_identity"}
"""An I/O error, or a lost file under ``fingerprints/``: the record may be sound."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One record that does not read as it should."""

    row: IndexRow
    reason: str
    """A ``MissReason``, or ``missing_identity`` when the fingerprint's identity is not readable."""
    detail: str

    @property
    def is_damage(self) -> bool:
        """Whether the record itself is at fault, so that only making it again helps."""
        return self.reason not in _NO_DAMAGE

    def to_dict(self) -> dict[str, str]:
        """For people and machines."""
        row = self.row
        return {
            "namespace": row.namespace,
            "doc_id": row.doc_id,
            "fingerprint": row.fingerprint,
            "reason": self.reason,
            "detail": self.detail,
        }


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What was checked and what was wrong."""

    documents: int
    """Records looked at."""
    bytes: int
    """Bytes of those that could be read."""
    problems: tuple[Problem, ...]
    dropped: int | None = None
    """Rows that a repair dropped; None without one."""

    @property
    def ok(self) -> bool:
        """Whether every record read was sound."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            "ok": self.ok,
            "documents": self.documents,
            "bytes": self.bytes,
            "problems": [problem.to_dict() for problem in self.problems],
            "dropped": self.dropped,
        }


def verify_rows(
    storage: Storage,
    identities: Identities,
    index: Index,
    rows: Sequence[IndexRow],
    *,
    fraction: float,
    seed: int,
) -> VerifyReport:
    """Read and check the records of ``rows``, or of a random ``fraction`` (0 to 1] of them.

    Raises:
        InputError: fraction out of range.
        StoreError: I/O error on the identities.
    """
    if not 0 < fraction <= 1:
        raise InputError(f"expected a fraction above 0 and up to 1, got {fraction}")
    count = len(rows) if fraction == 1 else min(len(rows), max(1, round(len(rows) * fraction)))
    chosen = random.Random(seed).sample(rows, count)
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(lambda batch: _check(storage, identities, batch), _batches(chosen))
        problems = [problem for batch in found for problem in batch]
    problems = _look_again(storage, identities, index, problems)
    return VerifyReport(
        documents=len(chosen),
        bytes=sum(row.length for row in chosen) - sum(p.row.length for p in problems if p.reason in _UNREAD),
        problems=tuple(sorted(problems, key=lambda problem: problem.row.key)),
    )


def _look_again(
    storage: Storage, identities: Identities, index: Index, problems: Sequence[Problem]
) -> list[Problem]:
    """The problems less those of records that ``gc`` moved or somebody removed since the index was read."""
    kept = [problem for problem in problems if problem.reason != "missing_shard"]
    lost: dict[str, list[IndexRow]] = defaultdict(list)
    for problem in problems:
        if problem.reason == "missing_shard":
            lost[problem.row.namespace].append(problem.row)
    for namespace, rows in lost.items():
        keys = {row.key for row in rows}
        now = [r for r in index.rows_of_documents(namespace, [r.doc_id for r in rows]) if r.key in keys]
        kept += [problem for batch in _batches(now) for problem in _check(storage, identities, batch)]
    return kept


def _batches(rows: Sequence[IndexRow]) -> Iterator[list[IndexRow]]:
    """Of one fingerprint, neighbours of a shard together."""
    groups: dict[str, list[IndexRow]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row.shard, row.offset)):
        group = groups[row.fingerprint]
        if group and sum(r.length for r in group) + row.length > BATCH_BYTES:
            yield group
            group = groups[row.fingerprint] = []
        group.append(row)
    yield from groups.values()


def _check(storage: Storage, identities: Identities, rows: Sequence[IndexRow]) -> list[Problem]:
    fingerprint = rows[0].fingerprint
    identity = identities.load(fingerprint)
    if identity is None:
        detail = f"no readable identity for fingerprint {fingerprint}; the next extraction under it writes it again"
        return [Problem(row=row, reason="missing_identity", detail=detail) for row in rows]
    outcomes = fetch_documents(storage, rows, identity=identity)
    return [
        Problem(row=row, reason=outcome.reason, detail=outcome.detail)
        for row, outcome in zip(rows, outcomes, strict=True)
        if isinstance(outcome, Miss)
    ]
