"""What passes between the stages of an extraction: units of documents in, their outcomes out.

read -> units (``UNIT_SCHEMA``): documents that the plan wants, gathered to about ``shard_tokens``; a row a unit.
extract -> outcomes (``OUT_SCHEMA``): what became of each; a row a unit again, so that rows in are rows out.

A unit is what an actor works on at a time, a shard a ratio, and all that is lost when the actor dies. Slots never pass
through Ray: only texts on the way in, and texts and index rows on the way out.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import xxhash

from c2kv_core import SourceDocument
from c2kv_core.store import FailureKind

BYTES_PER_TOKEN = 4
"""Of UTF-8, for estimates before anything is tokenised."""

UNIT_SCHEMA = pa.schema(
    [
        ("unit", pa.string()),
        (
            "documents",
            pa.list_(
                pa.struct(
                    [
                        ("doc_id", pa.string()),
                        ("title", pa.large_string()),
                        ("text", pa.large_string()),
                        ("metadata", pa.large_string()),
                        ("content_hash", pa.string()),
                        ("ratios", pa.list_(pa.int32())),
                        ("stored", pa.bool_()),
                    ]
                )
            ),
        ),
    ]
)
"""A unit: documents, the ratios wanted of each, and whether an earlier content of it is stored."""

OUT_SCHEMA = pa.schema(
    [
        ("unit", pa.string()),
        ("actor", pa.string()),
        ("seconds", pa.float64()),
        ("cpu_s", pa.float64()),
        ("padded_tokens", pa.int64()),
        (
            "outcomes",
            pa.list_(
                pa.struct(
                    [
                        ("doc_id", pa.string()),
                        ("content_hash", pa.string()),
                        ("title", pa.large_string()),
                        ("text", pa.large_string()),
                        ("metadata", pa.large_string()),
                        ("kind", pa.string()),
                        ("reason", pa.string()),
                        ("attempts", pa.int32()),
                        ("source_tokens", pa.int64()),
                        ("reused_tokens", pa.int64()),
                        ("seconds", pa.float64()),
                        ("index_rows", pa.large_string()),
                    ]
                )
            ),
        ),
    ]
)
"""A unit's outcomes: ``kind`` is null where the document is stored, ``index_rows`` JSON of its index rows."""


@dataclass(frozen=True, kw_only=True)
class UnitDocument:
    """A document to extract."""

    doc_id: str
    title: str
    text: str
    metadata: str | None
    content_hash: str
    ratios: tuple[int, ...]
    stored: bool

    @property
    def source(self) -> SourceDocument:
        """Without what the job needs."""
        return SourceDocument(self.doc_id, self.title, self.text)

    @property
    def named(self) -> tuple[str, str]:
        """Id and content: the document and no other version of it."""
        return (self.doc_id, self.content_hash)

    @property
    def size_bytes(self) -> int:
        """Bytes of title and text."""
        return len(self.title.encode()) + len(self.text.encode())


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one document."""

    document: UnitDocument
    kind: FailureKind | None = None
    reason: str | None = None
    attempts: int = 1
    """Tries that failed, where it failed."""
    source_tokens: int = 0
    reused_tokens: int = 0
    """Of these, in parts whose slots were stored already."""
    seconds: float = 0.0
    index_rows: tuple[dict[str, Any], ...] = ()


def unit_row(documents: Iterable[UnitDocument]) -> pa.Table:
    """A unit as its row. Its name follows from its documents alone, also in another process."""
    listed = list(documents)
    names = "\0".join(part for document in listed for part in document.named)
    row = {"unit": xxhash.xxh3_64_hexdigest(names.encode()), "documents": [asdict(d) for d in listed]}
    return pa.Table.from_pylist([row], schema=UNIT_SCHEMA)


def documents_of(row: dict[str, Any]) -> list[UnitDocument]:
    """The documents of a unit's row."""
    return [UnitDocument(**{**values, "ratios": tuple(values["ratios"])}) for values in row["documents"]]


def out_row(
    unit: str,
    outcomes: Iterable[Outcome],
    *,
    actor: str,
    seconds: float,
    cpu_s: float,
    padded_tokens: int,
    keep_text: bool,
) -> pa.Table:
    """A unit's outcomes as their row."""
    row = {
        "unit": unit,
        "actor": actor,
        "seconds": seconds,
        "cpu_s": cpu_s,
        "padded_tokens": padded_tokens,
        "outcomes": [_out_values(outcome, keep_text) for outcome in outcomes],
    }
    return pa.Table.from_pylist([row], schema=OUT_SCHEMA)


def _out_values(outcome: Outcome, keep_text: bool) -> dict[str, Any]:
    document = outcome.document
    # A failed document's text is of no use to the driver.
    sent = keep_text and outcome.kind is None
    return {
        "doc_id": document.doc_id,
        "content_hash": document.content_hash,
        "title": document.title if sent else None,
        "text": document.text if sent else None,
        "metadata": document.metadata if sent else None,
        "kind": outcome.kind,
        "reason": outcome.reason,
        "attempts": outcome.attempts,
        "source_tokens": outcome.source_tokens,
        "reused_tokens": outcome.reused_tokens,
        "seconds": outcome.seconds,
        "index_rows": json.dumps(outcome.index_rows),
    }


def gather(
    documents: Iterable[UnitDocument], *, shard_tokens: int, max_documents: int
) -> Iterator[list[UnitDocument]]:
    """Documents in order, in groups of about ``shard_tokens`` tokens; one beyond that is a group of its own."""
    group: list[UnitDocument] = []
    filled = 0
    for document in documents:
        tokens = -(-document.size_bytes // BYTES_PER_TOKEN)
        if tokens > shard_tokens:
            yield [document]
            continue
        if group and (filled + tokens > shard_tokens or len(group) == max_documents):
            yield group
            group, filled = [], 0
        group.append(document)
        filled += tokens
    if group:
        yield group
