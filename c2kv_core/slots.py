"""Where slots are and what they see (DESIGN 2): pure arithmetic, shared by extraction, store and composition."""

from typing import TYPE_CHECKING

from c2kv_core.errors import InputError, RatioError

if TYPE_CHECKING:
    from torch import Tensor


def check_ratio(ratio: int) -> int:
    """The ratio itself.

    Raises:
        RatioError: not a positive integer.
    """
    if isinstance(ratio, bool) or not isinstance(ratio, int) or ratio < 1:
        raise RatioError(f"expected a ratio of 1 or more source tokens per slot, got {ratio!r}")
    return ratio


def slot_count(num_tokens: int, ratio: int) -> int:
    """Slots of a part: ``ceil(n / k)``.

    Raises:
        InputError: fewer than one token.
    """
    if num_tokens < 1:
        raise InputError(
            f"expected a document of 1 token or more, got {num_tokens}; leave empty documents out"
        )
    return -(-num_tokens // check_ratio(ratio))


def slot_positions(num_tokens: int, ratio: int) -> "Tensor":
    """(M,) int64: slot j stands at the last token of its block, ``min((j + 1) k, n) - 1``."""
    import torch

    count = slot_count(num_tokens, ratio)
    ends = torch.arange(1, count + 1, dtype=torch.int64) * ratio
    return ends.clamp(max=num_tokens) - 1
