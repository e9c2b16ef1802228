"""Writing documents that clients put: one thread a replica, many documents a commit."""

import logging
import threading
import time
from collections import defaultdict, deque
from concurrent.futures import Future
from dataclasses import dataclass

from c2kv_core.document import StoredDocument
from c2kv_core.errors import C2KVError, StoreError
from c2kv_core.store import IndexRow, KVStore, SourceText

logger = logging.getLogger(__name__)

_FAILURES = (C2KVError, OSError, RuntimeError, ValueError, TypeError, LookupError, MemoryError)
"""What libraries raise over one commit; only what the store foresees is told to clients as it is."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Put:
    store: KVStore
    document: StoredDocument
    text: SourceText
    done: "Future[IndexRow]"

    @property
    def key(self) -> tuple[KVStore, str, str]:
        """A commit holds it once."""
        return (self.store, self.document.namespace, self.document.doc_id)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Delete:
    store: KVStore
    namespace: str
    doc_id: str
    done: "Future[int]"


class DocumentWriter:
    """Puts and deletes in the order they came. Safe to share between threads."""

    def __init__(self, *, gather_s: float, max_documents: int) -> None:
        """Start the thread.

        Args:
            gather_s: how long the first document of a commit waits for others, in seconds.
            max_documents: most documents of a commit.
        """
        self._gather_s = gather_s
        self._max_documents = max_documents
        self._changed = threading.Condition()
        self._queue: deque[_Put | _Delete] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="c2kv-writer", daemon=True)
        self._thread.start()

    def put(self, store: KVStore, document: StoredDocument, text: SourceText) -> "Future[IndexRow]":
        """Store a document and its text; done when both can be read by anybody.

        The store is opened under the document's identity.

        The future may raise InputError (it cannot be stored) or StoreError (nothing of it became visible).
        """
        done: Future[IndexRow] = Future()
        self._add(_Put(store=store, document=document, text=text, done=done))
        return done

    def delete(self, store: KVStore, namespace: str, doc_id: str) -> "Future[int]":
        """Remove a document under every identity, and its text; the number of records that went."""
        done: Future[int] = Future()
        self._add(_Delete(store=store, namespace=namespace, doc_id=doc_id, done=done))
        return done

    @property
    def waiting(self) -> int:
        """Operations not begun."""
        return len(self._queue)

    def fault(self) -> str | None:
        """Why nothing is written any more; None while it is well."""
        return None if self._thread.is_alive() else "the writer thread has ended"

    def close(self) -> None:
        """Finish what has been taken on, and stop."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _add(self, operation: _Put | _Delete) -> None:
        with self._changed:
            if self._closed:
                operation.done.set_exception(_stopping())
                return
            self._queue.append(operation)
            self._changed.notify()

    def _work(self) -> None:
        try:
            while self._await_work():
                with self._changed:
                    taken = self._take()
                self._run(taken)
        finally:
            self._fail_all()

    def _await_work(self) -> bool:
        """Wait for an operation, and where it is a put for others to share its commit; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._queue)
            if self._queue and isinstance(self._queue[0], _Put) and not self._closed:
                self._gather()
            return bool(self._queue)

    def _gather(self) -> None:
        """Wait for more documents, at most ``gather_s``; gives the lock up meanwhile."""
        deadline_s = time.monotonic() + self._gather_s
        while len(self._queue) < self._max_documents and not self._closed:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return
            self._changed.wait(left_s)

    def _take(self) -> list[_Put] | _Delete:
        """The next delete, or the puts before it; a store's document comes only once, so that order is kept."""
        first = self._queue.popleft()
        if isinstance(first, _Delete):
            return first
        puts = {first.key: first}
        while self._queue and len(puts) < self._max_documents:
            following = self._queue[0]
            if isinstance(following, _Delete) or following.key in puts:
                break
            puts[following.key] = following
            self._queue.popleft()
        return list(puts.values())

    def _run(self, taken: list[_Put] | _Delete) -> None:
        # From here on a client that leaves cancels nothing: the result of a cancelled future cannot be set.
        if isinstance(taken, _Delete):
            if taken.done.set_running_or_notify_cancel():
                self._delete(taken)
            return
        by_store: defaultdict[KVStore, list[_Put]] = defaultdict(list)
        for put in taken:
            if put.done.set_running_or_notify_cancel():
                by_store[put.store].append(put)
        for store, puts in by_store.items():
            self._put(store, puts)

    def _delete(self, one: _Delete) -> None:
        try:
            removed = one.store.delete([one.doc_id], namespace=one.namespace)
        except _FAILURES as error:
            one.done.set_exception(_told(error))
        else:
            one.done.set_result(removed)

    def _put(self, store: KVStore, puts: list[_Put]) -> None:
        try:
            rows = store.put([put.document for put in puts], texts=[put.text for put in puts], run="served")
        except _FAILURES as error:
            if len(puts) > 1:  # one that cannot be stored is not the others' fault
                for put in puts:
                    self._put(store, [put])
            else:
                puts[0].done.set_exception(_told(error))
            return
        by_key = {(row.namespace, row.doc_id): row for row in rows}
        for put in puts:
            put.done.set_result(by_key[put.document.namespace, put.document.doc_id])

    def _fail_all(self) -> None:
        with self._changed:
            self._closed = True
            for operation in self._queue:
                if operation.done.set_running_or_notify_cancel():
                    operation.done.set_exception(_stopping())
            self._queue.clear()


def _told(error: Exception) -> C2KVError:
    if isinstance(error, C2KVError):
        return error
    logger.error("writing to the store failed", exc_info=error)
    return StoreError("cannot write to the store; see the server's log")


def _stopping() -> StoreError:
    return StoreError("cannot write the document: this replica is stopping")
