"""Which documents are asked for most, told from replica to replica through the store.

Each replica writes ``hot/<its own name>.json`` now and then; one that starts reads what the others wrote lately, and
has the most wanted documents in memory before it is asked for any.
"""

import json
import logging
import threading
import time
import uuid
from collections import Counter

from c2kv_core.errors import C2KVError
from c2kv_core.store import Storage, open_storage

logger = logging.getLogger(__name__)

HOT = "hot/"
EVERY_S = 60.0
"""Between two lists of a replica."""
_FRESH_S = 3600.0
"""Age up to which a list counts."""
_FADE = 0.8
"""Weight of the past at each list: what was asked for ten lists ago counts a tenth."""
_TOLD = 1024
"""Documents of a list at most."""

Key = tuple[str, str]
"""Namespace and id."""


class HotDocuments:
    """Counts, writes and reads lists. Safe to share between threads."""

    def __init__(self, uri: str, *, every_s: float = EVERY_S) -> None:
        """Start writing lists to a store, beside all else.

        Args:
            uri: of the store.
            every_s: seconds between two lists.
        """
        self._uri = uri
        self._every_s = every_s
        self._path = f"{HOT}{uuid.uuid4().hex}.json"
        self._lock = threading.Lock()
        self._counts: Counter[Key] = Counter()
        self._told: list[list[str | float]] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="c2kv-hot", daemon=True)
        self._thread.start()

    def used(self, namespace: str, doc_id: str) -> None:
        """Count a use."""
        with self._lock:
            self._counts[namespace, doc_id] += 1

    def most_wanted(self, count: int) -> list[Key]:
        """By what all replicas wrote lately, the most wanted first; empty where that cannot be read."""
        total: Counter[Key] = Counter()
        try:
            storage = open_storage(self._uri)
            for file in storage.list_files(HOT):
                if time.time() - file.modified_s <= _FRESH_S:
                    total.update(_parsed(storage, file.path))
        except (OSError, C2KVError) as error:
            logger.warning("cannot read which documents are wanted most: %s", error)
        return [key for key, _ in total.most_common(count)]

    def close(self) -> None:
        """Write a last list and stop."""
        self._closed.set()
        self._thread.join()

    def _tell(self) -> None:
        while not self._closed.wait(self._every_s):
            self._write()
        self._write()

    def _write(self) -> None:
        with self._lock:
            top = self._counts.most_common(_TOLD)
            self._counts = Counter({key: _FADE * count for key, count in top if count > 0.1})
        told: list[list[str | float]] = [[*key, round(count, 3)] for key, count in top]
        if not told or told == self._told:
            return
        try:
            storage = open_storage(self._uri)
            storage.put(self._path, json.dumps(told).encode())
            self._told = told
            for file in list(storage.list_files(HOT)):
                if time.time() - file.modified_s > _FRESH_S:
                    storage.delete(file.path)
        except (OSError, C2KVError) as error:
            # Reading is enough to serve.
            logger.info("cannot tell other replicas which documents are wanted most: %s", error)


def _parsed(storage: Storage, path: str) -> dict[Key, float]:
    try:
        listed = json.loads(storage.get(path).to_pybytes())
        return {(str(namespace), str(doc_id)): float(count) for namespace, doc_id, count in listed}
    except FileNotFoundError:  # removed by another replica
        return {}
    except (ValueError, TypeError) as error:
        logger.warning("%s makes no sense and is left out: %s", path, error)
        return {}
