"""Slots in 8 bits: keys with a scale a head and channel, values with a scale a head and slot (where heads share slots
out, a row of the (L, K) table stands for a head).

A channel of the keys has its own range over all slots, values have none that lasts (KIVI, arXiv 2402.02750). Keys are
stored before RoPE, which would mix two channels; a scale therefore holds wherever the slots are placed. Symmetric:
``x = scale * q``, ``scale = max |x| / 127``, q rounded to the nearest of -127 to 127.

A layer is: key scales (K, H) and value scales (K, M) as float32, keys (K, M, H) and values (K, M, H) as int8, then
zeros up to a multiple of 64 bytes.

Shape legend: L layers, K kv heads, M slots, H head dim.
"""

import torch
from torch import Tensor

from c2kv_core.store.codecs.codec import LayerShape
from c2kv_core.store.storage import ALIGNMENT_BYTES

_LARGEST = 127
_SCALE = torch.float32


class Int8:
    """Half the bytes of bfloat16, and a little for the scales."""

    def layer_bytes(self, shape: LayerShape, dtype: torch.dtype) -> int:
        return -(-sum(_sizes(shape)) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def encode(self, keys_LKMH: Tensor, values_LKMH: Tensor, target: Tensor) -> None:
        layers, kv_heads, slots, head_dim = keys_LKMH.shape
        shape = LayerShape(kv_heads=kv_heads, slots=slots, head_dim=head_dim)
        key_scales, value_scales, keys, values = _split(target, shape)
        for stored, scales, x, dim in (
            (keys, key_scales, keys_LKMH, 2),
            (values, value_scales, values_LKMH, 3),
        ):
            x = x.to("cpu", _SCALE)
            if not slots:
                continue
            scale = x.abs().amax(dim=dim, keepdim=True) / _LARGEST
            # All zero: any scale will do, and 0 says so; dividing by it must not.
            quantised = (x / scale.clamp(min=torch.finfo(_SCALE).tiny)).round().clamp(-_LARGEST, _LARGEST)
            scales.copy_(scale.reshape(layers, -1).view(torch.uint8).view(layers, -1))
            stored.copy_(quantised.to(torch.int8).reshape(layers, -1).view(torch.uint8))

    def decode(self, stored: Tensor, shape: LayerShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        layers, kv_heads, slots, head_dim = len(stored), shape.kv_heads, shape.slots, shape.head_dim
        # A copy of the scales: theirs is not an address of floats.
        key_scales, value_scales, keys, values = _split(stored, shape)
        key_scale = key_scales.contiguous().view(_SCALE).view(layers, kv_heads, 1, head_dim)
        value_scale = value_scales.contiguous().view(_SCALE).view(layers, kv_heads, slots, 1)
        keys_LKMH = keys.view(torch.int8).unflatten(1, (kv_heads, slots, head_dim)) * key_scale
        values_LKMH = values.view(torch.int8).unflatten(1, (kv_heads, slots, head_dim)) * value_scale
        return keys_LKMH.to(dtype), values_LKMH.to(dtype)


def _sizes(shape: LayerShape) -> list[int]:
    """Bytes of key scales, value scales, keys and values of a layer."""
    scale = _SCALE.itemsize
    return [
        scale * shape.kv_heads * shape.head_dim,
        scale * shape.kv_heads * shape.slots,
        shape.elements,
        shape.elements,
    ]


def _split(stored: Tensor, shape: LayerShape) -> tuple[Tensor, ...]:
    """(L, bytes) views of the four."""
    sizes = _sizes(shape)
    made: tuple[Tensor, ...] = stored[:, : sum(sizes)].split(sizes, dim=1)
    return made
