"""CacheBlend: naive reuse, then the tokens whose values deviate most are computed again.

Source: Yao et al., CacheBlend (arXiv 2405.16444), section 4, in the form of the authors' released code: layers 0 and 1
are computed for all tokens; the share of tokens with the largest squared difference between computed and reused values
at layer 1 goes on through the later layers, where their keys and values replace the reused ones. (The paper also
narrows that set from layer to layer; the released code does not.)

Shape legend: T document tokens, S entries of prefix and documents.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from c2kv_core import ComposedContext, compose, hf_adapter
from c2kv_core.cache import ContextCache
from c2kv_core.models import parse_dtype
from pipelines.eval.case import Case
from pipelines.eval.methods.method import MethodContext, Setup
from pipelines.eval.methods.reuse import token_documents

CHECK_LAYER = 1
"""Layer at which the deviation is taken."""


class CacheBlend:
    """Reused caches with selective recompute of ``recompute_share`` of the document tokens."""

    def __init__(self, setup: Setup) -> None:
        self._model = setup.compressor.model
        self._dtype = parse_dtype(setup.config.slot_dtype)
        self._share = setup.config.recompute_share

    def contexts(self, case: Case) -> list[MethodContext]:
        """See ``Method``."""
        stored = [document.to(self._dtype) for document in token_documents(self._model, case.parts)]
        reused = compose(self._model, case.prefix, stored)
        context = blend(self._model, reused, case.source_ids, share=self._share)
        return [MethodContext(ratio=1, context=context, entries=case.source_tokens)]


@torch.no_grad()
def blend(
    model: PreTrainedModel, reused: ComposedContext, document_ids: Sequence[int], *, share: float
) -> ComposedContext:
    """Recompute a share of the document tokens, which are the last entries of the context.

    Args:
        model: the frozen base.
        reused: prefix and naively reused documents, one entry a token; it is not changed.
        document_ids: token ids of all documents in order.
        share: of the document tokens that are computed in the layers after ``CHECK_LAYER``.
    """
    tokens, entries = len(document_ids), reused.cache.num_entries
    cache = _PatchedCache(reused.cache, torch.arange(entries - tokens, entries, device=model.device))
    ids = torch.as_tensor(document_ids, dtype=torch.int64, device=model.device)[None]
    positions = torch.arange(reused.next_position - tokens, reused.next_position, device=model.device)[None]
    mask = torch.ones(tokens, entries, dtype=torch.bool, device=model.device).tril(entries - tokens)
    hidden = hf_adapter.embed(model, ids)
    for index, layer in enumerate(hf_adapter.decoder_layers(model)):
        hidden = hf_adapter.run_layer(
            layer,
            hidden,
            positions=positions,
            angles=hf_adapter.rotation(model, positions),
            cache=cache,
            mask=mask[None, None],
        )
        if index == CHECK_LAYER:
            chosen = _most_deviant(reused.cache.values[index], cache.values[index], tokens, share)
            hidden, positions, mask = hidden[:, chosen], positions[:, chosen], mask[chosen]
            cache.places = cache.places[chosen]
    return ComposedContext(
        cache=ContextCache(keys=tuple(cache.keys), values=tuple(cache.values)),
        next_position=reused.next_position,
    )


def _most_deviant(reused: Tensor, computed: Tensor, tokens: int, share: float) -> Tensor:
    """Places among the document tokens, ascending, where (1, K, S, H) values differ most."""
    deviation_T = (computed - reused)[0, :, -tokens:].float().square().sum(dim=(0, 2))
    count = max(1, int(tokens * share))
    return deviation_T.topk(count).indices.sort().values


class _PatchedCache:
    """A copy of a context in which new keys and values replace those at ``places``."""

    def __init__(self, context: ContextCache, places: Tensor) -> None:
        self.keys = [k.clone() for k in context.keys]
        self.values = [v.clone() for v in context.values]
        self.places = places

    def update(self, keys: Tensor, values: Tensor, layer: int, **extra: Any) -> tuple[Tensor, Tensor]:
        """See ``hf_adapter.LayerCache``."""
        self.keys[layer][:, :, self.places] = keys
        self.values[layer][:, :, self.places] = values
        return self.keys[layer], self.values[layer]
