"""One step of several answers at once, each over a context of its own length and with tokens of its own number.

The layers' projections and MLPs run over the tokens of all answers as one batch; attention runs answer by answer, over
exactly the entries that answer has. So nothing is padded, answers join and leave between any two steps without a copy,
the weights, which bound a single answer's speed, are read once a step for all, and a question that is being read
(many tokens) costs answers that are being decoded (one token each) little.

Shape legend: B answers, N tokens of all answers, T tokens of one, D hidden, Q query heads, K kv heads, S entries of one
answer, H head dim, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from c2kv_core import hf_adapter

if TYPE_CHECKING:
    from c2kv_core.generate import Decoder


@dataclass(frozen=True, kw_only=True)
class _Share:
    """One answer's part of a step."""

    decoder: "Decoder"
    tokens: slice
    """Its places among all tokens."""


@torch.no_grad()
def step_together(
    model: PreTrainedModel, decoders: Sequence["Decoder"], ids: Sequence[Sequence[int]]
) -> Tensor:
    """Logits (B, V) of the token after the last of ``ids[i]`` in answer i.

    Equals feeding ``ids[i]`` to ``decoders[i]`` alone up to the rounding of matrix products of another shape. After an
    error every answer can go on as from before.

    Args:
        model: the base that all decoders answer with.
        decoders: different answers.
        ids: of each, a chunk of its question, or the last token drawn.
    """
    device = model.device
    ids_1N = torch.tensor([[token for some in ids for token in some]], device=device)
    positions_1N = torch.cat(
        [torch.arange(d.position, d.position + len(i)) for d, i in zip(decoders, ids, strict=True)]
    )[None].to(device)
    shares = _shares(decoders, ids)
    hidden_1ND = hf_adapter.embed(model, ids_1N)
    angles = hf_adapter.rotation(model, positions_1N)
    for decoder in decoders:
        decoder.rewind()
    for index, layer in enumerate(hf_adapter.decoder_layers(model)):
        hidden_1ND = _layer(layer, index, hidden_1ND, angles, shares)
    last_BD = hidden_1ND[0, [share.tokens.stop - 1 for share in shares]]
    logits_BV = hf_adapter.logits(model, hf_adapter.final_norm(model, last_BD))
    for decoder, some in zip(decoders, ids, strict=True):
        decoder.advance(len(some))
    return logits_BV


def _shares(decoders: Sequence["Decoder"], ids: Sequence[Sequence[int]]) -> list[_Share]:
    shares = []
    start = 0
    for decoder, some in zip(decoders, ids, strict=True):
        shares.append(_Share(decoder=decoder, tokens=slice(start, start + len(some))))
        start += len(some)
    return shares


def _layer(
    layer: hf_adapter.StockLayer,
    index: int,
    hidden_1ND: Tensor,
    angles: hf_adapter.Rotation,
    shares: Sequence[_Share],
) -> Tensor:
    attention = layer.self_attn
    normed_1ND = layer.input_layernorm(hidden_1ND)
    q_1QNH = hf_adapter.rotate(hf_adapter.project_heads(attention, "q", attention.q_proj(normed_1ND)), angles)
    k_1KNH = hf_adapter.rotate(hf_adapter.project_heads(attention, "k", attention.k_proj(normed_1ND)), angles)
    v_1KNH = hf_adapter.project_heads(attention, "v", attention.v_proj(normed_1ND))
    scale = hf_adapter.attention_scale(attention)
    attended = []
    for share in shares:
        attended.append(
            share.decoder.cache.attend(
                q_1QNH[:, :, share.tokens],
                k_1KNH[:, :, share.tokens],
                v_1KNH[:, :, share.tokens],
                index,
                scale=scale,
            )
        )
    attended_1NQH = torch.cat(attended, dim=2).transpose(1, 2)
    return hf_adapter.finish_layer(layer, hidden_1ND, attended_1NQH.flatten(2))
