"""Contexts: prefixes by prefill, documents by composition of their slots (DESIGN 2, Compose).

Shape legend: L layers, K kv heads, S entries, M slots, T new tokens, H head dim.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from c2kv_core import hf_adapter
from c2kv_core.cache import AppendCache, ContextCache
from c2kv_core.document import CompressedDocument, Geometry
from c2kv_core.errors import ContextLengthError, InputError
from c2kv_core.head_slots import HeadLayout, entry_positions

PREFILL_CHUNK_TOKENS = 512
"""Tokens prefilled at once over an existing context: bounds the mask at 512 x (S + 512), times the query heads where
heads have different numbers of entries."""


@dataclass(frozen=True, kw_only=True)
class ComposedContext:
    """Everything a question sees. Never changed: appending makes a new one."""

    cache: ContextCache
    next_position: int
    """Position of the token that comes next: source tokens so far, not entries."""


def prefill(
    model: PreTrainedModel, ids: Sequence[int], context: ComposedContext | None = None
) -> ComposedContext:
    """Full base keys and values of ordinary tokens after a context.

    Args:
        model: the frozen base.
        ids: token ids of the prefix (system message) or of text placed among documents.
        context: what stands before and is seen; None at the start.

    Raises:
        InputError: no ids, or one without an embedding.
        ContextLengthError: more positions than the model has.
    """
    if not ids:
        raise InputError("expected at least one token to prefill, got none")
    check_ids(model, ids)
    cache = AppendCache(context.cache if context else None)
    start = context.next_position if context else 0
    check_positions(model, start + len(ids))
    with torch.no_grad():
        _prefill_hidden(model, ids, cache, start=start, first=context is None)
    return ComposedContext(cache=cache.frozen(), next_position=start + len(ids))


def _prefill_hidden(
    model: PreTrainedModel, ids: Sequence[int], cache: hf_adapter.MaskedCache, *, start: int, first: bool
) -> Tensor:
    """Final hidden states (1, T, D) of the last chunk of ``ids``, which are the ``first`` entries or follow others."""
    ids_T = torch.as_tensor(ids, dtype=torch.int64, device=model.device)
    step = len(ids) if first else PREFILL_CHUNK_TOKENS
    hidden = torch.empty(0)
    for offset in range(0, len(ids), step):
        hidden = token_states(model, ids_T[None, offset : offset + step], cache, start=start + offset)
    return hidden


def token_states(
    model: PreTrainedModel, ids_BT: Tensor, cache: hf_adapter.MaskedCache, *, start: int
) -> Tensor:
    """Final hidden states (B, T, D) of ordinary tokens at positions ``start``.. after the cached entries.

    Every token sees all cached entries and the tokens up to itself; positions are given, never inferred.
    """
    tokens = ids_BT.shape[1]
    positions = torch.arange(start, start + tokens, device=ids_BT.device).expand_as(ids_BT)

    def mask(layer: int) -> Tensor | None:
        return cache.mask(layer, tokens, device=ids_BT.device)

    return hf_adapter.run_model(model, ids_BT, positions=positions, cache=cache, mask=mask)


def compose(
    model: PreTrainedModel,
    prefix: ComposedContext | None,
    documents: Sequence[CompressedDocument],
    *,
    gaps: Sequence[int] = (),
) -> ComposedContext:
    """Place documents after a prefix, in the order given, without recompute.

    Slots of a document stand at cursor + local position, then the cursor moves by the document's source length.
    Keys are rotated once, by the model's own rotary module; the inputs are not changed.

    Args:
        model: the frozen base the documents were extracted with.
        prefix: an earlier context, or None.
        documents: any order, repeats allowed; none gives the prefix back.
        gaps: positions left free before each document; without them documents follow each other.

    Raises:
        InputError: neither prefix nor documents, or a document of another geometry.
        ContextLengthError: more positions than the model has.
    """
    if not documents:
        if prefix is None:
            raise InputError("expected a prefix or at least one document to compose, got neither")
        return prefix
    layers, cursor = rotated_layers(model, documents, prefix.next_position if prefix else 0, gaps=gaps)
    keys, values, seen = zip(*(placed.padded() for placed in layers), strict=True)
    shared = seen if seen[0] is not None else None
    if prefix is not None:
        return ComposedContext(cache=prefix.cache.followed_by(keys, values, shared), next_position=cursor)
    return ComposedContext(cache=ContextCache(keys=keys, values=values, seen=shared), next_position=cursor)


class PlacedLayer(NamedTuple):
    """The entries of documents in one layer: of all heads, or where these have different numbers one by one."""

    keys: tuple[Tensor, ...]
    """One (1, K, S, H), or K times (1, 1, S, H), rotated to their places."""
    values: tuple[Tensor, ...]
    """In the same shapes."""
    by_head: bool

    def padded(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values (1, K, S, H), and which entries each head has (K, S); None: all."""
        if not self.by_head:
            return self.keys[0], self.values[0], None
        counts = torch.tensor([k.shape[2] for k in self.keys], device=self.keys[0].device)
        most = int(counts.max())
        keys, values = (
            torch.cat([pad(x, (0, 0, 0, most - x.shape[2])) for x in heads], dim=1)
            for heads in (self.keys, self.values)
        )
        return keys, values, torch.arange(most, device=counts.device) < counts[:, None]


