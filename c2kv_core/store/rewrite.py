"""Taking dead records out of shards that live ones keep: what erasure needs.

A shard with dead bytes is written anew from its live records, bit for bit, and the index rows are moved in one commit,
each only if it still names the old place: a document that was replaced meanwhile stays replaced. The old shard is then
one that no row needs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from c2kv_core.errors import StoreError
from c2kv_core.store.decode import reuse_record
from c2kv_core.store.failures import as_store_error, first_line
from c2kv_core.store.identities import Identities
from c2kv_core.store.index import Index
from c2kv_core.store.miss import Miss
from c2kv_core.store.shard import FIRST_RECORD, SCHEMA_SLACK, TAIL_BYTES, records_end
from c2kv_core.store.storage import FileRange, Storage, StoredFile, read_ranges
from c2kv_core.store.writer import publish_shard

RUN = "gc"
"""Name of the run whose folders hold rewritten shards."""


@dataclass(frozen=True, kw_only=True)
class DeadBytes:
    """A shard with records that no row names, beside live ones."""

    shard: str
    dead_bytes: int
    live_bytes: int


def find_dead(
    storage: Storage, files: Sequence[StoredFile], live_bytes: Mapping[str, int]
) -> list[DeadBytes]:
    """Shards among ``files`` that hold both live and dead records; ``live_bytes`` by shard."""
    live = [file for file in files if file.path in live_bytes and file.size_bytes > TAIL_BYTES]
    ends = [FileRange(path=f.path, offset=f.size_bytes - TAIL_BYTES, length=TAIL_BYTES) for f in live]
    tails = read_ranges(storage, ends)
    found = []
    for file, tail in zip(live, tails, strict=True):
        if not isinstance(tail, pa.Buffer):
            raise StoreError(f"cannot read {file.path}: {first_line(tail)}")
        end = records_end(tail, size=file.size_bytes)
        # No reader needs the end of a shard. Where it is damaged, nobody knows what lies there: it is written anew.
        dead = (file.size_bytes if end is None else end) - FIRST_RECORD - live_bytes[file.path]
        if dead > SCHEMA_SLACK:
            # Of shards with the longer schema by these few bytes too many: which have it is not looked up.
            found.append(DeadBytes(shard=file.path, dead_bytes=dead, live_bytes=live_bytes[file.path]))
    return found


def rewrite(storage: Storage, index: Index, identities: Identities, found: DeadBytes) -> bool:
    """Write the live records of a shard into a new one; False where one of them cannot be read.

    Raises:
        StoreError: I/O error or lasting write conflict; the old shard is still live then.
    """
    rows = sorted(index.rows_of(found.shard), key=lambda row: row.offset)
    if not rows:
        return True  # replaced meanwhile: the whole shard is dead
    identity = identities.load(rows[0].fingerprint)
    if identity is None:
        return False
    ranges = [FileRange(path=row.shard, offset=row.offset, length=row.length) for row in rows]
    contents = []
    for row, record in zip(rows, read_ranges(storage, ranges), strict=True):
        content = reuse_record(record, row=row, identity=identity) if isinstance(record, pa.Buffer) else None
        if content is None or isinstance(content, Miss):
            return False
        contents.append(content)
    with as_store_error(f"rewrite the shard {found.shard}"):
        moved = publish_shard(storage, contents, rows, identity=identity, run=RUN)
    index.move(dict(zip(rows, moved, strict=True)))
    return True
