"""A shard: an Arrow IPC file of many records, built whole before a byte of it is stored."""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from c2kv_core.store.checksum import digest
from c2kv_core.store.record import (
    RECORD_SCHEMA,
    SHARED_RECORD_SCHEMA,
    RecordContent,
    encode_record,
    record_bytes_bound,
)

_MAGIC_BYTES = 8
"""``ARROW1`` and two zero bytes, before the schema message."""
FIRST_RECORD: int = _MAGIC_BYTES + RECORD_SCHEMA.serialize().size
"""Least offset of a shard's first record; that of every shard whose heads do not share slots out."""
SCHEMA_SLACK: int = SHARED_RECORD_SCHEMA.serialize().size - RECORD_SCHEMA.serialize().size
"""Bytes by which the first record of other shards lies further on; far fewer than any record has."""
TAIL_BYTES = 10
"""A shard ends with its footer's length (int32) and ``ARROW1``."""
_END_OF_STREAM_BYTES = 8
_FOOTER_BYTES = 256
"""End of stream, the footer's own fields, its length and magic, rounded up."""
_BLOCK_BYTES = 24
"""Of the footer for each record (struct ``Block`` of the format's File.fbs)."""
_MAGIC = b"ARROW1"


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


def build_shard(contents: Sequence[RecordContent]) -> tuple[pa.Buffer, list[RecordPlace]]:
    """The bytes of a shard and the place of each record in it, in the order given."""
    # In memory of the final size: a buffer that grows costs several times the copying.
    memory = pa.allocate_buffer(_bytes_bound(contents))
    sink = pa.FixedSizeBufferWriter(memory)
    spans: list[tuple[int, int, int]] = []
    schema = contents[0].schema
    # The writer puts magic and schema into the file only when the first batch comes.
    start = _MAGIC_BYTES + schema.serialize().size
    with pa.ipc.new_file(sink, schema) as writer:
        for content in contents:
            encoded = encode_record(content, record_start=start)
            writer.write_batch(encoded.batch)
            end = sink.tell()
            spans.append((start, end, encoded.head_length))
            start = end
    data = memory.slice(0, sink.tell())
    return data, [_place(data, *span) for span in spans]


def _bytes_bound(contents: Sequence[RecordContent]) -> int:
    """Bytes that a shard of these takes at most."""
    schema_bytes: int = contents[0].schema.serialize().size
    footer = _FOOTER_BYTES + schema_bytes + _BLOCK_BYTES * len(contents)
    return footer + _MAGIC_BYTES + schema_bytes + sum(record_bytes_bound(content) for content in contents)


def _place(data: pa.Buffer, start: int, end: int, head_length: int) -> RecordPlace:
    return RecordPlace(
        offset=start,
        length=end - start,
        head_length=head_length,
        head_checksum=digest(data.slice(start, head_length)).hex(),
    )


def records_end(tail: pa.Buffer | bytes, *, size: int) -> int | None:
    """Offset of the first byte after a shard's records, from its last ``TAIL_BYTES``; None where it is no shard.

    Source: Arrow columnar format, IPC file format.
    """
    data = bytes(tail)
    if len(data) != TAIL_BYTES or data[4:] != _MAGIC:
        return None
    end = size - TAIL_BYTES - int.from_bytes(data[:4], "little") - _END_OF_STREAM_BYTES
    return end if FIRST_RECORD <= end <= size else None
