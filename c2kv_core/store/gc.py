"""Removing what no live row needs: files, dead records inside shards, old files of the tables.

What is younger than the retention stays. It protects shards that a running job has written and not yet committed: it
must exceed the longest job's time between the two. Readers with an old view of the index look again. A shard that holds
both live and dead records is written anew without the dead ones, so that an erased document's bytes are gone.
"""

import time
from dataclasses import dataclass

from c2kv_core.errors import InputError
from c2kv_core.store.dead_letters import DeadLetters
from c2kv_core.store.failures import as_store_error
from c2kv_core.store.identities import Identities
from c2kv_core.store.index import Index
from c2kv_core.store.names import ATTEMPTS, PROBES, SHARDS
from c2kv_core.store.storage import TEMPORARY, Storage, StoredFile
from c2kv_core.store.texts import Texts

DEFAULT_RETENTION_S = 86_400.0
_LONGEST_RETENTION_S = 100 * 365 * 86_400.0


@dataclass(frozen=True, kw_only=True)
class GcReport:
    """What was removed, or would be on a dry run."""

    dry_run: bool
    removed: tuple[str, ...]
    """Paths of shards and unfinished files."""
    removed_bytes: int
    written_bytes: int
    """Of the shards that took the place of those written anew: what is freed is ``removed_bytes`` less these."""
    kept_young: int
    """Files that no row needs, and shards with dead records, kept for being younger than the retention."""
    kept_young_bytes: int
    """Of these files, and of the dead records in these shards."""
    live_shards: int
    rewritten: tuple[str, ...]
    """Shards that were written anew without their dead records; they are among ``removed``."""
    erased_bytes: int
    """Dead bytes in these."""
    unreadable: tuple[str, ...]
    """Shards with dead records that stay, because a live one in them is damaged: see ``verify``."""
    table_files: tuple[str, ...]
    """Files of the tables ``index/``, ``documents/`` and ``failures/`` that no version within the retention needs."""


def collect_garbage(
    storage: Storage,
    index: Index,
    texts: Texts,
    identities: Identities,
    *,
    retention_s: float,
    dry_run: bool,
) -> GcReport:
    """Remove what is unneeded and older than ``retention_s`` seconds.

    Raises:
        InputError: negative retention.
        StoreError: I/O error or lasting write conflict.
    """
    if not 0 <= retention_s <= _LONGEST_RETENTION_S:
        raise InputError(
            f"expected a retention of 0 to {_LONGEST_RETENTION_S:.0f} seconds, got {retention_s}"
        )
    # Imported late, as torch is by it: looking at a store needs none of it.
    from c2kv_core.store.rewrite import find_dead, rewrite

    with as_store_error("collect garbage"):
        oldest_kept_s = time.time() - retention_s
        files, live = _look(storage, index)
        young = {file.path for file in files if file.modified_s > oldest_kept_s}
        mixed = find_dead(storage, files, live)
        dead = [one for one in mixed if one.shard not in young]
        rewritten = [one for one in dead if dry_run or rewrite(storage, index, identities, one)]
        if rewritten and not dry_run:
            files, live = _look(storage, index)
        gone = {one.shard for one in rewritten}
        unneeded = [file for file in files if file.path in gone or file.path not in live]
        old = [file for file in unneeded if file.modified_s <= oldest_kept_s]
        if not dry_run:
            for file in old:
                storage.delete(file.path)
        kept = [index.table, texts.table]
        letters = DeadLetters(storage, buckets=index.buckets)
        if letters.exists:
            kept.append(letters.table)
        tables = [table.maintain(retention_s=retention_s, dry_run=dry_run) for table in kept]
    return GcReport(
        dry_run=dry_run,
        removed=tuple(file.path for file in old),
        removed_bytes=sum(file.size_bytes for file in old),
        written_bytes=sum(one.live_bytes for one in rewritten),
        kept_young=len(unneeded) - len(old) + len(mixed) - len(dead),
        kept_young_bytes=sum(f.size_bytes for f in unneeded if f.modified_s > oldest_kept_s)
        + sum(one.dead_bytes for one in mixed if one.shard in young),
        live_shards=len(live),
        rewritten=tuple(one.shard for one in rewritten),
        erased_bytes=sum(one.dead_bytes for one in rewritten),
        unreadable=tuple(one.shard for one in dead if one not in rewritten),
        table_files=tuple(path for paths in tables for path in paths),
    )


def _look(storage: Storage, index: Index) -> tuple[list[StoredFile], dict[str, int]]:
    """All files that may be unneeded, and the bytes of live records by shard."""
    # Files first, rows second: what is committed in between is then seen as live.
    files = [f for place in (SHARDS, PROBES, ATTEMPTS, TEMPORARY) for f in storage.list_files(place)]
    return files, index.live_bytes()
