"""Documents to slots (DESIGN 2): the frozen base over the tokens, the sidecar beside it over the slots.

Shape legend: B documents of a batch, N tokens (padded), M slots (padded), D hidden, K kv heads, Q query heads,
H head dim, L layers.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from c2kv_core import hf_adapter
from c2kv_core.architecture import check_supported
from c2kv_core.batching import length_batches
from c2kv_core.compose import check_ids
from c2kv_core.document import CompressedDocument
from c2kv_core.errors import ContextLengthError, InputError
from c2kv_core.sidecar import Sidecar
from c2kv_core.slot_selection import ranked_tokens
from c2kv_core.slot_stream import SlotStates, SlotStream


class Extractor:
    """Turns documents, each alone, into slots of a frozen model."""

    def __init__(
        self,
        model: PreTrainedModel,
        sidecar: Sidecar,
        *,
        max_batch_tokens: int = 4096,
        recompute: bool = False,
    ) -> None:
        """Bind a sidecar to its base.

        Args:
            model: the frozen base; it is put in evaluation mode and never changed.
            sidecar: trained for this base; moved to the model's device and dtype if it is elsewhere.
            max_batch_tokens: padded tokens of one batch; one longer document is a batch of its own.
            recompute: in training, keep no activations of a layer but its input (gradient checkpointing).

        Raises:
            UnsupportedModelError: the architecture breaks the method's maths.
            SidecarError: the sidecar is for a model of another shape.
        """
        check_supported(model.config)
        sidecar.check_base(model)
        self.model = model.eval()
        self.sidecar = sidecar.to(device=model.device, dtype=model.dtype)
        self.max_batch_tokens = max_batch_tokens
        self.recompute = recompute

    def extract(
        self, documents: Sequence[Sequence[int]], ratio: int, *, force_ratio: bool = False
    ) -> list[CompressedDocument]:
        """Slots of each document (one part each), in the order given.

        Args:
            documents: token ids, at least one a document.
            ratio: source tokens per slot, one the sidecar was trained for.
            force_ratio: allow a ratio it was not trained for.

        Raises:
            InputError: an empty document, named by its place; or a token id without an embedding.
            ContextLengthError: a document longer than the model's positions.
            RatioError: an untrained ratio, not forced.
        """
        return self.extract_ratios(documents, (ratio,), force_ratio=force_ratio)[ratio]

    def extract_ratios(
        self,
        documents: Sequence[Sequence[int]],
        ratios: Sequence[int],
        *,
        force_ratio: bool = False,
        finish: Callable[[CompressedDocument], CompressedDocument] | None = None,
    ) -> dict[int, list[CompressedDocument]]:
        """As ``extract``, for several ratios with one pass over the tokens: ``{ratio: documents}``.

        Args:
            documents: token ids, at least one a document.
            ratios: source tokens per slot.
            force_ratio: allow ratios the sidecar was not trained for.
            finish: turns each result into what is kept, as soon as it is there: many documents then take the memory
                of what is kept, not of what was computed.
        """
        if not force_ratio:
            for ratio in ratios:
                self.sidecar.config.require_ratio(ratio)
        self._check_documents(documents)
        found: dict[int, dict[int, CompressedDocument]] = {ratio: {} for ratio in ratios}
        lengths = [len(ids) for ids in documents]
        with torch.no_grad():
            for batch in length_batches(lengths, max_tokens=self.max_batch_tokens):
                for states in self.states([documents[i] for i in batch], ratios):
                    single = len(batch) == 1
                    for i, document in zip(batch, states.documents(), strict=True):
                        own = document if single else _own_memory(document)
                        found[states.ratio][i] = own if finish is None else finish(own)
        return {ratio: [by_place[i] for i in range(len(documents))] for ratio, by_place in found.items()}

    def states(self, documents: Sequence[Sequence[int]], ratios: Sequence[int]) -> list[SlotStates]:
        """Slots of one batch at each ratio, differentiable in the sidecar. Token states carry no gradient."""
        device = self.model.device
        lengths = tuple(len(ids) for ids in documents)
        ids_BN = torch.zeros(len(documents), max(lengths), dtype=torch.int64, device=device)
        for row, ids in enumerate(documents):
            ids_BN[row, : len(ids)] = torch.as_tensor(ids, dtype=torch.int64)
        streams = [
            SlotStream(self.model, self.sidecar, ids_BN, lengths, ratio, recompute=self.recompute)
            for ratio in ratios
        ]
        layers = hf_adapter.decoder_layers(self.model)
        lengths_B = torch.tensor(lengths, device=device)
        selects = self.sidecar.config.selection != "none"
        for index, tokens in enumerate(_token_states(self.model, ids_BN, last=selects)):
            # Of the tokens alone, so the same for every ratio.
            ranked = self._ranked(index, layers[index], tokens.hidden, lengths_B) if selects else None
            for stream in streams:
                if index + 1 < len(layers):
                    stream.step(index, layers[index], tokens.keys, tokens.values, ranked)
                else:
                    stream.finish(layers[index], tokens.keys, tokens.values, ranked)
        if not selects:
            for stream in streams:
                stream.finish(layers[-1])
        return [stream.states() for stream in streams]

    @torch.no_grad()
    def _ranked(
        self, index: int, layer: hf_adapter.StockLayer, hidden_BND: Tensor, lengths_B: Tensor
    ) -> Tensor:
        """(B, K, N) the tokens in the order in which each kv head of a layer wants them."""
        scores_BNK = self.sidecar.scores(index, hf_adapter.inside(layer, layer.input_layernorm, hidden_BND))
        return ranked_tokens(scores_BNK, lengths_B)

    def _check_documents(self, documents: Sequence[Sequence[int]]) -> None:
        limit = hf_adapter.max_positions(self.model)
        for place, ids in enumerate(documents):
            if len(ids) == 0:
                raise InputError(
                    f"expected at least one token in document {place}, got none; leave empty ones out"
                )
            if len(ids) > limit:
                raise ContextLengthError(
                    f"document {place} has {len(ids)} tokens, the model {limit} positions; split it into parts"
                )
            check_ids(self.model, ids)


class _CaptureCache:
    """Hands a stock layer its own keys and values back and keeps them for the slots."""

    def __init__(self) -> None:
        self.kv: tuple[Tensor, Tensor] | None = None

    def update(self, keys: Tensor, values: Tensor, layer: int, **extra: Any) -> tuple[Tensor, Tensor]:
        self.kv = (keys, values)
        return keys, values


class TokenStates(NamedTuple):
    """The tokens in one layer."""

    hidden: Tensor
    """(B, N, D), the layer's input."""
    keys: Tensor
    """(B, K, N, H), rotated."""
    values: Tensor
    """(B, K, N, H)."""


