"""Reading a record back: checked in full, and only then tensors over its bytes."""

import warnings
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from c2kv_core.document import CompressedDocument, StoredDocument
from c2kv_core.identity import Identity
from c2kv_core.store.checksum import digest, layer_checksums, part_checksum
from c2kv_core.store.codecs import CODECS, LayerShape
from c2kv_core.store.failures import ARROW_ERRORS, first_line
from c2kv_core.store.miss import Miss, MissReason
from c2kv_core.store.record import (
    DTYPES,
    METADATA,
    RecordContent,
    layer_bytes,
    record_schema,
)
from c2kv_core.store.row import IndexRow
from c2kv_core.store.storage import ALIGNMENT_BYTES

with warnings.catch_warnings():
    # torch warns, once a process, about a buffer that cannot be written. Ours are maps of immutable
    # files, read only on purpose; take the warning here, so that no global filter is needed.
    warnings.simplefilter("ignore", UserWarning)
    torch.frombuffer(b"\0", dtype=torch.uint8)


class _Rejected(Exception):
    """Control flow inside this module; never leaves it."""

    def __init__(self, reason: MissReason, detail: str) -> None:
        super().__init__(detail)
        self.miss = Miss(reason=reason, detail=detail)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A row of a record, still unverified."""

    metadata: dict[str, Any]
    slot_positions: NDArray[np.int32]
    head_slots: NDArray[np.int32] | None
    """Entries of each head of each layer, where the identity shares slots out."""
    layer_sums: list[bytes]
    checksum: bytes
    value: pa.Buffer
    """Padding, then KV."""


def decode_record(record: pa.Buffer, *, row: IndexRow, identity: Identity) -> StoredDocument | Miss:
    """The document that an index row promises, from the bytes at its place; all parts or none.

    Checks length, head checksum, which document and version it is, geometry, and the checksums of
    metadata and of every layer. Without quantisation the tensors are views of ``record`` and keep it alive; writing
    to them is an error (a mapped file is read only).
    """
    try:
        parts = _verified(record, row, identity)
    except _Rejected as rejected:
        return rejected.miss
    return StoredDocument(
        namespace=row.namespace,
        doc_id=row.doc_id,
        content_hash=row.content_hash,
        title=str(parts[0].metadata["title"]),
        parts=tuple(_tensors(part) for part in parts),
    )


def reuse_record(record: pa.Buffer, *, row: IndexRow, identity: Identity) -> RecordContent | Miss:
    """What a record holds, checked as ``decode_record`` does, to be laid out anew bit for bit."""
    try:
        parts = _verified(record, row, identity)
    except _Rejected as rejected:
        return rejected.miss

    def fill(index: int, target: Tensor) -> None:
        target.copy_(_view(_kv(parts[index])))

    rows = [
        {
            **part.metadata,
            "slot_positions": part.slot_positions,
            **({} if part.head_slots is None else {"head_slots": part.head_slots}),
            "layer_checksums": part.layer_sums,
            "checksum": part.checksum,
        }
        for part in parts
    ]
    return RecordContent(schema=record_schema(identity.selection), rows=rows, fill=fill)


def _verified(record: pa.Buffer, row: IndexRow, identity: Identity) -> list[_Part]:
    parts = _parse(record, row, record_schema(identity.selection))
    _check_is_promised(parts, row)
    for part in parts:
        _check_geometry(part, identity)
    _check_place(record, row, parts)
    for part in parts:
        _check_sums(part)
    return parts


def _parse(record: pa.Buffer, row: IndexRow, schema: pa.Schema) -> list[_Part]:
    where = f"{row.offset} of {row.shard}"
    if record.size != row.length:
        raise _Rejected("truncated", f"expected {row.length} bytes at {where}, the file holds {record.size}")
    # Before Arrow sees it: a parser of damaged offsets and sizes is no place to find damage.
    head = record.slice(0, row.head_length) if 0 < row.head_length <= row.length else b""
    if digest(head).hex() != row.head_checksum:
        raise _Rejected("damaged_record", f"head of the record at {where} does not match its checksum")
    try:
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(record), schema)
        batch.validate(full=True)
    except ARROW_ERRORS as error:
        raise _Rejected("damaged_record", f"no record at {where}: {first_line(error)}") from error
    scalars = batch.select(list(METADATA)).to_pylist()
    shared = "head_slots" in schema.names
    return [
        _Part(
            metadata=scalars[index],
            slot_positions=batch.column("slot_positions")[index].values.to_numpy(),
            head_slots=batch.column("head_slots")[index].values.to_numpy() if shared else None,
            layer_sums=batch.column("layer_checksums")[index].as_py(),
            checksum=batch.column("checksum")[index].as_py(),
            value=value,
        )
        for index, value in enumerate(_values(batch.column("kv")))
    ]


def _values(column: pa.LargeBinaryArray) -> list[pa.Buffer]:
    """The values of a column as slices of its memory; Arrow's own scalars are copies."""
    _, offsets, data = column.buffers()
    if not len(column) or data is None:
        return [pa.py_buffer(b"")] * len(column)
    ends = np.frombuffer(offsets, dtype=np.int64, count=len(column) + 1).tolist()
    return [data.slice(start, end - start) for start, end in pairwise(ends)]


