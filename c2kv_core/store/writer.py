"""Writing shards: durable and read back before anybody is told of them."""

from collections.abc import Sequence
from datetime import UTC, datetime

from c2kv_core.document import StoredDocument
from c2kv_core.errors import StoreError
from c2kv_core.identity import Identity
from c2kv_core.store.failures import as_store_error
from c2kv_core.store.fetch import fetch_documents
from c2kv_core.store.miss import Miss
from c2kv_core.store.names import bucket_of, new_shard_path
from c2kv_core.store.row import IndexRow
from c2kv_core.store.shard import build_shard
from c2kv_core.store.storage import Storage


def write_shard(
    storage: Storage, documents: Sequence[StoredDocument], *, identity: Identity, run: str, buckets: int
) -> list[IndexRow]:
    """Put documents of one namespace into one new shard; their rows, in the order given.

    Raises:
        StoreError: I/O error, or a record that does not read back as it should.
    """
    namespace = documents[0].namespace
    path = new_shard_path(namespace=namespace, fingerprint=identity.fingerprint, run=run)
    data, places = build_shard(documents, identity)
    with as_store_error(f"write the shard {path}"):
        storage.put(path, data)
    created_at = datetime.now(UTC)
    rows = [
        IndexRow(
            bucket=bucket_of(namespace, document.doc_id, buckets=buckets),
            namespace=namespace,
            doc_id=document.doc_id,
            fingerprint=identity.fingerprint,
            content_hash=document.content_hash,
            shard=path,
            offset=place.offset,
            length=place.length,
            parts=len(document.parts),
            slots=document.num_slots,
            source_tokens=document.num_tokens,
            created_at=created_at,
            head_length=place.head_length,
            head_checksum=place.head_checksum,
        )
        for document, place in zip(documents, places, strict=True)
    ]
    _check_reads_back(storage, rows, identity)
    return rows


def _check_reads_back(storage: Storage, rows: Sequence[IndexRow], identity: Identity) -> None:
    for row, outcome in zip(rows, fetch_documents(storage, rows, identity=identity), strict=True):
        if isinstance(outcome, Miss):
            # Nobody knows the shard, so gc takes it.
            raise StoreError(
                f"cannot write document {row.doc_id!r}: it reads back as {outcome.reason}: {outcome.detail}"
            )
