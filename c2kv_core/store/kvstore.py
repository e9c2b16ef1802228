"""The store of compressed documents: shards for bytes, one Delta commit for what counts."""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Self

from c2kv_core.document import StoredDocument
from c2kv_core.errors import IdentityError, StoreFormatError
from c2kv_core.identity import Identity
from c2kv_core.store.backends import open_storage
from c2kv_core.store.counters import Counters
from c2kv_core.store.creation import create_store
from c2kv_core.store.dead_letters import DeadLetters
from c2kv_core.store.disk_tier import DiskTier
from c2kv_core.store.fetch import fetch_documents
from c2kv_core.store.gc import DEFAULT_RETENTION_S, GcReport, collect_garbage
from c2kv_core.store.identities import Identities, check_identity
from c2kv_core.store.index import Index
from c2kv_core.store.intake import check_committable, check_document
from c2kv_core.store.manifest import DEFAULT_BUCKETS, Manifest, check_can_hold_store, read_manifest
from c2kv_core.store.miss import Miss
from c2kv_core.store.names import check_namespace, check_run, listed_ids
from c2kv_core.store.probe import probe
from c2kv_core.store.quarantine import forget, quarantine
from c2kv_core.store.reader import DEFAULT_REFRESH_S, IndexReader
from c2kv_core.store.row import IndexRow
from c2kv_core.store.storage import Storage
from c2kv_core.store.texts import SourceText, Texts
from c2kv_core.store.timing import ReadTiming
from c2kv_core.store.totals import Totals
from c2kv_core.store.verify import VerifyReport, verify_rows


