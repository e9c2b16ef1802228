"""Looking up index rows from memory: a bucket is read once and again only when its files change."""

import math
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from concurrent.futures import Future

import numpy as np
import pyarrow as pa
import xxhash

from c2kv_core.errors import C2KVError, StoreError
from c2kv_core.store.index import Index, index_rows, is_storable
from c2kv_core.store.names import bucket_of
from c2kv_core.store.row import IndexRow

DEFAULT_REFRESH_S = 5.0
MISS_REFRESH_S = 0.5
"""Oldest view by which a document is said not to be there."""
MAX_STALE_S = 600.0
"""Oldest view that is used while storage does not answer."""
MAX_HELD_BYTES = 2 * 2**30
"""Memory of a reader for index rows; at 300 bytes a row, seven million of them."""
_OVERHEAD_BYTES = 16_384
"""Of a bucket, about, if it is empty."""


class _Bucket:
    """One bucket of one namespace as of some version: columns, and a sorted hash of ids to find rows by.

    Rows become objects only when they are asked for; a million of them would not fit as such.
    """

    def __init__(self, files: tuple[str, ...], table: pa.Table) -> None:
        self.files = files
        # In one piece: taking rows out of many chunks costs more than all else.
        self._table = table.combine_chunks()
        hashes = np.fromiter(
            (xxhash.xxh3_64_intdigest(doc_id.encode()) for doc_id in table["doc_id"].to_pylist()),
            dtype=np.uint64,
            count=table.num_rows,
        )
        self._order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._order]
        self.nbytes = _OVERHEAD_BYTES + self._table.nbytes + self._hashes.nbytes + self._order.nbytes

    def rows(self, doc_id: str) -> tuple[IndexRow, ...]:
        """Of one document, a row a fingerprint."""
        if not is_storable(doc_id):
            return ()
        wanted = np.uint64(xxhash.xxh3_64_intdigest(doc_id.encode()))
        first, last = (int(np.searchsorted(self._hashes, wanted, side=side)) for side in ("left", "right"))
        places = self._order[first:last].tolist()
        return tuple(
            row for row in index_rows(self._table.take(pa.array(places, pa.int64()))) if row.doc_id == doc_id
        )


class IndexReader:
    """A cached view of the index, at most ``refresh_s`` seconds old. Safe to share between threads.

    With ``patience_s`` a look-up does not wait longer than that for a storage that hangs or fails, as long as the view
    at hand is no older than ``MAX_STALE_S``: what was known goes on being known.
    """

    def __init__(
        self, index: Index, *, refresh_s: float = DEFAULT_REFRESH_S, patience_s: float | None = None
    ) -> None:
        self._index = index
        self._refresh_s = refresh_s
        self._patience_s = patience_s
        self._lock = threading.Lock()
        """Guards what is held; never held while storage is read."""
        self._files: dict[int, tuple[str, ...]] = {}
        self._seen_s = -math.inf
        """When the view was asked for, by the monotonic clock."""
        self._must_see_s = -math.inf
        """A view asked for before this is too old, whatever happens."""
        self._refreshing: Future[None] | None = None
        self._loading: defaultdict[tuple[str, int], threading.Lock] = defaultdict(threading.Lock)
        self._buckets: OrderedDict[tuple[str, int], _Bucket] = OrderedDict()
        """The most recently used last."""
        self._held_bytes = 0

    def invalidate(self) -> None:
        """Look for a new version at the next lookup: the caller has committed."""
        with self._lock:
            self._must_see_s = time.monotonic()

    def lookup(self, namespace: str, doc_ids: Iterable[str]) -> dict[str, tuple[IndexRow, ...]]:
        """Rows by id, a row a fingerprint, all as of one version; none for an unknown id.

        Raises:
            StoreError: the index cannot be read.
        """
        doc_ids = list(doc_ids)
        self._refresh(self._refresh_s)
        try:
            found = self._rows(namespace, doc_ids)
        except StoreError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            # gc has removed a file of an older version since we looked.
            self.invalidate()
            self._refresh(self._refresh_s)
            return self._rows(namespace, doc_ids)
        if not all(found.values()) and self.age_s > MISS_REFRESH_S:
            # Somebody may just have put what is missing.
            self._refresh(min(MISS_REFRESH_S, self._refresh_s))
            found = self._rows(namespace, doc_ids)
        return found

    @property
    def age_s(self) -> float:
        """Seconds since the view was asked for."""
        return time.monotonic() - self._seen_s

    def _rows(self, namespace: str, doc_ids: list[str]) -> dict[str, tuple[IndexRow, ...]]:
        files = self._files
        return {doc_id: self._bucket(files, namespace, doc_id).rows(doc_id) for doc_id in doc_ids}

    def _refresh(self, max_age_s: float) -> None:
        """See to a view that is young enough; several that need one wait for the same."""
        with self._lock:
            now_s = time.monotonic()
            young = now_s - self._seen_s < max_age_s and self._seen_s >= self._must_see_s
            if young:
                return
            if self._refreshing is None or self._refreshing.done():
                self._refreshing = Future()
                threading.Thread(target=self._look, args=(self._refreshing,), daemon=True).start()
            refreshing = self._refreshing
            may_go_on = (
                self._patience_s is not None
                and now_s - self._seen_s < MAX_STALE_S
                and self._seen_s >= self._must_see_s
            )
        try:
            refreshing.result(self._patience_s if may_go_on else None)
        except (TimeoutError, C2KVError):
            if not may_go_on:
                raise
        if self._seen_s < self._must_see_s:  # that look began before the commit
            self._refresh(max_age_s)

    def _look(self, done: "Future[None]") -> None:
        asked_s = time.monotonic()
        try:
            files = self._index.files()
            with self._lock:
                self._files, self._seen_s = files, asked_s
            done.set_result(None)
        except C2KVError as error:
            done.set_exception(error)
        finally:
            if not done.done():  # something unforeseen, which the thread's own report tells
                done.set_exception(StoreError("cannot read the index: looking for a new version failed"))

    def _bucket(self, files: dict[int, tuple[str, ...]], namespace: str, doc_id: str) -> _Bucket:
        number = bucket_of(namespace, doc_id, buckets=self._index.buckets)
        key, wanted = (namespace, number), files.get(number, ())
        held = self._held(key)
        if held is not None and held.files == wanted:
            return held
        with self._loading[key]:
            held = self._held(key)
            if held is None or held.files != wanted:
                held = _Bucket(wanted, self._index.table_of(wanted, namespace=namespace, bucket=number))
                self._hold(key, held)
            return held

    def _held(self, key: tuple[str, int]) -> _Bucket | None:
        with self._lock:
            if key in self._buckets:
                self._buckets.move_to_end(key)
            return self._buckets.get(key)

    def _hold(self, key: tuple[str, int], bucket: _Bucket) -> None:
        with self._lock:
            if key in self._buckets:
                self._held_bytes -= self._buckets.pop(key).nbytes
            self._buckets[key] = bucket
            self._held_bytes += bucket.nbytes
            while self._held_bytes > MAX_HELD_BYTES and len(self._buckets) > 1:
                gone, dropped = self._buckets.popitem(last=False)
                self._held_bytes -= dropped.nbytes
                self._loading.pop(gone, None)
