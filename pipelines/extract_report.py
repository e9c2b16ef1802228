"""What an extraction run did, for people and machines."""

import heapq
from dataclasses import asdict, dataclass, field
from typing import Any

NAMED = 1000
"""Documents of a kind that are named; the others are counted."""
SLOWEST = 10
STEADY_S = 10.0
STEADY_UNITS = 6
"""So long and so many units must have been finished one after another before their speed says something."""
TELLING_TOKENS = 2_000
"""So many source tokens a run must have had before its speed says something about others."""


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A document that was not stored, and why."""

    doc_id: str
    reason: str
    kind: str = "text"
    """``c2kv_core.store.FailureKind`` where it failed."""


@dataclass(frozen=True, kw_only=True, order=True)
class Slow:
    """A document that took long."""

    seconds: float
    source_tokens: int
    doc_id: str


@dataclass(kw_only=True)
class ActorWork:
    """What one extractor process did."""

    units: int = 0
    source_tokens: int = 0
    busy_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Source tokens a second of its busy time."""
        return self.source_tokens / self.busy_s if self.busy_s else 0.0


@dataclass(kw_only=True)
class ExtractReport:
    """Counts of one run. Every document of the corpus is in exactly one of those that ``unaccounted`` subtracts."""

    run: str
    store: str
    namespace: str
    fingerprints: dict[int, str]
    """Fingerprint of the slots at each ratio."""
    hardware: str
    """``ExtractConfig.hardware``."""
    sidecar: str
    """``trained`` or ``untrained``."""
    positions: int
    """Of the model: what the source tokens of all documents of a question, its text and its answer must fit into."""
    documents: int
    """Documents of the corpus within limit and partition."""
    unchanged: int
    state: str = "running"
    """``done``, or how the run ended."""
    new: int = 0
    """Planned documents of which nothing was stored."""
    changed: int = 0
    """Planned documents of which another content was stored."""
    extracted: int = 0
    failed_before: int = 0
    """Documents left alone because they failed in an earlier run; ``retry_failed`` tries them again."""
    vanished: int = 0
    """Planned documents that were no longer in the corpus when it was read."""
    relabelled: int = 0
    """Of the unchanged, documents whose metadata was replaced."""
    not_in_corpus: int | None = None
    """Documents stored under one of the fingerprints and not in the corpus; None where that was not looked at: a
    limited run or a partition."""
    removed: int = 0
    """Documents gone from the corpus and removed from the store; not among ``documents``."""
    parts: int = 0
    """Parts written, over all ratios."""
    source_tokens: int = 0
    """Of extracted documents, each counted once."""
    reused_tokens: int = 0
    """Of these, in unchanged parts of changed documents, whose slots were taken from the store."""
    computed_tokens: int = 0
    """Tokens that went through the model, padding included, work done twice as well."""
    slots: int = 0
    """Over all ratios."""
    stored_bytes: int = 0
    """Of the records written, over all ratios."""
    commits: int = 0
    elapsed_s: float = 0.0
    """From the first document's way to the actors to the last commit; start of Ray and loading included."""
    steady_s: float = 0.0
    """From the first finished unit to the last."""
    steady_tokens: int = 0
    """Source tokens of all units but the first, which came in that time."""
    cpu_s: float = 0.0
    """CPU seconds of the extractor processes."""
    gpu_s: float = 0.0
    """Seconds of reserved GPUs while their actors were busy."""
    cost: float | None = None
    """Of the actors for the whole run, in the currency of ``price_per_hour``."""
    quality: str = ""
    """What became of the quality check and the promotion."""
    skipped_documents: int = 0
    failed_documents: int = 0
    beyond_context_documents: int = 0
    """Extracted documents with more source tokens than the model has positions: no question can use them."""
    beyond_context: list[str] = field(default_factory=list)
    """Ids of the first of these."""
    skipped: list[Skipped] = field(default_factory=list)
    """Documents without text, the first of them."""
    failed: list[Skipped] = field(default_factory=list)
    """Documents that could not be extracted, the first of them."""
    slowest: list[Slow] = field(default_factory=list)
    actors: dict[str, ActorWork] = field(default_factory=dict)

    @property
    def unaccounted(self) -> int:
        """Documents that are in none of the counts; anything but 0 is a fault of the job."""
        return (
            self.documents
            - self.unchanged
            - self.extracted
            - self.skipped_documents
            - self.failed_documents
            - self.failed_before
            - self.vanished
        )

    @property
    def complaint(self) -> str | None:
        """Why a run that came to its end was no success, on one line; None where every document is stored."""
        if not self.failed:
            return None
        first = self.failed[0]
        return (
            f"{self.failed_documents} of {self.documents} documents failed, the first {first.doc_id!r}: "
            f"{first.reason}; the others are stored"
        )

    @property
    def tokens_per_s(self) -> float:
        """Source tokens a second of ``elapsed_s``."""
        return self.source_tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def steady_tokens_per_s(self) -> float:
        """Source tokens a second while units were being finished."""
        return self.steady_tokens / self.steady_s if self.steady_s else 0.0

    @property
    def was_steady(self) -> bool:
        """Whether ``steady_tokens_per_s`` means something."""
        return self.steady_s >= STEADY_S and sum(work.units for work in self.actors.values()) >= STEADY_UNITS

    @property
    def usual_tokens_per_s(self) -> float | None:
        """For estimates: the steady speed, of a short run that of its busy actors; None with hardly any tokens."""
        if self.source_tokens - self.reused_tokens < TELLING_TOKENS:
            return None
        if self.was_steady:
            return self.steady_tokens_per_s
        return sum(work.tokens_per_s for work in self.actors.values()) or None

    @property
    def padding_waste(self) -> float:
        """Share of the computed tokens that was padding (or work done twice)."""
        needed = self.source_tokens - self.reused_tokens
        return 1.0 - needed / self.computed_tokens if self.computed_tokens else 0.0

    @property
    def cost_per_million_tokens(self) -> float | None:
        """In the currency of the price; None without one, or where nothing was extracted."""
        if self.cost is None or not self.source_tokens:
            return None
        return self.cost / self.source_tokens * 1e6

    def add_slow(self, slow: Slow) -> None:
        """Keep the slowest documents."""
        self.slowest = heapq.nlargest(SLOWEST, [*self.slowest, slow])

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        fields = asdict(self)
        for name in ("skipped", "failed"):
            fields[name] = [
                {"id": s["doc_id"], "reason": s["reason"], "kind": s["kind"]} for s in fields[name]
            ]
        fields["slowest"] = [
            {"id": s.doc_id, "seconds": s.seconds, "tokens": s.source_tokens} for s in self.slowest
        ]
        fields["actors"] = {
            name: {**asdict(work), "tokens_per_s": work.tokens_per_s} for name, work in self.actors.items()
        }
        derived = (
            "tokens_per_s",
            "steady_tokens_per_s",
            "usual_tokens_per_s",
            "padding_waste",
            "cost_per_million_tokens",
            "unaccounted",
            "complaint",
        )
        return {**fields, **{name: getattr(self, name) for name in derived}}
