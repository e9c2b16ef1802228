"""Questions with their answers over contexts, many in one pass of the frozen base.

Shape legend: B asks, T question and answer tokens (padded), S cached entries (padded), K kv heads, H head dim,
D hidden, P predictions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from c2kv_core import ComposedContext, hf_adapter
from c2kv_core.compose import check_positions


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A question and the answer to be learned, after a context."""

    context: ComposedContext
    question_ids: list[int]
    answer_ids: list[int]

    @property
    def ids(self) -> list[int]:
        """Question and answer."""
        return self.question_ids + self.answer_ids


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Which tokens are predicted: flat lists over all asks."""

    rows: Tensor
    """(P,) the ask."""
    places: Tensor
    """(P,) the token, within the ask's ids, whose hidden state predicts."""
    targets: Tensor
    """(P,) the id that follows."""
    in_answer: Tensor
    """(P,) bool: the target belongs to the answer."""


def predictions(
    asks: Sequence[tuple[list[int], list[int]]], *, questions: bool, device: torch.device
) -> Predictions:
    """Predictions of (question ids, answer ids): of the answers, or of all tokens but the first."""
    rows, places, targets, in_answer = [], [], [], []
    for row, (question, answer) in enumerate(asks):
        ids = question + answer
        for place in range(0 if questions else len(question) - 1, len(ids) - 1):
            rows.append(row)
            places.append(place)
            targets.append(ids[place + 1])
            in_answer.append(place + 1 >= len(question))
    return Predictions(
        rows=torch.tensor(rows, device=device),
        places=torch.tensor(places, device=device),
        targets=torch.tensor(targets, device=device),
        in_answer=torch.tensor(in_answer, device=device),
    )


def ask_states(model: PreTrainedModel, asks: Sequence[Ask], *, recompute: bool = False) -> Tensor:
    """Final hidden states (B, T, D); gradients flow to the contexts.

    Args:
        model: the frozen base.
        asks: contexts may differ in length.
        recompute: keep no activations of a layer but its input; compute it again in the backward pass.
    """
    device = model.device
    past_B = torch.tensor([a.context.cache.num_entries for a in asks], device=device)
    starts_B = torch.tensor([a.context.next_position for a in asks], device=device)
    length = max(len(a.ids) for a in asks)
    check_positions(model, max(a.context.next_position + len(a.ids) for a in asks))
    ids_BT = padded_ids([a.ids for a in asks], device)
    # Padded places keep within the model's positions; nobody reads them.
    positions = (starts_B[:, None] + torch.arange(length, device=device)).clamp(
        max=hf_adapter.max_positions(model) - 1
    )
    angles = hf_adapter.rotation(model, positions)
    mask = _mask(past_B, int(past_B.max()), length)
    hidden = hf_adapter.embed(model, ids_BT)
    for index, layer in enumerate(hf_adapter.decoder_layers(model)):
        keys = _stacked([a.context.cache.keys[index] for a in asks])
        values = _stacked([a.context.cache.values[index] for a in asks])

        def run(hidden: Tensor, keys: Tensor, values: Tensor, layer: hf_adapter.StockLayer = layer) -> Tensor:
            cache = _Past(keys, values)
            return hf_adapter.run_layer(
                layer, hidden, positions=positions, angles=angles, cache=cache, mask=mask
            )

        hidden = (
            checkpoint(run, hidden, keys, values, use_reentrant=False)
            if recompute
            else run(hidden, keys, values)
        )
    normed: Tensor = model.model.norm(hidden)
    return normed


def padded_ids(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """(B, T) ids, padded on the right with 0."""
    ids_BT = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64, device=device)
    for row, ids in enumerate(rows):
        ids_BT[row, : len(ids)] = torch.as_tensor(ids, dtype=torch.int64)
    return ids_BT


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


def _mask(past_B: Tensor, entries: int, tokens: int) -> Tensor:
    """(B, 1, T, S + T) bool: every token sees its own context and the tokens up to itself."""
    device = past_B.device
    seen_BS = torch.arange(entries, device=device) < past_B[:, None]
    past = seen_BS[:, None, None].expand(-1, 1, tokens, -1)
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
    return torch.cat([past, causal.expand(len(past_B), 1, -1, -1)], dim=-1)
