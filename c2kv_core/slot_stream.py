"""Slots on their way through the layers: what the sidecar computes beside the frozen base (DESIGN 2).

Shape legend: B documents of a batch, N tokens (padded), M slots (padded), D hidden, K kv heads, H head dim, L layers,
E entries of all heads of a layer.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from c2kv_core import hf_adapter
from c2kv_core.document import CompressedDocument
from c2kv_core.head_slots import entry_positions, head_slots
from c2kv_core.sidecar import Sidecar
from c2kv_core.sidecar_config import SHARING
from c2kv_core.slot_attention import slot_attention
from c2kv_core.slot_residual import SlotResidual
from c2kv_core.slot_selection import (
    entries_by_document,
    kept_entries,
    kept_tokens,
    padded_slots,
    selected_kv,
    selected_tokens,
)
from c2kv_core.slots import slot_count, slot_positions


@dataclass(frozen=True, kw_only=True)
class SlotStates:
    """Slots of a batch at one ratio, padded on the right; gradients flow to the sidecar."""

    keys: Tensor
    """(L, B, K, M, H), before RoPE."""
    values: Tensor
    """(L, B, K, M, H)."""
    lengths: tuple[int, ...]
    """Source tokens of each document."""
    ratio: int
    head_slots_BLK: Tensor | None = None
    """(B, L, K) int64 entries of each head, where they are not M: then ``keys`` and ``values`` hold them as a
    ``CompressedDocument`` does."""

    def documents(self) -> list[CompressedDocument]:
        """The documents without padding; tensors are views."""
        made = []
        for row, length in enumerate(self.lengths):
            slots = slot_count(length, self.ratio)
            made.append(
                CompressedDocument(
                    keys=self.keys[:, row, :, :slots],
                    values=self.values[:, row, :, :slots],
                    slot_positions=slot_positions(length, self.ratio),
                    num_tokens=length,
                    ratio=self.ratio,
                    head_slots=None if self.head_slots_BLK is None else self.head_slots_BLK[row],
                )
            )
        return made


class _SlotKv(NamedTuple):
    """Keys and values of a layer's slots."""

    seen: tuple[Tensor, Tensor]
    """(B, K, M, H) each, keys before RoPE: what later slots attend to."""
    stored: tuple[Tensor, Tensor]
    """The same, or the entries of all heads (E, H), keys rotated to their tokens' places."""


