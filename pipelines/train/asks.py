"""Questions with their answers over contexts, many in one pass of the frozen base.

Shape legend: B asks, T tokens of an ask's questions and answers (padded), S cached entries (padded), K kv heads,
H head dim, D hidden, P predictions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from c2kv_core import ComposedContext, hf_adapter
from c2kv_core.cache import all_seen
from c2kv_core.compose import check_positions
from pipelines.train.prepare import Asked


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Questions with the answers to be learned, each alone after the same context."""

    context: ComposedContext
    asked: Sequence[Asked]


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Which tokens are predicted: flat lists over all questions of all asks."""

    rows: Tensor
    """(P,) the ask."""
    places: Tensor
    """(P,) the token, within the ask's packed ids, whose hidden state predicts."""
    targets: Tensor
    """(P,) the id that follows."""
    in_answer: Tensor
    """(P,) bool: the target belongs to the answer."""
    questions: Tensor
    """(P,) the question, counted over all asks."""


def predictions(asks: Sequence[Sequence[Asked]], *, questions: bool, device: torch.device) -> Predictions:
    """Predictions of the answers of each ask, or of all tokens of a question but its first."""
    rows, places, targets, in_answer, numbers = [], [], [], [], []
    number = 0
    for row, asked in enumerate(asks):
        start = 0
        for one in asked:
            ids = one.ids
            for place in range(0 if questions else len(one.question_ids) - 1, len(ids) - 1):
                rows.append(row)
                places.append(start + place)
                targets.append(ids[place + 1])
                in_answer.append(place + 1 >= len(one.question_ids))
                numbers.append(number)
            start += len(ids)
            number += 1
    return Predictions(
        rows=torch.tensor(rows, device=device),
        places=torch.tensor(places, device=device),
        targets=torch.tensor(targets, device=device),
        in_answer=torch.tensor(in_answer, device=device),
        questions=torch.tensor(numbers, device=device),
    )


class PackedIds(NamedTuple):
    """The questions of one ask side by side."""

    ids: list[int]
    steps: list[int]
    """Place of each token within its question."""
    numbers: list[int]
    """Question of each token, from 1."""


def pack_ids(asked: Sequence[Asked]) -> PackedIds:
    """Questions with their answers, one after the other."""
    return PackedIds(
        ids=[i for one in asked for i in one.ids],
        steps=[step for one in asked for step in range(len(one.ids))],
        numbers=[number for number, one in enumerate(asked, 1) for _ in one.ids],
    )


@dataclass(frozen=True, kw_only=True)
class _Packed:
    """Asks as one batch: the questions of an ask stand side by side, hidden from each other."""

    ids_BT: Tensor
    positions_BT: Tensor
    """Each question starts where its ask's context ends."""
    own: Tensor
    """(B, 1, T, T) bool: a token sees its own question up to itself."""


def _pack(model: PreTrainedModel, asks: Sequence[Ask]) -> _Packed:
    """Lay the asks out; padding stands to the right and is read by nobody."""
    device = model.device
    starts_B = torch.tensor([a.context.next_position for a in asks], device=device)
    check_positions(model, max(a.context.next_position + len(one.ids) for a in asks for one in a.asked))
    packed = [pack_ids(a.asked) for a in asks]
    ids_BT = padded([p.ids for p in packed], device)
    # Padding is a question of its own, numbered 0; its positions stay within the model's.
    steps_BT = padded([p.steps for p in packed], device)
    numbers_BT = padded([p.numbers for p in packed], device)
    same = (numbers_BT[:, :, None] == numbers_BT[:, None]).tril()[:, None]
    return _Packed(
        ids_BT=ids_BT,
        positions_BT=starts_B[:, None] + steps_BT,
        own=same,
    )


def _seen_entries(asks: Sequence[Ask], layer: int) -> Tensor:
    """(B, K, S) bool, padded on the right: the entries of a layer that each head of each context has; (B, 1, S) where
    all heads have the same."""
    differ = any(a.context.cache.seen is not None for a in asks)
    each = []
    for ask in asks:
        cache = ask.context.cache
        seen = all_seen(cache.keys[layer]) if cache.seen is None else cache.seen[layer]
        each.append(seen if differ else seen[:1])
    longest = max(x.shape[1] for x in each)
    return torch.stack([F.pad(x, (0, longest - x.shape[1])) for x in each])


def _mask(seen_BKS: Tensor, own_B1TT: Tensor) -> Tensor:
    """(B, K, T, S + T) bool: a token sees all entries of its context, and its own question up to itself."""
    past = seen_BKS[:, :, None].expand(-1, -1, own_B1TT.shape[2], -1)
    return torch.cat([past, own_B1TT.expand(-1, past.shape[1], -1, -1)], dim=-1)


def ask_states(model: PreTrainedModel, asks: Sequence[Ask], *, recompute: bool = False) -> Tensor:
    """Final hidden states (B, T, D); gradients flow to the contexts.

    Args:
        model: the frozen base.
        asks: contexts may differ in length.
        recompute: keep no activations of a layer but its input; compute it again in the backward pass.
    """
    packed = _pack(model, asks)
    angles = hf_adapter.rotation(model, packed.positions_BT)
    hidden = hf_adapter.embed(model, packed.ids_BT)
    for index, layer in enumerate(hf_adapter.decoder_layers(model)):
        keys, values = _entries(asks, index)
        seen = _seen_entries(asks, index)

        def run(
            hidden: Tensor,
            keys: Tensor,
            values: Tensor,
            layer: hf_adapter.StockLayer = layer,
            seen: Tensor = seen,
        ) -> Tensor:
            # Made here, so that with ``recompute`` none is kept until the backward pass.
            mask = hf_adapter.for_query_heads(layer.self_attn, _mask(seen, packed.own))
            return hf_adapter.run_layer(
                layer,
                hidden,
                positions=packed.positions_BT,
                angles=angles,
                cache=_Past(keys, values),
                mask=mask,
            )

        hidden = (
            checkpoint(run, hidden, keys, values, use_reentrant=False)
            if recompute
            else run(hidden, keys, values)
        )
    normed: Tensor = model.model.norm(hidden)
    return normed


def _entries(asks: Sequence[Ask], layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values (B, K, S, H) of a layer of the asks' contexts, padded on the right."""
    keys = _stacked([a.context.cache.keys[layer] for a in asks])
    values = _stacked([a.context.cache.values[layer] for a in asks])
    return keys, values


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """(B, T), padded on the right with 0."""
    padded_BT = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64, device=device)
    for row, numbers in enumerate(rows):
        padded_BT[row, : len(numbers)] = torch.as_tensor(numbers, dtype=torch.int64)
    return padded_BT


class _Past:
    """One layer's cached entries; changes nothing, so that a layer can be computed twice."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = keys, values

    def update(self, keys: Tensor, values: Tensor, layer: int, **extra: object) -> tuple[Tensor, Tensor]:
        return torch.cat([self._keys, keys], dim=2), torch.cat([self._values, values], dim=2)


def _stacked(entries: Sequence[Tensor]) -> Tensor:
    """(1, K, S_b, H) each to (B, K, S, H), padded on the right."""
    longest = max(x.shape[2] for x in entries)
    return torch.cat([F.pad(x, (0, 0, 0, longest - x.shape[2])) for x in entries])
