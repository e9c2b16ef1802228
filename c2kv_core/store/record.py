"""The record: one document as one Arrow record batch, a row a part.

A record describes itself: all columns before ``kv`` say what the bytes are, ``kv`` holds them layer by layer, laid
out as the codec that ``quantisation`` names does it. Arrow aligns buffers to 8 bytes only, so each ``kv`` value starts
with up to 63 zero bytes that bring its KV to a 64-byte offset of the *file*; ``kv_offset`` counts them.
Identities whose heads share slots out have one column more, ``head_slots``.

The record's *head* is everything before the first ``kv`` value. All bytes are covered: the head by a
checksum in the index row, KV by a checksum a layer, padding by being zero.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from c2kv_core.document import StoredDocument
from c2kv_core.identity import Identity
from c2kv_core.sidecar_config import SHARING
from c2kv_core.store.checksum import CHECKSUM_BYTES, layer_checksums, part_checksum
from c2kv_core.store.codecs import CODECS, LayerShape
from c2kv_core.store.storage import ALIGNMENT_BYTES

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Slot dtypes by the name that identities and records carry."""


def _columns(*, head_slots: bool) -> list[pa.Field]:
    numbers = pa.list_(pa.field("item", pa.int32(), nullable=False))
    types: dict[str, pa.DataType] = {
        "namespace": pa.string(),
        "doc_id": pa.string(),
        "content_hash": pa.string(),
        "title": pa.string(),
        "part_index": pa.int32(),
        "part_count": pa.int32(),
        "fingerprint": pa.string(),
        "source_tokens": pa.int64(),
        "slots": pa.int64(),
        "ratio": pa.int32(),
        "dtype": pa.string(),
        "quantisation": pa.string(),
        "layers": pa.int32(),
        "kv_heads": pa.int32(),
        "head_dim": pa.int32(),
        "kv_offset": pa.int64(),
        "kv_length": pa.int64(),
        "slot_positions": numbers,
        **({"head_slots": numbers} if head_slots else {}),
        "layer_checksums": pa.list_(pa.field("item", pa.binary(CHECKSUM_BYTES), nullable=False)),
        "checksum": pa.binary(CHECKSUM_BYTES),
        "kv": pa.large_binary(),  # last: a reader can check all else before it, a layer at a time after
    }
    return [pa.field(name, type_, nullable=False) for name, type_ in types.items()]


RECORD_SCHEMA: pa.Schema = pa.schema(_columns(head_slots=False), metadata={"c2kv.record": "1"})
"""Of records whose heads all have as many entries as there are slots."""
SHARED_RECORD_SCHEMA: pa.Schema = pa.schema(_columns(head_slots=True), metadata={"c2kv.record": "2"})
"""Of records whose heads share them out."""

METADATA = tuple(
    name
    for name in RECORD_SCHEMA.names
    if name not in ("slot_positions", "layer_checksums", "checksum", "kv")
)
"""The scalar columns, which a part's checksum covers together with positions and layer sums."""


def record_schema(selection: str) -> pa.Schema:
    """Of the records of an identity with this ``selection``."""
    return SHARED_RECORD_SCHEMA if selection == SHARING else RECORD_SCHEMA


@dataclass(frozen=True, kw_only=True)
class RecordContent:
    """What a record holds, before it is known where it will lie."""

    schema: pa.Schema
    rows: list[dict[str, Any]]
    """All columns but ``kv``, a row a part; ``kv_offset`` and checksums are entered when it is laid out."""
    fill: Callable[[int, Tensor], None]
    """Writes the KV bytes of a part into zeros, uint8 of shape (``kv_length``,)."""


@dataclass(frozen=True, kw_only=True)
class EncodedRecord:
    """A document ready to be written at one offset of a shard."""

    batch: pa.RecordBatch
    head_length: int
    """Bytes from the start of the message to the first ``kv`` value."""


def content_of(document: StoredDocument, *, identity: Identity) -> RecordContent:
    """A document as what a record of an identity holds."""
    rows = [
        _describe(document, index, identity.fingerprint, identity.quantisation)
        for index in range(len(document.parts))
    ]

    def fill(index: int, target: Tensor) -> None:
        part = document.parts[index]
        codec = CODECS[identity.quantisation]
        codec.encode(part.keys, part.values, target.view(rows[index]["layers"], -1))

    return RecordContent(schema=record_schema(identity.selection), rows=rows, fill=fill)


