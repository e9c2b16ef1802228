"""One row of the index: where a document's record lies and what it must hold."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexRow:
    """The live record of a (namespace, doc_id, fingerprint). Small, picklable, made of plain values."""

    bucket: int
    """Partition of the index, from a digest of namespace and id."""
    namespace: str
    doc_id: str
    fingerprint: str
    """Of the identity that made the slots."""
    content_hash: str
    """SHA-256 hex of the title and text the slots were made from."""
    shard: str
    """Path of the shard file, relative to the store's root."""
    offset: int
    """First byte of the record in the shard."""
    length: int
    """Bytes of the record: one encapsulated Arrow message."""
    parts: int
    slots: int
    """Over all parts."""
    source_tokens: int
    """Over all parts."""
    created_at: datetime
    """When the shard was written, UTC."""
    head_length: int
    """Bytes of the record before its KV: Arrow's metadata and all other columns."""
    head_checksum: str
    """xxh3-128 hex of the head, checked before anything parses it."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What there is one live row of."""
        return (self.namespace, self.doc_id, self.fingerprint)

    def to_dict(self) -> dict[str, str | int]:
        """Plain values; ``created_at`` as ISO 8601."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**values, "created_at": self.created_at.isoformat()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "IndexRow":
        """The inverse of ``to_dict``; ``created_at`` may also be a datetime already."""
        created_at = values["created_at"]
        if isinstance(created_at, str):
            created_at = datetime.fromisoformat(created_at)
        return cls(**{**values, "created_at": created_at})
