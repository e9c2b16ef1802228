"""Removing files that no live row needs.

A shard is removed when no row of the index names it and it is older than the retention. The retention
protects shards that a running job has written and not yet committed, and readers with an old view of the
index: it must exceed the longest job's time between the two. A shard with any live document stays whole,
so the bytes of a deleted document remain until every other document of its shard is replaced or deleted.
"""

import time
from dataclasses import dataclass

from c2kv_core.errors import InputError
from c2kv_core.store.failures import as_store_error
from c2kv_core.store.index import Index
from c2kv_core.store.names import PROBES, SHARDS
from c2kv_core.store.storage import TEMPORARY, Storage

DEFAULT_RETENTION_S = 86_400.0


@dataclass(frozen=True, kw_only=True)
class GcReport:
    """What was removed, or would be on a dry run."""

    dry_run: bool
    removed: tuple[str, ...]
    """Paths of shards and unfinished files."""
    removed_bytes: int
    kept_young: int
    """Files that no row needs, kept for being younger than the retention."""
    live_shards: int


def collect_garbage(storage: Storage, index: Index, *, retention_s: float, dry_run: bool) -> GcReport:
    """Remove unneeded shards and unfinished files older than ``retention_s`` seconds.

    Raises:
        InputError: negative retention.
        StoreError: I/O error.
    """
    if not retention_s >= 0:
        raise InputError(f"expected a retention of 0 seconds or more, got {retention_s}")
    with as_store_error("collect garbage"):
        # Files first, rows second: what is committed in between is then seen as live.
        files = [f for place in (SHARDS, PROBES, TEMPORARY) for f in storage.list_files(place)]
        live = {row.shard for row in index.rows()}
        unneeded = [file for file in files if file.path not in live]
        oldest_kept_s = time.time() - retention_s
        old = [file for file in unneeded if file.modified_s <= oldest_kept_s]
        if not dry_run:
            for file in old:
                storage.delete(file.path)
    return GcReport(
        dry_run=dry_run,
        removed=tuple(file.path for file in old),
        removed_bytes=sum(file.size_bytes for file in old),
        kept_young=len(unneeded) - len(old),
        live_shards=len(live),
    )