def _check_is_promised(parts: list[_Part], row: IndexRow) -> None:
    for index, part in enumerate(parts):
        for name in ("namespace", "doc_id", "content_hash", "fingerprint"):
            _check_equal("wrong_record", name, expected=getattr(row, name), came=part.metadata[name])
        _check_equal("wrong_record", "part_index", expected=index, came=part.metadata["part_index"])
        _check_equal("wrong_record", "part_count", expected=row.parts, came=part.metadata["part_count"])
    slots = sum(part.metadata["slots"] for part in parts)
    source_tokens = sum(part.metadata["source_tokens"] for part in parts)
    _check_equal("wrong_record", "parts", expected=row.parts, came=len(parts))
    _check_equal("wrong_record", "slots", expected=row.slots, came=slots)
    _check_equal("wrong_record", "source_tokens", expected=row.source_tokens, came=source_tokens)


def _check_geometry(part: _Part, identity: Identity) -> None:
    expected: dict[str, str | int] = {
        "layers": identity.geometry.layers,
        "kv_heads": identity.geometry.kv_heads,
        "head_dim": identity.geometry.head_dim,
        "ratio": identity.ratio,
        "dtype": identity.slot_dtype,
        "quantisation": identity.quantisation,
        "slots": len(part.slot_positions),
        "kv_length": identity.geometry.layers * _layer_bytes(part, identity),
    }
    for name, value in expected.items():
        _check_equal("wrong_geometry", name, expected=value, came=part.metadata[name])
    if part.head_slots is not None:
        heads = identity.geometry.layers * identity.geometry.kv_heads
        _check_equal("wrong_geometry", "head_slots", expected=heads, came=len(part.head_slots))
        entries = heads * len(part.slot_positions)
        _check_equal("wrong_geometry", "entries", expected=entries, came=int(part.head_slots.sum()))
        _check_equal("wrong_geometry", "least entries", expected=0, came=min(int(part.head_slots.min()), 0))


def _check_place(record: pa.Buffer, row: IndexRow, parts: list[_Part]) -> None:
    """The values follow the head without a gap, and whatever is not KV is zero."""
    cursor = row.head_length
    sound = True
    for part in parts:
        offset, length = part.metadata["kv_offset"], part.metadata["kv_length"]
        sound = sound and 0 <= offset < ALIGNMENT_BYTES and part.value.size == offset + length
        if sound and part.value.size:
            starts_at_cursor = part.value.address - record.address == cursor
            sound = starts_at_cursor and _is_zero(part.value.slice(0, offset))
        cursor += part.value.size
    if not sound or not _is_zero(record.slice(min(cursor, record.size))):
        raise _Rejected(
            "damaged_record", f"KV or padding of the record at {row.offset} of {row.shard} is not as written"
        )


def _check_sums(part: _Part) -> None:
    checksum = part_checksum(
        part.metadata,
        slot_positions=part.slot_positions,
        head_slots=part.head_slots,
        layer_sums=part.layer_sums,
    )
    index = part.metadata["part_index"]
    if checksum != part.checksum:
        raise _Rejected("damaged_metadata", f"metadata of part {index} does not match its checksum")
    came = layer_checksums(_kv(part), layers=part.metadata["layers"])
    wrong = [
        layer for layer, layer_sum in enumerate(came) if part.layer_sums[layer : layer + 1] != [layer_sum]
    ]
    if wrong:
        raise _Rejected("damaged_layer", f"KV of part {index} does not match its checksum in layers {wrong}")


def _check_equal(reason: MissReason, name: str, *, expected: str | int, came: str | int) -> None:
    if came != expected:
        raise _Rejected(reason, f"expected {name} {expected!r}, got {came!r}")


def _is_zero(buffer: pa.Buffer) -> bool:
    data: bytes = buffer.to_pybytes()
    return data.count(0) == len(data)


def _layer_bytes(part: _Part, identity: Identity) -> int:
    return layer_bytes(
        kv_heads=identity.geometry.kv_heads,
        slots=len(part.slot_positions),
        head_dim=identity.geometry.head_dim,
        dtype=identity.slot_dtype,
        quantisation=identity.quantisation,
    )


def _kv(part: _Part) -> pa.Buffer:
    return part.value.slice(part.metadata["kv_offset"], part.metadata["kv_length"])


def _tensors(part: _Part) -> CompressedDocument:
    told = part.metadata
    shape = LayerShape(kv_heads=told["kv_heads"], slots=told["slots"], head_dim=told["head_dim"])
    stored = _view(_kv(part)).view(told["layers"], -1 if part.metadata["kv_length"] else 0)
    keys, values = CODECS[told["quantisation"]].decode(stored, shape, DTYPES[told["dtype"]])
    return CompressedDocument(
        keys=keys,
        values=values,
        slot_positions=torch.from_numpy(part.slot_positions.astype(np.int64)),
        num_tokens=part.metadata["source_tokens"],
        ratio=part.metadata["ratio"],
        head_slots=None
        if part.head_slots is None
        else torch.from_numpy(part.head_slots.astype(np.int64)).view(told["layers"], told["kv_heads"]),
    )


def _view(buffer: pa.Buffer) -> Tensor:
    """A uint8 tensor over the buffer's own memory, which it keeps alive."""
    if buffer.size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memoryview(buffer), dtype=torch.uint8)
