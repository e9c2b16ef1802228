"""The Delta table ``failures/``: documents that could not be extracted, one row a (namespace, doc_id, fingerprint).

A row stands for one content: a document that has changed is tried again as if it were new. The table is made with its
first row, so that stores without failures, and those of earlier releases, have none.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Literal, Self

import pyarrow as pa

from c2kv_core.errors import StoreFormatError
from c2kv_core.store.backends import open_storage
from c2kv_core.store.failures import as_store_error
from c2kv_core.store.index import document_keys
from c2kv_core.store.manifest import read_manifest
from c2kv_core.store.names import FAILURES_TABLE, bucket_of
from c2kv_core.store.storage import Storage
from c2kv_core.store.table import Table

FailureKind = Literal["text", "tokenizer", "model", "memory", "killed", "too_long"]
"""text: no part of it fits; tokenizer, model: raised an error; memory: ran out of it; killed: the process died over it,
repeatedly; too_long: over a limit of the configuration."""

FAILURES_SCHEMA: pa.Schema = pa.schema(
    [
        pa.field("bucket", pa.int32(), nullable=False),
        pa.field("namespace", pa.string(), nullable=False),
        pa.field("doc_id", pa.string(), nullable=False),
        pa.field("fingerprint", pa.string(), nullable=False),
        pa.field("content_hash", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("attempts", pa.int32(), nullable=False),
        pa.field("run", pa.string(), nullable=False),
        pa.field("first_failed_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("last_failed_at", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)
_STORED = [name for name in FAILURES_SCHEMA.names if name != "bucket"]
_ROW_GROUP_ROWS = 65_536


@dataclass(frozen=True, kw_only=True)
class DeadLetter:
    """A document that failed under one identity."""

    namespace: str
    doc_id: str
    fingerprint: str
    content_hash: str
    """Of the content that failed."""
    kind: FailureKind
    reason: str
    attempts: int
    """Over all runs that tried this content."""
    run: str
    """The last of them."""
    first_failed_at: datetime
    last_failed_at: datetime


class DeadLetters:
    """Reads and writes failures. Safe to share between threads."""

    def __init__(self, storage: Storage, *, buckets: int) -> None:
        self._storage, self._buckets = storage, buckets
        self.table = Table(
            storage,
            FAILURES_TABLE,
            schema=FAILURES_SCHEMA,
            key=("namespace", "doc_id", "fingerprint"),
            row_group_rows=_ROW_GROUP_ROWS,
        )

    @classmethod
    def open(cls, uri: str | os.PathLike[str]) -> Self:
        """Of the store at a place.

        Raises:
            InputError: a URI that cannot hold a store.
            StoreFormatError: no store there, or one of another format version.
            StoreError: I/O error.
        """
        storage = open_storage(uri)
        manifest = read_manifest(storage)
        if manifest is None:
            raise StoreFormatError(f"no store at {storage.uri}; create one with `c2kv extract`")
        return cls(storage, buckets=manifest.buckets)

    @property
    def exists(self) -> bool:
        """Whether a document has ever failed.

        Raises:
            StoreError: I/O error.
        """
        with as_store_error(f"look for {FAILURES_TABLE}/"):
            log = f"{FAILURES_TABLE}/_delta_log/"
            return next(iter(self._storage.list_files(log)), None) is not None

    def record(self, letters: Sequence[DeadLetter]) -> None:
        """Add failures in one commit. An earlier row of the same content keeps its date and adds its attempts.

        Raises:
            StoreError: I/O error or lasting write conflict.
        """
        if not letters:
            return
        if not self.exists:
            with as_store_error(f"create {FAILURES_TABLE}/"):
                self.table.create()
        latest = {(one.namespace, one.doc_id, one.fingerprint): one for one in letters}
        for known in self._of({(namespace, doc_id) for namespace, doc_id, _ in latest}):
            key = (known.namespace, known.doc_id, known.fingerprint)
            if (new := latest.get(key)) is not None and new.content_hash == known.content_hash:
                latest[key] = replace(
                    new,
                    attempts=new.attempts + known.attempts,
                    first_failed_at=known.first_failed_at,
                )
        rows = [{"bucket": self._bucket(one), **asdict(one)} for one in latest.values()]
        self.table.upsert(pa.Table.from_pylist(rows, schema=FAILURES_SCHEMA))

    def delete(self, namespace: str, doc_ids: Iterable[str]) -> int:
        """Forget the failures of documents under every fingerprint; how many rows went.

        Raises:
            StoreError: I/O error or lasting write conflict.
        """
        return (
            self.table.delete(document_keys(namespace, doc_ids, buckets=self._buckets)) if self.exists else 0
        )

    def settle(self, namespace: str, fingerprint: str, doc_ids: Iterable[str]) -> int:
        """Forget the failures of documents under one fingerprint, since it has them now; how many rows went.

        Raises:
            StoreError: I/O error or lasting write conflict.
        """
        if not self.exists:
            return 0
        keys = document_keys(namespace, doc_ids, buckets=self._buckets)
        fingerprints = pa.array([fingerprint] * keys.num_rows, pa.string())
        return self.table.delete(keys.append_column("fingerprint", fingerprints))

    def rows(self, *, namespace: str | None = None) -> list[DeadLetter]:
        """All failures now, sorted by namespace, id and fingerprint.

        Raises:
            StoreError: the table cannot be read.
        """
        where = {} if namespace is None else {"namespace": [namespace]}
        found = [DeadLetter(**row) for table in self.tables(_STORED, where) for row in table.to_pylist()]
        return sorted(found, key=lambda one: (one.namespace, one.doc_id, one.fingerprint))

    def tables(self, columns: Sequence[str], where: dict[str, list[str]]) -> Iterator[pa.Table]:
        """Columns of the rows that match, file by file.

        Raises:
            StoreError: the table cannot be read.
        """
        if self.exists:
            for paths in self.table.files().values():
                for path in paths:
                    yield self.table.read([path], columns=columns, where=where)

    def _of(self, documents: set[tuple[str, str]]) -> Iterator[DeadLetter]:
        where = {"namespace": sorted({n for n, _ in documents}), "doc_id": sorted({i for _, i in documents})}
        for table in self.tables(_STORED, where):
            yield from (DeadLetter(**row) for row in table.to_pylist())

    def _bucket(self, one: DeadLetter) -> int:
        return bucket_of(one.namespace, one.doc_id, buckets=self._buckets)


def dead_letter(
    *,
    namespace: str,
    doc_id: str,
    fingerprint: str,
    content_hash: str,
    kind: FailureKind,
    reason: str,
    attempts: int,
    run: str,
) -> DeadLetter:
    """A failure of now."""
    now = datetime.now(UTC)
    return DeadLetter(
        namespace=namespace,
        doc_id=doc_id,
        fingerprint=fingerprint,
        content_hash=content_hash,
        kind=kind,
        reason=reason,
        attempts=attempts,
        run=run,
        first_failed_at=now,
        last_failed_at=now,
    )
