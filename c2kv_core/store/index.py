"""The Delta table ``index/``: one live row a (namespace, doc_id, fingerprint)."""

from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa

from c2kv_core.store.names import INDEX_TABLE, bucket_of
from c2kv_core.store.row import IndexRow
from c2kv_core.store.storage import Storage
from c2kv_core.store.table import Table
from c2kv_core.store.totals import SUMMED, Totals, sum_up

INDEX_SCHEMA: pa.Schema = pa.schema(
    [
        pa.field("bucket", pa.int32(), nullable=False),
        pa.field("namespace", pa.string(), nullable=False),
        pa.field("doc_id", pa.string(), nullable=False),
        pa.field("fingerprint", pa.string(), nullable=False),
        pa.field("content_hash", pa.string(), nullable=False),
        pa.field("shard", pa.string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
        pa.field("parts", pa.int32(), nullable=False),
        pa.field("slots", pa.int64(), nullable=False),
        pa.field("source_tokens", pa.int64(), nullable=False),
        pa.field("created_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("head_length", pa.int64(), nullable=False),
        pa.field("head_checksum", pa.string(), nullable=False),
    ]
)

_ROW_GROUP_ROWS = 65_536

_PLACE = ("shard", "offset")
"""What tells a version of a document's record from another."""

_REPEATED = ("namespace", "fingerprint", "shard")
"""Long values that many rows share."""

_STORED = [name for name in INDEX_SCHEMA.names if name != "bucket"]


class Index:
    """Reads and writes index rows; no cache (see ``reader``)."""

    def __init__(self, storage: Storage, *, buckets: int) -> None:
        self.buckets = buckets
        self.table = Table(
            storage,
            INDEX_TABLE,
            schema=INDEX_SCHEMA,
            key=("namespace", "doc_id", "fingerprint"),
            row_group_rows=_ROW_GROUP_ROWS,
        )

    def upsert(self, rows: Iterable[IndexRow]) -> None:
        """Make these the live rows of their keys in one commit; the last of equal keys counts.

        Raises:
            StoreError: I/O error or lasting write conflict.
        """
        latest = {row.key: row for row in rows}
        self.table.upsert(_table(latest.values()))

    def delete(self, namespace: str, doc_ids: Iterable[str]) -> int:
        """Remove the rows of documents under every fingerprint; how many went."""
        return self.table.delete(document_keys(namespace, doc_ids, buckets=self.buckets))

    def move(self, places: Mapping[IndexRow, IndexRow]) -> int:
        """Point rows to new places, each only if it is still as given; how many were."""
        source = _table(places.values())
        for name in _PLACE:
            before = pa.array([getattr(row, name) for row in places], INDEX_SCHEMA.field(name).type)
            source = source.append_column(f"before_{name}", before)
        return self.table.update_where(
            source,
            columns=("shard", "offset", "length", "head_length", "head_checksum"),
            predicate=" AND ".join(f"target.{name} = source.before_{name}" for name in _PLACE),
        )

    def drop(self, rows: Iterable[IndexRow]) -> int:
        """Remove rows, each only if it is still as given; how many were."""
        predicate = " AND ".join(f"target.{name} = source.{name}" for name in _PLACE)
        return self.table.delete_where(_table(rows), predicate=predicate)

    def files(self) -> dict[int, tuple[str, ...]]:
        """The newest version's files by bucket."""
        return self.table.files()

    def table_of(self, paths: Sequence[str], *, namespace: str, bucket: int) -> pa.Table:
        """Rows of one namespace in the files of one bucket, as columns that take little memory."""
        table = self.table.read(paths, columns=_STORED, where=_where(namespace, None))
        for name in _REPEATED:
            column = table[name].combine_chunks().dictionary_encode()
            table = table.set_column(table.schema.get_field_index(name), name, column)
        return table.append_column("bucket", pa.array([bucket] * table.num_rows, pa.int32()))

    def rows(self, *, namespace: str | None = None, fingerprint: str | None = None) -> list[IndexRow]:
        """All live rows now, sorted by key."""
        return sorted(self._read(_where(namespace, fingerprint)), key=lambda row: row.key)

    def rows_of_documents(self, namespace: str, doc_ids: Iterable[str]) -> list[IndexRow]:
        """The live rows of some documents now, at every fingerprint, sorted by key; reads only their buckets."""
        keys = document_keys(namespace, doc_ids, buckets=self.buckets)
        wanted = set(keys["bucket"].to_pylist())
        paths = [path for bucket, paths in self.files().items() if bucket in wanted for path in paths]
        where = {**_where(namespace, None), "doc_id": keys["doc_id"].to_pylist()}
        return sorted(self._read(where, paths), key=lambda row: row.key)

    def totals(self, *, namespace: str | None = None) -> list[Totals]:
        """Sums over the live rows now, by namespace and fingerprint."""
        columns = ["namespace", "fingerprint", *SUMMED]
        return sum_up(self.table.read(self._paths(), columns=columns, where=_where(namespace, None)))

    def live_bytes(self) -> dict[str, int]:
        """Bytes of live records by shard; no row becomes an object."""
        sums = (
            self.table.read(self._paths(), columns=["shard", "length"])
            .group_by("shard")
            .aggregate([("length", "sum")])
        )
        return dict(zip(sums["shard"].to_pylist(), sums["length_sum"].to_pylist(), strict=True))

    def rows_of(self, shard: str) -> list[IndexRow]:
        """The live rows of one shard."""
        return self._read({"shard": [shard]})

    def content_hashes(self, *, namespace: str, fingerprint: str) -> dict[str, str]:
        """Content hash of every live document of one namespace and fingerprint, by id."""
        table = self.table.read(
            self._paths(), columns=["doc_id", "content_hash"], where=_where(namespace, fingerprint)
        )
        return dict(zip(table["doc_id"].to_pylist(), table["content_hash"].to_pylist(), strict=True))

    def _paths(self) -> list[str]:
        """All files of the newest version."""
        return [path for paths in self.files().values() for path in paths]

    def _read(self, where: Mapping[str, Sequence[str]], paths: Sequence[str] | None = None) -> list[IndexRow]:
        """Rows of these files; of all by default."""
        paths = self._paths() if paths is None else paths
        table = self.table.read(paths, columns=_STORED, where=where)
        return [
            IndexRow(bucket=bucket_of(values["namespace"], values["doc_id"], buckets=self.buckets), **values)
            for values in table.to_pylist()
        ]


def index_rows(table: pa.Table) -> list[IndexRow]:
    """Rows of a table with all columns."""
    return [IndexRow(**values) for values in table.to_pylist()]


def document_keys(namespace: str, doc_ids: Iterable[str], *, buckets: int) -> pa.Table:
    """Keys of documents as a table to join with; ids that no row can have are left out."""
    ids = sorted({doc_id for doc_id in doc_ids if is_storable(doc_id)})
    return pa.table(
        {
            "bucket": pa.array([bucket_of(namespace, doc_id, buckets=buckets) for doc_id in ids], pa.int32()),
            "namespace": pa.array([namespace] * len(ids), pa.string()),
            "doc_id": pa.array(ids, pa.string()),
        }
    )


def is_storable(doc_id: str) -> bool:
    """Whether a row can have this id: half a surrogate pair is no text."""
    try:
        doc_id.encode()
    except UnicodeEncodeError:
        return False
    return True


def _table(rows: Iterable[IndexRow]) -> pa.Table:
    """All columns of rows."""
    rows = list(rows)
    columns = {name: [getattr(row, name) for row in rows] for name in INDEX_SCHEMA.names}
    return pa.table(columns, schema=INDEX_SCHEMA)


def _where(namespace: str | None, fingerprint: str | None) -> dict[str, list[str]]:
    wanted = {"namespace": namespace, "fingerprint": fingerprint}
    return {name: [value] for name, value in wanted.items() if value is not None}
