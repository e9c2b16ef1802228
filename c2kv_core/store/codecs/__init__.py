"""The slot codecs by the name that identities and records carry as ``quantisation``."""

from dataclasses import replace

import torch

from c2kv_core.document import CompressedDocument
from c2kv_core.store.codecs.codec import LayerShape, SlotCodec
from c2kv_core.store.codecs.int8 import Int8
from c2kv_core.store.codecs.plain import Plain

CODECS: dict[str, SlotCodec] = {"none": Plain(), "int8": Int8()}


def as_stored(part: CompressedDocument, quantisation: str) -> tuple[CompressedDocument, int]:
    """A part as it is after storing and reading, and the bytes of its keys and values in between."""
    layers, kv_heads, slots, head_dim = part.keys.shape
    shape = LayerShape(kv_heads=kv_heads, slots=slots, head_dim=head_dim)
    codec, dtype = CODECS[quantisation], part.keys.dtype
    stored = torch.zeros(layers, codec.layer_bytes(shape, dtype), dtype=torch.uint8)
    if stored.numel():
        codec.encode(part.keys, part.values, stored)
    keys, values = codec.decode(stored, shape, dtype)
    return replace(part, keys=keys, values=values), stored.nbytes


__all__ = ["CODECS", "LayerShape", "SlotCodec", "as_stored"]
