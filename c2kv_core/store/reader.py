"""Looking up index rows from memory: a bucket is read once and again only when its files change."""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import xxhash

from c2kv_core.errors import StoreError
from c2kv_core.store.index import Index, index_rows, is_storable
from c2kv_core.store.names import bucket_of
from c2kv_core.store.row import IndexRow

DEFAULT_REFRESH_S = 5.0
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
    """A cached view of the index, at most ``refresh_s`` seconds old. Safe to share between threads."""

    def __init__(self, index: Index, *, refresh_s: float = DEFAULT_REFRESH_S) -> None:
        self._index = index
        self._refresh_s = refresh_s
        self._lock = threading.Lock()
        self._files: dict[int, tuple[str, ...]] = {}
        self._expires_s = 0.0
        """By the monotonic clock; 0 is long ago."""
        self._buckets: OrderedDict[tuple[str, int], _Bucket] = OrderedDict()
        """The most recently used last."""
        self._held_bytes = 0

    def invalidate(self) -> None:
        """Look for a new version at the next lookup: the caller has committed."""
        with self._lock:
            self._expires_s = 0.0

    def lookup(self, namespace: str, doc_ids: Iterable[str]) -> dict[str, tuple[IndexRow, ...]]:
        """Rows by id, a row a fingerprint, all as of one version; none for an unknown id.

        Raises:
            StoreError: the index cannot be read.
        """
        doc_ids = list(doc_ids)
        with self._lock:
            self._refresh()
            try:
                return self._rows(namespace, doc_ids)
            except StoreError as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise
            # gc has removed a file of an older version since we looked.
            self._expires_s = 0.0
            self._refresh()
            return self._rows(namespace, doc_ids)

    def _rows(self, namespace: str, doc_ids: list[str]) -> dict[str, tuple[IndexRow, ...]]:
        return {doc_id: self._bucket(namespace, doc_id).rows(doc_id) for doc_id in doc_ids}

    def _refresh(self) -> None:
        if time.monotonic() >= self._expires_s:
            self._files = self._index.files()
            self._expires_s = time.monotonic() + self._refresh_s

    def _bucket(self, namespace: str, doc_id: str) -> _Bucket:
        number = bucket_of(namespace, doc_id, buckets=self._index.buckets)
        files = self._files.get(number, ())
        held = self._buckets.get((namespace, number))
        if held is None or held.files != files:
            held = _Bucket(files, self._index.table_of(files, namespace=namespace, bucket=number))
            self._hold((namespace, number), held)
        self._buckets.move_to_end((namespace, number))
        return held

    def _hold(self, key: tuple[str, int], bucket: _Bucket) -> None:
        if key in self._buckets:
            self._held_bytes -= self._buckets.pop(key).nbytes
        self._buckets[key] = bucket
        self._held_bytes += bucket.nbytes
        while self._held_bytes > MAX_HELD_BYTES and len(self._buckets) > 1:
            self._held_bytes -= self._buckets.popitem(last=False)[1].nbytes
