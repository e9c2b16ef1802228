"""Reading a store's records to find damage before a request does."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from c2kv_core.errors import InputError
from c2kv_core.store.fetch import fetch_document
from c2kv_core.store.identities import Identities
from c2kv_core.store.miss import Miss
from c2kv_core.store.row import IndexRow
from c2kv_core.store.storage import Storage


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One record that does not read as it should."""

    namespace: str
    doc_id: str
    fingerprint: str
    reason: str
    """A ``MissReason``, or ``missing_identity`` when the fingerprint's identity is not readable."""
    detail: str


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What was checked and what was wrong."""

    documents: int
    """Records read."""
    bytes: int
    """Bytes of those records."""
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether every record read was sound."""
        return not self.problems


def verify_rows(
    storage: Storage, identities: Identities, rows: Sequence[IndexRow], *, fraction: float, seed: int
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
    problems = [problem for row in chosen if (problem := _check(storage, identities, row)) is not None]
    return VerifyReport(
        documents=len(chosen), bytes=sum(row.length for row in chosen), problems=tuple(problems)
    )


def _check(storage: Storage, identities: Identities, row: IndexRow) -> Problem | None:
    identity = identities.load(row.fingerprint)
    if identity is None:
        detail = f"no readable identity for fingerprint {row.fingerprint}"
        return _problem(row, "missing_identity", detail)
    outcome = fetch_document(storage, row, identity=identity)
    return _problem(row, outcome.reason, outcome.detail) if isinstance(outcome, Miss) else None


def _problem(row: IndexRow, reason: str, detail: str) -> Problem:
    return Problem(
        namespace=row.namespace,
        doc_id=row.doc_id,
        fingerprint=row.fingerprint,
        reason=reason,
        detail=detail,
    )
