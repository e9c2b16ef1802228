"""Slots as they are: (layer, k/v, head, slot, dim) in the slot dtype (float32, bfloat16 or float16).

Shape legend: L layers, K kv heads, M slots, H head dim.
"""

import torch
from torch import Tensor

from c2kv_core.store.codecs.codec import LayerShape


class Plain:
    """No loss, and no copy on the way back."""

    def layer_bytes(self, shape: LayerShape, dtype: torch.dtype) -> int:
        return 2 * shape.elements * dtype.itemsize

    def encode(self, keys_LKMH: Tensor, values_LKMH: Tensor, target: Tensor) -> None:
        # The one copy on the way out: straight from the model's tensors, wherever they are, to file order.
        layers, *shape = keys_LKMH.shape
        both_L2KMH = target.view(keys_LKMH.dtype).view(layers, 2, *shape)
        both_L2KMH[:, 0].copy_(keys_LKMH)
        both_L2KMH[:, 1].copy_(values_LKMH)

    def decode(self, stored: Tensor, shape: LayerShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        # Flat, because a row of no bytes cannot be seen as another dtype.
        flat = stored.reshape(-1).view(dtype)
        both_L2KMH = flat.view(len(stored), 2, shape.kv_heads, shape.slots, shape.head_dim)
        return both_L2KMH[:, 0], both_L2KMH[:, 1]
