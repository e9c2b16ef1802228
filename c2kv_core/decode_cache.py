"""The cache of one answer: filled in place, nothing in it padded.

Shape legend: K kv heads, Q query heads, S entries of a head, T new tokens, H head dim, R rows.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from c2kv_core.cache import Causal, ContextCache

HEADS_READ_AT_ONCE = 4
"""Most kv heads with different numbers of entries that a single token reads by one product of matrices: this multiplies
every query by the entries of all of them, which costs nothing where reading these bounds the time."""


class DecodeCache:
    """A copy of a context with room for ``extra_tokens`` more entries.

    Heads may have different numbers of entries. What was put in since the last ``commit`` can be dropped again.
    """

    def __init__(self, context: ContextCache, *, extra_tokens: int) -> None:
        self._layers: list[_Layer] = []
        self._replaced: dict[int, _Layer] = {}
        self._causal = Causal(context.keys[0].dtype)
        for index, (keys, values, seen) in enumerate(context.layers()):
            self._layers.append(
                _EqualHeads(keys, values, room=(keys.shape[2] if seen is None else 0) + extra_tokens)
            )
            self.place(_by_head(keys, seen), _by_head(values, seen), index, by_head=seen is not None)
        self.commit()

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, room included."""
        return sum(layer.nbytes for layer in self._layers)

    def commit(self) -> None:
        """Keep what is there."""
        self._replaced.clear()
        for layer in self._layers:
            layer.committed = layer.used

    def rewind(self) -> None:
        """Drop, in every layer, what came since the last ``commit``."""
        for index, layer in self._replaced.items():
            self._layers[index] = layer
        self._replaced.clear()
        for layer in self._layers:
            layer.used = layer.committed

    def place(self, keys: Sequence[Tensor], values: Sequence[Tensor], layer: int, *, by_head: bool) -> None:
        """Put in entries: one (1, K, S, H) of all heads, for which there is room, or ``by_head`` K times (1, 1, S, H),
        for which room is made beside that for ``extra_tokens``."""
        own = self._layers[layer]
        if by_head:
            self._layers[layer] = own.with_entries([k[0, 0] for k in keys], [v[0, 0] for v in values])
            self._replaced.setdefault(layer, own)
        else:
            own.put(keys[0], values[0])

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, layer: int, *, scale: float) -> Tensor:
        """Put in T new entries (1, K, T, H) and read with their queries (1, Q, T, H), which see all entries and each
        other causally: (1, Q, T, H)."""
        own = self._layers[layer]
        own.put(keys, values)
        return own.read(queries, self._causal, scale=scale)


