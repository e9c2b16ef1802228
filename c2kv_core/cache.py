"""Two caches: one that grows by concatenation (prefill, training), one of fixed capacity (decode).

Shape legend: B batch (1 unless training), K kv heads, S entries, T new entries, H head dim, L layers.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ContextCache:
    """Rotated keys and values of a context. Never changed after it was made."""

    keys: tuple[Tensor, ...]
    """L tensors (1, K, S, H), rotated to their final positions."""
    values: tuple[Tensor, ...]
    """L tensors (1, K, S, H)."""

    @property
    def num_entries(self) -> int:
        """S: prefix tokens and slots."""
        return int(self.keys[0].shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(x.nbytes for x in (*self.keys, *self.values))


class AppendCache:
    """Starts from a context and grows out of place, so that the context stays as it was and gradients flow."""

    def __init__(self, context: ContextCache | None) -> None:
        self._keys: list[Tensor | None] = list(context.keys) if context else []
        self._values: list[Tensor | None] = list(context.values) if context else []

    def update(self, keys: Tensor, values: Tensor, layer: int, **extra: Any) -> tuple[Tensor, Tensor]:
        """See ``hf_adapter.LayerCache``."""
        if layer == len(self._keys):
            self._keys.append(keys)
            self._values.append(values)
            return keys, values
        past_k, past_v = self._keys[layer], self._values[layer]
        assert past_k is not None and past_v is not None, "layers are filled in order"
        self._keys[layer] = torch.cat([past_k, keys], dim=2)
        self._values[layer] = torch.cat([past_v, values], dim=2)
        return self._keys[layer], self._values[layer]  # type: ignore[return-value]

    def frozen(self) -> ContextCache:
        """What has been gathered so far."""
        keys = tuple(k for k in self._keys if k is not None)
        values = tuple(v for v in self._values if v is not None)
        return ContextCache(keys=keys, values=values)


class DecodeCache:
    """A copy of a context with room for ``extra_tokens`` more entries, filled in place."""

    def __init__(self, context: ContextCache, *, extra_tokens: int) -> None:
        used, capacity = context.num_entries, context.num_entries + extra_tokens
        self._keys = [_with_room(k, capacity) for k in context.keys]
        self._values = [_with_room(v, capacity) for v in context.values]
        self._used = [used] * len(self._keys)

    def keep(self, entries: int) -> None:
        """Forget all but the first ``entries``, in every layer."""
        self._used = [entries] * len(self._used)

    def update(self, keys: Tensor, values: Tensor, layer: int, **extra: Any) -> tuple[Tensor, Tensor]:
        """See ``hf_adapter.LayerCache``; the tensors returned are views."""
        start = self._used[layer]
        end = start + keys.shape[2]
        self._keys[layer][:, :, start:end] = keys
        self._values[layer][:, :, start:end] = values
        self._used[layer] = end
        return self._keys[layer][:, :, :end], self._values[layer][:, :, :end]


def _with_room(x: Tensor, capacity: int) -> Tensor:
    grown = x.new_empty(*x.shape[:2], capacity, x.shape[3])
    grown[:, :, : x.shape[2]] = x
    return grown
