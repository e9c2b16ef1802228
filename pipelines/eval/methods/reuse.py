"""Naive reuse: each document's full cache, prefilled alone, moved to its place and used without any recompute."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from c2kv_core import CompressedDocument, compose, hf_adapter
from c2kv_core.batching import length_batches
from c2kv_core.models import parse_dtype
from pipelines.eval.case import Case
from pipelines.eval.methods.method import MethodContext, Setup

BATCH_TOKENS = 4096
"""Padded tokens of one batch of documents."""


class NaiveReuse:
    """The base's own keys and values, one entry a token: ratio 1 without a sidecar."""

    def __init__(self, setup: Setup) -> None:
        self._model = setup.compressor.model
        self._dtype = parse_dtype(setup.config.slot_dtype)

    def contexts(self, case: Case) -> list[MethodContext]:
        """See ``Method``."""
        stored = [document.to(self._dtype) for document in token_documents(self._model, case.parts)]
        context = compose(self._model, case.prefix, stored)
        return [MethodContext(ratio=1, context=context, entries=case.source_tokens)]


@torch.no_grad()
def token_documents(model: PreTrainedModel, parts: Sequence[Sequence[int]]) -> list[CompressedDocument]:
    """Full keys (before RoPE) and values of each part, prefilled alone, in the form of slots at every token."""
    made: dict[int, CompressedDocument] = {}
    for batch in length_batches([len(ids) for ids in parts], max_tokens=BATCH_TOKENS):
        longest = max(len(parts[i]) for i in batch)
        # Padding stands to the right, where plain causal attention keeps it from every real token.
        ids_BN = torch.tensor([[*parts[i], *[0] * (longest - len(parts[i]))] for i in batch])
        keys, values = _token_kv(model, ids_BN.to(model.device))
        for row, i in enumerate(batch):
            length = len(parts[i])
            made[i] = CompressedDocument(
                keys=keys[:, row, :, :length],
                values=values[:, row, :, :length],
                slot_positions=torch.arange(length),
                num_tokens=length,
                ratio=1,
            )
    return [made[i] for i in range(len(parts))]


def _token_kv(model: PreTrainedModel, ids_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Keys before RoPE and values of all layers, (L, B, K, N, H) each."""
    positions = torch.arange(ids_BN.shape[1], device=ids_BN.device).expand_as(ids_BN)
    angles = hf_adapter.rotation(model, positions)
    hidden = hf_adapter.embed(model, ids_BN)
    layers = hf_adapter.decoder_layers(model)
    keys, values = [], []
    for index, layer in enumerate(layers):
        own_keys, own_values = hf_adapter.project_kv(layer, hidden)
        keys.append(own_keys)
        values.append(own_values)
        if index + 1 < len(layers):
            hidden = hf_adapter.run_layer(
                layer, hidden, positions=positions, angles=angles, cache=_NoCache(), mask=None
            )
    return torch.stack(keys), torch.stack(values)


class _NoCache:
    """Hands a layer its own keys and values back."""

    def update(self, keys: Tensor, values: Tensor, layer: int, **extra: Any) -> tuple[Tensor, Tensor]:
        """See ``hf_adapter.LayerCache``."""
        return keys, values
