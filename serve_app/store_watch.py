"""Whether the store can be reached, looked at now and then beside all requests."""

import logging
import threading
import time

from c2kv_core.errors import C2KVError
from c2kv_core.store import open_storage

logger = logging.getLogger(__name__)

EVERY_S = 5.0
SILENCE_S = 15.0
"""Silence of the store after which it counts as unreachable."""


class StoreWatch:
    """One small read every few seconds, on a thread of its own: a store that hangs holds up nobody."""

    def __init__(self, uri: str, *, every_s: float = EVERY_S, silence_s: float = SILENCE_S) -> None:
        """Start looking.

        Args:
            uri: of the store.
            every_s: seconds between looks.
            silence_s: seconds without an answer after which there is a fault.
        """
        self._uri = uri
        self._every_s = every_s
        self._silence_s = silence_s
        self._answered_s = time.monotonic()
        self._failure: str | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._look, name="c2kv-store-watch", daemon=True).start()

    def fault(self) -> str | None:
        """What is wrong with the store, in words for anybody who asks; None while it answers.

        Where the store is and how it fails are for the log: health is told without a key.
        """
        silence_s = time.monotonic() - self._answered_s
        if silence_s < self._silence_s:
            return None
        return (
            f"the store has not answered for {silence_s:.0f} s; only documents in memory and text given in full can be "
            "used; the server's log says more"
        )

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()

    def _look(self) -> None:
        storage = None
        while not self._closed.is_set():
            try:
                storage = storage or open_storage(self._uri)
                failure = None if storage.exists("store.json") else "its store.json is gone"
            except (OSError, C2KVError) as error:
                failure = " ".join(str(error).split())
            self._tell(failure)
            self._closed.wait(self._every_s)

    def _tell(self, failure: str | None) -> None:
        if failure is None:
            self._answered_s = time.monotonic()
        if failure != self._failure:
            if failure is None:
                logger.warning("the store %s answers again", self._uri)
            else:
                logger.warning("the store %s does not answer: %s", self._uri, failure)
        self._failure = failure
