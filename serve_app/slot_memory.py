"""The memory tier: slots used before, by content."""

from copy import copy

from c2kv_core.document import CompressedDocument
from serve_app.byte_lru import ByteLru
from serve_app.plan import Parts


class SlotMemory:
    """Slots of whole documents in host memory, bounded by bytes.

    The key is the identity's fingerprint, the namespace and the hash of title and text: under one identity equal text
    has equal slots. So a document that was replaced in the store is never served stale, and one that was damaged
    there is still served. Namespaces stay apart.
    """

    def __init__(self, *, max_bytes: int, fingerprint: str = "") -> None:
        self._lru: ByteLru[tuple[str, str, str], Parts] = ByteLru(max_bytes)
        self._fingerprint = fingerprint

    def under(self, fingerprint: str) -> "SlotMemory":
        """The same memory, for slots of another identity."""
        other = copy(self)
        other._fingerprint = fingerprint
        return other

    def get(self, namespace: str, content_hash: str) -> Parts | None:
        """The document's parts; None when they are not held."""
        return self._lru.get((self._fingerprint, namespace, content_hash))

    def keep(self, namespace: str, content_hash: str, parts: Parts) -> Parts:
        """The parts in memory of their own, held from now on; as they are where the tier has no room for them.

        What comes from the store is a view of a mapped file. Copied right after it was verified, it no longer changes
        whatever happens to the file.
        """
        size_bytes = sum(part.kv_bytes + part.slot_positions.nbytes for part in parts)
        if not self._lru.has_room_for(size_bytes):
            return parts
        own = tuple(_copy(part) for part in parts)
        self._lru.put((self._fingerprint, namespace, content_hash), own, size_bytes=size_bytes)
        return own

    @property
    def evictions(self) -> int:
        """Documents dropped for lack of room."""
        return self._lru.evictions

    @property
    def used_bytes(self) -> int:
        """Bytes held."""
        return self._lru.used_bytes


def _copy(part: CompressedDocument) -> CompressedDocument:
    return CompressedDocument(
        keys=part.keys.clone(),
        values=part.values.clone(),
        slot_positions=part.slot_positions.clone(),
        num_tokens=part.num_tokens,
        ratio=part.ratio,
        head_slots=part.head_slots,
    )
