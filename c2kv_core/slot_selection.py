"""What the option ``selection`` makes of slots: each head of a slot starts from one token of its block.

A slot that is a copy of its block's last token hides the other tokens from every head. With ``scored`` a learned linear
map of the token's normed state says, for every layer and kv head, which token of the block that head keeps; its key
and value are the slot's, and what the slot projections add to the base's is added to them. The idea that heads keep
tokens of their own, and that attention while a text is repeated tells which, is KVzip's (arXiv 2505.23416).

Shape legend: B documents, N tokens (padded), M slots (padded), D hidden, K kv heads, H head dim, k ratio.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from c2kv_core import hf_adapter


def selected_tokens(scores_BNK: Tensor, lengths_B: Tensor, *, slots: int, ratio: int) -> Tensor:
    """(B, K, M) the token of each block with the highest score, the later of equals.

    What padded slots are given is a token of the batch, of no meaning.
    """
    batch, tokens, heads = scores_BNK.shape
    real_BN = torch.arange(tokens, device=scores_BNK.device) < lengths_B[:, None]
    masked = scores_BNK.float().masked_fill(~real_BN[..., None], float("-inf"))
    blocks_BMkK = F.pad(masked, (0, 0, 0, slots * ratio - tokens), value=float("-inf")).view(
        batch, slots, ratio, heads
    )
    # argmax takes the first of equals.
    from_end_BMK = blocks_BMkK.flip(2).argmax(dim=2)
    starts_M = torch.arange(slots, device=scores_BNK.device) * ratio
    chosen_BMK = starts_M[:, None] + (ratio - 1 - from_end_BMK)
    return chosen_BMK.clamp(max=tokens - 1).transpose(1, 2)


def selected_kv(
    token_k_BKNH: Tensor, token_v_BKNH: Tensor, chosen_BKM: Tensor, slot_angles: hf_adapter.Rotation
) -> tuple[Tensor, Tensor]:
    """Keys and values (B, K, M, H) of the chosen tokens, from rotated keys.

    Keys are turned back by the slot's position, so that RoPE at the slot's place puts them where the token was.
    """
    index = chosen_BKM[..., None].expand(-1, -1, -1, token_k_BKNH.shape[-1])
    keys = hf_adapter.unrotate(token_k_BKNH.gather(2, index), slot_angles)
    return keys, token_v_BKNH.gather(2, index)
