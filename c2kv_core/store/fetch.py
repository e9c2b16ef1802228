"""From index rows to verified documents, in one range read each."""

import time
from collections.abc import Sequence

import pyarrow as pa

from c2kv_core.document import StoredDocument
from c2kv_core.identity import Identity
from c2kv_core.store.disk_tier import DiskTier
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
    storage: Storage,
    rows: Sequence[IndexRow],
    *,
    identity: Identity,
    timing: ReadTiming | None = None,
    disk: DiskTier | None = None,
) -> list[StoredDocument | Miss]:
    """The document at each row's place, or why there is none. Never raises for what storage holds.

    All are asked for at once, so that a remote store is waited for once; each is checked while others arrive. Copies on
    ``disk`` are read instead where they are sound, and made of what had to be fetched.
    """
    timing = timing or ReadTiming()
    outcomes: dict[int, StoredDocument | Miss] = {}
    if disk is not None:
        started_s = time.monotonic()
        for number, row in enumerate(rows):
            if (copy := disk.get(storage.uri, row, identity=identity)) is not None:
                outcomes[number] = copy
                timing.from_disk.add(row.doc_id)
        timing.verify_s += time.monotonic() - started_s
    wanted = [number for number in range(len(rows)) if number not in outcomes]
    ranges = [FileRange(path=rows[n].shard, offset=rows[n].offset, length=rows[n].length) for n in wanted]
    for place, record in storage.stream_ranges(ranges):
        started_s = time.monotonic()
        row = rows[wanted[place]]
        outcome = outcomes[wanted[place]] = _outcome(record, row, identity)
        timing.verify_s += time.monotonic() - started_s
        if disk is not None and isinstance(outcome, StoredDocument) and isinstance(record, pa.Buffer):
            disk.keep(storage.uri, row, record)
    return [outcomes[number] for number in range(len(rows))]


def _outcome(record: pa.Buffer | OSError, row: IndexRow, identity: Identity) -> StoredDocument | Miss:
    if isinstance(record, FileNotFoundError):
        return Miss(reason="missing_shard", detail=f"the shard {row.shard} is gone")
    if isinstance(record, OSError):
        detail = f"cannot read {row.shard}: {first_line(record)}"
        return Miss(reason="unreadable_shard", detail=detail)
    # Imported late, as torch is by it: looking at a store needs none of it.
    from c2kv_core.store.decode import decode_record

    return decode_record(record, row=row, identity=identity)
