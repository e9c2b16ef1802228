"""What a slot codec is: how one part's keys and values lie in the bytes of a record.

Shape legend: L layers, K kv heads, M slots, H head dim.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Shape of one layer's keys, and of its values."""

    kv_heads: int
    slots: int
    head_dim: int

    @property
    def elements(self) -> int:
        """Of keys alone."""
        return self.kv_heads * self.slots * self.head_dim


class SlotCodec(Protocol):
    """One way to lay out slots. Layers follow one another, all of one size, so that they can be read in order."""

    def layer_bytes(self, shape: LayerShape, dtype: torch.dtype) -> int:
        """Bytes of a layer."""
        ...

    def encode(self, keys_LKMH: Tensor, values_LKMH: Tensor, target: Tensor) -> None:
        """Fill ``target``, zeros of dtype uint8 and shape (L, layer bytes)."""
        ...

    def decode(self, stored: Tensor, shape: LayerShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values (L, K, M, H) of ``dtype`` from what ``encode`` filled; views of it where that is possible."""
        ...
