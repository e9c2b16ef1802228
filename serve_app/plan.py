"""What is to be placed for each document of a request, and what is told about it afterwards."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from c2kv_core.document import CompressedDocument
from c2kv_core.slots import slot_count
from serve_app.answers import DocumentReport

Tier = Literal["memory", "disk", "store", "extracted", "text", "skipped"]
"""Where a document's keys and values came from, the cheapest first."""
CACHED_TIERS: tuple[Tier, ...] = ("memory", "disk", "store")
"""Tiers whose documents cost no model work."""

Parts = tuple[CompressedDocument, ...]
"""A whole document as slots."""


@dataclass(frozen=True, kw_only=True)
class Slots:
    """Slots at hand."""

    parts: Parts
    tier: Tier

    @property
    def source_tokens(self) -> int:
        """Positions it takes."""
        return sum(part.num_tokens for part in self.parts)

    def entries(self, ratio: int) -> int:
        """Keys and values a layer and head that it takes in a context, a mean where heads differ."""
        return sum(part.num_slots for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class Extraction:
    """Text to be compressed by the model's worker."""

    part_ids: tuple[tuple[int, ...], ...]
    """Token ids of each part."""
    namespace: str
    content_hash: str
    """Of title and text; with the namespace the key under which the slots stay in memory."""

    @property
    def source_tokens(self) -> int:
        """Positions it takes."""
        return sum(map(len, self.part_ids))

    def entries(self, ratio: int) -> int:
        """See ``Slots``."""
        return sum(slot_count(len(ids), ratio) for ids in self.part_ids)


@dataclass(frozen=True, kw_only=True)
class OrdinaryText:
    """Text to be placed as ordinary tokens, seeing all that stands before it."""

    ids: tuple[int, ...]

    @property
    def source_tokens(self) -> int:
        """Positions it takes."""
        return len(self.ids)

    def entries(self, ratio: int) -> int:
        """See ``Slots``."""
        return len(self.ids)


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Nothing to place."""

    source_tokens: int = 0

    def entries(self, ratio: int) -> int:
        """See ``Slots``."""
        return 0


DocumentWork = Slots | Extraction | OrdinaryText | LeftOut
"""What a document asks of the engine."""


@dataclass(frozen=True, kw_only=True)
class PlannedDocument:
    """One document of a request."""

    index: int
    """Its place in the request, from 0."""
    doc_id: str | None
    """None for a document given in full."""
    work: DocumentWork
    fallback_reason: str | None = None
    """Why the stored slots were not used; None where nothing went wrong."""

    def report(
        self, tier: Tier, *, parts: Sequence[CompressedDocument] = (), kv_bytes: int | None = None
    ) -> DocumentReport:
        """What the client is told about it.

        Args:
            tier: where its keys and values came from in the end.
            parts: its slots, where it was placed as slots.
            kv_bytes: bytes of its keys and values where it was not.
        """
        return DocumentReport(
            id=self.doc_id,
            index=self.index,
            tier=tier,
            ratio=parts[0].ratio if parts else None,
            slots=sum(part.num_slots for part in parts),
            source_tokens=self.work.source_tokens,
            bytes=sum(part.kv_bytes for part in parts) if kv_bytes is None else kv_bytes,
            fallback_reason=self.fallback_reason,
        )
