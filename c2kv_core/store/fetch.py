"""From an index row to a verified document, in one range read."""

import time

from c2kv_core.document import StoredDocument
from c2kv_core.identity import Identity
from c2kv_core.store.decode import decode_record
from c2kv_core.store.failures import first_line
from c2kv_core.store.miss import Miss
from c2kv_core.store.row import IndexRow
from c2kv_core.store.storage import Storage
from c2kv_core.store.timing import ReadTiming


def fetch_document(
    storage: Storage, row: IndexRow, *, identity: Identity, timing: ReadTiming | None = None
) -> StoredDocument | Miss:
    """The document at a row's place, or why there is none. Never raises for what storage holds."""
    try:
        record = storage.get_range(row.shard, offset=row.offset, length=row.length)
    except FileNotFoundError:
        return Miss(reason="missing_shard", detail=f"the shard {row.shard} is gone")
    except OSError as error:
        return Miss(reason="unreadable_shard", detail=f"cannot read {row.shard}: {first_line(error)}")
    started_s = time.monotonic()
    outcome = decode_record(record, row=row, identity=identity)
    if timing is not None:
        timing.verify_s += time.monotonic() - started_s
    return outcome
