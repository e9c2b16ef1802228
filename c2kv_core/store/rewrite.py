"""Taking dead records out of shards that live ones keep: what erasure needs.

A shard with dead bytes is written anew from its live records, bit for bit, and the index rows are moved in one commit,
each only if it still names the old place: a document that was replaced meanwhile stays replaced. The old shard is then
one that no row needs.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from c2kv_core.store.decode import reuse_record
from c2kv_core.store.failures import as_store_error
from c2kv_core.store.identities import Identities
from c2kv_core.store.index import Index
from c2kv_core.store.miss import Miss
from c2kv_core.store.row import IndexRow
from c2kv_core.store.shard import FIRST_RECORD, TAIL_BYTES, records_end
from c2kv_core.store.storage import FileRange, Storage, StoredFile
from c2kv_core.store.writer import publish_shard

RUN = "gc"
"""Name of the run whose folders hold rewritten shards."""


@dataclass(frozen=True, kw_only=True)
class DeadBytes:
    """A shard with records that no row names."""

    shard: str
    dead_bytes: int
    rows: tuple[IndexRow, ...]
    """The live ones."""


def find_dead(storage: Storage, files: Sequence[StoredFile], rows: Sequence[IndexRow]) -> list[DeadBytes]:
    """Shards among ``files`` that hold both live and dead records."""
    live: dict[str, list[IndexRow]] = defaultdict(list)
    for row in rows:
        live[row.shard].append(row)
    mixed = [file for file in files if file.path in live and file.size_bytes > TAIL_BYTES]
    tails = storage.get_ranges(
        [FileRange(path=f.path, offset=f.size_bytes - TAIL_BYTES, length=TAIL_BYTES) for f in mixed]
    )
    found = []
    for file, tail in zip(mixed, tails, strict=True):
        end = records_end(tail, size=file.size_bytes) if isinstance(tail, pa.Buffer) else None
        if end is None:
            continue  # damage is for verify to find
        dead = end - FIRST_RECORD - sum(row.length for row in live[file.path])
        if dead > 0:
            found.append(DeadBytes(shard=file.path, dead_bytes=dead, rows=tuple(live[file.path])))
    return found


def rewrite(storage: Storage, index: Index, identities: Identities, found: DeadBytes) -> bool:
    """Write the live records of a shard into a new one; False where one of them cannot be read.

    Raises:
        StoreError: I/O error or lasting write conflict; the old shard is still live then.
    """
    identity = identities.load(found.rows[0].fingerprint)
    if identity is None:
        return False
    rows = sorted(found.rows, key=lambda row: row.offset)
    ranges = [FileRange(path=row.shard, offset=row.offset, length=row.length) for row in rows]
    contents = []
    for row, record in zip(rows, storage.get_ranges(ranges), strict=True):
        content = reuse_record(record, row=row, identity=identity) if isinstance(record, pa.Buffer) else None
        if content is None or isinstance(content, Miss):
            return False
        contents.append(content)
    with as_store_error(f"rewrite the shard {found.shard}"):
        moved = publish_shard(storage, contents, rows, identity=identity, run=RUN)
    index.move(dict(zip(rows, moved, strict=True)))
    return True
