"""A Delta table with one live row a key: upsert, delete, and which files hold what.

Two facts of delta-rs decide how it is written to (both are tested):

- Appends never conflict, so two writers that append the same key double it. Rows are therefore merged.
- A merge sees another commit as a conflict only where its predicate may touch what that commit added, and
  it knows that of a partition only if the predicate names it as a literal. So every predicate lists its
  buckets as numbers; ids never enter a predicate's text, they come as a table to join with.
"""

import math
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable, WriterProperties
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.table import TableMerger

from c2kv_core.errors import StoreError, StoreFormatError
from c2kv_core.store.commit_log import files_of_commit
from c2kv_core.store.failures import as_store_error
from c2kv_core.store.lease import lease
from c2kv_core.store.storage import Storage

COMMIT_TIMEOUT_S = 60.0
"""How long a commit is tried again while other writers win."""

LOG_RETENTION_S = 86_400
"""How long the log remembers rows that are gone."""

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 2.0


class Table:
    """One of the store's tables, partitioned by ``bucket``. Safe to share between threads."""

    def __init__(
        self, storage: Storage, name: str, *, schema: pa.Schema, key: tuple[str, ...], row_group_rows: int
    ) -> None:
        """Describe a table; nothing is touched yet.

        Args:
            storage: where it lies.
            name: its folder.
            schema: its columns, ``bucket`` among them.
            key: the columns that there is one live row of, ``bucket`` left out.
            row_group_rows: rows that a reader takes in at a time.
        """
        self.name = name
        self._writer_properties = WriterProperties(compression="ZSTD", max_row_group_size=row_group_rows)
        self._storage = storage
        self._schema = schema
        self._key = key
        self._lock = threading.RLock()
        self._delta: DeltaTable | None = None
        self._options: dict[str, str] = {}

    def create(self) -> None:
        """Make the table unless it is there. Of several that race, all succeed."""
        try:
            DeltaTable.create(
                self._storage.table_uri(self.name),
                self._schema,
                mode="ignore",
                partition_by=["bucket"],
                storage_options=self._storage.table_options(),
                # Only keys may be copied into the log as statistics: texts there would outlive deletion.
                configuration={
                    "delta.dataSkippingStatsColumns": ",".join(self._key),
                    # The log names ids of rows that are gone; gc trims it to this age.
                    "delta.logRetentionDuration": f"interval {LOG_RETENTION_S // 86_400} day",
                },
            )
        except CommitFailedError:
            self._handle()  # another writer was first; fails if that is not so
        self._storage.make_durable([f"{self.name}/_delta_log/{0:020}.json"])

    def upsert(self, rows: pa.Table) -> None:
        """Make ``rows`` the live rows of their keys, in one atomic commit.

        Raises:
            StoreError: I/O error, or other writers kept winning for ``COMMIT_TIMEOUT_S``.
        """
        if rows.num_rows:
            self._commit(
                rows,
                ("bucket", *self._key),
                lambda merger: merger.when_matched_update_all().when_not_matched_insert_all(),
            )

    def delete(self, keys: pa.Table) -> int:
        """Remove every row that agrees with one of ``keys`` in all of its columns; how many went.

        ``keys`` has ``bucket`` and some of the key columns.
        """
        if not keys.num_rows:
            return 0
        metrics = self._commit(keys, keys.column_names, lambda merger: merger.when_matched_delete())
        return int(metrics["num_target_rows_deleted"])

    def update_where(self, rows: pa.Table, *, columns: Sequence[str], predicate: str) -> int:
        """Set columns of the live rows of these keys, where the predicate on ``target`` and ``source`` holds."""
        if not rows.num_rows:
            return 0
        updates = {name: f"source.{name}" for name in columns}
        metrics = self._commit(
            rows,
            ("bucket", *self._key),
            lambda merger: merger.when_matched_update(updates, predicate=predicate),
        )
        return int(metrics["num_target_rows_updated"])

    def delete_where(self, rows: pa.Table, *, predicate: str) -> int:
        """Remove the live rows of these keys, where the predicate on ``target`` and ``source`` holds."""
        if not rows.num_rows:
            return 0
        metrics = self._commit(
            rows, ("bucket", *self._key), lambda merger: merger.when_matched_delete(predicate)
        )
        return int(metrics["num_target_rows_deleted"])

    def maintain(self, *, retention_s: float, dry_run: bool) -> list[str]:
        """Merge small files, and remove those that no version younger than the retention needs; their paths.

        Retention counts in whole hours, rounded up. Where another process does the same, nothing is done; where a
        writer is at work, merging is left for the next time.
        """
        hours = math.ceil(retention_s / 3600)
        with self._lock, as_store_error(f"maintain the table {self.name}/"):
            delta = self._handle()
            delta.update_incremental()
            removed, stale = self._unneeded(delta, hours)
            scattered = any(len(paths) > 1 for paths in self.files().values())
            if dry_run or not (removed or stale or scattered):
                return removed
            with lease(self._storage, self.name) as alone:
                return self._tidy(delta, hours) if alone else []

    def _tidy(self, delta: DeltaTable, hours: int) -> list[str]:
        """Merge, vacuum and trim the log, as the only process that does so; paths of the files that went."""
        delta.update_incremental()
        before = delta.version()
        with suppress(CommitFailedError):
            delta.optimize.compact(writer_properties=self._writer_properties)
        if delta.version() != before:
            self._storage.make_durable(files_of_commit(self._storage, self.name, delta.version()))
        removed, stale = self._unneeded(delta, hours)
        if removed:
            self._vacuum(delta, hours, dry_run=False)
        if removed or stale or delta.version() != before:
            delta.create_checkpoint()
            delta.cleanup_metadata()
        return removed

    def _unneeded(self, delta: DeltaTable, hours: int) -> tuple[list[str], bool]:
        """Files that no version within the retention needs, and whether the log can be trimmed."""
        there = {file.path: file.modified_s for file in self._storage.list_files(f"{self.name}/")}
        # delta-rs also names files that an earlier vacuum removed, for as long as the log remembers them.
        removed = [path for path in self._vacuum(delta, hours, dry_run=True) if path in there]
        old_s = time.time() - LOG_RETENTION_S
        log = [
            path for path in there if path.startswith(f"{self.name}/_delta_log/") and path.endswith(".json")
        ]
        return removed, len([path for path in log if there[path] < old_s]) > 1

    def _vacuum(self, delta: DeltaTable, hours: int, *, dry_run: bool) -> list[str]:
        paths = delta.vacuum(
            retention_hours=hours, dry_run=dry_run, enforce_retention_duration=False, full=True
        )
        # Of a local table it gives absolute paths.
        return [f"{self.name}/{unquote(path).rpartition(f'/{self.name}/')[2]}" for path in paths]

    def files(self) -> dict[int, tuple[str, ...]]:
        """The newest version's data files by bucket, as paths for ``read``."""
        with self._lock, as_store_error(f"read the table {self.name}/"):
            delta = self._handle()
            delta.update_incremental()
            actions = pa.table(delta.get_add_actions(flatten=True))
            found: defaultdict[int, list[str]] = defaultdict(list)
            for path, bucket in zip(
                actions["path"].to_pylist(), actions["partition.bucket"].to_pylist(), strict=True
            ):
                found[bucket].append(unquote(path))
        return {bucket: tuple(sorted(paths)) for bucket, paths in found.items()}

    def read(
        self,
        paths: Sequence[str],
        *,
        columns: Sequence[str],
        where: Mapping[str, Sequence[str]] | None = None,
    ) -> pa.Table:
        """Rows of data files whose columns named in ``where`` hold one of the values given there.

        All columns but ``bucket`` can be read. Of row groups without such a row only those columns are read.

        Raises:
            StoreError: I/O error, or a file that is not as delta-rs wrote it.
        """
        schema = pa.schema([self._schema.field(name) for name in columns])
        tables = [schema.empty_table()]
        with as_store_error(f"read the table {self.name}/"):
            for path in paths:
                file = pq.ParquetFile(pa.BufferReader(self._storage.get(f"{self.name}/{path}")))
                for group in range(file.num_row_groups):
                    mask = self._mask(file, group, where or {})
                    if mask is None or pc.any(mask).as_py():
                        rows = self._read_group(file, group, columns)
                        tables.append(rows if mask is None else rows.filter(mask))
            return pa.concat_tables(tables)

    def _mask(self, file: pq.ParquetFile, group: int, where: Mapping[str, Sequence[str]]) -> Any:
        if not where:
            return None
        keys = self._read_group(file, group, list(where))
        masks = [
            pc.is_in(keys[name], value_set=pa.array(values, pa.string())) for name, values in where.items()
        ]
        return reduce(pc.and_, masks)

    def _read_group(self, file: pq.ParquetFile, group: int, columns: Sequence[str]) -> pa.Table:
        # delta-rs writes string views, which Arrow can neither compare nor look up (its own row filters
        # fail on them too, when they come to a file's statistics): so read, cast to our types, then filter.
        schema = pa.schema([self._schema.field(name) for name in columns])
        rows = file.read_row_group(group, columns=list(columns))
        for name in columns:
            if name not in rows.column_names and self._schema.field(name).nullable:
                # Written before the column existed.
                rows = rows.append_column(name, pa.nulls(rows.num_rows, self._schema.field(name).type))
        return rows.select(list(columns)).cast(schema)

    def _handle(self) -> DeltaTable:
        options = self._storage.table_options()
        if self._delta is None or options != self._options:  # credentials are renewed
            try:
                delta = DeltaTable(self._storage.table_uri(self.name), storage_options=options)
            except TableNotFoundError as error:
                raise StoreFormatError(
                    f"the store at {self._storage.uri} has lost its table {self.name}/: "
                    "restore it from a backup"
                ) from error
            # Files are read as they are: whatever a table feature would add to them, we would miss.
            protocol = delta.protocol()
            if protocol.min_reader_version > 1:
                raise StoreFormatError(
                    f"expected Delta reader version 1 for {self.name}/, got {protocol.min_reader_version}: "
                    "another program has changed the table"
                )
            self._delta, self._options = delta, options
        return self._delta

    def _lacks_columns(self, delta: DeltaTable) -> bool:
        """Whether the table was made before one of its columns existed."""
        there = {field.name for field in delta.schema().fields}
        return not there.issuperset(self._schema.names)

    def _commit(
        self, source: pa.Table, on: Sequence[str], clauses: Callable[[TableMerger], TableMerger]
    ) -> dict[str, Any]:
        buckets = ", ".join(str(bucket) for bucket in sorted(set(source["bucket"].to_pylist())))
        predicate = " AND ".join(
            [f"target.bucket IN ({buckets})", *(f"target.{name} = source.{name}" for name in on)]
        )
        deadline = time.monotonic() + COMMIT_TIMEOUT_S
        attempt = 0
        with as_store_error(f"commit to {self.name}/"):
            while True:
                try:
                    return self._merge_once(source, predicate, clauses)
                except CommitFailedError as conflict:
                    attempt += 1
                    pause_s = random.uniform(0.5, 1.5) * min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt)
                    if time.monotonic() + pause_s > deadline:
                        raise StoreError(
                            f"cannot commit to {self.name}/: other writers won {attempt} times in "
                            f"{COMMIT_TIMEOUT_S:.0f} s; run fewer committers at once"
                        ) from conflict
                    time.sleep(pause_s)

    def _merge_once(
        self, source: pa.Table, predicate: str, clauses: Callable[[TableMerger], TableMerger]
    ) -> dict[str, Any]:
        with self._lock:
            delta = self._handle()
            delta.update_incremental()
            before = delta.version()
            merger = delta.merge(
                source,
                predicate,
                source_alias="source",
                target_alias="target",
                writer_properties=self._writer_properties,
                merge_schema=self._lacks_columns(delta),
            )
            metrics = clauses(merger).execute()
            if delta.version() != before:
                self._storage.make_durable(files_of_commit(self._storage, self.name, delta.version()))
            return metrics
