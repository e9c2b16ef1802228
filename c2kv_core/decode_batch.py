"""One decode step of several answers at once, each over a context of its own length.

The layers' projections and MLPs run over all answers as one batch; attention runs answer by answer, over exactly the
entries that answer has. So nothing is padded, answers join and leave between any two steps without a copy, and the
weights, which bound a single answer's speed, are read once a step for all.

Shape legend: B answers, D hidden, Q query heads, K kv heads, S entries of one answer, H head dim, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from c2kv_core import hf_adapter
from c2kv_core.generate import Decoder


@torch.no_grad()
def step_together(model: PreTrainedModel, decoders: Sequence[Decoder], tokens: Sequence[int]) -> Tensor:
    """Logits (B, V) of the token after ``tokens[i]`` in answer i.

    Equals ``decoders[i].step(tokens[i])`` up to the rounding of matrix products of another shape. After an error
    every answer can go on as from before.

    Args:
        model: the base that all decoders answer with.
        decoders: different answers whose questions are prefilled.
        tokens: the last token drawn of each.
    """
    device = model.device
    ids_1B = torch.tensor([list(tokens)], device=device)
    positions_1B = torch.tensor([[decoder.position for decoder in decoders]], device=device)
    hidden_1BD = hf_adapter.embed(model, ids_1B)
    angles = hf_adapter.rotation(model, positions_1B)
    for decoder in decoders:
        decoder.rewind()
    for index, layer in enumerate(hf_adapter.decoder_layers(model)):
        hidden_1BD = _layer(layer, index, hidden_1BD, angles, decoders)
    logits_BV = hf_adapter.logits(model, hf_adapter.final_norm(model, hidden_1BD)[0])
    for decoder in decoders:
        decoder.advance(1)
    return logits_BV


def _layer(
    layer: hf_adapter.StockLayer,
    index: int,
    hidden_1BD: Tensor,
    angles: hf_adapter.Rotation,
    decoders: Sequence[Decoder],
) -> Tensor:
    attention = layer.self_attn
    normed_1BD = layer.input_layernorm(hidden_1BD)
    q_1QBH = hf_adapter.rotate(hf_adapter.project_heads(attention, "q", attention.q_proj(normed_1BD)), angles)
    k_1KBH = hf_adapter.rotate(hf_adapter.project_heads(attention, "k", attention.k_proj(normed_1BD)), angles)
    v_1KBH = hf_adapter.project_heads(attention, "v", attention.v_proj(normed_1BD))
    scale = hf_adapter.attention_scale(attention)
    attended = []
    for place, decoder in enumerate(decoders):
        one = slice(place, place + 1)
        keys_1KSH, values_1KSH = decoder.cache.update(k_1KBH[:, :, one], v_1KBH[:, :, one], index)
        attended.append(
            scaled_dot_product_attention(
                q_1QBH[:, :, one], keys_1KSH, values_1KSH, scale=scale, enable_gqa=True
            )
        )
    attended_1BQH = torch.cat(attended, dim=2).transpose(1, 2)
    return hf_adapter.finish_layer(layer, hidden_1BD, attended_1BQH.flatten(2))
