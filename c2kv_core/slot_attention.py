"""Attention of slots: sink block, own block and earlier slots in one softmax, in memory linear in the document.

Shape legend: B documents, N tokens (padded), M slots (padded), K kv heads, G query heads a kv head, H head dim,
k ratio, W tokens of a slot's own block (ratio + overlap), C slots of a chunk.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_SLOTS = 256
"""Slots whose scores are held at once: bounds memory at CHUNK_SLOTS x M scores a head, never (N + M)²."""


def slot_attention(
    q_BQMH: Tensor,
    slot_k_BKMH: Tensor,
    slot_v_BKMH: Tensor,
    token_k_BKNH: Tensor,
    token_v_BKNH: Tensor,
    *,
    lengths_B: Tensor,
    ratio: int,
    overlap_tokens: int,
    scale: float,
) -> Tensor:
    """What each slot reads: (B, M, Q*H).

    Slot j sees tokens [0, min(n, k)), tokens [jk - overlap, min((j+1)k, n)) and slots 0..j; a token in both token
    sets counts once. Queries and keys are rotated. Documents are padded on the right to N tokens and M slots; what
    padded slots return is meaningless and is read by no real slot.
    """
    batch, heads, slots, dim = q_BQMH.shape
    kv_heads = slot_k_BKMH.shape[1]
    q_BKGMH = (q_BQMH * scale).view(batch, kv_heads, heads // kv_heads, slots, dim)
    sink = min(ratio, token_k_BKNH.shape[2])
    sink_k, sink_v = token_k_BKNH[:, :, :sink], token_v_BKNH[:, :, :sink]
    own_k, own_v = (_own_blocks(x, slots, ratio, overlap_tokens) for x in (token_k_BKNH, token_v_BKNH))
    hidden = _hidden_tokens(lengths_B, slots, ratio=ratio, overlap_tokens=overlap_tokens, sink=sink)
    outs = []
    for start in range(0, slots, CHUNK_SLOTS):
        end = min(start + CHUNK_SLOTS, slots)
        outs.append(
            _attend_chunk(
                q_BKGMH[:, :, :, start:end],
                (sink_k, sink_v),
                (own_k[:, :, start:end], own_v[:, :, start:end]),
                (slot_k_BKMH[:, :, :end], slot_v_BKMH[:, :, :end]),
                hidden[:, start:end],
            )
        )
    out_BKGMH = outs[0] if len(outs) == 1 else torch.cat(outs, dim=3)
    return out_BKGMH.reshape(batch, heads, slots, dim).transpose(1, 2).reshape(batch, slots, heads * dim)


def _own_blocks(x_BKNH: Tensor, slots: int, ratio: int, overlap_tokens: int) -> Tensor:
    """The block of each slot, (B, K, M, W, H); places outside the document are zeros that the mask hides."""
    right = slots * ratio - x_BKNH.shape[2]
    padded = F.pad(x_BKNH, (0, 0, overlap_tokens, max(right, 0)))[:, :, : overlap_tokens + slots * ratio]
    blocks: Tensor = padded.unfold(2, ratio + overlap_tokens, ratio).transpose(-1, -2)
    return blocks


def _hidden_tokens(lengths_B: Tensor, slots: int, *, ratio: int, overlap_tokens: int, sink: int) -> Tensor:
    """(B, M, sink + W) bool: True where a slot must not read that place of [sink block | own block]."""
    device = lengths_B.device
    width = ratio + overlap_tokens
    starts = torch.arange(slots, device=device) * ratio - overlap_tokens
    own = starts[:, None] + torch.arange(width, device=device)
    length = lengths_B[:, None, None]
    # Tokens of the own block that lie in the sink block are read there: a set, not a sum.
    own_hidden = (own < ratio) | (own >= length)
    sink_hidden = (torch.arange(sink, device=device) >= length).expand(-1, slots, -1)
    return torch.cat([sink_hidden, own_hidden], dim=-1)


def _attend_chunk(
    q_BKGCH: Tensor,
    sink_kv: tuple[Tensor, Tensor],
    own_kv: tuple[Tensor, Tensor],
    slot_kv: tuple[Tensor, Tensor],
    hidden_BCX: Tensor,
) -> Tensor:
    """(B, K, G, C, H) for the last C of the slots in ``slot_kv``."""
    batch, kv_heads, group, chunk, dim = q_BKGCH.shape
    flat = (batch, kv_heads, group * chunk, dim)
    q_flat = q_BKGCH.reshape(flat)
    sink = sink_kv[0].shape[2]
    seen = slot_kv[0].shape[2]

    scores_sink = (q_flat @ sink_kv[0].transpose(-1, -2)).view(batch, kv_heads, group, chunk, sink)
    # own block: one small product a slot, with the group of query heads as rows
    q_BKCGH = q_BKGCH.transpose(2, 3)
    scores_own = (q_BKCGH @ own_kv[0].transpose(-1, -2)).transpose(2, 3)
    scores_slot = (q_flat @ slot_kv[0].transpose(-1, -2)).view(batch, kv_heads, group, chunk, seen)

    later = torch.ones(chunk, seen, dtype=torch.bool, device=q_flat.device).triu(seen - chunk + 1)
    hidden = torch.cat([hidden_BCX, later.expand(batch, -1, -1)], dim=-1)
    scores = torch.cat([scores_sink, scores_own, scores_slot], dim=-1)
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q_flat.dtype)

    own_width = scores_own.shape[-1]
    w_sink, w_own, w_slot = weights.split([sink, own_width, seen], dim=-1)
    out = w_slot.reshape(batch, kv_heads, group * chunk, seen) @ slot_kv[1]
    out = out + w_sink.reshape(batch, kv_heads, group * chunk, sink) @ sink_kv[1]
    own = (w_own.transpose(2, 3) @ own_kv[1]).transpose(2, 3)
    merged: Tensor = out.view(batch, kv_heads, group, chunk, dim) + own
    return merged
