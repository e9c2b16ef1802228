"""The identities a replica can serve, and which of them a namespace is served by now.

Every request is planned and answered under one edition, chosen when its documents are looked for: while what is served
changes, answers that have begun end as they began, and none mixes slots of two identities.
"""

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYetError
from dataclasses import dataclass

from c2kv_core.compressor import Compressor
from c2kv_core.errors import C2KVError
from c2kv_core.identity import Identity
from c2kv_core.store import KVStore, Served, served
from serve_app.answering import Answerer
from serve_app.documents import DocumentResolver
from serve_app.fetching import DocumentFetcher
from serve_app.slot_memory import SlotMemory

logger = logging.getLogger(__name__)

_QUIET = 2
"""So many times the age at which a look is due, what is known is too old to answer by while a new look goes on."""


@dataclass(frozen=True, kw_only=True)
class Edition:
    """All that depends on one identity."""

    identity: Identity
    compressor: Compressor
    store: KVStore
    """Opened under the identity."""
    memory: SlotMemory
    resolver: DocumentResolver
    answerer: Answerer
    fetcher: DocumentFetcher
    """That of the resolver."""

    @property
    def ratio(self) -> int:
        """Source tokens per slot."""
        return self.identity.ratio

    @property
    def fingerprint(self) -> str:
        """Of the identity."""
        return self.identity.fingerprint


@dataclass(kw_only=True)
class _Pointer:
    """What is known of a namespace."""

    entry: Served | None = None
    edition: Edition
    looked_s: float = float("-inf")
    """When the last look ended, by the monotonic clock."""
    looking: "Future[Served | None] | None" = None
    began_s: float = float("-inf")
    """When it was asked for."""
    failed: bool = False
    """Whether the last look that ended did: while a store fails, nobody waits for it until a look has succeeded."""


class Editions:
    """Follows ``served/<namespace>`` of the store. Safe to share between threads."""

    def __init__(self, editions: list[Edition], *, uri: str, refresh_s: float, patience_s: float) -> None:
        """Bind the editions.

        Args:
            editions: at least one; the first serves namespaces in which nothing was promoted.
            uri: of the store.
            refresh_s: age of what is known, in seconds, after which it is looked up anew.
            patience_s: longest wait of a request, in seconds, for a look at what its namespace is served by where none
                has ended for long: neither the start of a replica nor a namespace that nobody asked in must bring back
                what was replaced.
        """
        self.all = editions
        self._by_fingerprint = {edition.fingerprint: edition for edition in editions}
        self._uri = uri
        self._refresh_s, self._patience_s = refresh_s, patience_s
        self._lock = (
            threading.RLock()
        )  # a look that has ended already tells so in the thread that asked for it
        self._pointers: dict[str, _Pointer] = {}
        self._looks = ThreadPoolExecutor(1, thread_name_prefix="c2kv-served")

    def named(self, fingerprint: str) -> Edition:
        """The edition of a fingerprint that ``of`` gave."""
        return self._by_fingerprint[fingerprint]

    def of(self, namespace: str, *, most_s: float = float("inf")) -> Edition:
        """What a namespace is served by, as of the last look; a store that does not answer changes nothing.

        Args:
            namespace: of the request.
            most_s: longest wait, in seconds, where less than the patience.
        """
        if len(self.all) == 1:
            return self.all[0]
        with self._lock:
            pointer = self._pointers.setdefault(namespace, _Pointer(edition=self.all[0]))
            now_s = time.monotonic()
            age_s = now_s - pointer.looked_s
            if age_s >= self._refresh_s and pointer.looking is None:
                pointer.began_s = now_s
                pointer.looking = self._looks.submit(served, self._uri, namespace)
                pointer.looking.add_done_callback(lambda look: self._seen(namespace, look))
            looking = pointer.looking
            waits = age_s >= _QUIET * self._refresh_s and not pointer.failed
            # All who come while a look goes on wait until the same moment, and whoever comes after it not at all.
            left_s = min(most_s, pointer.began_s + self._patience_s - now_s)
        if waits and looking is not None and left_s > 0:
            try:
                looking.exception(left_s)
            except NotYetError:
                pass
            else:
                self._seen(namespace, looking)
        return pointer.edition

    def close(self) -> None:
        """Stop looking, and the editions' threads."""
        for edition in self.all:
            edition.fetcher.close()
        self._looks.shutdown(wait=False, cancel_futures=True)

    def _seen(self, namespace: str, look: "Future[Served | None]") -> None:
        with self._lock:
            pointer = self._pointers[namespace]
            if pointer.looking is not look or look.cancelled():
                return
            pointer.looking = None
            pointer.looked_s = time.monotonic()
            error = look.exception()
            pointer.failed = error is not None
            if error is None:
                self._follow(namespace, pointer, look.result())
            elif isinstance(error, C2KVError):
                logger.warning("cannot see what %r is served by: %s", namespace, error)
            else:
                logger.error("looking for what %r is served by failed", namespace, exc_info=error)

    def _follow(self, namespace: str, pointer: _Pointer, entry: Served | None) -> None:
        if entry is None or entry == pointer.entry:
            return
        pointer.entry = entry
        edition = self._by_fingerprint.get(entry.fingerprint)
        if edition is None:
            logger.error(
                "%r is to be served by %s (version %d), which is none of this server's editions; it goes on with %s",
                namespace,
                entry.fingerprint[:12],
                entry.version,
                pointer.edition.fingerprint[:12],
            )
            return
        pointer.edition = edition
        logger.info("%r is served by %s now (version %d)", namespace, entry.fingerprint[:12], entry.version)
