"""From index rows to verified documents, in one range read each."""

import time
from collections.abc import Sequence

import pyarrow as pa

from c2kv_core.document import StoredDocument
from c2kv_core.identity import Identity
from c2kv_core.store.decode import decode_record
from c2kv_core.store.failures import first_line
from c2kv_core.store.miss import Miss
from c2kv_core.store.row import IndexRow
from c2kv_core.store.storage import FileRange, Storage
from c2kv_core.store.timing import ReadTiming


def fetch_document(storage: Storage, row: IndexRow, *, identity: Identity) -> StoredDocument | Miss:
    """The document at one row's place."""
    (outcome,) = fetch_documents(storage, [row], identity=identity)
    return outcome


def fetch_documents(
    storage: Storage, rows: Sequence[IndexRow], *, identity: Identity, timing: ReadTiming | None = None
) -> list[StoredDocument | Miss]:
    """The document at each row's place, or why there is none. Never raises for what storage holds.

    All are asked for at once, so that a remote store is waited for once; each is checked while others arrive.
    """
    ranges = [FileRange(path=row.shard, offset=row.offset, length=row.length) for row in rows]
    outcomes: dict[int, StoredDocument | Miss] = {}
    for number, record in storage.stream_ranges(ranges):
        started_s = time.monotonic()
        outcomes[number] = _outcome(record, rows[number], identity)
        if timing is not None:
            timing.verify_s += time.monotonic() - started_s
    return [outcomes[number] for number in range(len(rows))]


def _outcome(record: pa.Buffer | OSError, row: IndexRow, identity: Identity) -> StoredDocument | Miss:
    if isinstance(record, FileNotFoundError):
        return Miss(reason="missing_shard", detail=f"the shard {row.shard} is gone")
    if isinstance(record, OSError):
        detail = f"cannot read {row.shard}: {first_line(record)}"
        return Miss(reason="unreadable_shard", detail=detail)
    return decode_record(record, row=row, identity=identity)
