"""Values in host memory, the least recently used going first when the bytes run out."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByteLru(Generic[K, V]):
    """A map bounded by the bytes of its values. Safe to share between threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._bytes = 0
        self.evictions = 0
        """Values dropped for lack of room."""

    def get(self, key: K) -> V | None:
        """The value, now the most recently used; None when it is not held."""
        with self._lock:
            found = self._held.get(key)
            if found is None:
                return None
            self._held.move_to_end(key)
            return found[0]

    def put(self, key: K, value: V, *, size_bytes: int) -> bool:
        """Hold a value, dropping others as needed; False when it alone is too large."""
        if not self.has_room_for(size_bytes):
            return False
        with self._lock:
            if key in self._held:
                self._bytes -= self._held.pop(key)[1]
            self._held[key] = (value, size_bytes)
            self._bytes += size_bytes
            while self._bytes > self._max_bytes:
                self._bytes -= self._held.popitem(last=False)[1][1]
                self.evictions += 1
        return True

    def has_room_for(self, size_bytes: int) -> bool:
        """Whether a value of this size could be held at all."""
        return size_bytes <= self._max_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all values held."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._held)
