"""Counts of what a store was asked and answered."""

import threading
from collections import Counter

from c2kv_core.document import StoredDocument
from c2kv_core.store.miss import Miss


class Counters:
    """Thread-safe running counts since the store was opened."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Raise one count."""
        with self._lock:
            self._counts[name] += amount

    def count_read(self, outcome: StoredDocument | Miss) -> None:
        """Raise ``hit`` and ``hit_bytes``, or ``miss`` and ``miss_<reason>``."""
        if isinstance(outcome, Miss):
            self.add("miss")
            self.add(f"miss_{outcome.reason}")
        else:
            self.add("hit")
            self.add("hit_bytes", outcome.kv_bytes)

    def snapshot(self) -> dict[str, int]:
        """All counts now. A name that never happened is absent."""
        with self._lock:
            return dict(self._counts)
