"""What the option ``selection`` makes of slots: heads start from tokens of the document.

A slot that is a copy of its block's last token hides the other tokens from every head. With ``topk`` a learned linear
map of the token's normed state says, for every layer and kv head, how much that head wants of each token; as many as
there are slots are kept, in their order. Their keys and values are the slots', and what the slot projections add to the
base's is added to them. The idea that heads keep tokens of their own, and that attention while a text is repeated tells
which, is KVzip's (arXiv 2505.23416). With ``heads`` a head keeps as many as ``head_slots`` gives it, and what is added
to a token is what the slot of its block adds.

Shape legend: B documents, N tokens (padded), M slots (padded), D hidden, K kv heads, H head dim, k ratio, E entries.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from c2kv_core import hf_adapter


def ranked_tokens(scores_BNK: Tensor, lengths_B: Tensor) -> Tensor:
    """(B, K, N) places of the tokens, highest score first, of equals the earlier; padding last."""
    padding_BN = torch.arange(scores_BNK.shape[1], device=lengths_B.device) >= lengths_B[:, None]
    masked = scores_BNK.masked_fill(padding_BN[..., None], float("-inf"))
    return masked.transpose(1, 2).sort(dim=-1, descending=True, stable=True).indices


def selected_tokens(ranked_BKN: Tensor, slots_B: Tensor, *, slots: int) -> Tensor:
    """(B, K, M) the best tokens, as many as the document has slots, by place.

    What padded slots are given is a token of the batch, of no meaning.

    Args:
        ranked_BKN: of ``ranked_tokens``.
        slots_B: of each document, at most its tokens.
        slots: M, the most of ``slots_B``.
    """
    tokens = ranked_BKN.shape[2]
    own_BM = torch.arange(slots, device=slots_B.device) < slots_B[:, None]
    # Padded slots sort behind the others.
    best_BKM = ranked_BKN[..., :slots].masked_fill(~own_BM[:, None], tokens)
    return best_BKM.sort(dim=-1).values.clamp(max=tokens - 1)


def selected_kv(
    token_k_BKNH: Tensor, token_v_BKNH: Tensor, chosen_BKM: Tensor, slot_angles: hf_adapter.Rotation
) -> tuple[Tensor, Tensor]:
    """Keys and values (B, K, M, H) of the chosen tokens, from rotated keys.

    Keys are turned back by the slot's position, so that RoPE at the slot's place puts them where the token was.
    """
    index = chosen_BKM[..., None].expand(-1, -1, -1, token_k_BKNH.shape[-1])
    keys = hf_adapter.unrotate(token_k_BKNH.gather(2, index), slot_angles)
    return keys, token_v_BKNH.gather(2, index)


def kept_tokens(ranked_BKN: Tensor, counts_BK: Tensor) -> Tensor:
    """(B, K, N) bool: the best tokens of each head, as many as it has entries."""
    places = torch.arange(ranked_BKN.shape[2], device=ranked_BKN.device).expand_as(ranked_BKN)
    ranks_BKN = torch.empty_like(ranked_BKN).scatter_(2, ranked_BKN, places)
    return ranks_BKN < counts_BK[..., None]


def kept_entries(token_x_BKNH: Tensor, added_BKMH: Tensor, kept_BKN: Tensor, *, ratio: int) -> Tensor:
    """(E, H) of the kept tokens, document by document, head by head, with what the slot of its block adds to each."""
    rows, heads, tokens = kept_BKN.nonzero(as_tuple=True)
    return token_x_BKNH[rows, heads, tokens] + added_BKMH[rows, heads, tokens // ratio]


def entries_by_document(layers: Sequence[Tensor], counts_BLK: Tensor) -> list[Tensor]:
    """(E, H) of each document: its entries of all layers, one layer after the other.

    Args:
        layers: (E, H) of each, as ``kept_entries`` gives them.
        counts_BLK: entries of each head.
    """
    by_layer = [
        entries.split(sizes) for entries, sizes in zip(layers, counts_BLK.sum(2).T.tolist(), strict=True)
    ]
    return [torch.cat(pieces) for pieces in zip(*by_layer, strict=True)]


def padded_slots(documents: Sequence[Tensor], *, layers: int, heads: int) -> Tensor:
    """(L, B, K, M, H): the entries of documents (L*K*M, H) each, in tensors of their slots' shape."""
    shaped = [x.view(layers, heads, -1, x.shape[1]) for x in documents]
    most = max(x.shape[2] for x in shaped)
    return torch.stack([functional.pad(x, (0, 0, 0, most - x.shape[2])) for x in shaped], dim=1)
