"""How the slots of a document are shared out among heads (``selection: heads``).

Some heads look tokens up and need nearly all of them, most need few: with equal shares the first are starved. A
document still has L x K x M entries, M slots a head on average, but a head gets as many as it is worth. The entries lie
in the same (L, K, M, H) tensors, head after head; ``head_slots`` says where each head's begin. That heads are worth
very different numbers of tokens, and that a fixed profile tells, is known from the eviction of caches (Ada-KV, arXiv
2407.11550; DuoAttention, arXiv 2410.10819; KVzip, arXiv 2505.23416).

Shape legend: L layers, K kv heads, M slots, P fractions, H head dim, D documents, S entries of a layer (padded),
E entries.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FRACTIONS = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)
"""Kept fractions of all tokens of all heads for which the shares of heads are known; others lie between."""
LEAST_SHARE = 1 / 16
"""Of a head, of what it would have if all had the same."""
_STEPS = 100
"""Of the bisection; far beyond the precision of float64."""


def head_slots(shares_LKP: Tensor, *, num_tokens: int, slots: int) -> Tensor:
    """(L, K) int64 entries of each head, together L x K x M: as its share is, at least 1 and at most all tokens.

    What heads that have all tokens leave goes to the others by their shares (water-filling). A function of its
    arguments alone.

    Args:
        shares_LKP: what fraction of its tokens each head keeps when heads together keep each of ``FRACTIONS``.
        num_tokens: of the document.
        slots: M, at most ``num_tokens``.
    """
    fraction = slots / num_tokens
    known = shares_LKP.detach().to("cpu", torch.float64).numpy()
    shares = np.maximum(_between(known, fraction), LEAST_SHARE * fraction).ravel()
    total = shares.size * slots
    low, high = 0.0, float(num_tokens / shares.min())
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if (shares * middle).clip(1.0, num_tokens).sum() > total:
            high = middle
        else:
            low = middle
    exact = (shares * low).clip(1.0, num_tokens)
    whole = np.floor(exact).astype(np.int64)
    # What rounding down left over goes to the largest remainders; full heads have none, so nobody gets too many.
    order = np.argsort(-np.where(whole < num_tokens, exact - whole, -1.0), kind="stable")
    whole[order[: total - int(whole.sum())]] += 1
    return torch.from_numpy(whole.reshape(known.shape[:2]))


def _between(shares_LKP: NDArray[np.float64], fraction: float) -> NDArray[np.float64]:
    """(L, K) at a fraction: linear in its logarithm between the two known ones around it, beyond them the last."""
    place = -math.log2(min(max(fraction, FRACTIONS[-1]), FRACTIONS[0])) - 1
    lower = min(int(place), len(FRACTIONS) - 2)
    part = place - lower
    made: NDArray[np.float64] = (1 - part) * shares_LKP[..., lower] + part * shares_LKP[..., lower + 1]
    return made


def entry_positions(head_slots_LK: Tensor, *, num_tokens: int) -> Tensor:
    """(E,) int64 positions inside the part at which RoPE puts the entries of all heads, one head after the other.

    Entry i of the c that a head has stands at ``floor((2 i + 1) n / 2 c)``: of a head that has all tokens each where
    its token was, of others evenly spread, so that nothing but c and n need be known. Keys are kept so that RoPE at
    that place puts them where their token was.
    """
    counts = head_slots_LK.flatten().numpy()
    own_E = np.repeat(counts, counts)
    index_E = np.arange(len(own_E)) - np.repeat(counts.cumsum() - counts, counts)
    return torch.from_numpy((2 * index_E + 1) * num_tokens // (2 * own_E))


class HeadLayout:
    """Where the entries of several documents are: each document's layer by layer, and in these head by head."""

    def __init__(self, counts: Sequence[Tensor]) -> None:
        """(L, K) entries of each document's heads."""
        self._counts_DLK: NDArray[np.int64] = np.stack([c.numpy() for c in counts])
        ends = self._counts_DLK.sum(axis=2).cumsum(axis=1)
        self._ends_DL = np.concatenate([np.zeros_like(ends[:, :1]), ends], axis=1)

    def span(self, document: int, layer: int) -> slice:
        """Places of a layer's entries among all of a document."""
        ends = self._ends_DL[document]
        return slice(int(ends[layer]), int(ends[layer + 1]))

    def by_head(self, layer: int) -> tuple[Tensor, list[int]]:
        """(E,) places, among the layer's entries of all documents one after the other, in the order of heads, and how
        many each head has."""
        counts_DK = self._counts_DLK[:, layer]
        documents, heads = counts_DK.shape
        # Of 16 bits: numpy sorts these by radix, in linear time.
        head_E = np.repeat(np.tile(np.arange(heads, dtype=np.uint16), documents), counts_DK.ravel())
        return torch.from_numpy(head_E.argsort(kind="stable")), counts_DK.sum(axis=0).tolist()