class KVStore:
    """Documents as verified KV slots under one identity, by namespace and id.

    Slots of several identities lie side by side; a store opened with one reads and writes only that.
    Opened without one it lists, verifies, deletes and collects garbage. Safe to share between threads;
    each process opens its own.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        reader: IndexReader,
        *,
        identity: Identity | None,
        disk: DiskTier | None = None,
    ) -> None:
        """Use ``KVStore.open``."""
        self._disk = disk
        self._storage = storage
        self._buckets = manifest.buckets
        self._identity = identity
        self._index = Index(storage, buckets=manifest.buckets)
        self._texts = Texts(storage, buckets=manifest.buckets)
        self._identities = Identities(storage)
        self._reader = reader
        self._counters = Counters()

    @classmethod
    def open(
        cls,
        uri: str | os.PathLike[str],
        *,
        identity: Identity | None = None,
        create: bool = False,
        buckets: int = DEFAULT_BUCKETS,
        index_refresh_s: float = DEFAULT_REFRESH_S,
        patience_s: float | None = None,
        disk: DiskTier | None = None,
    ) -> Self:
        """Open the store at a directory or a prefix of a bucket.

        Args:
            uri: path, ``file://`` or ``s3://`` URI; S3 by the standard AWS settings.
            identity: of the slots to read and write; needed by all that touches slots.
            create: make the store if nothing is there, and check that it can be written. Racing creators are fine.
            buckets: partitions of the index of a store made now; an existing store keeps its own.
            index_refresh_s: how old a reader's view of other processes' commits may be, in seconds.
            patience_s: seconds after which reading goes on with an older view if storage fails; None waits and raises.
            disk: keeps copies of what is read from a remote store.

        Raises:
            InputError: a URI that cannot hold a store.
            StoreFormatError: no store there, something else, or another format version.
            IdentityError: an identity that this release cannot store.
            StoreError: I/O error.
        """
        storage = open_storage(uri)
        if identity is not None:
            check_identity(identity)
        manifest = read_manifest(storage)
        if manifest is None and not create:
            raise StoreFormatError(f"no store at {storage.uri}; create one with `c2kv extract`")
        if manifest is None:
            manifest = create_store(storage, buckets=buckets)
        if create:
            probe(storage)
        reader = IndexReader(
            Index(storage, buckets=manifest.buckets), refresh_s=index_refresh_s, patience_s=patience_s
        )
        return cls(storage, manifest, reader, identity=identity, disk=disk)

    @classmethod
    def find(cls, uri: str | os.PathLike[str], *, identity: Identity | None = None) -> Self | None:
        """The store at a place, or None where one can be made: for checks that must write nothing.

        Raises:
            InputError: a URI that cannot hold a store.
            StoreFormatError: something else is there, or a store of another format version.
            StoreError: I/O error.
        """
        storage = open_storage(uri)
        if read_manifest(storage) is None:
            check_can_hold_store(storage, buckets=DEFAULT_BUCKETS)
            return None
        return cls.open(uri, identity=identity)

    @property
    def uri(self) -> str:
        """Where the store lies."""
        return self._storage.uri

    @property
    def identity(self) -> Identity | None:
        """What the store was opened with."""
        return self._identity

    @property
    def counters(self) -> dict[str, int]:
        """Counts since opening: ``hit``, ``hit_bytes``, ``miss`` and ``miss_<reason>``."""
        return self._counters.snapshot()

    def put(
        self, documents: Sequence[StoredDocument], *, texts: Iterable[SourceText] = (), run: str = "put"
    ) -> list[IndexRow]:
        """Store documents, replacing those of the same namespace and id; all visible at once.

        Raises:
            InputError: a document or text that cannot be stored.
            IdentityError: opened without an identity, or a document of another.
            StoreError: I/O error or lasting write conflict; nothing became visible.
        """
        rows = self.write_shard(documents, run=run)
        self.commit(rows, texts=texts)
        return rows

    def write_shard(self, documents: Sequence[StoredDocument], *, run: str) -> list[IndexRow]:
        """Write documents to a new shard (one a namespace), durable and read back, not yet visible.

        For many processes at once; hand the rows to one ``commit``. A shard whose rows are never
        committed is removed by ``gc``.

        Args:
            documents: of any namespaces.
            run: name of the job, a folder under ``shards/``.

        Raises:
            InputError: a document or run name that cannot be stored.
            IdentityError: opened without an identity, or a document of another.
            StoreError: I/O error.
        """
        # Imported late, as torch is by it: looking at a store needs none of it.
        from c2kv_core.store.writer import write_shard

        identity = self._required_identity("write slots")
        check_run(run)
        by_namespace: defaultdict[str, list[StoredDocument]] = defaultdict(list)
        for document in documents:
            check_document(document, identity)
            by_namespace[document.namespace].append(document)
        if documents:
            self._identities.publish(identity)
        return [
            row
            for group in by_namespace.values()
            for row in write_shard(self._storage, group, identity=identity, run=run, buckets=self._buckets)
        ]

    def commit(self, rows: Iterable[IndexRow], *, texts: Iterable[SourceText] = ()) -> None:
        """Make written documents live in one atomic commit, replacing earlier ones of the same keys.

        Texts are committed before, so a live document's text can always be read. Of rows with equal keys
        the last counts. Committing the same rows again changes nothing.

        Raises:
            InputError: rows of a store with another number of buckets, or texts that cannot be stored.
            StoreError: a row's shard is gone, I/O error, or lasting write conflict.
        """
        rows = list(rows)
        check_committable(self._storage, rows, buckets=self._buckets)
        self._texts.upsert(texts)
        self._index.upsert(rows)
        self._reader.invalidate()

    def lookup(self, ids: Iterable[str], *, namespace: str) -> dict[str, IndexRow | Miss]:
        """The live row of each document under the opened identity, or why there is none; as fresh as ``get``.

        Raises:
            InputError: a malformed namespace, or a string instead of a list of ids.
            IdentityError: opened without an identity.
            StoreError: the index cannot be read.
        """
        identity = self._required_identity("read slots")
        found = self._reader.lookup(check_namespace(namespace), listed_ids(ids))
        return {doc_id: self._identities.own_row(doc_id, rows, identity) for doc_id, rows in found.items()}

    def get(
        self, ids: Iterable[str], *, namespace: str, timing: ReadTiming | None = None
    ) -> dict[str, StoredDocument | Miss]:
        """Documents by id, each whole and verified, or why not.

        Tensors are views of the mapped shard: read only, and valid as long as they are held. Other
        processes' commits are seen within ``index_refresh_s``, one's own at once.

        Args:
            ids: of documents.
            namespace: tenant.
            timing: adds up how long verification took.

        Raises:
            InputError: a malformed namespace, or a string instead of a list of ids.
            IdentityError: opened without an identity.
            StoreError: the index cannot be read.
        """
        identity = self._required_identity("read slots")
        outcomes = self._fetch(ids, namespace, identity, timing)
        lost = [i for i, o in outcomes.items() if isinstance(o, Miss) and o.reason == "missing_shard"]
        if lost:
            # gc may have moved them since the index was read.
            self._reader.invalidate()
            outcomes |= self._fetch(lost, namespace, identity, timing)
        for outcome in outcomes.values():
            self._counters.count_read(outcome)
        return outcomes

    def is_on_disk(self, row: IndexRow) -> bool:
        """Whether a copy of a row's record is on the local disk."""
        return self._disk is not None and self._disk.holds(self.uri, row)

    def delete(self, ids: Iterable[str], *, namespace: str) -> int:
        """Remove documents under every identity, and their texts; how many index rows went.

        Safe to repeat: an interrupted delete is finished by the next. The bytes of the slots stay in
        their shards until ``gc`` finds those without a live document.

        Raises:
            InputError: a malformed namespace, or a string instead of a list of ids.
            StoreError: I/O error or lasting write conflict.
        """
        check_namespace(namespace)
        wanted = listed_ids(ids)
        removed = self._index.delete(namespace, wanted)
        self._reader.invalidate()
        self._texts.delete(namespace, wanted)
        forget(self._storage, namespace, wanted)
        DeadLetters(self._storage, buckets=self._buckets).delete(namespace, wanted)
        return removed

    def text(self, ids: Iterable[str], *, namespace: str) -> dict[str, SourceText]:
        """Source texts by id; ids without one are left out. Always the newest version.

        Raises:
            InputError: a malformed namespace, or a string instead of a list of ids.
            StoreError: the table cannot be read.
        """
        return self._texts.get(check_namespace(namespace), listed_ids(ids))

    def invalidate(self) -> None:
        """See at the next read what another ``KVStore`` of this process has committed, however young the view is."""
        self._reader.invalidate()

    def rows(self, *, namespace: str | None = None, fingerprint: str | None = None) -> list[IndexRow]:
        """All live rows now, sorted by namespace, id and fingerprint.

        Raises:
            StoreError: the index cannot be read.
        """
        return self._index.rows(namespace=namespace, fingerprint=fingerprint)

    def rows_of(self, ids: Iterable[str], *, namespace: str) -> list[IndexRow]:
        """Live rows of some documents now, at every fingerprint, sorted by id and fingerprint.

        Raises:
            InputError: a malformed namespace, or a string instead of a list of ids.
            StoreError: the index cannot be read.
        """
        return self._index.rows_of_documents(check_namespace(namespace), listed_ids(ids))

    def totals(self, *, namespace: str | None = None) -> list[Totals]:
        """Documents, slots, tokens and bytes that are live now, by namespace and fingerprint.

        Raises:
            StoreError: the index cannot be read.
        """
        return self._index.totals(namespace=namespace)

    def identity_of(self, fingerprint: str) -> Identity | None:
        """What made the records of a fingerprint; None where the store does not say."""
        return self._identities.load(fingerprint)

    def content_hashes(self, *, namespace: str) -> dict[str, str]:
        """Content hash by id of all documents live now under the opened identity.

        Raises:
            InputError: a malformed namespace, or a string instead of a list of ids.
            IdentityError: opened without an identity.
            StoreError: the index cannot be read.
        """
        identity = self._required_identity("compare contents")
        return self._index.content_hashes(
            namespace=check_namespace(namespace), fingerprint=identity.fingerprint
        )

    def explain_missing(self, namespace: str) -> str | None:
        """Why a namespace with documents has none to read: the fields in which the nearest identity differs.

        None when it has documents of the opened identity, or none at all.

        Raises:
            IdentityError: opened without an identity.
            StoreError: the index cannot be read.
        """
        identity = self._required_identity("read slots")
        found = {group.fingerprint for group in self.totals(namespace=check_namespace(namespace))}
        return self._identities.explain_absence(identity, found, namespace)

    def require_identity(self, namespace: str) -> None:
        """Refuse a namespace that holds documents, but only of other identities.

        Raises:
            IdentityError: names the differing fields.
            StoreError: the index cannot be read.
        """
        explanation = self.explain_missing(namespace)
        if explanation is not None:
            raise IdentityError(f"{explanation}; open with what made them, or extract again")

    def verify(
        self, *, namespace: str | None = None, fraction: float = 1.0, seed: int = 0, repair: bool = False
    ) -> VerifyReport:
        """Read and check all live records of all identities, or a random fraction of them.

        Args:
            namespace: only this tenant's.
            fraction: share of the records, above 0 up to 1.
            seed: of the choice.
            repair: note damaged records under ``quarantine/`` and drop their rows, so that the next extraction makes
                them again. A record that could not be read for another reason than damage keeps its row.

        Raises:
            InputError: fraction not in (0, 1].
            StoreError: the index cannot be read or written.
        """
        rows = self.rows(namespace=namespace)
        report = verify_rows(self._storage, self._identities, self._index, rows, fraction=fraction, seed=seed)
        if repair:
            dropped = quarantine(self._storage, self._index, report.problems)
            self._reader.invalidate()
            report = replace(report, dropped=dropped)
        return report

    def gc(self, *, dry_run: bool = False, retention_s: float = DEFAULT_RETENTION_S) -> GcReport:
        """Remove what no live document needs and is older than the retention; see ``store.gc``.

        Safe beside readers and, with a sufficient retention, beside writers.

        Args:
            dry_run: only report.
            retention_s: seconds; must exceed any running job's time from writing a shard to its commit.

        Raises:
            InputError: negative retention.
            StoreError: I/O error.
        """
        parts = (self._storage, self._index, self._texts, self._identities)
        try:
            return collect_garbage(*parts, retention_s=retention_s, dry_run=dry_run)
        finally:
            self._reader.invalidate()

    def _fetch(
        self, ids: Iterable[str], namespace: str, identity: Identity, timing: ReadTiming | None
    ) -> dict[str, StoredDocument | Miss]:
        found = self.lookup(ids, namespace=namespace)
        live = {doc_id: row for doc_id, row in found.items() if isinstance(row, IndexRow)}
        fetched = fetch_documents(
            self._storage, list(live.values()), identity=identity, timing=timing, disk=self._disk
        )
        by_id = dict(zip(live, fetched, strict=True))
        return {doc_id: by_id[doc_id] if isinstance(row, IndexRow) else row for doc_id, row in found.items()}

    def _required_identity(self, doing: str) -> Identity:
        if self._identity is None:
            raise IdentityError(f"cannot {doing}: open the store with identity=...")
        return self._identity
