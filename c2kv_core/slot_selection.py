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


def selected_tokens(scores_BNK: Tensor, slots_B: Tensor, *, slots: int) -> Tensor:
    """(B, K, M) the tokens with the highest scores, as many as the document has slots, by place; the earlier of equals.

    What padded slots are given is a token of the batch, of no meaning.

    Args:
        scores_BNK: -inf for padded tokens.
        slots_B: of each document, at most its tokens.
        slots: M, the most of ``slots_B``.
    """
    tokens = scores_BNK.shape[1]
    best_BKM = scores_BNK.transpose(1, 2).sort(dim=-1, descending=True, stable=True).indices[..., :slots]
    own_BM = torch.arange(slots, device=slots_B.device) < slots_B[:, None]
    # Padded slots sort behind the others.
    return best_BKM.masked_fill(~own_BM[:, None], tokens).sort(dim=-1).values.clamp(max=tokens - 1)


def selected_kv(
    token_k_BKNH: Tensor, token_v_BKNH: Tensor, chosen_BKM: Tensor, slot_angles: hf_adapter.Rotation
) -> tuple[Tensor, Tensor]:
    """Keys and values (B, K, M, H) of the chosen tokens, from rotated keys.

    Keys are turned back by the slot's position, so that RoPE at the slot's place puts them where the token was.
    """
    index = chosen_BKM[..., None].expand(-1, -1, -1, token_k_BKNH.shape[-1])
    keys = hf_adapter.unrotate(token_k_BKNH.gather(2, index), slot_angles)
    return keys, token_v_BKNH.gather(2, index)
