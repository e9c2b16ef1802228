"""The Delta table ``documents/``: source text, one row a (namespace, doc_id).

Text lives apart from slots, so that it is kept once for all fingerprints and erased with the document.

Order of commits: text before index on writing, index before text on deleting. So whoever sees a live index
row finds a text. It may be newer than the row: a reader between the two commits of an update, or one of a
fingerprint that was not extracted again, sees another ``content_hash`` and can tell. A delete that races
with a put of the same id may leave either; callers serialise those.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa

from c2kv_core.store.index import document_keys
from c2kv_core.store.names import TEXTS_TABLE, bucket_of, check_doc_id, check_namespace
from c2kv_core.store.storage import Storage
from c2kv_core.store.table import Table

TEXTS_SCHEMA: pa.Schema = pa.schema(
    [
        pa.field("bucket", pa.int32(), nullable=False),
        pa.field("namespace", pa.string(), nullable=False),
        pa.field("doc_id", pa.string(), nullable=False),
        pa.field("content_hash", pa.string(), nullable=False),
        pa.field("title", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("updated_at", pa.timestamp("us", tz="UTC"), nullable=False),
        # Nullable and last: tables made before it existed get it with the first commit that has it.
        pa.field("metadata", pa.string()),
    ]
)

_ROW_GROUP_ROWS = 256
"""Few, because a row is a whole document."""


@dataclass(frozen=True, kw_only=True)
class SourceText:
    """A document's text as it came."""

    namespace: str
    doc_id: str
    title: str
    """May be empty."""
    text: str
    content_hash: str
    """SHA-256 hex of title and text; equals the index row's when the slots were made from this text."""
    metadata: str | None = None
    """JSON object of what the owner wants carried along with the document; never part of its slots."""


class Texts:
    """Reads and writes source texts."""

    def __init__(self, storage: Storage, *, buckets: int) -> None:
        self._buckets = buckets
        self.table = Table(
            storage,
            TEXTS_TABLE,
            schema=TEXTS_SCHEMA,
            key=("namespace", "doc_id"),
            row_group_rows=_ROW_GROUP_ROWS,
        )

    def upsert(self, texts: Iterable[SourceText]) -> None:
        """Make these the texts of their documents in one commit; the last of equal keys counts.

        Raises:
            InputError: a namespace or id that cannot be stored.
            StoreError: I/O error or lasting write conflict.
        """
        latest = {(check_namespace(text.namespace), check_doc_id(text.doc_id)): text for text in texts}
        now = datetime.now(UTC)
        rows = [
            {
                "bucket": bucket_of(text.namespace, text.doc_id, buckets=self._buckets),
                "namespace": text.namespace,
                "doc_id": text.doc_id,
                "content_hash": text.content_hash,
                "title": text.title,
                "text": text.text,
                "updated_at": now,
                "metadata": text.metadata,
            }
            for text in latest.values()
        ]
        self.table.upsert(pa.Table.from_pylist(rows, schema=TEXTS_SCHEMA))

    def set_metadata(self, namespace: str, metadata: Mapping[str, str | None]) -> int:
        """Replace what is carried along with documents whose text is here, by id; how many there were."""
        keys = document_keys(namespace, metadata, buckets=self._buckets)
        values = pa.array([metadata[doc_id] for doc_id in keys["doc_id"].to_pylist()], pa.string())
        return self.table.update_where(
            keys.append_column("metadata", values), columns=("metadata",), predicate="true"
        )

    def delete(self, namespace: str, doc_ids: Iterable[str]) -> int:
        """Remove the texts of documents; how many went."""
        return self.table.delete(document_keys(namespace, doc_ids, buckets=self._buckets))

    def get(self, namespace: str, doc_ids: Iterable[str]) -> dict[str, SourceText]:
        """The newest texts by id; ids without one are left out. Reads only their buckets."""
        keys = document_keys(namespace, doc_ids, buckets=self._buckets)
        files = self.table.files()
        paths = [path for bucket in set(keys["bucket"].to_pylist()) for path in files.get(bucket, ())]
        table = self.table.read(
            paths,
            columns=["namespace", "doc_id", "title", "text", "content_hash", "metadata"],
            where={"namespace": [namespace], "doc_id": keys["doc_id"].to_pylist()},
        )
        return {values["doc_id"]: SourceText(**values) for values in table.to_pylist()}