def rotated_layers(
    model: PreTrainedModel, documents: Sequence[CompressedDocument], cursor: int, *, gaps: Sequence[int] = ()
) -> tuple[Iterator[PlacedLayer], int]:
    """Each layer's entries, at their places from ``cursor`` on; the cursor after them.

    One layer at a time, so that whoever copies them into a cache of its own needs no second copy of all.

    Raises:
        InputError: a document of another geometry.
        ContextLengthError: more positions than the model has.
    """
    check_geometry(model, documents)
    starts, end = _place(documents, cursor, gaps or [0] * len(documents))
    check_positions(model, end)
    moved = [(d.keys.to(model.device), d.values.to(model.device)) for d in documents]
    if any(d.head_slots is not None for d in documents):
        return _shared_out(model, documents, moved, starts), end
    positions = torch.cat([d.slot_positions + start for d, start in zip(documents, starts, strict=True)])
    return _rotated(model, moved, positions), end


def _rotated(
    model: PreTrainedModel, documents: Sequence[tuple[Tensor, Tensor]], positions: Tensor
) -> Iterator[PlacedLayer]:
    angles = hf_adapter.rotation(model, positions[None].to(model.device))
    for layer in range(len(documents[0][0])):
        keys_1KSH = torch.cat([keys[layer].to(model.dtype) for keys, _ in documents], dim=1)[None]
        values_1KSH = torch.cat([values[layer].to(model.dtype) for _, values in documents], dim=1)[None]
        yield PlacedLayer((hf_adapter.rotate(keys_1KSH, angles),), (values_1KSH,), by_head=False)


def _shared_out(
    model: PreTrainedModel,
    documents: Sequence[CompressedDocument],
    moved: Sequence[tuple[Tensor, Tensor]],
    starts: Sequence[int],
) -> Iterator[PlacedLayer]:
    """Entries to the heads that have them (``CompressedDocument.head_slots``)."""
    layout = HeadLayout([_head_slots(d) for d in documents])
    first, last = starts[0], starts[-1] + documents[-1].num_tokens
    angles = hf_adapter.rotation(model, torch.arange(first, last, device=model.device)[None])
    stands = [_entry_positions(d) + start - first for d, start in zip(documents, starts, strict=True)]
    flat = [tuple(x.flatten(0, 2) for x in pair) for pair in moved]
    for layer in range(len(moved[0][0])):
        spans = [layout.span(i, layer) for i in range(len(documents))]
        order_E, counts = layout.by_head(layer)
        stands_E = torch.cat([x[span] for x, span in zip(stands, spans, strict=True)])[order_E].to(
            model.device
        )
        order_E = order_E.to(model.device)
        # Rows are put in order as they are stored, which for 16 bits is half the bytes.
        keys_EH, values_EH = (
            torch.cat([pair[part][span] for pair, span in zip(flat, spans, strict=True)])
            .index_select(0, order_E)
            .to(model.dtype)
            for part in (0, 1)
        )
        own = tuple(x.index_select(1, stands_E) for x in angles)
        turned_11EH = hf_adapter.rotate(keys_EH[None, None], (own[0], own[1]))
        yield PlacedLayer(
            turned_11EH.split(counts, dim=2), values_EH[None, None].split(counts, dim=2), by_head=True
        )


def _head_slots(document: CompressedDocument) -> Tensor:
    if document.head_slots is not None:
        return document.head_slots
    layers, heads, slots, _ = document.keys.shape
    return torch.full((layers, heads), slots, dtype=torch.int64)


def _entry_positions(document: CompressedDocument) -> Tensor:
    """(E,) inside the part."""
    if document.head_slots is not None:
        return entry_positions(document.head_slots, num_tokens=document.num_tokens)
    layers, heads, _, _ = document.keys.shape
    return document.slot_positions.repeat(layers * heads)


def _place(
    documents: Sequence[CompressedDocument], cursor: int, gaps: Sequence[int]
) -> tuple[list[int], int]:
    """Position of each document's first token, and the position after the last document."""
    starts = []
    for document, gap in zip(documents, gaps, strict=True):
        starts.append(cursor + gap)
        cursor += gap + document.num_tokens
    return starts, cursor


def check_geometry(model: PreTrainedModel, documents: Sequence[CompressedDocument]) -> None:
    """Refuse documents whose tensors are not of the model's geometry.

    Raises:
        InputError: names the document's place and both shapes.
    """
    expected = hf_adapter.geometry(model.config)
    for place, document in enumerate(documents):
        layers, kv_heads, slots, head_dim = document.keys.shape
        got = Geometry(layers=layers, kv_heads=kv_heads, head_dim=head_dim)
        if got != expected or document.values.shape != document.keys.shape or slots != document.num_slots:
            raise InputError(
                f"document {place} has keys of {got} with {slots} slots, the model needs {expected}"
            )
        counts = document.head_slots
        if counts is None:
            continue
        entries = layers * kv_heads * slots
        if tuple(counts.shape) != (layers, kv_heads) or int(counts.sum()) != entries or int(counts.min()) < 0:
            raise InputError(
                f"document {place} has head_slots of shape {tuple(counts.shape)} and sum {int(counts.sum())}, expected "
                f"({layers}, {kv_heads}) and {entries}, none below 0"
            )


def check_ids(model: PreTrainedModel, ids: Sequence[int]) -> None:
    """Refuse ids without an embedding: on a GPU one of them would end the process.

    Raises:
        InputError: names the id and the size of the vocabulary.
    """
    size = hf_adapter.vocabulary_size(model)
    for token in (min(ids), max(ids)):
        if not 0 <= token < size:
            raise InputError(
                f"token id {token} has no embedding, the model has ids 0 to {size - 1}; is the tokenizer the model's?"
            )


def check_positions(model: PreTrainedModel, positions: int) -> None:
    """Refuse a context beyond the model's positions.

    Raises:
        ContextLengthError: names both numbers.
    """
    limit = hf_adapter.max_positions(model)
    if positions > limit:
        raise ContextLengthError(
            f"the context needs {positions} positions, the model has {limit}; use fewer documents"
        )
