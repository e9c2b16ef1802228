"""Two caches: one that grows by concatenation (prefill, training), one that is filled in place (decode).

Heads may have different numbers of entries: the entries of a layer are then padded to those of the head that has most,
and ``seen`` says which are there. Layers may differ as well.

Shape legend: B batch (1 unless training), K kv heads, S entries of a layer (padded), T new entries, H head dim,
L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


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
        self._causal = _Causal(torch.bool)

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
            return self._causal.mask(past, tokens, device)
        past_KTS = self._seen[layer][:, None].expand(-1, tokens, -1)
        own_KTT = self._causal.own(tokens, device).expand(past_KTS.shape[0], -1, -1)
        return torch.cat([past_KTS, own_KTT], dim=2)[None]

    def frozen(self) -> ContextCache:
        """What has been gathered so far."""
        keys = tuple(k for k in self._keys if k is not None)
        values = tuple(v for v in self._values if v is not None)
        return ContextCache(keys=keys, values=values, seen=None if self._seen is None else tuple(self._seen))


class DecodeCache:
    """A copy of a context with room for ``extra_tokens`` more entries, filled in place.

    Entries of which heads have different numbers take room of their own beside it.

    What was put in since the last ``commit`` can be dropped again.
    """

    def __init__(self, context: ContextCache, *, extra_tokens: int) -> None:
        self._extra_tokens = extra_tokens
        self._used = [int(k.shape[2]) for k in context.keys]
        self._committed = list(self._used)
        self._keys = [_with_room(k, k.shape[2] + extra_tokens) for k in context.keys]
        self._values = [_with_room(v, v.shape[2] + extra_tokens) for v in context.values]
        self._hidden = (
            None if context.seen is None else [self._hide(i, seen) for i, seen in enumerate(context.seen)]
        )
        # Numbers to add, once a step: attention would otherwise make them of a bool mask in every layer.
        self._causal = _Causal(context.keys[0].dtype)

    def commit(self) -> None:
        """Keep what is there."""
        self._committed = list(self._used)

    def rewind(self) -> None:
        """Drop, in every layer, what came since the last ``commit``."""
        self._used = list(self._committed)

    def update(self, keys: Tensor, values: Tensor, layer: int, **extra: Any) -> tuple[Tensor, Tensor]:
        """See ``hf_adapter.LayerCache``; the tensors returned are views."""
        start = self._used[layer]
        end = start + keys.shape[2]
        self._keys[layer][:, :, start:end] = keys
        self._values[layer][:, :, start:end] = values
        if self._hidden is not None:
            self._hidden[layer][:, start:end] = 0
        self._used[layer] = end
        return self._keys[layer][:, :, :end], self._values[layer][:, :, :end]

    def place(self, keys: Tensor, values: Tensor, seen: Tensor | None, layer: int) -> None:
        """Put entries in of which heads have different numbers: ``seen`` (K, S)."""
        if seen is not None and self._hidden is None:
            self._hidden = [
                self._hide(index, all_seen(k[:, :, :used]))
                for index, (k, used) in enumerate(zip(self._keys, self._used, strict=True))
            ]
        start = self._used[layer]
        if seen is not None:
            self._make_room(layer, start + keys.shape[2] + self._extra_tokens)
        self.update(keys, values, layer)
        if seen is not None:
            assert self._hidden is not None
            self._hidden[layer][:, start : self._used[layer]].masked_fill_(~seen, float("-inf"))

    def mask(self, layer: int, tokens: int, *, device: torch.device) -> Tensor | None:
        """See ``hf_adapter.MaskedCache``; added to scores where heads differ."""
        past = self._used[layer]
        if self._hidden is None:
            return self._causal.mask(past, tokens, device)
        hidden = self._hidden[layer]
        hidden[:, past : past + tokens] = 0
        past_KTS = hidden[:, None, : past + tokens].expand(-1, tokens, -1)
        if tokens == 1:
            return past_KTS[None]
        return (past_KTS + pad(self._causal.own(tokens, device), (past, 0)))[None]

    def _hide(self, layer: int, seen: Tensor) -> Tensor:
        """(K, capacity) to add to scores: -inf where a head has no entry."""
        keys = self._keys[layer]
        hidden = keys.new_zeros(keys.shape[1], keys.shape[2])
        hidden[:, : seen.shape[1]].masked_fill_(~seen, float("-inf"))
        return hidden

    def _make_room(self, layer: int, capacity: int) -> None:
        if capacity <= self._keys[layer].shape[2]:
            return
        self._keys[layer] = _with_room(self._keys[layer], capacity)
        self._values[layer] = _with_room(self._values[layer], capacity)
        if self._hidden is not None:
            old = self._hidden[layer]
            self._hidden[layer] = pad(old, (0, capacity - old.shape[1]))


class _Causal:
    """Masks of tokens that see each other causally. The last is kept: all layers of a pass ask for the same."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Bool, or a floating dtype for numbers to add to scores."""
        self._dtype = dtype
        self._mask: tuple[tuple[int, int], Tensor] | None = None

    def mask(self, past: int, tokens: int, device: torch.device) -> Tensor | None:
        """(1, 1, T, past + T) over entries that all see; None where stock layers need none."""
        if past == 0 or tokens == 1:
            return None
        return self._made(past, tokens, device)[None, None]

    def own(self, tokens: int, device: torch.device) -> Tensor:
        """(T, T)."""
        return self._made(0, tokens, device)

    def _made(self, past: int, tokens: int, device: torch.device) -> Tensor:
        if self._mask is None or self._mask[0] != (past, tokens):
            mask = torch.ones(tokens, past + tokens, dtype=torch.bool, device=device).tril(past)
            if self._dtype != torch.bool:
                mask = torch.zeros_like(mask, dtype=self._dtype).masked_fill_(~mask, float("-inf"))
            self._mask = ((past, tokens), mask)
        return self._mask[1]


def _with_room(x: Tensor, capacity: int) -> Tensor:
    grown = x.new_empty(*x.shape[:2], capacity, x.shape[3])
    grown[:, :, : x.shape[2]] = x
    return grown
