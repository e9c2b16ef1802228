"""Two caches: one that grows by concatenation (prefill, training), one that is filled in place (decode).

Heads may have different numbers of entries: a context pads those of a layer to the head that has most, and ``seen``
says which are there. Layers may differ as well.

Shape legend: B batch (1 unless training), K kv heads, Q query heads, S entries of a layer (padded), T new entries,
H head dim, L layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


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


@dataclass(kw_only=True)
class _Group:
    """Heads of a layer that have equally many entries."""

    heads: slice
    keys: Tensor
    """(1, K of the group, capacity, H)."""
    values: Tensor
    used: int
    committed: int

    def put(self, keys: Tensor, values: Tensor) -> None:
        end = self.used + keys.shape[2]
        self.keys[:, :, self.used : end] = keys
        self.values[:, :, self.used : end] = values
        self.used = end

    def with_capacity(self, capacity: int) -> "_Group":
        """The same entries in memory of their own."""
        grown = [_with_room(x[:, :, : self.used], capacity) for x in (self.keys, self.values)]
        return replace(self, keys=grown[0], values=grown[1])


class DecodeCache:
    """A copy of a context with room for ``extra_tokens`` more entries, filled in place; nothing in it is padded.

    Heads with different numbers of entries have tensors of their own. What was put in since the last ``commit`` can be
    dropped again.
    """

    def __init__(self, context: ContextCache, *, extra_tokens: int) -> None:
        self._layers = [
            [
                _Group(
                    heads=slice(0, int(keys.shape[1])),
                    keys=_with_room(keys[:, :, :0], (keys.shape[2] if seen is None else 0) + extra_tokens),
                    values=_with_room(
                        values[:, :, :0], (keys.shape[2] if seen is None else 0) + extra_tokens
                    ),
                    used=0,
                    committed=0,
                )
            ]
            for keys, values, seen in context.layers()
        ]
        for index, (keys, values, seen) in enumerate(context.layers()):
            self.place(_by_head(keys, seen), _by_head(values, seen), index, by_head=seen is not None)
        self.commit()
        self._causal = _Causal(context.keys[0].dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, room included."""
        return sum(g.keys.nbytes + g.values.nbytes for layer in self._layers for g in layer)

    def commit(self) -> None:
        """Keep what is there."""
        for layer in self._layers:
            for group in layer:
                group.committed = group.used

    def rewind(self) -> None:
        """Drop, in every layer, what came since the last ``commit``."""
        for layer in self._layers:
            for group in layer:
                group.used = group.committed

    def place(self, keys: Sequence[Tensor], values: Sequence[Tensor], layer: int, *, by_head: bool) -> None:
        """Put in entries: one (1, K, S, H) of all heads, for which there is room, or ``by_head`` K times (1, 1, S, H),
        for which room is made beside that for ``extra_tokens``."""
        if by_head:
            self._layers[layer] = [
                _Group(
                    heads=slice(head, head + 1),
                    keys=group.keys[:, head - group.heads.start][:, None],
                    values=group.values[:, head - group.heads.start][:, None],
                    used=group.used,
                    committed=group.committed,
                ).with_capacity(group.keys.shape[2] + keys[head].shape[2])
                for group in self._layers[layer]
                for head in range(group.heads.start, group.heads.stop)
            ]
        for group in self._layers[layer]:
            if by_head:
                group.put(keys[group.heads.start], values[group.heads.start])
            else:
                group.put(keys[0][:, group.heads], values[0][:, group.heads])

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, layer: int, *, scale: float) -> Tensor:
        """Put in T new entries (1, K, T, H) and read with their queries (1, Q, T, H), which see all entries and each
        other causally: (1, Q, T, H)."""
        tokens = queries.shape[2]
        per_head = queries.shape[1] // keys.shape[1]
        read = []
        for group in self._layers[layer]:
            past = group.used
            group.put(keys[:, group.heads], values[:, group.heads])
            own = slice(group.heads.start * per_head, group.heads.stop * per_head)
            read.append(
                scaled_dot_product_attention(
                    queries[:, own],
                    group.keys[:, :, : group.used],
                    group.values[:, :, : group.used],
                    attn_mask=self._causal.mask(past, tokens, queries.device) if tokens > 1 else None,
                    scale=scale,
                    enable_gqa=True,
                )
            )
        return read[0] if len(read) == 1 else torch.cat(read, dim=1)


class _Causal:
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


def _by_head(x: Tensor, seen: Tensor | None) -> tuple[Tensor, ...]:
    """(1, K, S, H) as it is, or without padding, head by head."""
    if seen is None:
        return (x,)
    return tuple(x[:, head : head + 1, own] for head, own in enumerate(seen))


def _with_room(x: Tensor, capacity: int) -> Tensor:
    grown = x.new_empty(*x.shape[:2], capacity, x.shape[3])
    grown[:, :, : x.shape[2]] = x
    return grown
