"""What an extraction run did, for people and machines."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A document that was not stored, and why."""

    doc_id: str
    reason: str


@dataclass(kw_only=True)
class ExtractReport:
    """Counts of one run. Every document of the corpus is extracted, unchanged, skipped or failed."""

    run: str
    store: str
    namespace: str
    fingerprints: dict[int, str]
    """Fingerprint of the slots at each ratio."""
    sidecar: str
    """``trained`` or ``untrained``."""
    documents: int
    """Documents of the corpus within the limit."""
    unchanged: int
    extracted: int = 0
    parts: int = 0
    """Parts written, over all ratios."""
    source_tokens: int = 0
    """Of extracted documents, each counted once."""
    slots: int = 0
    """Over all ratios."""
    stored_bytes: int = 0
    """Of the records written, over all ratios."""
    elapsed_s: float = 0.0
    """From the first document's way to the actors to the last commit; start of Ray and loading included."""
    skipped: list[Skipped] = field(default_factory=list)
    """Documents without text."""
    failed: list[Skipped] = field(default_factory=list)
    """Documents that could not be extracted."""

    @property
    def unaccounted(self) -> int:
        """Documents that are in none of the counts; anything but 0 is a fault of the job."""
        return self.documents - self.unchanged - self.extracted - len(self.skipped) - len(self.failed)

    @property
    def tokens_per_s(self) -> float:
        """Source tokens a second of ``elapsed_s``."""
        return self.source_tokens / self.elapsed_s if self.elapsed_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        fields = asdict(self)
        for name in ("skipped", "failed"):
            fields[name] = [{"id": s["doc_id"], "reason": s["reason"]} for s in fields[name]]
        return {**fields, "tokens_per_s": self.tokens_per_s}
