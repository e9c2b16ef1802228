"""Writing shards: durable and read back before anybody is told of them."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from c2kv_core.document import StoredDocument
from c2kv_core.errors import StoreError
from c2kv_core.identity import Identity
from c2kv_core.store.failures import as_store_error
from c2kv_core.store.fetch import fetch_documents
from c2kv_core.store.miss import Miss
from c2kv_core.store.names import bucket_of, new_shard_path
from c2kv_core.store.record import RecordContent, content_of
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
    created_at = datetime.now(UTC)
    unplaced = [
        IndexRow(
            bucket=bucket_of(namespace, document.doc_id, buckets=buckets),
            namespace=namespace,
            doc_id=document.doc_id,
            fingerprint=identity.fingerprint,
            content_hash=document.content_hash,
            shard="",
            offset=0,
            length=0,
            parts=len(document.parts),
            slots=document.num_slots,
            source_tokens=document.num_tokens,
            created_at=created_at,
            head_length=0,
            head_checksum="",
        )
        for document in documents
    ]
    contents = [content_of(document, identity=identity) for document in documents]
    return publish_shard(storage, contents, unplaced, identity=identity, run=run)


def publish_shard(
    storage: Storage,
    contents: Sequence[RecordContent],
    rows: Sequence[IndexRow],
    *,
    identity: Identity,
    run: str,
) -> list[IndexRow]:
    """Put records of one namespace into one new shard; their rows with the places they got.

    Raises:
        StoreError: I/O error, or a record that does not read back as it should.
    """
    path = new_shard_path(namespace=rows[0].namespace, fingerprint=identity.fingerprint, run=run)
    data, places = build_shard(contents)
    with as_store_error(f"write the shard {path}"):
        storage.put(path, data)
    placed = [
        replace(
            row,
            shard=path,
            offset=place.offset,
            length=place.length,
            head_length=place.head_length,
            head_checksum=place.head_checksum,
        )
        for row, place in zip(rows, places, strict=True)
    ]
    _check_reads_back(storage, placed, identity)
    return placed


def _check_reads_back(storage: Storage, rows: Sequence[IndexRow], identity: Identity) -> None:
    for row, outcome in zip(rows, fetch_documents(storage, rows, identity=identity), strict=True):
        if isinstance(outcome, Miss):
            # Nobody knows the shard, so gc takes it.
            raise StoreError(
                f"cannot write document {row.doc_id!r}: it reads back as {outcome.reason}: {outcome.detail}"
            )