def encode_record(content: RecordContent, *, record_start: int) -> EncodedRecord:
    """The record batch that goes to offset ``record_start`` (bytes) of a file."""
    rows = [dict(row) for row in content.rows]
    # Nothing about the layout of the head depends on the values filled in below.
    head_length = _head_bytes(content.schema, rows)
    values_length = 0
    for row in rows:
        row["kv_offset"] = -(record_start + head_length + values_length) % ALIGNMENT_BYTES
        values_length += row["kv_offset"] + row["kv_length"]
    kv = _fill(content, rows, values_length)
    return EncodedRecord(batch=_batch(content.schema, rows, kv), head_length=head_length)


def record_bytes_bound(content: RecordContent) -> int:
    """Bytes that the record of a document takes at most, wherever it lies."""
    values: int = sum(row["kv_length"] + ALIGNMENT_BYTES for row in content.rows)
    return _head_bytes(content.schema, content.rows) + values + ALIGNMENT_BYTES


def layer_bytes(*, kv_heads: int, slots: int, head_dim: int, dtype: str, quantisation: str) -> int:
    """Bytes of one layer of a part."""
    shape = LayerShape(kv_heads=kv_heads, slots=slots, head_dim=head_dim)
    return CODECS[quantisation].layer_bytes(shape, DTYPES[dtype])


def _describe(document: StoredDocument, index: int, fingerprint: str, quantisation: str) -> dict[str, Any]:
    part = document.parts[index]
    layers, kv_heads, slots, head_dim = part.keys.shape
    dtype = str(part.keys.dtype).removeprefix("torch.")
    size = layer_bytes(
        kv_heads=kv_heads, slots=slots, head_dim=head_dim, dtype=dtype, quantisation=quantisation
    )
    return {
        "namespace": document.namespace,
        "doc_id": document.doc_id,
        "content_hash": document.content_hash,
        "title": document.title,
        "part_index": index,
        "part_count": len(document.parts),
        "fingerprint": fingerprint,
        "source_tokens": part.num_tokens,
        "slots": slots,
        "ratio": part.ratio,
        "dtype": dtype,
        "quantisation": quantisation,
        "layers": layers,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "kv_offset": 0,
        "kv_length": layers * size,
        "slot_positions": part.slot_positions.to("cpu", torch.int32).numpy(),
        **({} if part.head_slots is None else {"head_slots": _flat(part.head_slots)}),
        "layer_checksums": [bytes(CHECKSUM_BYTES)] * layers,
        "checksum": bytes(CHECKSUM_BYTES),
    }


def _flat(head_slots_LK: Tensor) -> NDArray[np.int32]:
    made: NDArray[np.int32] = head_slots_LK.flatten().to("cpu", torch.int32).numpy()
    return made


def _head_bytes(schema: pa.Schema, rows: list[dict[str, Any]]) -> int:
    return int(_batch(schema, rows, pa.array([b""] * len(rows), pa.large_binary())).serialize().size)


def _fill(content: RecordContent, rows: list[dict[str, Any]], values_length: int) -> pa.Array:
    """The ``kv`` column; also enters the checksums of what it copies into the rows."""
    values = torch.zeros(values_length, dtype=torch.uint8)
    ends = [0]
    for index, row in enumerate(rows):
        start = ends[-1] + row["kv_offset"]
        ends.append(start + row["kv_length"])
        if row["kv_length"]:
            content.fill(index, values[start : ends[-1]])
        kv = pa.py_buffer(values.numpy()).slice(start, row["kv_length"])
        row["layer_checksums"] = layer_checksums(kv, layers=row["layers"])
        row["checksum"] = part_checksum(
            {name: row[name] for name in METADATA},
            slot_positions=row["slot_positions"],
            head_slots=row.get("head_slots"),
            layer_sums=row["layer_checksums"],
        )
    offsets = pa.array(ends, pa.int64()).buffers()[1]
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(rows), [None, offsets, pa.py_buffer(values.numpy())]
    )


def _batch(schema: pa.Schema, rows: list[dict[str, Any]], kv: pa.Array) -> pa.RecordBatch:
    columns = [pa.array([row[f.name] for row in rows], f.type) for f in schema if f.name != "kv"]
    return pa.RecordBatch.from_arrays([*columns, kv], schema=schema)
