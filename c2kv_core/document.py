"""The values that pass between extraction, the store and composition."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class SourceDocument(NamedTuple):
    """A document as its owner gives it."""

    doc_id: str
    title: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Shape of a model's KV cache."""

    layers: int
    """L, decoder layers."""
    kv_heads: int
    """K, key/value heads a layer."""
    head_dim: int
    """H, elements a head."""


@dataclass(frozen=True, kw_only=True)
class CompressedDocument:
    """One part of a document as slots: ``ceil(num_tokens / ratio)`` of them.

    Shapes: L layers, K kv heads, M slots, H head dim.
    """

    keys: "Tensor"
    """(L, K, M, H), after any key norm and before RoPE."""
    values: "Tensor"
    """(L, K, M, H), same dtype as ``keys``."""
    slot_positions: "Tensor"
    """(M,) int64, position of each slot inside the part, ascending."""
    num_tokens: int
    """Source tokens n of the part."""
    ratio: int
    """k, source tokens per slot."""
    head_slots: "Tensor | None" = None
    """(L, K) int64, entries of each head, together L x K x M; None where each head has M. Given, ``keys`` and
    ``values`` hold the entries of layer 0's head 0, then of its head 1, and so on, flattened over (L, K, M), and RoPE
    is to put them at ``head_slots.entry_positions`` instead of ``slot_positions``."""

    @property
    def num_slots(self) -> int:
        """M."""
        return int(self.slot_positions.shape[0])

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values together."""
        return self.keys.nbytes + self.values.nbytes

    def to(self, dtype: "torch.dtype", *, device: str | None = None) -> "CompressedDocument":
        """The same part with keys and values in another floating dtype, and on another device if one is given."""
        return CompressedDocument(
            keys=self.keys.to(device=device, dtype=dtype),
            values=self.values.to(device=device, dtype=dtype),
            slot_positions=self.slot_positions,
            num_tokens=self.num_tokens,
            ratio=self.ratio,
            head_slots=self.head_slots,
        )


@dataclass(frozen=True, kw_only=True)
class StoredDocument:
    """A whole document as the store keeps it: its parts in order."""

    namespace: str
    """Tenant, ``[a-z0-9._-]{1,64}``."""
    doc_id: str
    """The caller's id, any non-empty unicode string."""
    content_hash: str
    """SHA-256 hex of title and text (``c2kv_core.text.content_hash``)."""
    title: str
    """May be empty."""
    parts: tuple[CompressedDocument, ...]
    """At least one, in source order, all of one ratio and geometry."""

    @property
    def num_tokens(self) -> int:
        """Source tokens over all parts."""
        return sum(part.num_tokens for part in self.parts)

    @property
    def num_slots(self) -> int:
        """Slots over all parts."""
        return sum(part.num_slots for part in self.parts)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values over all parts."""
        return sum(part.kv_bytes for part in self.parts)
