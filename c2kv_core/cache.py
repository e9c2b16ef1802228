"""Keys and values of a context, and a cache that grows from it by concatenation (prefill, training).

Heads may have different numbers of entries: a context pads those of a layer to the head that has most, and ``seen``
says which are there. Layers may differ as well.

Shape legend: B batch (1 unless training), K kv heads, Q query heads, S entries of a layer (padded), T new entries,
H head dim, L layers.
"""

from collections.abc import Iterator, Sequence
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
    seen: tuple[Tensor, ...] | None = None
    """L tensors (K, S) bool, which entries each head has; None: all."""

    @property
    def num_entries(self) -> int:
        """S of the layer that has most: prefix tokens and slots."""
        return max(int(k.shape[2]) for k in self.keys)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, padding included."""
        return sum(x.nbytes for x in (*self.keys, *self.values))

    def layers(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Keys, values and ``seen``, layer by layer."""
        seen = self.seen or (None,) * len(self.keys)
        return zip(self.keys, self.values, seen, strict=True)

    def followed_by(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], seen: Sequence[Tensor] | None
    ) -> "ContextCache":
        """These entries and then others."""
        both = None
        if self.seen is not None or seen is not None:
            first = self.seen or [all_seen(k) for k in self.keys]
            second = seen or [all_seen(k) for k in keys]
            both = tuple(torch.cat(pair, dim=1) for pair in zip(first, second, strict=True))
        return ContextCache(
            keys=tuple(torch.cat(pair, dim=2) for pair in zip(self.keys, keys, strict=True)),
            values=tuple(torch.cat(pair, dim=2) for pair in zip(self.values, values, strict=True)),
            seen=both,
        )


def all_seen(keys: Tensor) -> Tensor:
    """(K, S) of True for keys (1, K, S, H)."""
    return torch.ones(keys.shape[1:3], dtype=torch.bool, device=keys.device)


class AppendCache:
    """Starts from a context and grows out of place, so that the context stays as it was and gradients flow."""

    def __init__(self, context: ContextCache | None) -> None:
        self._keys: list[Tensor | None] = list(context.keys) if context else []
        self._values: list[Tensor | None] = list(context.values) if context else []
        self._seen = list(context.seen) if context and context.seen is not None else None
        self._causal = Causal(torch.bool)

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
        if self._seen is not None:
            self._seen[layer] = torch.cat([self._seen[layer], all_seen(keys)], dim=1)
        return self._keys[layer], self._values[layer]  # type: ignore[return-value]

    def mask(self, layer: int, tokens: int, *, device: torch.device) -> Tensor | None:
        """See ``hf_adapter.MaskedCache``."""
        keys = self._keys[layer] if layer < len(self._keys) else None
        past = 0 if keys is None else int(keys.shape[2])
        if self._seen is None:
            if past == 0 or tokens == 1:
                return None
            return self._causal.mask(past, tokens, device)[None, None]
        past_KTS = self._seen[layer][:, None].expand(-1, tokens, -1)
        own_KTT = self._causal.mask(0, tokens, device).expand(past_KTS.shape[0], -1, -1)
        return torch.cat([past_KTS, own_KTT], dim=2)[None]

    def frozen(self) -> ContextCache:
        """What has been gathered so far."""
        keys = tuple(k for k in self._keys if k is not None)
        values = tuple(v for v in self._values if v is not None)
        return ContextCache(keys=keys, values=values, seen=None if self._seen is None else tuple(self._seen))


class Causal:
    """Masks of tokens that see each other causally. One is kept for all layers of a pass: whoever has fewer entries
    gets its end, as the new tokens stand last."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Bool, or a floating dtype for numbers to add to scores."""
        self._dtype = dtype
        self._mask: Tensor | None = None

    def mask(self, past: int, tokens: int, device: torch.device) -> Tensor:
        """(T, past + T): all see the first entries."""
        if self._mask is None or self._mask.shape[0] != tokens or self._mask.shape[1] < past + tokens:
            mask = torch.ones(tokens, past + tokens, dtype=torch.bool, device=device).tril(past)
            if self._dtype != torch.bool:
                mask = torch.zeros_like(mask, dtype=self._dtype).masked_fill_(~mask, float("-inf"))
            self._mask = mask
        columns = self._mask[:, self._mask.shape[1] - past - tokens :]
        # Kernels of GPUs ask for aligned rows.
        return columns.contiguous() if columns.is_cuda else columns
