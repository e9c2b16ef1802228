"""Checksums of a record: xxh3-128. They detect faults, not tampering."""

import json
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

CHECKSUM_BYTES = 16


def digest(data: pa.Buffer | memoryview | bytes) -> bytes:
    """16 bytes over raw bytes."""
    return xxhash.xxh3_128_digest(memoryview(data))


def layer_checksums(kv: pa.Buffer | memoryview, *, layers: int) -> list[bytes]:
    """One checksum a layer, over KV bytes laid out (layer, k/v, head, slot, dim).

    A layer of no bytes (a document without slots) has the checksum of nothing.
    """
    view = memoryview(kv)
    layer_bytes = len(view) // layers
    return [digest(view[index * layer_bytes : (index + 1) * layer_bytes]) for index in range(layers)]


def part_checksum(
    metadata: Mapping[str, str | int],
    *,
    slot_positions: NDArray[np.int32],
    head_slots: NDArray[np.int32] | None = None,
    layer_sums: Sequence[bytes],
) -> bytes:
    """Checksum over a part's metadata, positions, entries of heads and layer checksums, and so over all of the part."""
    positions = slot_positions.astype("<i4").tobytes()
    head = json.dumps(metadata, sort_keys=True, separators=(",", ":")).encode()
    # Lengths first, so that no byte can wander from one field to the next.
    lengths = len(head).to_bytes(8, "little") + len(positions).to_bytes(8, "little")
    # Where heads have entries of their own numbers, there is one number for each head of each layer.
    entries = b"" if head_slots is None else head_slots.astype("<i4").tobytes()
    return digest(lengths + head + positions + entries + b"".join(layer_sums))