class _Layer(Protocol):
    """Entries of one layer: tokens, as many for each head and with room for more, and before them what documents gave
    heads that have different numbers."""

    used: int
    """Tokens that are there."""
    committed: int
    """Those that stay when a step fails."""

    @property
    def nbytes(self) -> int: ...

    def put(self, keys: Tensor, values: Tensor) -> None:
        """Take tokens, (1, K, T, H)."""

    def read(self, queries: Tensor, causal: Causal, *, scale: float) -> Tensor:
        """What the last T tokens read, with queries (1, Q, T, H): (1, Q, T, H)."""

    def with_entries(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> "_Layer":
        """A layer of its own memory with the same tokens and room, and these (S, H) more of each head."""


class _EqualHeads:
    """Tokens alone; the slots of heads with equally many count as such."""

    def __init__(self, keys: Tensor, values: Tensor, *, room: int) -> None:
        """Empty, for such as ``keys`` and ``values`` (1, K, S, H)."""
        self.keys = keys.new_empty(*keys.shape[:2], room, keys.shape[3])
        self.values = values.new_empty(*values.shape[:2], room, values.shape[3])
        self.used = self.committed = 0

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def put(self, keys: Tensor, values: Tensor) -> None:
        end = _end(self.used + keys.shape[2], room=self.keys.shape[2])
        self.keys[:, :, self.used : end] = keys
        self.values[:, :, self.used : end] = values
        self.used = end

    def read(self, queries: Tensor, causal: Causal, *, scale: float) -> Tensor:
        return _attention(
            queries, self.keys[:, :, : self.used], self.values[:, :, : self.used], causal, scale=scale
        )

    def with_entries(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> _Layer:
        # Few heads are read at once on a CPU, in the precision in which scores may be added up.
        at_once = (
            len(keys) <= HEADS_READ_AT_ONCE
            and self.keys.device.type == "cpu"
            and self.keys.dtype == torch.float32
        )
        made: _Layer = (_RowsOfAllHeads if at_once else _HeadByHead)(keys, values, room=self.keys.shape[2])
        made.put(self.keys[:, :, : self.used], self.values[:, :, : self.used])
        made.committed = self.committed
        return made


class _HeadByHead:
    """Every head as a layer of its own."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], *, room: int) -> None:
        self._room = room
        self._counts = [k.shape[0] for k in keys]
        self._heads = [
            _EqualHeads(k[None, None], v[None, None], room=k.shape[0] + room)
            for k, v in zip(keys, values, strict=True)
        ]
        for head, k, v in zip(self._heads, keys, values, strict=True):
            head.put(k[None, None], v[None, None])
        self.used = self.committed = 0

    @property
    def nbytes(self) -> int:
        return sum(head.nbytes for head in self._heads)

    def put(self, keys: Tensor, values: Tensor) -> None:
        for index, head in enumerate(self._heads):
            head.used = self._counts[index] + self.used
            head.put(keys[:, index : index + 1], values[:, index : index + 1])
        self.used += keys.shape[2]

    def read(self, queries: Tensor, causal: Causal, *, scale: float) -> Tensor:
        shares = queries.chunk(len(self._heads), dim=1)
        return torch.cat(
            [head.read(own, causal, scale=scale) for head, own in zip(self._heads, shares, strict=True)],
            dim=1,
        )

    def with_entries(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> _Layer:
        own_k, own_v = [head.keys[0, 0] for head in self._heads], [head.values[0, 0] for head in self._heads]
        made = _HeadByHead(
            [torch.cat(pair) for pair in zip(self._given(own_k), keys, strict=True)],
            [torch.cat(pair) for pair in zip(self._given(own_v), values, strict=True)],
            room=self._room,
        )
        made.put(self._tokens(own_k), self._tokens(own_v))
        made.committed = self.committed
        return made

    def _given(self, heads: Sequence[Tensor]) -> list[Tensor]:
        """(S, H) views of what documents gave each head."""
        return [x[:count] for x, count in zip(heads, self._counts, strict=True)]

    def _tokens(self, heads: Sequence[Tensor]) -> Tensor:
        """(1, K, T, H) tokens that are there."""
        return torch.stack([x[n : n + self.used] for x, n in zip(heads, self._counts, strict=True)])[None]


class _RowsOfAllHeads:
    """All heads in the rows of one matrix: what documents gave, head by head, then K rows a token.

    On a CPU a decoding step spends its time on reading entries and on starting operations: here these are few, whatever
    the number of heads, and an entry is read once, not once for each query head.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], *, room: int) -> None:
        self._counts = [k.shape[0] for k in keys]
        self._room = room
        self._keys, self._values = (self._filled(x) for x in (keys, values))
        self._token_keys, self._token_values = (self._tokens(x) for x in (self._keys, self._values))
        self._others_KR = self._other_heads()
        self.used = self.committed = 0

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def put(self, keys: Tensor, values: Tensor) -> None:
        end = _end(self.used + keys.shape[2], room=self._room)
        self._token_keys[:, self.used : end] = keys[0]
        self._token_values[:, self.used : end] = values[0]
        self.used = end

    def read(self, queries: Tensor, causal: Causal, *, scale: float) -> Tensor:
        if queries.shape[2] == 1:
            return self._read_one(queries, scale=scale)
        shares = queries.chunk(len(self._counts), dim=1)
        heads = zip(
            shares,
            self._heads(self._keys, self._token_keys),
            self._heads(self._values, self._token_values),
            strict=True,
        )
        return torch.cat(
            [_attention(own, k[None, None], v[None, None], causal, scale=scale) for own, k, v in heads], dim=1
        )

    def with_entries(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> _Layer:
        made = _RowsOfAllHeads(
            [torch.cat(pair) for pair in zip(self._given(self._keys), keys, strict=True)],
            [torch.cat(pair) for pair in zip(self._given(self._values), values, strict=True)],
            room=self._room,
        )
        made.put(self._token_keys[None, :, : self.used], self._token_values[None, :, : self.used])
        made.committed = self.committed
        return made

    def _read_one(self, queries: Tensor, *, scale: float) -> Tensor:
        """Of one token: products of all queries (Q, H) and all rows, of which a query sees those of its kv head."""
        heads = len(self._counts)
        rows = len(self._keys) - (self._room - self.used) * heads
        queries_QH = queries[0, :, 0] * scale
        scores_KGR = (queries_QH @ self._keys[:rows].T).view(heads, -1, rows)
        scores_KGR.masked_fill_(self._others_KR[:, None, :rows], float("-inf"))
        read_QH = scores_KGR.softmax(dim=-1).view(-1, rows) @ self._values[:rows]
        return read_QH[None, :, None]

    def _other_heads(self) -> Tensor:
        """(K, R): which rows are another head's."""
        heads = torch.arange(len(self._counts))
        head_R = torch.cat([heads.repeat_interleave(torch.tensor(self._counts)), heads.repeat(self._room)])
        return heads[:, None] != head_R

    def _filled(self, given: Sequence[Tensor]) -> Tensor:
        """(R, H): these rows, and room."""
        rows = given[0].new_empty(sum(self._counts) + len(given) * self._room, given[0].shape[1])
        torch.cat(list(given), out=rows[: sum(self._counts)])
        return rows

    def _tokens(self, rows: Tensor) -> Tensor:
        """(K, room, H) view of the rows of tokens."""
        return rows[sum(self._counts) :].view(self._room, len(self._counts), rows.shape[1]).transpose(0, 1)

    def _given(self, rows: Tensor) -> tuple[Tensor, ...]:
        """(S, H) views of the rows that documents gave each head."""
        given: tuple[Tensor, ...] = rows[: sum(self._counts)].split(self._counts)
        return given

    def _heads(self, rows: Tensor, tokens: Tensor) -> list[Tensor]:
        """(S, H) of each head, tokens included."""
        return [
            torch.cat([given, own[: self.used]]) for given, own in zip(self._given(rows), tokens, strict=True)
        ]


def _end(end: int, *, room: int) -> int:
    """Where new entries end. A single one beyond the room would be broadcast into an empty view: no error, no entry.

    Raises:
        IndexError: there is no room.
    """
    if end > room:
        raise IndexError(f"expected room for {end} entries in an answer's cache, there is room for {room}")
    return end


def _attention(queries: Tensor, keys: Tensor, values: Tensor, causal: Causal, *, scale: float) -> Tensor:
    """Of the last T of S tokens: (1, Q, T, H) queries, (1, K, S, H) keys and values to (1, Q, T, H)."""
    tokens = queries.shape[2]
    mask = causal.mask(keys.shape[2] - tokens, tokens, queries.device) if tokens > 1 else None
    return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)


def _by_head(x: Tensor, seen: Tensor | None) -> tuple[Tensor, ...]:
    """(1, K, S, H) as it is, or without padding, head by head."""
    if seen is None:
        return (x,)
    return tuple(x[:, head : head + 1, own] for head, own in enumerate(seen))
