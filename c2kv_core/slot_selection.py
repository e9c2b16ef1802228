"""What the option ``selection`` makes of slots: each head of a slot starts from one token of the document.

A slot that is a copy of its block's last token hides the other tokens from every head. With ``topk`` a learned linear
map of the token's normed state says, for every layer and kv head, how much that head wants of each token; as many as
there are slots are kept, in their order. Their keys and values are the slots', and what the slot projections add to the
base's is added to them. The idea that heads keep tokens of their own, and that attention while a text is repeated tells
which, is KVzip's (arXiv 2505.23416).

Shape legend: B documents, N tokens (padded), M slots (padded), D hidden, K kv heads, H head dim, k ratio.
"""

import torch
from torch import Tensor

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
