"""Reading stored documents for requests: once however many ask, from memory first, never longer than allowed."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from c2kv_core.document import StoredDocument
from c2kv_core.errors import StoreError, StoreFormatError
from c2kv_core.store import IndexRow, KVStore, Miss, MissReason, ReadTiming, SourceText
from serve_app.cost_gate import CostGate
from serve_app.plan import Slots, Tier
from serve_app.slot_memory import SlotMemory

T = TypeVar("T")
logger = logging.getLogger(__name__)
_Key = tuple[str, str, str, int]
"""Namespace, id, shard and offset: one version of a document."""

SLOWER: MissReason = "slower"
LATE: MissReason = "late"
UNREACHABLE: MissReason = "unreachable"
_NO_ANSWER = Miss(reason=LATE, detail="the store did not answer in time")
STORE_FAILURES = (LATE, UNREACHABLE)
"""Reasons that are the store's, and pass."""


class DocumentFetcher:
    """Documents and texts, each within a time limit. Safe to share between threads.

    A read that comes too late is given up on by those who waited. It goes on, and what it brings stays in memory for
    later requests, verified like all else; it lands in no request that has gone on without it.
    """

    def __init__(
        self,
        *,
        store: KVStore,
        memory: SlotMemory,
        threads: int,
        gate: CostGate,
        on_use: Callable[[str, str], None] | None = None,
    ) -> None:
        """Start the threads.

        Args:
            store: opened under the served identity.
            memory: the tier before the store.
            gate: learns how fast the store is.
            on_use: is told namespace and id of each document that was found.
            threads: reads at the same time; those that hang keep theirs until the store's client gives up.
        """
        self._store = store
        self._memory = memory
        self._gate = gate
        self._on_use = on_use
        self._lock = threading.Lock()
        self._flying: dict[_Key, Future[Slots | Miss]] = {}
        # Apart, so that reads that hang do not hold up the look-ups of what is in memory.
        self._lookups = ThreadPoolExecutor(threads, thread_name_prefix="c2kv-lookup")
        self._reads = ThreadPoolExecutor(threads, thread_name_prefix="c2kv-read")

    def slots(
        self,
        ids: Sequence[str],
        namespace: str,
        *,
        until_s: float,
        timing: ReadTiming | None = None,
        may_refuse: bool = False,
    ) -> dict[str, Slots | Miss]:
        """Each document's slots, or why there are none.

        Args:
            ids: of documents.
            namespace: whose they are.
            until_s: when to go on without what is not there yet, by the monotonic clock.
            timing: adds up verification of what this call read.
            may_refuse: leave documents unread (``slower``) whose slots are expected to be sooner made than read.
        """
        if not ids:
            return {}
        # One by one: a bucket of the index that cannot be read now must not take others' documents with it.
        asked = {doc_id: self._lookups.submit(self._row, doc_id, namespace) for doc_id in dict.fromkeys(ids)}
        wait(asked.values(), timeout=max(0.0, until_s - time.monotonic()))
        found: dict[str, Slots | Miss] = {}
        to_read: list[IndexRow] = []
        for doc_id, one in asked.items():
            row = one.result() if one.done() else _NO_ANSWER
            if self._on_use is not None and not isinstance(row, Miss):
                self._on_use(namespace, doc_id)
            if isinstance(row, Miss):
                found[doc_id] = row
            elif (parts := self._memory.get(namespace, row.content_hash)) is not None:
                found[doc_id] = Slots(parts=parts, tier="memory")
            elif may_refuse and (why := self._refusal(row)) is not None:
                found[doc_id] = Miss(reason=SLOWER, detail=why)
            else:
                to_read.append(row)
        flights = self._join(to_read, timing)
        wait(flights.values(), timeout=max(0.0, until_s - time.monotonic()))
        late = Miss(reason=LATE, detail="the store did not deliver it in time")
        return found | {i: flight.result() if flight.done() else late for i, flight in flights.items()}

    def texts(self, ids: Sequence[str], namespace: str, *, until_s: float) -> dict[str, SourceText] | Miss:
        """Source texts by id, or why they cannot be read."""
        return self._within(until_s, self._reads, lambda: self._store.text(ids, namespace=namespace))

    def close(self) -> None:
        """Stop the threads when what they read has come."""
        for pool in (self._lookups, self._reads):
            pool.shutdown(wait=False, cancel_futures=True)

    def _row(self, doc_id: str, namespace: str) -> IndexRow | Miss:
        try:
            return self._store.lookup([doc_id], namespace=namespace)[doc_id]
        except (StoreError, StoreFormatError) as error:
            return _unreachable(error)

    def _refusal(self, row: IndexRow) -> str | None:
        if self._store.is_on_disk(row):
            return None
        return self._gate.refusal(row.length, row.source_tokens)

    def _within(self, until_s: float, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T | Miss:
        try:
            return pool.submit(work).result(max(0.0, until_s - time.monotonic()))
        except TimeoutError:
            return _NO_ANSWER
        except (StoreError, StoreFormatError) as error:
            return _unreachable(error)

    def _join(self, rows: Sequence[IndexRow], timing: ReadTiming | None) -> dict[str, Future[Slots | Miss]]:
        """The reads of these records: those under way already, and one more for all others together."""
        flights: dict[str, Future[Slots | Miss]] = {}
        mine: dict[_Key, Future[Slots | Miss]] = {}
        with self._lock:
            for row in rows:
                key = (row.namespace, row.doc_id, row.shard, row.offset)
                flight = self._flying.get(key)
                if flight is None:
                    flight = self._flying[key] = mine[key] = Future()
                flights[row.doc_id] = flight
        if mine:
            self._reads.submit(self._read, mine, timing)
        return flights

    def _read(self, flights: dict[_Key, Future[Slots | Miss]], timing: ReadTiming | None) -> None:
        namespace = next(iter(flights))[0]
        ids = [doc_id for _, doc_id, _, _ in flights]
        outcomes: dict[str, Slots | Miss] = dict.fromkeys(
            ids, Miss(reason=UNREACHABLE, detail="reading it failed")
        )
        own = ReadTiming()
        started_s = time.monotonic()
        try:
            read = self._store.get(ids, namespace=namespace, timing=own)
            self._learn(read, own, time.monotonic() - started_s)
            for doc_id, document in read.items():
                tier: Tier = "disk" if doc_id in own.from_disk else "store"
                outcomes[doc_id] = document if isinstance(document, Miss) else self._kept(document, tier)
        except (StoreError, StoreFormatError) as error:
            outcomes = dict.fromkeys(ids, _unreachable(error))
        finally:
            with self._lock:
                for key in flights:
                    self._flying.pop(key)
            if timing is not None:
                timing.verify_s += own.verify_s
            for key, flight in flights.items():
                flight.set_result(outcomes[key[1]])

    def _learn(self, read: dict[str, StoredDocument | Miss], timing: ReadTiming, taken_s: float) -> None:
        """Tell the gate of a read that was the store's alone."""
        sizes = [document.kv_bytes for document in read.values() if isinstance(document, StoredDocument)]
        if len(sizes) == len(read) and not timing.from_disk:
            self._gate.has_read(sum(sizes), taken_s)

    def _kept(self, document: StoredDocument, tier: Tier) -> Slots:
        parts = self._memory.keep(document.namespace, document.content_hash, document.parts)
        return Slots(parts=parts, tier=tier)


def _unreachable(error: StoreError | StoreFormatError) -> Miss:
    # Details come to clients' eyes; where the store is and how it fails is for the log.
    logger.warning("the store cannot be read: %s", error)
    return Miss(reason=UNREACHABLE, detail="the store cannot be read")