@torch.no_grad()
def _token_states(model: PreTrainedModel, ids_BN: Tensor, *, last: bool) -> Iterator[TokenStates]:
    """States of the tokens, layer by layer. Attention of slots does not read the last layer: it comes if ``last``.

    Padding stands to the right, so plain causal attention keeps it from every real token.
    """
    positions = torch.arange(ids_BN.shape[1], device=ids_BN.device).expand_as(ids_BN)
    angles = hf_adapter.rotation(model, positions)
    hidden = hf_adapter.embed(model, ids_BN)
    *layers, last_layer = hf_adapter.decoder_layers(model)
    for layer in layers:
        capture, before = _CaptureCache(), hidden
        hidden = hf_adapter.run_layer(
            layer, hidden, positions=positions, angles=angles, cache=capture, mask=None
        )
        assert capture.kv is not None, "a stock decoder layer always updates its cache"
        yield TokenStates(before, *capture.kv)
    if last:
        keys, values = hf_adapter.inside(last_layer, partial(hf_adapter.project_kv, last_layer), hidden)
        yield TokenStates(hidden, hf_adapter.rotate(keys, angles), values)


def _own_memory(document: CompressedDocument) -> CompressedDocument:
    """A copy that does not keep the whole padded batch alive."""
    return CompressedDocument(
        keys=document.keys.clone(),
        values=document.values.clone(),
        slot_positions=document.slot_positions,
        num_tokens=document.num_tokens,
        ratio=document.ratio,
        head_slots=document.head_slots,
    )
