"""A shard: an Arrow IPC file of many records, built whole before a byte of it is stored."""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from c2kv_core.document import StoredDocument
from c2kv_core.identity import Identity
from c2kv_core.store.checksum import digest
from c2kv_core.store.record import RECORD_SCHEMA, encode_record

_MAGIC_BYTES = 8
"""``ARROW1`` and two zero bytes, before the schema message."""


@dataclass(frozen=True, kw_only=True)
class RecordPlace:
    """Where a record lies in its shard."""

    offset: int
    """First byte of the encapsulated message."""
    length: int
    """Bytes of the message."""
    head_length: int
    """Bytes of it before the KV."""
    head_checksum: str
    """xxh3-128 hex of the head."""


def build_shard(
    documents: Sequence[StoredDocument], identity: Identity
) -> tuple[pa.Buffer, list[RecordPlace]]:
    """The bytes of a shard and the place of each document in it, in the order given."""
    sink = pa.BufferOutputStream()
    spans: list[tuple[int, int, int]] = []
    # The writer puts magic and schema into the file only when the first batch comes.
    start = _MAGIC_BYTES + RECORD_SCHEMA.serialize().size
    with pa.ipc.new_file(sink, RECORD_SCHEMA) as writer:
        for document in documents:
            encoded = encode_record(
                document,
                fingerprint=identity.fingerprint,
                quantisation=identity.quantisation,
                record_start=start,
            )
            writer.write_batch(encoded.batch)
            end = sink.tell()
            spans.append((start, end, encoded.head_length))
            start = end
    data = sink.getvalue()
    return data, [_place(data, *span) for span in spans]


def _place(data: pa.Buffer, start: int, end: int, head_length: int) -> RecordPlace:
    return RecordPlace(
        offset=start,
        length=end - start,
        head_length=head_length,
        head_checksum=digest(data.slice(start, head_length)).hex(),
    )