class SlotStream:
    """The slots of one batch at one ratio on their way through the layers."""

    def __init__(
        self,
        model: PreTrainedModel,
        sidecar: Sidecar,
        ids_BN: Tensor,
        lengths: tuple[int, ...],
        ratio: int,
        *,
        recompute: bool,
    ) -> None:
        self.model, self.sidecar, self.lengths, self.ratio = model, sidecar, lengths, ratio
        self.residual = SlotResidual(model, sidecar.config, ids_BN, lengths, ratio)
        self.recompute = recompute and torch.is_grad_enabled()
        device = model.device
        counts = [slot_count(length, ratio) for length in lengths]
        slots = max(counts)
        positions = torch.zeros(len(lengths), slots, dtype=torch.int64)
        for row, length in enumerate(lengths):
            positions[row, : counts[row]] = slot_positions(length, ratio)
        positions = positions.to(device)
        self.angles = hf_adapter.rotation(model, positions)
        self.lengths_B = torch.tensor(lengths, device=device)
        self.slots_B = torch.tensor(counts, device=device)
        self.hidden = self.residual.start(sidecar.slot_embedding.expand(len(lengths), slots, -1), positions)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.counts_BLK: Tensor | None = None
        if sidecar.config.selection == SHARING:
            shares_LKP = sidecar.shares()
            self.counts_BLK = torch.stack(
                [head_slots(shares_LKP, num_tokens=n, slots=m) for n, m in zip(lengths, counts, strict=True)]
            )

    def step(self, index: int, layer: hf_adapter.StockLayer, *tokens: Tensor | None) -> None:
        """Run one layer; its stored keys and values are kept. ``tokens``: their keys, values and ranking (or None)."""
        body = partial(self._layer, index, layer)
        if self.recompute:
            made = checkpoint(body, self.hidden, *tokens, use_reentrant=False)
        else:
            made = body(self.hidden, *tokens)
        self.hidden, k, v = made
        self.keys.append(k)
        self.values.append(v)

    def finish(self, layer: hf_adapter.StockLayer, *tokens: Tensor | None) -> None:
        """The last layer: only its keys and values are stored, so nothing attends there.

        Args:
            layer: of the base.
            *tokens: as for ``step``; none where slots select none of them.
        """
        k, v = hf_adapter.inside(layer, partial(self._last, len(self.keys), layer), self.hidden, *tokens)
        self.keys.append(k)
        self.values.append(v)

    def _normed(self, index: int, layer: hf_adapter.StockLayer, hidden: Tensor) -> Tensor:
        normed = layer.input_layernorm(hidden)
        return self.residual.projected(normed, layer) if index == 0 else normed

    def _project(self, index: int, layer: hf_adapter.StockLayer, name: str, normed: Tensor) -> Tensor:
        attention = layer.self_attn
        return hf_adapter.project_heads(attention, name, self.sidecar.project(index, name, normed, attention))

    def _last(
        self, index: int, layer: hf_adapter.StockLayer, hidden: Tensor, *tokens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return self._key_values(index, layer, self._normed(index, layer, hidden), *tokens).stored

    def _key_values(
        self,
        index: int,
        layer: hf_adapter.StockLayer,
        normed: Tensor,
        token_k: Tensor | None = None,
        token_v: Tensor | None = None,
        ranked: Tensor | None = None,
    ) -> _SlotKv:
        """Keys and values of the slots; without a ranking, of their own projections alone."""
        if ranked is None or token_k is None or token_v is None:
            own = (self._project(index, layer, "k", normed), self._project(index, layer, "v", normed))
            return _SlotKv(seen=own, stored=own)
        attention = layer.self_attn
        with torch.no_grad():
            chosen = selected_tokens(ranked, self.slots_B, slots=normed.shape[1])
            kept_k, kept_v = selected_kv(token_k, token_v, chosen, self.angles)
        added_k, added_v = (
            hf_adapter.added_heads(
                attention, name, self.sidecar.added(index, name, normed, attention), normed=normed
            )
            for name in ("k", "v")
        )
        seen = (kept_k + added_k, kept_v + added_v)
        if self.counts_BLK is None:
            return _SlotKv(seen=seen, stored=seen)
        kept = kept_tokens(ranked, self.counts_BLK[:, index].to(ranked.device))
        turned_k = hf_adapter.rotate(added_k, self.angles)
        return _SlotKv(
            seen=seen,
            stored=(
                kept_entries(token_k, turned_k, kept, ratio=self.ratio),
                kept_entries(token_v, added_v, kept, ratio=self.ratio),
            ),
        )

    def _layer(
        self, index: int, layer: hf_adapter.StockLayer, hidden: Tensor, *tokens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states after a layer, and what it stores. Changes nothing, so that it can run twice."""
        return hf_adapter.inside(layer, partial(self._attend, index, layer), hidden, *tokens)

    def _attend(
        self,
        index: int,
        layer: hf_adapter.StockLayer,
        hidden: Tensor,
        token_k: Tensor,
        token_v: Tensor,
        ranked: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        normed = self._normed(index, layer, hidden)
        q = self._project(index, layer, "q", normed)
        made = self._key_values(index, layer, normed, token_k, token_v, ranked)
        k, v = made.seen
        attended = slot_attention(
            hf_adapter.rotate(q, self.angles),
            hf_adapter.rotate(k, self.angles),
            v,
            token_k,
            token_v,
            lengths_B=self.lengths_B,
            ratio=self.ratio,
            overlap_tokens=self.sidecar.config.overlap_tokens,
            scale=hf_adapter.attention_scale(layer.self_attn),
        )
        return hf_adapter.finish_layer(layer, hidden, attended), *made.stored

    def states(self) -> SlotStates:
        if self.counts_BLK is None:
            keys, values = torch.stack(self.keys), torch.stack(self.values)
        else:
            keys, values = self._shared_out(self.counts_BLK)
        return SlotStates(
            keys=keys,
            values=values,
            lengths=self.lengths,
            ratio=self.ratio,
            head_slots_BLK=self.counts_BLK,
        )

    def _shared_out(self, counts_BLK: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as ``CompressedDocument`` has them, (L, B, K, M, H)."""
        _, layers, heads = counts_BLK.shape
        keys = [
            self._unrotated(entries_EH, entry_positions(counts_LK, num_tokens=length))
            for entries_EH, counts_LK, length in zip(
                entries_by_document(self.keys, counts_BLK), counts_BLK, self.lengths, strict=True
            )
        ]
        values = entries_by_document(self.values, counts_BLK)
        return (
            padded_slots(keys, layers=layers, heads=heads),
            padded_slots(values, layers=layers, heads=heads),
        )

    def _unrotated(self, keys_EH: Tensor, positions_E: Tensor) -> Tensor:
        """Keys that stand where their tokens were, so that RoPE at these positions brings them there."""
        places = torch.arange(max(self.lengths), device=keys_EH.device)[None]
        cos, sin = (x[:, positions_E.to(keys_EH.device)] for x in hf_adapter.rotation(self.model, places))
        return hf_adapter.unrotate(keys_EH[None, None], (cos, sin))[0, 0]
