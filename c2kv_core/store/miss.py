"""What a read returns instead of a document that is absent or not sound."""

from dataclasses import dataclass
from typing import Literal

MissReason = Literal[
    "not_found",  # no live row for the id
    "other_identity",  # stored, but only as slots of another model, sidecar, ratio, ...
    "missing_shard",  # the index names a file that is gone
    "unreadable_shard",  # the file cannot be read (I/O error, permission)
    "truncated",  # the file ends before the record does
    "damaged_record",  # the record's head does not match its checksum, or is not an Arrow message
    "wrong_record",  # a sound record of another document, version, or number of parts
    "wrong_geometry",  # shape, dtype or ratio unlike the opened identity's, or sizes that do not add up
    "damaged_metadata",  # metadata and layer checksums do not match the part's checksum
    "damaged_layer",  # KV bytes of a layer do not match their checksum
    "slower",  # serving: making slots from the text was expected to be sooner than reading them
    "late",  # serving: the store did not deliver it in time
    "unreachable",  # serving: the store cannot be read
]
"""Stable codes: metrics, logs and the API carry them."""

ABSENT: tuple[MissReason, ...] = ("not_found", "other_identity")
"""Reasons of documents that nobody promised."""


@dataclass(frozen=True, kw_only=True)
class Miss:
    """No document, and why. A miss never carries bytes."""

    reason: MissReason
    detail: str
    """One line for a person."""

    @property
    def is_damage(self) -> bool:
        """Whether the index promised a document that could not be delivered."""
        return self.reason not in ABSENT
